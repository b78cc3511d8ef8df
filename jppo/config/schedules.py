"""Schedules: hyperparameters that change during a run.

A schedule is a function of the progress p in [0, 1], which is update / num_updates of the whole run. Its numbers may be
Python floats or arrays; `jppo.ppo.types` registers the schedules as JAX pytrees.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jppo.config.checks import did_you_mean, to_float
from jppo.errors import Refused

_FORMS = "0.01, 0.01:0 (linear), cosine:0.01:0, exponential:0.01:0.001, piecewise:0.01:0.5:0 or warmup:0.1:3e-4"


class Schedule:
    """The base class of all schedules."""

    def __call__(self, progress: Any) -> Any:
        """Returns the value at a progress in [0, 1], a float or an array."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The name of the function that makes this schedule."""
        return type(self).__name__.lower()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of that function."""
        return tuple(vars(self).values())

    @property
    def extremes(self) -> tuple[Any, ...]:
        """Numbers between which all values of the schedule are."""
        return self.arguments

    def check(self) -> None:
        """Raises ValueError if an argument is invalid; does not check the extremes."""

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(_show, self.arguments))})"


@dataclass(frozen=True, repr=False)
class Linear(Schedule):
    """See `linear`."""

    a: Any
    b: Any

    def __call__(self, progress: Any) -> Any:
        return self.a * (1 - progress) + self.b * progress


@dataclass(frozen=True, repr=False)
class Cosine(Schedule):
    """See `cosine`."""

    a: Any
    b: Any

    def __call__(self, progress: Any) -> Any:
        weight = (1 + _namespace(progress).cos(math.pi * progress)) / 2
        return self.a * weight + self.b * (1 - weight)


@dataclass(frozen=True, repr=False)
class Exponential(Schedule):
    """See `exponential`."""

    a: Any
    b: Any

    def __call__(self, progress: Any) -> Any:
        return self.a ** (1 - progress) * self.b**progress

    def check(self) -> None:
        if not (self.a > 0 and self.b > 0):
            raise Refused("both numbers must be positive")


@dataclass(frozen=True, repr=False)
class Piecewise(Schedule):
    """See `piecewise`."""

    values: tuple[Any, ...]
    boundaries: tuple[Any, ...]

    def __call__(self, progress: Any) -> Any:
        value = self.values[0]
        for boundary, following in zip(self.boundaries, self.values[1:], strict=True):
            value = _select(progress >= boundary, following, value)
        return value

    @property
    def extremes(self) -> tuple[Any, ...]:
        return self.values

    def check(self) -> None:
        ends = (0.0, *map(to_float, self.boundaries), 1.0)
        if any(not low < high for low, high in itertools.pairwise(ends)):
            raise Refused("the boundaries must increase and lie between 0 and 1")


@dataclass(frozen=True, repr=False)
class Warmup(Schedule):
    """See `warmup`."""

    fraction: Any
    schedule: Any

    def __call__(self, progress: Any) -> Any:
        start, after = self.fraction, self.schedule
        if isinstance(after, Schedule):
            first, later = after(0 * progress), after(_select(progress < start, 0.0, (progress - start) / (1 - start)))
        else:
            first = later = after
        return _select(progress < start, first * (progress / start), later)

    @property
    def extremes(self) -> tuple[Any, ...]:
        return (0.0, *(self.schedule.extremes if isinstance(self.schedule, Schedule) else (self.schedule,)))

    def check(self) -> None:
        if not 0 < to_float(self.fraction) < 1:
            raise Refused(f"the fraction {self.fraction} must be between 0 and 1")
        if isinstance(self.schedule, Schedule):
            self.schedule.check()


def linear(a: Any, b: Any) -> Linear:
    """Returns the schedule a * (1 - p) + b * p."""
    return Linear(a, b)


def cosine(a: Any, b: Any) -> Cosine:
    """Returns the schedule a * w + b * (1 - w) with w = (1 + cos(pi * p)) / 2.

    Loshchilov and Hutter (2017), "SGDR: Stochastic gradient descent with warm restarts", without restarts.
    """
    return Cosine(a, b)


def exponential(a: Any, b: Any) -> Exponential:
    """Returns the schedule a^(1 - p) * b^p, for positive numbers."""
    return Exponential(a, b)


def piecewise(values: Sequence[Any], boundaries: Sequence[Any]) -> Piecewise:
    """Returns the schedule that is values[i] from boundaries[i - 1] until boundaries[i].

    Args:
      values: one more than boundaries.
      boundaries: increasing progress values between 0 and 1.

    Raises:
      ValueError: wrong lengths.
    """
    try:
        values, boundaries = tuple(values), tuple(boundaries)
    except TypeError:
        raise Refused(f"piecewise({values}, {boundaries}) needs a list of values and a list of boundaries") from None
    if len(values) != len(boundaries) + 1 or not boundaries:
        raise Refused(
            f"piecewise({_show(values)}, {_show(boundaries)}) has {len(values)} values and {len(boundaries)} "
            "boundaries; it needs at least one boundary, and one more value than boundaries"
        )
    return Piecewise(values, boundaries)


def warmup(fraction: Any, schedule_or_number: Any) -> Warmup:
    """Returns the schedule that increases linearly from 0 until p = fraction.

    Afterwards it is the number, or the other schedule over the rest of the run: schedule((p - fraction) / (1 -
    fraction)).
    """
    return Warmup(fraction, schedule_or_number)


KINDS = (Linear, Cosine, Exponential, Piecewise, Warmup)
_FUNCTIONS: dict[str, Any] = {f.__name__: f for f in (linear, cosine, exponential, piecewise, warmup)}


def check_schedule(schedule: Schedule) -> None:
    """Raises ValueError if a number of a schedule is not finite or an argument is invalid. Takes concrete numbers."""
    for number in _numbers(schedule):
        if not math.isfinite(to_float(number)):
            raise Refused(f"{number!r} is not a finite number")
    schedule.check()


def to_json(value: Any) -> Any:
    """Returns a number or a schedule as JSON: 0.01, "inf" or {"linear": [0.01, 0.0]}."""
    if isinstance(value, Schedule):
        return {value.name: [to_json(argument) for argument in value.arguments]}
    if isinstance(value, tuple):
        return [to_json(number) for number in value]
    number = float(value)
    return number if math.isfinite(number) else str(number)  # JSON has no infinity


def from_json(value: Any) -> Any:
    """Returns the number or the schedule that `to_json` converted. Raises ValueError or TypeError if it is invalid."""
    if isinstance(value, dict):
        ((name, arguments),) = value.items()
        return _function(name)(*map(from_json, arguments))
    return tuple(map(from_json, value)) if isinstance(value, list) else float(value)


def parse(text: str) -> Any:
    """Returns the number or the schedule that a text describes.

    A number, or numbers separated by colons after the name of a schedule; without a name it is linear. The numbers of
    piecewise alternate: value, boundary, value, ... After warmup:FRACTION follows a number or another schedule.

    Raises:
      ValueError: the text is none of these.
    """
    try:
        return _parse(text.split(":"))
    except (ValueError, TypeError):
        raise Refused(f"{text!r} is not a number or a schedule; write {_FORMS}") from None


def show_parsable(value: Any) -> str:
    """Returns the text that `parse` converts to a number or a schedule."""
    if not isinstance(value, Schedule):
        return _show(value)
    if isinstance(value, Piecewise):
        words = [value.values[0], *(x for pair in zip(value.boundaries, value.values[1:], strict=True) for x in pair)]
    else:
        words = list(value.arguments)
    return ":".join([*([] if isinstance(value, Linear) else [value.name]), *map(show_parsable, words)])


def _function(name: str) -> Any:
    if name not in _FUNCTIONS:
        raise Refused(f"unknown schedule {name!r}; {did_you_mean(name, _FUNCTIONS)}")
    return _FUNCTIONS[name]


def _parse(words: list[str]) -> Any:
    first, *rest = words
    if not rest:
        return float(first)
    if first == "warmup":
        return warmup(float(rest[0]), _parse(rest[1:]))
    if first not in _FUNCTIONS:
        first, rest = "linear", words
    values = [float(word) for word in rest]
    return piecewise(values[::2], values[1::2]) if first == "piecewise" else _FUNCTIONS[first](*values)


def _numbers(value: Any) -> list[Any]:
    """Returns all numbers of a schedule."""
    if isinstance(value, Schedule):
        value = value.arguments
    return [number for part in value for number in _numbers(part)] if isinstance(value, tuple) else [value]


def _show(value: Any) -> str:
    """Returns a number without superfluous zeros, a sequence or a schedule as text."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_show, value))}]"
    return str(value).removesuffix(".0")


def _namespace(value: Any) -> Any:
    """Returns jax.numpy or numpy for their arrays, otherwise math."""
    return value.__array_namespace__() if hasattr(value, "__array_namespace__") else math


def _select(condition: Any, then: Any, otherwise: Any) -> Any:
    namespace = _namespace(condition)
    return (then if condition else otherwise) if namespace is math else namespace.where(condition, then, otherwise)
