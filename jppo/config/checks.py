"""Checks of arguments that several modules share."""

import difflib
import numbers
from collections.abc import Iterable
from typing import Any


def check_int(name: str, value: Any, minimum: int) -> int:
    """Returns the value as an int. Raises ValueError if it is not an integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise ValueError(f"{name} = {value!r} must be an integer of at least {minimum}")
    return int(value)


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Returns a hint for an unknown name: the most similar choice, or all choices if none is similar."""
    names = list(choices)
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(names)}"
