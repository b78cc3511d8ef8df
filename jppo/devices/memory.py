"""Memory that compiled programs need, memory that devices have free, and the error message when it runs out."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jppo.errors import Refused

_USABLE_SHARE = 0.9  # of the free memory; the rest is a reserve
_CGROUP = Path("/sys/fs/cgroup")


def bytes_needed(compiled: Any) -> int:
    """Returns the peak device memory of a compiled program in bytes, according to the compiler."""
    stats = compiled.memory_analysis()
    arguments_and_outputs = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return arguments_and_outputs + stats.temp_size_in_bytes


def bytes_free(num_devices: int) -> int:
    """Returns the usable free memory of each of `num_devices` devices in bytes. CPU devices share the machine's."""
    import jax  # here, because `jppo doctor` imports this module without JAX

    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(_USABLE_SHARE * (stats["bytes_limit"] - stats.get("bytes_in_use", 0)))
    return int(_USABLE_SHARE * host_bytes_free()) // num_devices


def bytes_needed_beside(compiled: Any) -> int:
    """Returns the device memory in bytes that a program needs while another one runs, which holds its inputs."""
    stats = compiled.memory_analysis()
    return int(stats.output_size_in_bytes + stats.temp_size_in_bytes)


def check_memory(compiled: Any, num_devices: int, sizes: str, evaluation: int = 0) -> None:
    """Raises ValueError if a compiled program needs more memory than is free.

    Args:
      num_devices: number of devices of this process that run the program.
      sizes: what to lower, for example "num_envs = 4096".
      evaluation: memory of the evaluations in bytes, which run at the same time.
    """
    needed, free = bytes_needed(compiled) + evaluation, bytes_free(num_devices)
    if needed > free:
        share = f", {show_bytes(evaluation)} of it for evaluations" if evaluation else ""
        raise Refused(
            f"the run needs {show_bytes(needed)} of memory per device{share}, but only {show_bytes(free)} are free; "
            f"lower {sizes}{' or eval_episodes' if evaluation else ''}, or start it anyway with force=True (--force)"
        )


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
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise Refused(f"the device does not have enough memory; {remedy}") from error


def host_bytes_free() -> float:
    """Returns the free memory of the machine or, if that is less, of the container in bytes."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":") for line in meminfo.read_text(encoding="ascii").splitlines())
    return min(int(fields["MemAvailable"].split()[0]) * 1024, _container_bytes_free())


def _container_bytes_free() -> float:
    """Returns the memory that the container's limit leaves; infinity without a limit. Files in the cache do not count,
    because the kernel drops them."""
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        stats = dict(line.split() for line in (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):  # no version 2 of cgroups, or the limit is "max"
        return math.inf
    return limit - int(stats["anon"]) - int(stats["shmem"])
