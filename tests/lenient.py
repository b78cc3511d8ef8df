"""Other people's code that breaks JAX's strict modes, with those relaxed for that code alone."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jppo.envs import Environment, make_env


@contextlib.contextmanager
def lenient() -> Iterator[None]:
    """Lets ranks and dtypes promote."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def leniently(fun: Callable) -> Callable:
    """`fun`, lenient whenever it is called or traced."""

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        with lenient():
            return fun(*args, **kwargs)

    return call


def lenient_env(env: Any, **overrides: Any) -> Environment:
    """`make_env`, with reset and step traced leniently."""
    made = leniently(make_env)(env, **overrides)
    return made._replace(reset=leniently(made.reset), step=leniently(made.step))
