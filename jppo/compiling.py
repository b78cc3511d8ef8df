"""How programs are compiled."""

from collections.abc import Callable
from typing import Any

import jax


def jit(fun: Callable, **kwargs: Any) -> Callable:
    """`jax.jit` with the options that this library's programs want; for outermost functions.

    On CPU, XLA's concurrency-optimised schedule is switched off: with it, vmapped training programs stop for good after
    some ten thousand gradient steps, all of XLA's threads asleep (jaxlib 0.10.2; docs/performance.md has the
    measurements), and without it they are no slower.
    """
    options = {"xla_cpu_enable_concurrency_optimized_scheduler": False} if jax.default_backend() == "cpu" else None
    return jax.jit(fun, compiler_options=options, **kwargs)
