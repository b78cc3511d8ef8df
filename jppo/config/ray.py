"""Settings of Ray actors and of trials of Ray Tune, and the number of environments of each actor."""

import dataclasses
import numbers
import os
from dataclasses import dataclass
from typing import Literal

from jppo.config.checks import check_choice, check_int, check_non_negative, nearest_divisors
from jppo.config.ppo import PPOConfig
from jppo.errors import Refused


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """The Ray actors of a run."""

    num_actors: int | None = None
    """Number of actor processes; 0 steps the environments in this process, without Ray. Default: num_envs/envs_per_actor if both are set, otherwise one per core of this machine, or the next lower number that divides num_envs."""  # noqa: E501
    envs_per_actor: int | None = None
    """Number of environments of each actor. Default: num_envs/num_actors. If you set it and not num_envs, num_envs becomes num_actors*envs_per_actor."""  # noqa: E501
    policy_lag: Literal[0, 1] = 0
    """1: actors collect the next rollout while the learner updates, with parameters that are one update older."""
    actor_cpus: float = 1.0
    """CPUs that Ray reserves for each actor; may be a fraction."""
    actor_gpus: float = 0.0
    """GPUs that Ray reserves for each actor; may be a fraction. With 0, actors use the CPU."""
    address: str | None = None
    """Ray cluster to join: auto, host:port or ray://host:port. Default: RAY_ADDRESS if set, else a new local one."""
    actor_timeout: float | None = None
    """Seconds after which an actor that has not returned its rollout is replaced. Default: ten times the longest rollout, at least 60; 1800 for the first rollout."""  # noqa: E501
    max_restarts: int = 3
    """Maximum number of consecutive failures of one actor before the run ends; 1 before the first rollout."""

    def __post_init__(self) -> None:
        if self.num_actors is not None:
            check_int("num_actors", self.num_actors, 0)
        if self.envs_per_actor is not None:
            check_int("envs_per_actor", self.envs_per_actor)
        check_choice("policy_lag", self.policy_lag, (0, 1))
        check_non_negative("actor_cpus", self.actor_cpus)
        check_non_negative("actor_gpus", self.actor_gpus)
        timeout = self.actor_timeout
        if timeout is not None and (not isinstance(timeout, numbers.Real) or not timeout > 0.0):
            raise Refused(f"actor_timeout = {timeout!r} must be more than 0 seconds")
        check_int("max_restarts", self.max_restarts, 0)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources that Ray reserves for each trial of Ray Tune.

    Attributes:
      cpus: number of CPUs, which is also the number of threads of the process.
      gpus: number of GPUs. A fraction also limits the share of the GPU's memory. With 0, the process uses the CPU.

    Raises:
      ValueError: a number is negative or not finite.
    """

    cpus: float = 1.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        check_non_negative("cpus", self.cpus)
        check_non_negative("gpus", self.gpus)


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spread_envs(
    config: PPOConfig, ray: RayConfig, cores: int, fixed: bool, hosts: int = 1, agents: int = 1
) -> tuple[PPOConfig, RayConfig]:
    """Returns `config` and `ray` with num_envs, num_actors and envs_per_actor filled in. num_steps does not change.

    num_envs is num_actors*envs_per_actor. If num_actors is 0, it is hosts*envs_per_actor.

    Args:
      cores: default number of actors.
      fixed: whether config.num_envs must not change.
      hosts: number of hosts over which the actors are spread evenly.
      agents: number of agents of an environment, which stay together. Each counts as one of num_envs.

    Raises:
      ValueError: the numbers do not divide, or they contradict a fixed num_envs.
    """
    if agents > 1:
        for name, number in (("num_envs", config.num_envs), ("envs_per_actor", ray.envs_per_actor)):
            if number is not None and number % agents:
                raise Refused(not_divisible_by_agents(name, number, agents))
    if (ray.num_actors or 0) % hosts:
        raise Refused(f"num_actors = {ray.num_actors} cannot be spread evenly over {hosts} hosts")
    num_actors = ray.num_actors
    num_actors = _default_actors(config, ray, cores, fixed, hosts, agents) if num_actors is None else num_actors
    processes = max(num_actors, hosts)
    if ray.envs_per_actor is None:
        if config.num_envs % processes:
            over = f"num_actors = {num_actors}" if num_actors or hosts == 1 else f"{hosts} hosts"
            raise Refused(
                f"num_envs = {config.num_envs} cannot be spread evenly over {over}; nearest numbers that divide it: "
                f"{nearest_divisors(config.num_envs, processes)}; or set envs_per_actor"
            )
        if (envs_per_actor := config.num_envs // processes) % agents:
            raise Refused(
                f"num_actors = {num_actors} splits environments with {agents} agents: num_envs = {config.num_envs} are "
                f"{config.num_envs // agents} environments, and num_actors must divide this"
            )
        return config, dataclasses.replace(ray, num_actors=num_actors, envs_per_actor=envs_per_actor)
    num_envs = processes * ray.envs_per_actor
    if fixed and num_envs != config.num_envs:
        raise Refused(
            f"num_actors = {num_actors} with envs_per_actor = {ray.envs_per_actor} gives num_envs = {num_envs}, but "
            f"num_envs = {config.num_envs}; set only two of the three"
        )
    return dataclasses.replace(config, num_envs=num_envs), dataclasses.replace(ray, num_actors=num_actors)


def not_divisible_by_agents(name: str, number: int, agents: int) -> str:
    """Returns the message for a number of environments that is not a multiple of the number of agents."""
    below = number - number % agents
    nearest = " or ".join(str(n) for n in (below, below + agents) if n)
    return f"{name} = {number} counts agents and must be a multiple of the {agents} agents of an environment: {nearest}"


def _default_actors(config: PPOConfig, ray: RayConfig, cores: int, fixed: bool, hosts: int, agents: int) -> int:
    """Returns the default number of actors.

    It is num_envs/envs_per_actor if both are set. Otherwise it is the largest number, at most one per core, over which
    num_envs can be spread evenly.
    """
    if ray.envs_per_actor is not None:
        if fixed and config.num_envs % (ray.envs_per_actor * hosts) == 0:
            return config.num_envs // ray.envs_per_actor
        return max(cores - cores % hosts, hosts)
    return max((d for d in range(hosts, cores + 1, hosts) if config.num_envs % (d * agents) == 0), default=hosts)
