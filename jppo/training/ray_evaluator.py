"""Evaluates policies in a separate Ray actor, so that training does not wait."""

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

import jax
import ray

from jppo.actors.actor import ActorError, ActorProcess, make_actor_error, start_actor
from jppo.config.ray import RayConfig
from jppo.config.run import EVAL_EPISODES, RunConfig
from jppo.envs.gymnasium import HostEnvironment
from jppo.envs.spaces import PyTree
from jppo.errors import ActorsFailed, describe_error
from jppo.ppo.policy import Network, RecurrentNetwork, make_policy
from jppo.ppo.types import PolicyState
from jppo.runs.episodes import make_host_player
from jppo.training.evaluator import METRICS, EvaluationResult, PendingEvaluation, episode_seed

PlayerArgs = tuple[HostEnvironment, Network | RecurrentNetwork, PyTree, bool]  # env, network, action_spec, sampled


class EvaluationProcess(ActorProcess):
    """Plays whole episodes in its own process."""

    _play: Any = None

    def evaluate(
        self, player: PlayerArgs, policy_state: PolicyState, num_episodes: int, seed: int
    ) -> dict[str, float] | ActorError:
        """Returns the metrics of an evaluation, or the error."""
        try:
            if self._play is None:  # compiled once
                env, network, action_spec, sampled = player
                self._play = make_host_player(env, make_policy(network, env.obs_spec, action_spec), sampled)
            summary = self._play(policy_state, num_episodes, seed).summary()
        except Exception as error:
            return make_actor_error(error, traceback.format_exc())
        return {name: summary[name] for name in METRICS}


class RayEvaluator:
    """An `Evaluator` that plays the episodes in an actor, which the first evaluation starts. Ray must be connected."""

    def __init__(self, agent: Any, run: RunConfig, seed: int, config: RayConfig) -> None:
        policy = agent.policy
        self._player: PlayerArgs = (agent.env, policy.network, policy.action_spec, bool(run.eval_sampled))
        self._num_episodes, self._seed = run.eval_episodes or EVAL_EPISODES, seed
        # reserves nothing, because the actors of the run may have reserved everything
        self._config = dataclasses.replace(config, actor_cpus=0.0, actor_gpus=0.0)
        self._handle: Any = None
        self._player_ref: Any = None

    def __call__(self, policy_state: PolicyState, update: int, stop_requested: Callable[[], bool]) -> PendingEvaluation:
        """Starts an evaluation. Its result raises ActorsFailed if the evaluation failed."""
        if self._handle is None:
            self._handle = start_actor(self._config, jax.process_count() > 1, EvaluationProcess)
            self._player_ref = ray.put(self._player)
        policy_state = jax.device_get(policy_state)
        seed = episode_seed(self._seed, update)
        pending = self._handle.evaluate.remote(self._player_ref, policy_state, self._num_episodes, seed)

        def poll(timeout: float) -> EvaluationResult | None:
            if not ray.wait([pending], timeout=timeout)[0]:
                return None
            try:
                answer = ray.get(pending)
            except ray.exceptions.RayError as error:  # the process died
                answer = ActorError(describe_error(error))
            if isinstance(answer, ActorError):
                text = f"\n{answer.full}" if answer.full else f" {answer.short}"
                raise ActorsFailed(f"the evaluation after update {update} failed with:{text}")
            return EvaluationResult(answer, policy_state)

        return poll

    def close(self) -> None:
        """Ends the actor."""
        if self._handle is not None and ray.is_initialized():
            ray.kill(self._handle)
        self._handle = None
