"""What the user sets. Standard library only, so that the command line can show its help at once.

`PPOConfig` is structure: whatever changes the compiled program. `Hyperparams` are numbers: leaves of the
training state, so that a sweep over them is a `vmap` and compiles once.
"""

import dataclasses
import math
import numbers
import os
from dataclasses import dataclass
from typing import Any, Literal

DEFAULT_STRATA = 8
LEAST_SHARE = 2048  # samples of an update for a device of a CPU: with fewer, devices mostly wait for each other


@dataclass(frozen=True)
class PPOConfig:
    """The structure of a run: a change of any field compiles a new program."""

    num_envs: int = 64
    """Environments stepped side by side (N)."""
    num_steps: int = 128
    """Steps of each environment per rollout (T); an update learns from num_envs*num_steps samples."""
    num_epochs: int = 4
    """Passes over each rollout."""
    num_minibatches: int = 4
    """Gradient steps per pass; must divide num_envs*num_steps."""
    network: Literal["mlp", "cnn"] = "mlp"
    """mlp flattens the observation; cnn takes images, [height, width, channels] or [channels, height, width]."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers (after the convolutions, for cnn)."""
    activation: Literal["tanh", "relu", "swish"] = "tanh"
    """Activation of the hidden layers of the mlp (the cnn's own layers are relu)."""
    shared_torso: bool = False
    """One torso for actor and critic instead of one each."""
    normalize_obs: bool = False
    """Divide observations by their running standard deviation, after subtracting the running mean."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    normalize_advantage: bool = True
    """Standardise advantages within each minibatch."""
    clip_value: bool = True
    """Clip the value update like the policy's (by vf_clip_eps)."""
    anneal_learning_rate: bool = True
    """Let the learning rate fall linearly to zero over the run."""
    kl_control: Literal["none", "stop", "adapt"] = "none"
    """stop: skip an update's remaining epochs once its KL passes target_kl; adapt: steer the learning rate to it."""
    action_bounds: Literal["clip", "tanh"] = "clip"
    """How an unbounded sample becomes a bounded action: clipped to [-1, 1] or squashed, then scaled to the bounds."""
    num_strata: int = DEFAULT_STRATA
    """Maximum number of equal groups of environments that the minibatch shuffle keeps apart. The number of devices must divide it: set 16 or 32 to use as many devices. Reduced to the largest number that fits num_envs and num_minibatches."""  # noqa: E501

    def __post_init__(self) -> None:
        for name in ("num_envs", "num_steps", "num_epochs", "num_minibatches", "num_strata"):
            _check_whole(name, getattr(self, name))
        if self.batch_size >= 2**31:
            raise ValueError(f"num_envs*num_steps = {self.batch_size:,} must be less than 2**31")
        for field in dataclasses.fields(self):
            _check_field_type(field, getattr(self, field.name))
        if not isinstance(self.hidden_sizes, tuple):
            raise ValueError(f"hidden_sizes = {self.hidden_sizes!r} must be a tuple of whole numbers, such as (64, 64)")
        for size in self.hidden_sizes:
            _check_whole("hidden_sizes", size)
        if self.batch_size % self.num_minibatches:
            nearest = ", ".join(map(str, _nearest_divisors(self.batch_size, self.num_minibatches)))
            raise ValueError(
                f"num_envs*num_steps = {self.batch_size} is not divisible by num_minibatches = "
                f"{self.num_minibatches}; nearest that divide it: {nearest}"
            )
        if self.normalize_advantage and self.minibatch_size < 2:
            raise ValueError(
                f"num_minibatches = {self.num_minibatches} leaves minibatches of {self.minibatch_size} sample, whose "
                "advantages cannot be standardised; use fewer, or set normalize_advantage to false"
            )

    @property
    def batch_size(self) -> int:
        """Samples per update: num_envs*num_steps."""
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self) -> int:
        """Samples per gradient step."""
        return self.batch_size // self.num_minibatches

    @property
    def effective_strata(self) -> int:
        """Number of strata of the shuffle (see `jppo.ppo.minibatches`): the largest one up to num_strata that fits."""
        fits = (
            s
            for s in range(min(self.num_strata, self.num_envs), 0, -1)
            if self.num_envs % s == 0 and (self.batch_size // s) % self.num_minibatches == 0
        )
        return next(fits)

    def num_updates(self, total_steps: int) -> int:
        """Updates that make at least `total_steps` environment steps."""
        return -(-total_steps // self.batch_size)


@dataclass(frozen=True)
class Hyperparams:
    """The numbers of a run: a pytree whose leaves may as well be arrays, one number per lane of a `vmap`."""

    learning_rate: float = 2.5e-4
    """Step size of Adam (its start, where annealed)."""
    gamma: float = 0.99
    """Discount per step."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation."""
    clip_eps: float = 0.2
    """The policy's probability ratio is clipped to 1 +- this."""
    vf_clip_eps: float = 0.2
    """With clip_value, the value may move this far from the one recorded."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus."""
    max_grad_norm: float = 0.5
    """The gradient's global norm is clipped to this."""
    target_kl: float = 0.01
    """KL aimed at by kl_control."""
    adam_eps: float = 1e-5
    """Adam's epsilon."""


@dataclass(frozen=True)
class RayConfig:
    """How environments are spread over Ray actors."""

    num_actors: int | None = None
    """Processes that step environments; 0 steps them in this one, without Ray. Default: one per core of this machine, where that divides num_envs."""  # noqa: E501
    envs_per_actor: int | None = None
    """Environments in each. Default: num_envs/num_actors; where given, num_envs follows, and num_steps so that the batch stays."""  # noqa: E501
    policy_lag: Literal[0, 1] = 0
    """1: actors collect the next rollout while the learner learns from the last, with parameters one update older."""
    actor_cpus: float = 1.0
    """CPUs that Ray reserves for each actor; may be a fraction."""
    actor_gpus: float = 0.0
    """GPUs that Ray reserves for each actor; may be a fraction. Without one, an actor acts on the CPU."""
    address: str | None = None
    """A Ray cluster to join: auto, host:port or ray://host:port. Default: RAY_ADDRESS if set, else a new local one."""
    actor_timeout: float | None = None
    """Seconds after which a rollout is given up and its actor replaced. Default: ten times the longest so far, at least a minute; half an hour until there is one."""  # noqa: E501
    max_restarts: int = 3
    """Failures of one actor in a row that are made good; one more ends the run. Before the first rollout: one."""

    def __post_init__(self) -> None:
        if self.num_actors is not None:
            _check_whole("num_actors", self.num_actors, least=0)
        if self.envs_per_actor is not None:
            _check_whole("envs_per_actor", self.envs_per_actor)
        for field in dataclasses.fields(self):
            _check_field_type(field, getattr(self, field.name))
        for name in ("actor_cpus", "actor_gpus"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real) or not 0.0 <= float(value) < math.inf:
                raise ValueError(f"{name} = {value!r} must be a number of at least 0")
        timeout = self.actor_timeout
        if timeout is not None and (not isinstance(timeout, numbers.Real) or not timeout > 0.0):
            raise ValueError(f"actor_timeout = {timeout!r} must be more than 0 seconds")
        restarts = self.max_restarts
        if isinstance(restarts, bool) or not isinstance(restarts, numbers.Integral) or restarts < 0:
            raise ValueError(f"max_restarts = {restarts!r} must be a whole number of at least 0")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spread_envs(
    config: PPOConfig, actors: RayConfig, cores: int, fixed: bool, hosts: int = 1
) -> tuple[PPOConfig, RayConfig]:
    """Both with every number filled in: num_envs = max(num_actors, hosts)*envs_per_actor.

    Where envs_per_actor is given, num_envs follows from it, and num_steps from the batch, which stays what it was.

    Args:
      cores: the default number of actors, or the next lower one that fits.
      fixed: config is not to be changed.
      hosts: over which actors are spread evenly.

    Raises:
      ValueError: numbers that do not divide, or do not fit a fixed config.
    """
    if (actors.num_actors or 0) % hosts:
        raise ValueError(f"num_actors = {actors.num_actors} cannot be spread evenly over {hosts} hosts")
    cores = max(cores, hosts)
    if actors.envs_per_actor is None:
        num_actors = actors.num_actors
        if num_actors is None:
            fits = (d for d in range(hosts, cores + 1, hosts) if config.num_envs % d == 0)
            num_actors = max(fits, default=hosts)
        processes = max(num_actors, hosts)
        if config.num_envs % processes:
            nearest = ", ".join(map(str, _nearest_divisors(config.num_envs, processes)))
            over = f"num_actors = {num_actors}" if num_actors or hosts == 1 else f"{hosts} hosts"
            raise ValueError(
                f"num_envs = {config.num_envs} cannot be spread evenly over {over}; nearest that divide it: "
                f"{nearest}; or give envs_per_actor"
            )
        filled = dataclasses.replace(actors, num_actors=num_actors, envs_per_actor=config.num_envs // processes)
        return config, filled
    num_actors = actors.num_actors
    if num_actors is None:
        fitting = (
            k
            for k in range(cores - cores % hosts, 0, -hosts)
            if (
                config.num_envs == k * actors.envs_per_actor
                if fixed
                else config.batch_size % (k * actors.envs_per_actor) == 0
            )
        )
        num_actors = next(fitting, cores - cores % hosts)
    num_envs = max(num_actors, hosts) * actors.envs_per_actor
    if fixed and num_envs != config.num_envs:
        raise ValueError(
            f"{num_actors} actors of {actors.envs_per_actor} environments make num_envs = {num_envs}; num_envs = "
            f"{config.num_envs} was given"
        )
    if config.batch_size % num_envs:
        raise ValueError(
            f"{num_actors} actors of {actors.envs_per_actor} make num_envs = {num_envs}, which does not divide the "
            f"batch of num_envs*num_steps = {config.batch_size}; give num_envs = {num_envs} and the num_steps you want"
        )
    config = dataclasses.replace(config, num_envs=num_envs, num_steps=config.batch_size // num_envs)
    return config, dataclasses.replace(actors, num_actors=num_actors)


# (lowest, highest, whether the lowest is allowed)
_RANGES = {
    "learning_rate": (0.0, math.inf, True),
    "gamma": (0.0, 1.0, True),
    "gae_lambda": (0.0, 1.0, True),
    "clip_eps": (0.0, math.inf, False),
    "vf_clip_eps": (0.0, math.inf, False),
    "vf_coef": (0.0, math.inf, True),
    "ent_coef": (-math.inf, math.inf, False),
    "max_grad_norm": (0.0, math.inf, False),
    "target_kl": (0.0, math.inf, False),
    "adam_eps": (0.0, math.inf, False),
}


def check_hyperparams(hyperparams: Hyperparams) -> None:
    """Raises ValueError for the first number that is out of range, NaN or no number. Takes concrete scalars."""
    for name, (low, high, closed) in _RANGES.items():
        value = getattr(hyperparams, name)
        try:
            number = math.nan if isinstance(value, str | bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number):
            raise ValueError(f"{name} = {value!r} is not a number")
        inside = (low <= number if closed else low < number) and number <= high
        if not inside or (math.isinf(number) and name != "max_grad_norm"):
            bounds = f"{'[' if closed else '('}{low:g}, {high:g}{']' if high < math.inf else ')'}"
            raise ValueError(f"{name} = {number:g} is outside {bounds}")


def check_total_steps(total_steps: Any) -> int:
    """`total_steps` as an int; floats such as 5e5 are taken when whole. Raises ValueError otherwise."""
    number = isinstance(total_steps, numbers.Real) and not isinstance(total_steps, bool)
    if not number or not math.isfinite(total_steps) or total_steps != int(total_steps) or total_steps < 1:
        raise ValueError(f"total_steps = {total_steps!r} must be a whole number of at least 1")
    return int(total_steps)


def _check_whole(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name} = {value!r} must be a whole number of at least {least}")


def _check_field_type(field: dataclasses.Field, value: Any) -> None:
    choices = getattr(field.type, "__args__", ())
    if getattr(field.type, "__origin__", None) is Literal and value not in choices:
        raise ValueError(f"{field.name} = {value!r} is not one of {', '.join(map(str, choices))}")
    if field.type is bool and not isinstance(value, bool):
        raise ValueError(f"{field.name} = {value!r} must be True or False")


def _nearest_divisors(n: int, wanted: int) -> list[int]:
    """The five divisors of n nearest to `wanted`, in order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    divisors = {*small, *(n // d for d in small)}
    return sorted(sorted(divisors, key=lambda d: (abs(d - wanted), d))[:5])


def check_seed(seed: Any) -> int:
    """Returns the seed as an int. Raises ValueError if it is not an integer of 32 bits."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= int(seed) < 2**32:
        raise ValueError(f"seed = {seed!r} must be a whole number from 0 to 2**32 - 1")
    return int(seed)
