"""Settings of the algorithm. Standard library only, so that `jppo --help` starts without JAX."""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

from jppo.config.checks import check_bool, check_choice, check_int, did_you_mean, nearest_divisors, set_int, to_float
from jppo.config.schedules import Schedule, check_schedule, linear
from jppo.errors import Refused

R = TypeVar("R")
DEFAULT_STRATA = 8
_LARGEST_SIZE = 2**24  # of a layer. XLA ends the process if several layers have 2**28 units
_SIZES = ("num_envs", "num_steps", "num_epochs", "num_minibatches", "num_strata")
_INTS: list[tuple[str, int, int | None]] = [(name, 1, None) for name in _SIZES]  # name, minimum, maximum
_INTS += [("staggered_start", 0, 1_000_000_000), ("recurrent_size", 1, _LARGEST_SIZE)]
Hyperparam = float | Any  # a number or a schedule; Any, because losses and optimizers receive numbers only


def _explain_unknown_fields(kind: type[R]) -> type[R]:
    """Changes a dataclass so that an unknown field raises TypeError with the most similar name."""
    init: Callable[..., None] = kind.__init__
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: R, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() - set(names):
            is_method = callable(getattr(kind, name, None))
            hint = f"use {kind.__name__}(...).{name}(...)" if is_method else did_you_mean(name, names)
            raise TypeError(f"{kind.__name__} has no field {name!r}; {hint}")
        init(self, *args, **kwargs)

    kind.__init__ = checked  # type: ignore[method-assign, assignment]
    return kind


@_explain_unknown_fields
@dataclass(frozen=True)
class PPOConfig:
    """The structure of a run. Changing a field compiles a new program.

    Lists are accepted instead of tuples.
    """

    num_envs: int = 64
    """Number of parallel environments (N)."""
    num_steps: int = 128
    """Steps of each environment per rollout (T). An update trains on num_envs*num_steps samples."""
    num_epochs: int = 4
    """Passes over each rollout."""
    num_minibatches: int = 4
    """Gradient steps per pass; must divide num_envs*num_steps."""
    network: Literal["mlp", "cnn"] = "mlp"
    """mlp flattens the observation; cnn takes images, [height, width, channels] or [channels, height, width]."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers; for cnn, of the layers after the convolutions."""
    activation: Literal["tanh", "relu", "swish"] = "tanh"
    """Activation of the hidden layers of the mlp. The convolutions use relu."""
    shared_torso: bool = False
    """Actor and critic share their hidden layers."""
    normalize_obs: bool = False
    """Subtract the running mean from observations and divide them by their running standard deviation."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    clip_reward: bool = False
    """Train on the signs of the rewards, as is usual for Atari. Returns are those of the original rewards."""
    normalize_advantage: bool = True
    """Normalize advantages to mean 0 and standard deviation 1 within each minibatch."""
    clip_value: bool = True
    """Clip the change of the value to vf_clip_eps, as in the policy loss."""
    kl_control: Literal["none", "stop", "adapt"] = "none"
    """stop: end an update when its KL divergence exceeds target_kl; adapt: adapt the learning rate to target_kl."""
    action_bounds: Literal["clip", "tanh"] = "clip"
    """How a sample becomes a bounded action: clipped to [-1, 1] or squashed by tanh, then scaled to the bounds."""
    recurrent: Literal["none", "gru", "lstm"] = "none"
    """Recurrent layer of the network: gru or lstm for tasks that need a memory."""
    recurrent_size: int = 128
    """Size of the recurrent layer."""
    sequence_length: int | None = None
    """With a recurrent network, minibatches consist of sequences of this many steps; must divide num_steps. Default: num_steps."""  # noqa: E501
    actor_obs: tuple[str, ...] = ()
    """Names of the observation leaves that the actor sees. Default: all."""
    critic_obs: tuple[str, ...] = ()
    """Names of the observation leaves that the critic sees. Default: all."""
    keep_next_obs: bool = False
    """Store the true successor of each observation, for losses that need batch.next_obs."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Floating-point type of the hidden layers. With bfloat16, parameters, output layers, carries and losses are still float32."""  # noqa: E501
    staggered_start: int = 0
    """Largest age at which a first episode starts, in steps: environment i begins after i*staggered_start/num_envs steps with the initial policy. Set it to the time limit if all episodes have the same length. On-device environments only."""  # noqa: E501
    num_strata: int = DEFAULT_STRATA
    """Maximum number of equal groups of environments that the minibatch shuffle keeps apart. The number of devices must divide it: set 16 or 32 to use as many devices. Reduced to the largest number that fits num_envs and num_minibatches."""  # noqa: E501

    def __post_init__(self) -> None:
        for name, low, high in _INTS:  # products of NumPy ints can overflow
            object.__setattr__(self, name, check_int(name, getattr(self, name), low, high))
        for name in ("hidden_sizes", "actor_obs", "critic_obs"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if not isinstance(self.hidden_sizes, tuple):
            raise Refused(f"hidden_sizes = {self.hidden_sizes!r} must be a tuple of whole numbers, such as (64, 64)")
        sizes = tuple(check_int("hidden_sizes", size, 1, _LARGEST_SIZE) for size in self.hidden_sizes)
        object.__setattr__(self, "hidden_sizes", sizes)
        for field in dataclasses.fields(self):
            if field.type is bool:
                check_bool(field.name, getattr(self, field.name))
            elif getattr(field.type, "__origin__", None) is Literal:
                check_choice(field.name, getattr(self, field.name), field.type.__args__)  # type: ignore[union-attr]
        self._check_batch()

    def _check_batch(self) -> None:
        if self.clip_reward and self.normalize_reward:
            raise Refused("clip_reward and normalize_reward exclude each other; set one of them to false")
        if self.batch_size >= 2**31:
            raise Refused(f"num_envs*num_steps = {self.batch_size:,} must be less than 2**31")
        if self.batch_size % self.num_minibatches:
            raise Refused(
                f"num_envs*num_steps = {self.batch_size} is not divisible by num_minibatches = "
                f"{self.num_minibatches}; nearest numbers that divide it: "
                f"{nearest_divisors(self.batch_size, self.num_minibatches)}"
            )
        self._check_sequences()
        if self.normalize_advantage and self.minibatch_size < 2:
            raise Refused(
                f"num_minibatches = {self.num_minibatches} gives minibatches of {self.minibatch_size} sample, whose "
                "advantages cannot be normalized; use fewer minibatches, or set normalize_advantage to false"
            )

    def _check_sequences(self) -> None:
        """Raises ValueError for invalid settings of recurrent networks and of observation leaves."""
        set_int(self, "sequence_length")
        if self.num_steps % self.steps_per_sequence:
            raise Refused(
                f"num_steps = {self.num_steps} is not divisible by sequence_length = {self.sequence_length}; nearest "
                f"numbers that divide it: {nearest_divisors(self.num_steps, self.steps_per_sequence)}"
            )
        sequences = self.batch_size // self.steps_per_sequence
        if sequences % self.num_minibatches:
            nearest = nearest_divisors(sequences, self.num_minibatches)
            raise Refused(
                f"num_envs*num_steps = {self.batch_size} makes {sequences} sequences of {self.steps_per_sequence} "
                f"steps, which are not divisible by num_minibatches = {self.num_minibatches}; use {nearest} "
                "minibatches, more environments or a shorter sequence_length"
            )
        for name in ("actor_obs", "critic_obs"):
            names = getattr(self, name)
            if not (isinstance(names, tuple) and all(isinstance(leaf, str) for leaf in names)):
                raise Refused(f'{name} = {names!r} must be a tuple of names, such as ("state",)')
            if len(set(names)) < len(names):
                raise Refused(f"{name} = {names} contains a name twice; use {tuple(dict.fromkeys(names))}")
        if self.actor_obs != self.critic_obs and (self.shared_torso or self.recurrent != "none"):
            shared, remedy = "their hidden layers (shared_torso = True)", "set shared_torso to false"
            if self.recurrent != "none":
                shared, remedy = f"the {self.recurrent} and the layers before it", "use recurrent = none"
            raise Refused(
                f"actor_obs = {self.actor_obs} and critic_obs = {self.critic_obs} differ, but actor and critic share "
                f"{shared}; use the same names for both, or {remedy}"
            )

    @property
    def steps_per_sequence(self) -> int:
        """Steps of a unit of the minibatch shuffle: 1 for feed-forward networks."""
        return self.sequence_length or (1 if self.recurrent == "none" else self.num_steps)

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
            if self.num_envs % s == 0 and (self.batch_size // self.steps_per_sequence // s) % self.num_minibatches == 0
        )
        return next(fits)

    def num_updates(self, total_steps: int) -> int:
        """Returns the smallest number of updates with at least `total_steps` environment steps."""
        return -(-total_steps // self.batch_size)

    def replace(self, **fields: Any) -> Self:
        """Returns a copy with other values of some fields. Raises ValueError for an invalid value."""
        return dataclasses.replace(self, **fields)

    def scale_envs(self, factor: int) -> Self:
        """Returns a copy with `factor` times as many environments and minibatches.

        The minibatch size, the learning rate, the number of epochs and the gradient steps per sample do not change.
        Beukman et al. (2026), "Preventing learning stagnation in PPO by scaling to 1 million parallel environments".
        """
        factor = check_int("scale_envs", factor)
        return self.replace(num_envs=factor * self.num_envs, num_minibatches=factor * self.num_minibatches)


@_explain_unknown_fields
@dataclass(frozen=True)
class Hyperparams:
    """The numbers of a run. They are leaves of a pytree and can be arrays: under `vmap`, one value per run.

    Each field is a number or a schedule of `jppo.schedules`, such as linear(0.01, 0).
    """

    learning_rate: Hyperparam = linear(2.5e-4, 0.0)
    """Step size of Adam."""
    gamma: Hyperparam = 0.99
    """Discount factor per step."""
    gae_lambda: Hyperparam = 0.95
    """Lambda of generalized advantage estimation."""
    clip_eps: Hyperparam = 0.2
    """The policy's probability ratio is clipped to 1 +- clip_eps."""
    vf_clip_eps: Hyperparam = 0.2
    """With clip_value, the maximum difference to the value recorded in the rollout."""
    vf_coef: Hyperparam = 0.5
    """Weight of the value loss."""
    ent_coef: Hyperparam = 0.01
    """Weight of the entropy bonus."""
    max_grad_norm: Hyperparam = 0.5
    """Maximum global norm of the gradient; larger gradients are scaled down."""
    target_kl: Hyperparam = 0.01
    """Target KL divergence of kl_control."""
    adam_eps: Hyperparam = 1e-5
    """Adam's epsilon."""

    def replace(self, **fields: Any) -> Self:
        """Returns a copy with other values of some fields."""
        return dataclasses.replace(self, **fields)


# (minimum, maximum, whether the minimum itself is allowed)
RANGES: dict[str, tuple[float, float, bool]] = {
    "learning_rate": (0.0, math.inf, True),
    "gamma": (0.0, 1.0, True),
    "gae_lambda": (0.0, 1.0, True),
    "clip_eps": (0.0, math.inf, False),
    "vf_clip_eps": (0.0, math.inf, False),
    "vf_coef": (0.0, math.inf, True),
    "ent_coef": (0.0, math.inf, True),
    "max_grad_norm": (0.0, math.inf, False),
    "target_kl": (0.0, math.inf, False),
    "adam_eps": (0.0, math.inf, False),
}


def check_hyperparams(hyperparams: Hyperparams) -> None:
    """Raises ValueError for the first value that is not a number or out of range. Takes concrete scalars only."""
    for name in RANGES:
        value = getattr(hyperparams, name)
        if not isinstance(value, Schedule):
            if problem := _problem(name, value):
                raise Refused(f"{name} = {problem}")
            continue
        try:
            check_schedule(value)
        except ValueError as error:
            raise Refused(f"{name} = {value}: {error}") from None
        for number in value.extremes:
            if problem := _problem(name, number):
                raise Refused(f"{name} = {value} has a value outside its range: {problem}")


def _problem(name: str, value: Any) -> str:
    """Returns why a value is not a valid number for a hyperparameter; "" if it is one."""
    (low, high, closed), number = RANGES[name], to_float(value)
    if math.isnan(number):
        return f"{value!r} is not a number"
    inside = (low <= number if closed else low < number) and number <= high
    if not inside or (math.isinf(number) and name != "max_grad_norm"):
        return f"{number:g} is outside {'[' if closed else '('}{low:g}, {high:g}{']' if high < math.inf else ')'}"
    return ""
