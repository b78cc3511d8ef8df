"""Evaluations during training. They have their own keys and environments, so they do not change the run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jppo.config.run import EVAL_EPISODES, EVAL_MAX_STEPS, RunConfig
from jppo.devices.jit import jit
from jppo.devices.memory import bytes_needed_beside
from jppo.devices.mesh import AXIS, shard_over_devices
from jppo.envs.gymnasium import HostEnvironment
from jppo.envs.spaces import Array, PyTree
from jppo.ppo.anakin import Anakin
from jppo.ppo.policy import Network, RecurrentNetwork, make_policy
from jppo.ppo.types import Metrics, PolicyState, derive_key
from jppo.runs.episodes import check_legal_actions, make_host_player, make_player

METRICS = ("return_mean", "return_std", "length_mean", "unfinished")


class EvaluationResult(NamedTuple):
    """The result of an evaluation, which may still be computed on the device."""

    metrics: dict[str, Any]  # by name, see METRICS
    policy_state: PolicyState  # a copy
    check: Callable[[], None] = lambda: None  # raises ValueError if an episode had a step without a legal action


# (policy, number of updates) -> result
Evaluator = Callable[[PolicyState, int], EvaluationResult]


def make_evaluation(agent: Anakin, run: RunConfig) -> Callable[..., tuple[Metrics, PolicyState, Array]]:
    """Returns a pure function of (policy, key of the run's evaluations, number of updates).

    It returns the metrics, a copy of the policy, and the step [E] i32 of each episode at which no action was legal, or
    -1. The devices of the agent share the episodes.
    """
    num_episodes, mesh = run.eval_episodes or EVAL_EPISODES, agent.sharding.mesh
    split, whole = PartitionSpec(AXIS), PartitionSpec()
    player = make_player(agent.env, agent.policy, bool(run.eval_sampled), run.eval_max_steps or EVAL_MAX_STEPS)
    play = shard_over_devices(player, mesh, (whole, split), split)
    multiple = mesh.size * agent.env.num_agents
    num_keys = -(-num_episodes // multiple) * multiple

    def evaluate(state: PolicyState, key: Array, update: Array) -> tuple[Metrics, PolicyState, Array]:
        keys = jax.random.split(jax.random.fold_in(key, update), num_keys)
        returns, lengths, finished, stuck = play(state, keys)
        returns, lengths = returns[:num_episodes], lengths[:num_episodes].astype(jnp.float32)
        unfinished = (~finished[:num_episodes]).sum().astype(jnp.float32)
        metrics = dict(zip(METRICS, (returns.mean(), returns.std(), lengths.mean(), unfinished), strict=True))
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

    def __call__(self, state: PolicyState, update: int) -> EvaluationResult:
        """Starts an evaluation."""
        metrics, policy_state, stuck = self._program(state, np.int32(update))
        return EvaluationResult(metrics, policy_state, lambda: check_legal_actions(self._name, np.asarray(stuck)))


def make_host_evaluate(
    env: HostEnvironment,
    network: Network | RecurrentNetwork,
    action_spec: PyTree,
    sampled: bool,
    num_episodes: int,
    max_steps: int,
    seed: int,
) -> Callable[..., dict[str, Any]]:
    """Returns a function that plays the episodes in this process: (policy, update, before_step) -> metrics.

    before_step is optional and is called before each step. It may raise an exception to end the evaluation.

    Args:
      seed: of the run.
    """
    play = make_host_player(env, make_policy(network, env.obs_spec, action_spec), sampled)

    def evaluate(state: PolicyState, update: int, before_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
        key = jax.random.fold_in(evaluation_key(jax.random.key(seed)), update)
        summary = play(state, num_episodes, int(jax.random.bits(key)), max_steps, before_step=before_step).summary()
        return {name: summary[name] for name in METRICS}

    return evaluate


def evaluation_key(key: Array) -> Array:
    """Returns the key of the evaluations of a run with this key."""
    return derive_key(key, "evaluation during training")
