"""Checks of arguments that several modules share."""

import contextlib
import difflib
import inspect
import math
import numbers
import os
from collections.abc import Iterable
from typing import Any

from jppo.config.families import family_of, host_family_of
from jppo.errors import Refused

_ALIASES = {  # names in other libraries, and words for a parameter's values
    "lr": "learning_rate",
    "steps": "total_steps",
    "timesteps": "total_steps",
    "total_timesteps": "total_steps",
    "n_envs": "num_envs",
    "n_steps": "num_steps",
    "rollout_length": "num_steps",
    "n_epochs": "num_epochs",
    "update_epochs": "num_epochs",
    "n_minibatches": "num_minibatches",
    "clip_range": "clip_eps",
    "clip_coef": "clip_eps",
    "clip_range_vf": "vf_clip_eps",
    "entropy_coef": "ent_coef",
    "value_coef": "vf_coef",
    "lam": "gae_lambda",
    "net_arch": "hidden_sizes",
    "workers": "num_actors",
    "num_workers": "num_actors",
    "verbose": "progress",
    "halving": "selection",
    "successive_halving": "selection",
    "pbt": "selection",
    "max_episode_steps": "max_steps_in_episode",
}


MAX_INT32 = 2**31 - 1


def check_int(name: str, value: Any, minimum: int = 1, maximum: int | None = None) -> int:
    """Returns the value as an int. Raises ValueError if it is not an integer between both limits, inclusive."""
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_int or value < minimum or (maximum is not None and value > maximum):
        limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum:,}"
        raise Refused(f"{name} = {value!r} must be a whole number {limits}")
    return int(value)


def check_non_negative(name: str, value: Any) -> None:
    """Raises ValueError if the value is not a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0.0 <= float(value) < math.inf:
        raise Refused(f"{name} = {value!r} must be a number of at least 0")


def check_bool(name: str, value: Any) -> None:
    """Raises ValueError if the value is not True or False."""
    if not isinstance(value, bool):
        raise Refused(f"{name} = {value!r} must be True or False")


def check_path(name: str, value: Any) -> None:
    """Raises ValueError if the value is neither None nor a path."""
    if value is not None and not isinstance(value, str | os.PathLike):
        raise Refused(f"{name} = {value!r} must be a path")


def check_function(name: str, value: Any, arguments: str) -> None:
    """Checks a user's function.

    Args:
      arguments: names of its positional arguments, "obs, key".

    Raises:
      ValueError: the value cannot be called.
      TypeError: it cannot be called with these arguments.
    """
    if not callable(value):
        raise Refused(f"{name} = {value!r} must be a function of ({arguments})")
    with contextlib.suppress(ValueError):  # some builtins have no signature
        signature = inspect.signature(value)
        try:
            signature.bind(*arguments.split(", "))
        except TypeError as error:
            shown = getattr(value, "__name__", type(value).__name__)
            raise TypeError(f"{name} = {shown} must accept the arguments ({arguments}): {error}") from None


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raises ValueError if the value is not one of the choices."""
    if value not in (choices := tuple(choices)):
        raise Refused(f"{name} = {value!r} is not one of {', '.join(map(str, choices))}")


def check_total_steps(total_steps: Any) -> int:
    """Returns `total_steps` as an int; whole floats such as 5e5 are accepted. Raises ValueError for other values."""
    is_number = isinstance(total_steps, numbers.Real) and not isinstance(total_steps, bool)
    if not is_number or not math.isfinite(total_steps) or total_steps != int(total_steps) or total_steps < 1:
        raise Refused(f"total_steps = {total_steps!r} must be a whole number of at least 1")
    return int(total_steps)


def check_seed(seed: Any) -> int:
    """Returns the seed as an int. Raises ValueError if it is not an integer of 32 bits."""
    return check_int("seed", seed, 0, 2**32 - 1)


def nearest_divisors(n: int, wanted: int) -> str:
    """Returns the five divisors of n that are nearest to `wanted`, in order, as text."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    divisors = {*small, *(n // d for d in small)}
    return ", ".join(map(str, sorted(sorted(divisors, key=lambda d: (abs(d - wanted), d))[:5])))


def find_similar(name: str, choices: Iterable[str]) -> str | None:
    """Returns the choice that has another name in `_ALIASES`, or the most similar choice, or None."""
    names = list(choices)
    plain = name.replace("-", "_")
    if _ALIASES.get(plain) in names:
        return _ALIASES[plain]
    return next(iter(closest_names(name, names)), None)


def closest_names(name: str, names: Iterable[str]) -> list[str]:
    """Returns at most three different names that are similar to `name`, the most similar first."""
    return difflib.get_close_matches(name, dict.fromkeys(names))


def names_module(env: Any) -> bool:
    """Returns whether an environment is named as module:name, so that making it imports and runs that module."""
    is_family = family_of(env) or host_family_of(env)
    return isinstance(env, str) and ":" in env and not is_family


def did_you_mean(name: str, choices: Iterable[str], otherwise: str = "") -> str:
    """Returns a hint for an unknown name: the most similar choice; if none is similar, `otherwise` or all choices."""
    names = list(choices)
    similar = find_similar(name, names)
    return f"did you mean {similar}?" if similar else otherwise or f"choose from {', '.join(names)}"


def escape_controls(text: str) -> str:
    """Returns text with its control characters, which could change the terminal, as escape sequences."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def to_float(value: Any) -> float:
    """Returns a number or a scalar array as a float, and NaN for anything else."""
    try:
        return math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
