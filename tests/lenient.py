"""Relaxes JAX's strict modes for code of other libraries that does not support them."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jppo.envs import Environment, make_env


@contextlib.contextmanager
def lenient() -> Iterator[None]:
    """Allows promotion of ranks and dtypes."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def leniently(fun: Callable) -> Callable:
    """Returns `fun` with promotion allowed during its calls and traces."""

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        with lenient():
            return fun(*args, **kwargs)

    return call


def lenient_env(env: Any, **overrides: Any) -> Environment:
    """Returns `make_env(env)` with promotion allowed in reset and step."""
    made = leniently(make_env)(env, **overrides)
    return made._replace(reset=leniently(made.reset), step=leniently(made.step))
