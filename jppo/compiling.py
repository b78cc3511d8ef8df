"""How programs are compiled."""

from collections.abc import Callable
from typing import Any

import jax


def jit(fun: Callable, **kwargs: Any) -> Any:
    """`jax.jit` with the options that this library's programs want; for outermost functions.

    On CPU, XLA's default schedule runs independent operations at once, and in jaxlib 0.10.2 programs of many small ones
    (a vmapped training run is one) come to a stop for good after some thousand iterations, all of XLA's threads asleep.
    With the memory-optimised schedule that was seen with hundreds of tiny lanes only, and it is no slower
    (docs/performance.md).
    """
    on_cpu = jax.default_backend() == "cpu"
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if on_cpu else None
    return jax.jit(fun, compiler_options=options, **kwargs)
