"""The agent of the Ray mode: actors collect on the host, one learner updates on the devices.

This is the "Sebulba" architecture of Hessel et al. 2021, "Podracer architectures for scalable reinforcement learning".
`jppo.actors.actor_pool` starts the processes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jppo.actors.env_runner import Fragment, RunnerSpec
from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.devices.jit import jit, make_device_put
from jppo.devices.mesh import AXIS, shard_over_devices
from jppo.envs.gymnasium import HostEnvironment, make_host_env
from jppo.envs.spaces import Array
from jppo.errors import Refused
from jppo.ppo.learner import LearnerFactory, build_learner
from jppo.ppo.losses import Advantages, Loss, LossModule
from jppo.ppo.minibatches import Optimizer, adam
from jppo.ppo.normalization import pool_moments
from jppo.ppo.policy import Network, Policy, RecurrentNetwork
from jppo.ppo.types import EpisodeStats, Metrics, Rollout, TrainState, derive_key


class Sebulba(NamedTuple):
    """The functions of the learner, and the specification of the actors."""

    init: Callable[[Array, Hyperparams], TrainState]  # (key, hyperparams)
    place: Callable[
        [Sequence[Fragment]], tuple[Rollout, EpisodeStats]
    ]  # copies this process's fragments to its devices
    update: Any  # jitted: (TrainState, Rollout, EpisodeStats) -> TrainState, metrics
    runner_spec: Callable[..., RunnerSpec]  # (the same key as for init, number of updates before a resume = 0)
    env: HostEnvironment
    policy: Policy
    config: PPOConfig
    num_updates: int


def make_sebulba(
    env: Any,
    config: PPOConfig = PPOConfig(),
    *,
    total_steps: int = 1_000_000,
    network: Network | RecurrentNetwork | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | LossModule | None = None,
    advantages: Advantages | None = None,
    learner: LearnerFactory | None = None,
    num_devices: int = 1,
) -> Sebulba:
    """Makes the agent of the Ray mode. Its learner and the learner's keys are the same as in `make_anakin`.

    Args:
      env: see `make_host_env`.
      total_steps: environment steps of a run, rounded up to whole updates; schedules end there, too.
      network: a `jppo.Network`. Default: the network that `config` describes.
      optimizer, loss, advantages: see `make_learner`.
      learner: see `make_anakin`.
      num_devices: devices that share the samples, an equal number from each process. Parameters are replicated.

    Raises:
      ValueError: the environment is unknown or unsuitable, the network or optimizer is invalid, or there are too few
        devices.
    """
    if config.staggered_start:
        raise Refused(
            f"staggered_start = {config.staggered_start} supports on-device (JAX) environments only; leave it out"
        )
    env = make_host_env(env)
    policy, learned_by, mesh, num_updates = build_learner(
        env,
        config,
        total_steps=total_steps,
        network=network,
        optimizer=optimizer,
        loss=loss,
        advantages=advantages,
        learner=learner,
        num_devices=num_devices,
    )
    replicated = NamedSharding(mesh, PartitionSpec())

    def init(key: Array, hyperparams: Hyperparams = Hyperparams()) -> TrainState:
        learner_key = derive_key(key, "learner")
        obs = jax.tree.map(lambda spec: jnp.zeros((config.num_envs, *spec.shape), spec.dtype), env.obs_spec)
        return learned_by.init(learner_key, obs, hyperparams, num_updates)

    def runner_spec(key: Array, update: int = 0) -> RunnerSpec:
        envs_key = derive_key(key, "environments")
        if update:  # a resumed run has new environments, which must not start like the first ones
            envs_key = jax.random.fold_in(derive_key(key, "resumed environments"), update)
        shapes = jax.eval_shape(init, key).policy_state
        return RunnerSpec(
            env=env,
            network=policy.network,
            action_spec=policy.action_spec,
            num_steps=config.num_steps,
            sequence_length=config.steps_per_sequence,
            keep_next_obs=config.keep_next_obs,
            key_data=np.asarray(jax.random.key_data(envs_key)),
            policy_shapes=shapes,
        )

    def update(state: TrainState, rollout: Rollout, stats: EpisodeStats) -> tuple[TrainState, Metrics]:
        return learned_by.update(state, rollout, pool_moments(stats))  # the learner adds up all devices

    split, whole = PartitionSpec(None, AXIS), PartitionSpec()
    update = shard_over_devices(update, mesh, (whole, split, PartitionSpec(AXIS)), (whole, whole))
    return Sebulba(
        init=jit(init, out_shardings=replicated),
        place=functools.partial(_place, mesh, make_device_put(replicated)),
        update=jit(update),
        runner_spec=runner_spec,
        env=env,
        policy=policy,
        config=config,
        num_updates=num_updates,
    )


def _place(mesh: Mesh, put: Any, fragments: Sequence[Fragment]) -> tuple[Rollout, EpisodeStats]:
    """Copies the fragments of this process's K actors to its devices.

    Args:
      put: copies to the only device, if there is one.

    Returns:
      The rollout [T, N, ...], sharded over environments, and the statistics [D*K] with K rows per device. Each
      process's statistics are on its first device; the other devices have zeros.
    """
    rollouts, stats = zip(*((fragment.rollout, fragment.stats) for fragment in fragments), strict=True)
    if mesh.size == 1:
        rollout = rollouts[0]
        if len(rollouts) > 1:
            rollout = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *rollouts)
        return put((rollout, jax.tree.map(lambda *leaves: np.stack(leaves), *stats)))
    join, stack = functools.partial(_join, mesh), functools.partial(_stack, mesh)
    return jax.tree.map(join, *rollouts), jax.tree.map(stack, *stats)


def _join(mesh: Mesh, *parts: np.ndarray) -> Array:
    """Joins arrays [T, n, ...] to one [T, N, ...] that is sharded over environments, copying each shard once."""
    starts = np.cumsum([0, *(part.shape[1] for part in parts)])
    own_envs = int(starts[-1])
    num_envs, offset = own_envs * jax.process_count(), own_envs * jax.process_index()

    def make_shard(index: Any) -> np.ndarray:
        first, last, _ = index[1].indices(num_envs)
        first, last = first - offset, last - offset
        inside = [
            part[:, max(0, first - start) : last - start]
            for part, start in zip(parts, starts, strict=False)
            if start < last and start + part.shape[1] > first
        ]
        return inside[0] if len(inside) == 1 else np.concatenate(inside, axis=1)

    shape = (parts[0].shape[0], num_envs, *parts[0].shape[2:])
    return jax.make_array_from_callback(shape, NamedSharding(mesh, PartitionSpec(None, AXIS)), make_shard)


def _stack(mesh: Mesh, *leaves: np.ndarray) -> Array:
    """Stacks the statistics of K actors to [D*K, ...]: K rows on the process's first device, zeros on the others."""
    own, others = np.stack(leaves), mesh.size // jax.process_count() - 1
    rows = np.concatenate([own, *[np.zeros_like(own)] * others])
    return jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec(AXIS)), rows)
