"""The on-device mode: rollout and update fused into one program (the "Anakin" architecture of Hessel et al. 2021,
"Podracer architectures for scalable reinforcement learning")."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from jppo.config.ppo import Hyperparams, PPOConfig, check_total_steps
from jppo.devices.mesh import AXIS, make_mesh, shard_over_devices
from jppo.envs import Environment, make_env
from jppo.ppo.learner import Loss, make_learner
from jppo.ppo.networks import Network, make_network
from jppo.ppo.optimizer import Optimizer, adam, check_optimizer
from jppo.ppo.policy import Policy, check_network, make_policy
from jppo.ppo.rollout import collect, init_collect
from jppo.ppo.types import Array, CollectState, Metrics, TrainState


class AnakinState(struct.PyTreeNode, kw_only=True):
    """The whole of a run."""

    train: TrainState
    collect: CollectState


class Anakin(NamedTuple):
    """Pure functions over a run's state; each can be jitted, vmapped and scanned."""

    init: Callable[[Array, Hyperparams], AnakinState]  # (key, hyperparams)
    step: Callable[[AnakinState], tuple[AnakinState, Metrics]]  # one rollout and update
    train: Callable[[Array, Hyperparams], tuple[AnakinState, Metrics]]  # the whole run; metrics stacked [updates]
    env: Environment
    policy: Policy
    config: PPOConfig
    num_updates: int
    sharding: AnakinState  # of NamedShardings, for `jit(init, out_shardings=...)`: environments over the devices


def make_anakin(
    env: Any,
    config: PPOConfig = PPOConfig(),
    *,
    total_steps: int = 1_000_000,
    network: Network | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | None = None,
    num_devices: int = 1,
) -> Anakin:
    """The on-device agent.

    With several devices it is the same run: environments are sharded over them, parameters are on each, and every
    minibatch is the same set of samples; gradients are averaged over the devices once per minibatch.

    Args:
      env: a name, an object with gymnax's API, or an Environment.
      total_steps: environment steps of `train`, rounded up to whole updates; also the end of annealing.
      network: anything that fits `jppo.ppo.networks.Network`; by default what `config` names.
      optimizer, loss: see `make_learner`.
      num_devices: of each process as many; must divide `config.num_strata`.

    Raises:
      ValueError: an unknown or unfit environment, a network or optimizer that cannot be, or devices there are not.
    """
    env = make_env(env)
    network = make_network(config, env.obs_spec, env.action_spec) if network is None else network
    params = check_network(network, env.obs_spec, env.action_spec)
    check_optimizer(optimizer, params)
    action_spec = dataclasses.replace(env.action_spec, bounds=config.action_bounds)
    policy = make_policy(network, env.obs_spec, action_spec, params)
    mesh = make_mesh(config, num_devices)
    learner = make_learner(policy, config, optimizer, loss, AXIS if num_devices > 1 else None)
    num_updates = config.num_updates(check_total_steps(total_steps))

    def init(key: Array, hyperparams: Hyperparams = Hyperparams()) -> AnakinState:
        learner_key, envs_key = jax.random.split(key)
        collect_state = init_collect(env, envs_key, jnp.arange(config.num_envs, dtype=jnp.int32))
        train_state = learner.init(learner_key, collect_state.obs, hyperparams, num_updates)
        return AnakinState(train=train_state, collect=collect_state)

    rollout_of = functools.partial(collect, env, policy, config.num_steps)

    def local_step(state: AnakinState) -> tuple[AnakinState, Metrics]:
        train_state = state.train
        collect_state, rollout, stats = rollout_of(train_state.policy, state.collect, train_state.hyperparams.gamma)
        train_state, metrics = learner.update(train_state, rollout, stats)
        return AnakinState(train=train_state, collect=collect_state), metrics

    whole = PartitionSpec()
    split = AnakinState(train=whole, collect=PartitionSpec(AXIS))  # type: ignore[arg-type]
    step = shard_over_devices(local_step, mesh, (split,), (split, whole))
    sharding = jax.tree.map(functools.partial(NamedSharding, mesh), split, is_leaf=_is_spec)

    def train(key: Array, hyperparams: Hyperparams = Hyperparams()) -> tuple[AnakinState, Metrics]:
        return jax.lax.scan(lambda state, _: step(state), init(key, hyperparams), length=num_updates)

    return Anakin(init, step, train, env, policy, config, num_updates, sharding)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
