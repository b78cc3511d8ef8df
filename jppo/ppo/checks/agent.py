"""Validates the arguments of an agent and makes the parts that its two modes share."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jppo.config.checks import check_total_steps
from jppo.config.ppo import PPOConfig
from jppo.devices.mesh import AXIS, make_mesh
from jppo.ppo.advantages import Advantages
from jppo.ppo.checks.network import check_network
from jppo.ppo.checks.optimizer import check_optimizer
from jppo.ppo.checks.settings import check_agents, check_functions, check_own_options, check_sequences
from jppo.ppo.learner import Learner, make_learner
from jppo.ppo.losses import Loss, LossModule
from jppo.ppo.networks import Network, RecurrentNetwork, make_network
from jppo.ppo.optimizer import Optimizer
from jppo.ppo.policy import Policy, make_policy


class LearnerSetup(NamedTuple):
    """The parts of an agent that do not depend on how rollouts are collected."""

    policy: Policy
    learner: Learner
    mesh: Mesh
    num_updates: int  # of the whole run


def build_learner(
    env: Any,
    config: PPOConfig,
    total_steps: int,
    network: Network | RecurrentNetwork | None,
    optimizer: Optimizer,
    loss: Loss | LossModule | None,
    advantages: Advantages | None,
    num_devices: int,
) -> LearnerSetup:
    """Validates an agent's arguments and returns the parts that both modes share.

    Args:
      env: an Environment or a HostEnvironment.
      total_steps: environment steps of a run, rounded up to whole updates.
      network: None for the network that the config describes.
      optimizer, loss, advantages: see `make_learner`.
      num_devices: devices over which environments are sharded.

    Raises:
      ValueError: an invalid network, optimizer, loss or advantages, or a number of devices that is not available or
        does not fit.
    """
    check_functions(loss, advantages)
    if network is None:
        network = make_network(config, env.obs_spec, env.action_spec)
    else:
        check_own_options(network, config)
    params = check_network(network, env.obs_spec, env.action_spec)
    check_optimizer(optimizer, params)
    action_spec = jax.tree.map(lambda spec: dataclasses.replace(spec, bounds=config.action_bounds), env.action_spec)
    policy = make_policy(network, env.obs_spec, action_spec, params)
    check_sequences(policy, config)
    mesh = make_mesh(config, num_devices)
    check_agents(env, config, num_devices)
    learner = make_learner(policy, config, optimizer, loss, advantages, AXIS if num_devices > 1 else None)
    num_updates = config.num_updates(check_total_steps(total_steps))
    return LearnerSetup(policy=policy, learner=learner, mesh=mesh, num_updates=num_updates)
