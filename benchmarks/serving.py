"""The process of one implementation for versus_jax_peers.py.

It does not import jppo, because the other implementations run in their own Python environments.
"""

import contextlib
import json
import platform
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

_PACKAGES = ("jax", "gymnax", "flax", "distrax", "rejax", "brax")


def serve(train: Callable, argument: Any, jit: Callable = jax.jit) -> None:
    """Compiles `train(argument)` with `jit`, then runs it once per line of standard input.

    Prints a line of JSON after compilation and after each run ({"seconds", "cpu_seconds"}, the latter of all threads),
    and one at the end of the input ({"peak_rss_mb", "program_mb", "versions"}).
    """
    start = time.perf_counter()
    compiled = jit(train).lower(argument).compile()
    say({"seconds": time.perf_counter() - start})
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(compiled(argument))
        say({"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu})
    memory = compiled.memory_analysis()
    unit = 2**20 if platform.system() == "Darwin" else 2**10
    say(
        {
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit,
            "program_mb": (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 2**20,
            "versions": read_versions(),
        }
    )


def read_versions() -> dict[str, str]:
    """Returns the versions of the packages that are installed."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def say(content: dict[str, Any]) -> None:
    """Prints a message for the process that started this one."""
    print(json.dumps(content), flush=True)
