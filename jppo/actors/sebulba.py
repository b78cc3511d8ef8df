"""The Ray mode: actors collect on the host, one learner updates on the devices (the "Sebulba" architecture of Hessel et
al. 2021, "Podracer architectures for scalable reinforcement learning").

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
from jppo.ppo.learner import build_learner
from jppo.ppo.losses import Loss
from jppo.ppo.networks import Network
from jppo.ppo.normalization import pool_moments
from jppo.ppo.optimizer import Optimizer, adam
from jppo.ppo.policy import Policy
from jppo.ppo.types import Array, EpisodeStats, Metrics, Rollout, TrainState


class Sebulba(NamedTuple):
    """The learner's half of a run, and what the actors' half is made from."""

    init: Callable[[Array, Hyperparams], TrainState]  # (key, hyperparams)
    place: Callable[[Sequence[Fragment]], tuple[Rollout, EpisodeStats]]  # this process's fragments, onto its devices
    update: Any  # jitted: (TrainState, *what `place` returns) -> TrainState, metrics
    runner_spec: Callable[[Array], RunnerSpec]  # (the key that was given to init)
    env: HostEnvironment
    policy: Policy
    config: PPOConfig
    num_updates: int


def make_sebulba(
    env: Any,
    config: PPOConfig = PPOConfig(),
    *,
    total_steps: int = 1_000_000,
    network: Network | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | None = None,
    num_devices: int = 1,
) -> Sebulba:
    """The Ray mode's agent. Its learner, and the learner's keys, are those of `make_anakin`.

    Args:
      env: see `make_host_env`.
      total_steps: environment steps of a run, rounded up to whole updates; also the end of annealing.
      network: anything that fits `jppo.ppo.networks.Network`; by default what `config` names.
      optimizer, loss: see `make_learner`.
      num_devices: over which the environments' samples are spread, of each process as many; parameters are on each.

    Raises:
      ValueError: an unknown or unfit environment, a network or optimizer that cannot be, or devices there are not.
    """
    env = make_host_env(env)
    policy, learner, mesh, num_updates = build_learner(
        env,
        config,
        total_steps=total_steps,
        network=network,
        optimizer=optimizer,
        loss=loss,
        num_devices=num_devices,
    )
    replicated = NamedSharding(mesh, PartitionSpec())

    def init(key: Array, hyperparams: Hyperparams = Hyperparams()) -> TrainState:
        learner_key, _ = jax.random.split(key)
        obs = jax.tree.map(lambda spec: jnp.zeros((config.num_envs, *spec.shape), spec.dtype), env.obs_spec)
        return learner.init(learner_key, obs, hyperparams, num_updates)

    def runner_spec(key: Array) -> RunnerSpec:
        _, envs_key = jax.random.split(key)
        shapes = jax.eval_shape(init, key).policy
        return RunnerSpec(
            env, policy.network, policy.action_spec, config.num_steps, np.asarray(jax.random.key_data(envs_key)), shapes
        )

    def update(state: TrainState, rollout: Rollout, stats: EpisodeStats) -> tuple[TrainState, Metrics]:
        return learner.update(state, rollout, pool_moments(stats))  # which adds up those of all devices

    split, whole = PartitionSpec(None, AXIS), PartitionSpec()
    update = shard_over_devices(update, mesh, (whole, split, PartitionSpec(AXIS)), (whole, whole))
    place = functools.partial(_place, mesh, make_device_put(replicated))
    return Sebulba(
        jit(init, out_shardings=replicated), place, jit(update), runner_spec, env, policy, config, num_updates
    )


def _place(mesh: Mesh, put_whole: Any, fragments: Sequence[Fragment]) -> tuple[Rollout, EpisodeStats]:
    """Fragments [T, n, ...] of this process's K actors as its part of a rollout [T, N, ...] sharded over environments,
    each device's shard put together from what it needs, and their statistics [D*K]: K on each device, those of each
    process on its first one and zeros on its others. One device gets all of it by `put_whole`."""
    hosts, host, num_actors = jax.process_count(), jax.process_index(), len(fragments)
    rollouts, statistics = zip(*((fragment.rollout, fragment.stats) for fragment in fragments), strict=True)
    if mesh.size == 1:
        several = num_actors > 1
        whole = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1) if several else parts[0], *rollouts)
        return put_whole((whole, jax.tree.map(lambda *leaves: np.stack(leaves), *statistics)))

    def join(*parts: np.ndarray) -> Array:
        starts = np.cumsum([0, *(part.shape[1] for part in parts)])
        num_envs = int(starts[-1]) * hosts
        starts += int(starts[-1]) * host

        def shard(index: Any) -> np.ndarray:
            first, last, _ = index[1].indices(num_envs)
            inside = [
                part[:, max(0, first - start) : last - start]
                for part, start in zip(parts, starts, strict=False)
                if start < last and start + part.shape[1] > first
            ]
            return inside[0] if len(inside) == 1 else np.concatenate(inside, axis=1)

        shape = (parts[0].shape[0], num_envs, *parts[0].shape[2:])
        return jax.make_array_from_callback(shape, NamedSharding(mesh, PartitionSpec(None, AXIS)), shard)

    def stack(*leaves: np.ndarray) -> Array:
        own, rows = np.stack(leaves), mesh.size * num_actors

        def shard(index: Any) -> np.ndarray:
            device = index[0].indices(rows)[0] // num_actors
            return own if device % (mesh.size // hosts) == 0 else np.zeros_like(own)

        return jax.make_array_from_callback((rows, *own.shape[1:]), NamedSharding(mesh, PartitionSpec(AXIS)), shard)

    return jax.tree.map(join, *rollouts), jax.tree.map(stack, *statistics)
