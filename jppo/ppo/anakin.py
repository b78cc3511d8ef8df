"""The on-device mode: rollout and update as one compiled program.

This is the "Anakin" architecture of Hessel et al. (2021), "Podracer architectures for scalable reinforcement learning".
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.devices.mesh import AXIS, shard_over_devices
from jppo.envs import Environment, make_env
from jppo.ppo.advantages import Advantages
from jppo.ppo.checks.agent import build_learner
from jppo.ppo.hyperparams import current_hyperparams
from jppo.ppo.keys import derive_key
from jppo.ppo.learner import Learner
from jppo.ppo.losses import Loss, LossModule
from jppo.ppo.networks import Network, RecurrentNetwork
from jppo.ppo.optimizer import Optimizer, adam
from jppo.ppo.policy import Policy
from jppo.ppo.rollout import collect, init_collect, stagger
from jppo.ppo.types import Array, CollectState, EpisodeStats, Metrics, Rollout, TrainState

CHUNK_CAPACITY = 1024  # maximum number of updates in a chunk; a chunk returns only their metrics


class AnakinState(struct.PyTreeNode, kw_only=True):
    """The state of a run."""

    train: TrainState
    collect: CollectState


class AnakinSharding(NamedTuple):
    """Placement of an `AnakinState` on the devices."""

    mesh: Mesh
    train: NamedSharding  # replicated
    collect: NamedSharding  # sharded over environments

    @property
    def out_shardings(self) -> Any:
        """For `jit(agent.init, out_shardings=...)`: a pytree prefix of `AnakinState`."""
        return AnakinState(train=self.train, collect=self.collect)  # type: ignore[arg-type]


class Anakin(NamedTuple):
    """Pure functions of a run's state; each can be jitted, vmapped and scanned."""

    init: Callable[[Array, Hyperparams], AnakinState]  # (key, hyperparams)
    step: Callable[[AnakinState], tuple[AnakinState, Metrics]]  # one rollout and one update
    train: Callable[[Array, Hyperparams], tuple[AnakinState, Metrics]]  # a whole run; metrics stacked [updates]
    env: Environment
    policy: Policy
    learner: Learner
    config: PPOConfig
    num_updates: int
    sharding: AnakinSharding


def make_anakin(
    env: Any,
    config: PPOConfig = PPOConfig(),
    *,
    total_steps: int = 1_000_000,
    network: Network | RecurrentNetwork | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | LossModule | None = None,
    advantages: Advantages | None = None,
    num_devices: int = 1,
) -> Anakin:
    """Returns the on-device agent.

    The number of devices does not change a run, apart from rounding: environments are sharded over the devices,
    parameters are on each, every minibatch is the same set of samples, and gradients are averaged over the devices once
    per minibatch.

    Args:
      env: a name, an object with gymnax's API, or an Environment.
      total_steps: environment steps of `train`, rounded up to whole updates; schedules end there, too.
      network: an object that fits the `Network` protocol; by default the network that `config` describes.
      optimizer, loss, advantages: see `make_learner`.
      num_devices: the same number on each process; must divide `config.effective_strata`.

    Raises:
      ValueError: an unknown or invalid environment, an invalid network or optimizer, or unavailable devices.
    """
    env = make_env(env)
    policy, learner, mesh, num_updates = build_learner(
        env,
        config,
        total_steps=total_steps,
        network=network,
        optimizer=optimizer,
        loss=loss,
        advantages=advantages,
        num_devices=num_devices,
    )

    def init(key: Array, hyperparams: Hyperparams = Hyperparams()) -> AnakinState:
        learner_key, envs_key = derive_key(key, "learner"), derive_key(key, "environments")
        env_index = jnp.arange(config.num_envs, dtype=jnp.int32)
        collect_state = init_collect(env, envs_key, env_index, policy.initial_carry(config.num_envs))
        train_state = learner.init(learner_key, collect_state.obs, hyperparams, num_updates)
        if oldest := config.staggered_start:
            ages = (env_index.astype(jnp.float32) * (oldest / config.num_envs)).astype(jnp.int32)
            gamma = current_hyperparams(train_state).gamma
            collect_state = stagger(env, policy, train_state.policy_state, collect_state, gamma, oldest, ages)
        return AnakinState(train=train_state, collect=collect_state)

    def local_step(state: AnakinState) -> tuple[AnakinState, Metrics]:
        collect_state, rollout, stats = collect_rollout(env, policy, config, state.train, state.collect)
        train_state, metrics = learner.update(state.train, rollout, stats)
        return AnakinState(train=train_state, collect=collect_state), metrics

    replicated, sharded = PartitionSpec(), PartitionSpec(AXIS)
    specs = AnakinState(train=replicated, collect=sharded)  # type: ignore[arg-type]
    step = shard_over_devices(local_step, mesh, (specs,), (specs, replicated))

    def train(key: Array, hyperparams: Hyperparams = Hyperparams()) -> tuple[AnakinState, Metrics]:
        return jax.lax.scan(lambda state, _: step(state), init(key, hyperparams), length=num_updates)

    return Anakin(
        init=init,
        step=step,
        train=train,
        env=env,
        policy=policy,
        learner=learner,
        config=config,
        num_updates=num_updates,
        sharding=AnakinSharding(mesh=mesh, train=NamedSharding(mesh, replicated), collect=NamedSharding(mesh, sharded)),
    )


def collect_rollout(
    env: Environment, policy: Policy, config: PPOConfig, train: TrainState, state: CollectState
) -> tuple[CollectState, Rollout, EpisodeStats]:
    """Returns `collect` with the settings of a run."""
    gamma = current_hyperparams(train).gamma
    return collect(
        env,
        policy,
        config.num_steps,
        train.policy_state,
        state,
        gamma,
        sequence_length=config.sequence_length,
        keep_next_obs=config.keep_next_obs,
    )


def run_chunk(agent: Anakin, state: AnakinState, flags: Any, length: Array) -> tuple[AnakinState, Any, Metrics]:
    """Runs `length` updates, or fewer: stops after an update that diverges or reaches a target.

    The length is an argument, not a shape, so that one compiled program serves every chunk.

    Args:
      flags: [] bool, whether all updates so far were finite; or a record of them with the properties `running` and
        `reached` and the method `after(metrics, config)` (see `ReturnTarget`). The result of the chunk before.
      length: [] i32, at most CHUNK_CAPACITY.

    Returns:
      the state, the flags, and metrics in the first rows of buffers [CHUNK_CAPACITY]. With a target, the metric
      "reached" marks the update that reached it.
    """
    step, has_target = jax.jit(agent.step), hasattr(flags, "after")  # the step is traced once for both uses
    shapes = jax.eval_shape(step, state)[1]
    shapes |= {"reached": shapes["finite"]} if has_target else {}
    buffers = jax.tree.map(lambda x: jnp.zeros((CHUNK_CAPACITY,), x.dtype), shapes)

    def should_continue(loop: tuple[Array, Any, AnakinState, Metrics]) -> Array:
        done, flags, _, _ = loop
        return jnp.logical_and(done < length, flags.running if has_target else flags)

    def body(loop: tuple[Array, Any, AnakinState, Metrics]) -> tuple[Array, Any, AnakinState, Metrics]:
        done, flags, state, buffers = loop
        state, metrics = step(state)
        flags = flags.after(metrics, agent.config) if has_target else metrics["finite"]
        metrics |= {"reached": flags.reached} if has_target else {}
        buffers = jax.tree.map(lambda buffer, value: buffer.at[done].set(value), buffers, metrics)
        return done + 1, flags, state, buffers

    start = (jnp.zeros((), jnp.int32), flags, state, buffers)
    _, flags, state, buffers = jax.lax.while_loop(should_continue, body, start)
    return state, flags, buffers
