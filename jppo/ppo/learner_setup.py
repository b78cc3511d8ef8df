"""The parts of an agent that do not depend on how rollouts are collected."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jppo.config.checks import check_function, check_total_steps
from jppo.config.ppo import PPOConfig
from jppo.config.ray import not_divisible_by_agents
from jppo.devices.mesh import AXIS, make_mesh
from jppo.ppo.advantages import Advantages
from jppo.ppo.learner import Learner, make_learner
from jppo.ppo.losses import Loss, LossModule
from jppo.ppo.network_check import check_network
from jppo.ppo.networks import Network, RecurrentNetwork, make_network
from jppo.ppo.optimizer import Optimizer, check_optimizer
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
    *,
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
    arguments = "apply, batch, hyperparams, config, key"
    if isinstance(loss, LossModule):
        check_function("LossModule.init", loss.init, "key, obs")
        check_function("LossModule.apply", loss.apply, f"params, state, {arguments}")
        if loss.reward is not None:
            check_function("LossModule.reward", loss.reward, "params, state, rollout, axis_name")
    elif loss is not None:
        check_function("loss", loss, arguments)
    if advantages is not None:
        check_function("advantages", advantages, "apply, rollout, hyperparams, config")
    if network is not None and (config.actor_obs or config.critic_obs):
        raise ValueError(
            "actor_obs and critic_obs describe jppo's own network; leave them out and select the observation leaves in "
            f"{type(network).__name__}.apply"
        )
    if network is not None and config.compute_dtype != "float32":
        raise ValueError(
            f"compute_dtype = {config.compute_dtype} describes jppo's own network; leave it out and cast the inputs "
            f"and parameters in {type(network).__name__}.apply"
        )
    network = make_network(config, env.obs_spec, env.action_spec) if network is None else network
    params = check_network(network, env.obs_spec, env.action_spec)
    check_optimizer(optimizer, params)
    action_spec = jax.tree.map(lambda spec: dataclasses.replace(spec, bounds=config.action_bounds), env.action_spec)
    policy = make_policy(network, env.obs_spec, action_spec, params)
    _check_sequences(policy, config)
    mesh = make_mesh(config, num_devices)
    _check_agents(env, config, num_devices)
    learner = make_learner(policy, config, optimizer, loss, advantages, AXIS if num_devices > 1 else None)
    num_updates = config.num_updates(check_total_steps(total_steps))
    return LearnerSetup(policy=policy, learner=learner, mesh=mesh, num_updates=num_updates)


def _check_agents(env: Any, config: PPOConfig, num_devices: int) -> None:
    """Raises ValueError if the rows of an environment's agents do not fit num_envs or would be split over devices."""
    agents = env.num_agents
    if config.num_envs % agents:
        raise ValueError(f"{env.name}: {not_divisible_by_agents('num_envs', config.num_envs, agents)}")
    if config.staggered_start and agents > 1:
        raise ValueError(f"staggered_start = {config.staggered_start} needs an environment with one agent; set it to 0")
    if (config.num_envs // agents) % num_devices:
        raise ValueError(
            f"num_devices = {num_devices} does not divide the {config.num_envs // agents} environments that "
            f"num_envs = {config.num_envs} are with {agents} agents each"
        )


def _check_sequences(policy: Policy, config: PPOConfig) -> None:
    """Raises ValueError if the minibatch unit does not fit the network."""
    if policy.is_recurrent and config.recurrent == "none" and config.sequence_length is None:
        raise ValueError(
            f"the network is recurrent: set sequence_length, the steps of the sequences that minibatches consist of; "
            f"num_steps = {config.num_steps} makes whole rollouts"
        )
    if config.recurrent != "none" and not policy.is_recurrent:
        raise ValueError(
            f"recurrent = {config.recurrent} describes jppo's own network, but network = "
            f"{type(policy.network).__name__} is feed-forward; leave one of them out"
        )
    if config.sequence_length is not None and not policy.is_recurrent:
        raise ValueError(
            f"sequence_length = {config.sequence_length} needs a recurrent network; set recurrent to gru or lstm, or "
            "pass a network with initial_carry()"
        )
