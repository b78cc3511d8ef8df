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
from jppo.envs.spaces import Array
from jppo.ppo.learner import Learner, LearnerFactory, build_learner
from jppo.ppo.losses import Advantages, Loss, LossModule
from jppo.ppo.minibatches import Optimizer, adam
from jppo.ppo.policy import Network, Policy, RecurrentNetwork
from jppo.ppo.rollout import collect, init_collect, stagger
from jppo.ppo.types import CollectState, EpisodeStats, Metrics, Rollout, TrainState, current_hyperparams, derive_key


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
    learner: LearnerFactory | None = None,
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
      learner: a function (policy, config, axis_name) -> `Learner` that replaces `make_learner`, for another update.
      num_devices: the same number on each process; must divide `config.effective_strata`.

    Raises:
      ValueError: an unknown or invalid environment, an invalid network or optimizer, or unavailable devices.
    """
    env = make_env(env)
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

    def init(key: Array, hyperparams: Hyperparams = Hyperparams()) -> AnakinState:
        learner_key, envs_key = derive_key(key, "learner"), derive_key(key, "environments")
        env_index = jnp.arange(config.num_envs, dtype=jnp.int32)
        collect_state = init_collect(env, envs_key, env_index, policy.initial_carry(config.num_envs))
        train_state = learned_by.init(learner_key, collect_state.obs, hyperparams, num_updates)
        if oldest := config.staggered_start:
            ages = (env_index.astype(jnp.float32) * (oldest / config.num_envs)).astype(jnp.int32)
            gamma = current_hyperparams(train_state).gamma
            collect_state = stagger(env, policy, train_state.policy_state, collect_state, gamma, oldest, ages)
        return AnakinState(train=train_state, collect=collect_state)

    def local_step(state: AnakinState) -> tuple[AnakinState, Metrics]:
        collect_state, rollout, stats = collect_rollout(env, policy, config, state.train, state.collect)
        train_state, metrics = learned_by.update(state.train, rollout, stats)
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
        learner=learned_by,
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
