"""Memory that compiled programs need, memory that devices have free, and the error message when it runs out."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

_USABLE_SHARE = 0.9  # of the free memory; the rest is a reserve


def bytes_needed(compiled: Any) -> int:
    """Returns the peak device memory of a compiled program in bytes, according to the compiler."""
    stats = compiled.memory_analysis()
    arguments_and_outputs = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return arguments_and_outputs + stats.temp_size_in_bytes


def bytes_free(num_devices: int) -> int:
    """Returns the usable free memory of each of `num_devices` devices in bytes. CPU devices share the machine's."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(_USABLE_SHARE * (stats["bytes_limit"] - stats.get("bytes_in_use", 0)))
    return int(_USABLE_SHARE * _host_bytes_free()) // num_devices


def show_bytes(number: float) -> str:
    """Returns a number of bytes as text in bytes, KiB, MiB or GiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:,.4g} GiB"


@contextlib.contextmanager
def explain_out_of_memory(remedy: str) -> Iterator[None]:
    """Replaces XLA's RESOURCE_EXHAUSTED error with a ValueError that names a remedy.

    Args:
      remedy: advice to the user, for example "lower num_envs = 4096".
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(f"the device does not have enough memory; {remedy}") from error


def _host_bytes_free() -> int:
    """Returns the free memory of the machine in bytes."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text(encoding="ascii").splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
