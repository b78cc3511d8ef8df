"""Validates the arguments of an agent that must fit each other or the environment."""

from typing import Any

import jax

from jppo.config.checks import check_function
from jppo.config.ppo import PPOConfig
from jppo.config.ray import not_divisible_by_agents
from jppo.errors import Refused
from jppo.ppo.losses import Advantages, Loss, LossModule
from jppo.ppo.policy import Policy


def check_precision() -> None:
    """Raises ValueError if JAX is configured to compute in 64 bits."""
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise Refused("jppo computes in 32 bits, JAX in 64 (JAX_ENABLE_X64, or jax_enable_x64): switch that off")


def check_functions(loss: Loss | LossModule | None, advantages: Advantages | None) -> None:
    """Raises ValueError if a loss or a function of advantages does not take the arguments that the learner passes."""
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


def check_own_options(network: Any, config: PPOConfig) -> None:
    """Raises ValueError if the config describes details of jppo's own network, but the user passed another one."""
    if config.actor_obs or config.critic_obs:
        raise Refused(
            "actor_obs and critic_obs describe jppo's own network; leave them out and select the observation leaves in "
            f"{type(network).__name__}.apply"
        )
    if config.compute_dtype != "float32":
        raise Refused(
            f"compute_dtype = {config.compute_dtype} describes jppo's own network; leave it out and cast the inputs "
            f"and parameters in {type(network).__name__}.apply"
        )


def check_agents(env: Any, config: PPOConfig, num_devices: int) -> None:
    """Raises ValueError if the rows of an environment's agents do not fit num_envs or would be split over devices."""
    agents = env.num_agents
    if config.num_envs % agents:
        raise Refused(f"{env.name}: {not_divisible_by_agents('num_envs', config.num_envs, agents)}")
    if config.staggered_start and agents > 1:
        raise Refused(f"staggered_start = {config.staggered_start} needs an environment with one agent; set it to 0")
    if (config.num_envs // agents) % num_devices:
        raise Refused(
            f"num_devices = {num_devices} does not divide the {config.num_envs // agents} environments that "
            f"num_envs = {config.num_envs} are with {agents} agents each"
        )


def check_sequences(policy: Policy, config: PPOConfig) -> None:
    """Raises ValueError if the minibatch unit does not fit the network."""
    if policy.is_recurrent and config.recurrent == "none" and config.sequence_length is None:
        raise Refused(
            f"the network is recurrent: set sequence_length, the steps of the sequences that minibatches consist of; "
            f"num_steps = {config.num_steps} makes whole rollouts"
        )
    if config.recurrent != "none" and not policy.is_recurrent:
        raise Refused(
            f"recurrent = {config.recurrent} describes jppo's own network, but network = "
            f"{type(policy.network).__name__} is feed-forward; leave one of them out"
        )
    if config.sequence_length is not None and not policy.is_recurrent:
        raise Refused(
            f"sequence_length = {config.sequence_length} needs a recurrent network; set recurrent to gru or lstm, or "
            "pass a network with initial_carry()"
        )
