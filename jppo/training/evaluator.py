"""Evaluations during training. They have their own keys and environments, so they do not change the run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jppo.config.run import EVAL_EPISODES, RunConfig
from jppo.devices.jit import jit
from jppo.devices.mesh import AXIS, shard_over_devices
from jppo.ppo.anakin import Anakin
from jppo.ppo.keys import derive_key
from jppo.ppo.types import Array, Metrics, PolicyState
from jppo.runs.evaluation import check_legal_actions, make_host_player, make_player


class Evaluated(NamedTuple):
    """The result of an evaluation, which may still be computed on the device."""

    metrics: dict[str, Any]  # return_mean, return_std and length_mean
    policy_state: PolicyState  # a copy
    check: Callable[[], None] = lambda: None  # raises ValueError if an episode had a step without a legal action


Evaluator = Callable[[PolicyState, int], Evaluated]  # (policy, number of updates) -> Evaluated


def make_device_evaluator(agent: Anakin, shapes: PolicyState, run: RunConfig, seed: int) -> Evaluator:
    """Returns a compiled evaluation that does not wait for its result. The devices share the episodes.

    Args:
      shapes: shapes, dtypes and shardings of the policy.
    """
    num_episodes, mesh = run.eval_episodes or EVAL_EPISODES, agent.sharding.mesh
    split, whole = PartitionSpec(AXIS), PartitionSpec()
    player = make_player(agent.env, agent.policy, bool(run.eval_sampled))
    play = shard_over_devices(player, mesh, (whole, split), split)
    multiple = mesh.size * agent.env.num_agents
    num_keys = -(-num_episodes // multiple) * multiple

    def evaluate(state: PolicyState, update: Array) -> tuple[Metrics, PolicyState, Array]:
        keys = jax.random.split(_evaluation_key(seed, update), num_keys)
        returns, lengths, _, stuck = play(state, keys)
        returns, lengths = returns[:num_episodes], lengths[:num_episodes].astype(jnp.float32)
        metrics = {"return_mean": returns.mean(), "return_std": returns.std(), "length_mean": lengths.mean()}
        return metrics, jax.tree.map(jnp.copy, state), stuck  # training reuses the memory of the state

    program = jit(evaluate, out_shardings=agent.sharding.train).lower(shapes, np.int32(0)).compile()

    def start(state: PolicyState, update: int) -> Evaluated:
        metrics, policy_state, stuck = program(state, np.int32(update))
        return Evaluated(metrics, policy_state, lambda: check_legal_actions(agent.env.name, np.asarray(stuck)))

    return start


def make_host_evaluator(agent: Any, run: RunConfig, seed: int) -> Evaluator:
    """Returns an evaluation in this process."""
    num_episodes = run.eval_episodes or EVAL_EPISODES
    play = make_host_player(agent.env, agent.policy, bool(run.eval_sampled))

    def evaluate(state: PolicyState, update: int) -> Evaluated:
        policy = jax.device_put(jax.device_get(state), jax.local_devices()[0])
        episodes = play(policy, num_episodes, int(jax.random.bits(_evaluation_key(seed, update))))
        summary = episodes.summary()
        return Evaluated({name: summary[name] for name in ("return_mean", "return_std", "length_mean")}, policy)

    return evaluate


def _evaluation_key(seed: int, update: Array | int) -> Array:
    """Returns the key of the evaluation after an update."""
    return jax.random.fold_in(derive_key(jax.random.key(seed), "evaluation during training"), update)
