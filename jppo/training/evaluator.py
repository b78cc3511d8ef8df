"""Evaluations during training. They have their own keys and environments, so they do not change the run."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jppo.config.run import EVAL_EPISODES, RunConfig
from jppo.devices.jit import jit
from jppo.devices.memory import bytes_needed_beside
from jppo.devices.mesh import AXIS, allgather_ints, raise_on_all_processes, shard_over_devices
from jppo.envs.spaces import Array
from jppo.ppo.anakin import Anakin
from jppo.ppo.types import Metrics, PolicyState, derive_key
from jppo.runs.episodes import check_legal_actions, make_host_player, make_player

METRICS = ("return_mean", "return_std", "length_mean")


class EvaluationResult(NamedTuple):
    """The result of an evaluation, which may still be computed on the device."""

    metrics: dict[str, Any]  # by name, see METRICS
    policy_state: PolicyState  # a copy
    check: Callable[[], None] = lambda: None  # raises ValueError if an episode had a step without a legal action


# timeout in seconds -> the result of an evaluation in another process, or None if it still runs
PendingEvaluation = Callable[[float], EvaluationResult | None]

# (policy, number of updates, whether a stop was requested) -> result, or None if the stop request ended the evaluation
Evaluator = Callable[[PolicyState, int, Callable[[], bool]], EvaluationResult | PendingEvaluation | None]


class _StopRequest(Exception):
    """A stop was requested during an evaluation on the host."""


def make_evaluation(agent: Anakin, run: RunConfig) -> Callable[..., tuple[Metrics, PolicyState, Array]]:
    """Returns a pure function of (policy, key of the run's evaluations, number of updates).

    It returns the metrics, a copy of the policy, and the step [E] i32 of each episode at which no action was legal, or
    -1. The devices of the agent share the episodes.
    """
    num_episodes, mesh = run.eval_episodes or EVAL_EPISODES, agent.sharding.mesh
    split, whole = PartitionSpec(AXIS), PartitionSpec()
    player = make_player(agent.env, agent.policy, bool(run.eval_sampled))
    play = shard_over_devices(player, mesh, (whole, split), split)
    multiple = mesh.size * agent.env.num_agents
    num_keys = -(-num_episodes // multiple) * multiple

    def evaluate(state: PolicyState, key: Array, update: Array) -> tuple[Metrics, PolicyState, Array]:
        keys = jax.random.split(jax.random.fold_in(key, update), num_keys)
        returns, lengths, _, stuck = play(state, keys)
        returns, lengths = returns[:num_episodes], lengths[:num_episodes].astype(jnp.float32)
        metrics = dict(zip(METRICS, (returns.mean(), returns.std(), lengths.mean()), strict=True))
        return metrics, jax.tree.map(jnp.copy, state), stuck  # training reuses the memory of the state

    return evaluate


class DeviceEvaluator:
    """An `Evaluator` that runs a compiled evaluation and does not wait for its result. The devices share the episodes.

    Attributes:
      bytes: memory on each device while training runs.
    """

    def __init__(self, agent: Anakin, shapes: PolicyState, run: RunConfig, seed: int) -> None:
        """Compiles the evaluation.

        Args:
          shapes: shapes, dtypes and shardings of the policy.
        """
        evaluation = make_evaluation(agent, run)

        def evaluate(state: PolicyState, update: Array) -> tuple[Metrics, PolicyState, Array]:
            return evaluation(state, evaluation_key(jax.random.key(seed)), update)

        self._name = agent.env.name
        self._program = jit(evaluate, out_shardings=agent.sharding.train).lower(shapes, np.int32(0)).compile()
        self.bytes = bytes_needed_beside(self._program)

    def __call__(self, state: PolicyState, update: int, stop_requested: Callable[[], bool]) -> EvaluationResult:
        """Starts an evaluation."""
        metrics, policy_state, stuck = self._program(state, np.int32(update))
        return EvaluationResult(metrics, policy_state, lambda: check_legal_actions(self._name, np.asarray(stuck)))


def make_host_evaluator(agent: Any, run: RunConfig, seed: int) -> Evaluator:
    """Returns an evaluation in this process. A stop request or an exception in one process ends it in all."""
    num_episodes = run.eval_episodes or EVAL_EPISODES
    play = make_host_player(agent.env, agent.policy, bool(run.eval_sampled))

    def evaluate(state: PolicyState, update: int, stop_requested: Callable[[], bool]) -> EvaluationResult | None:
        def check_stop() -> None:
            if stop_requested():
                raise _StopRequest

        policy, result = jax.device_put(jax.device_get(state), jax.local_devices()[0]), None
        with raise_on_all_processes(), contextlib.suppress(_StopRequest):
            summary = play(policy, num_episodes, episode_seed(seed, update), before_step=check_stop).summary()
            result = EvaluationResult({name: summary[name] for name in METRICS}, policy)
        return None if allgather_ints([result is None]).any() else result

    return evaluate


def episode_seed(seed: int, update: int) -> int:
    """Returns the seed of an evaluation on the host."""
    return int(jax.random.bits(jax.random.fold_in(evaluation_key(jax.random.key(seed)), update)))


def evaluation_key(key: Array) -> Array:
    """Returns the key of the evaluations of a run with this key."""
    return derive_key(key, "evaluation during training")
