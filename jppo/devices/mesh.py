"""The device mesh, and agreement between the processes of a run.

Every device runs the same program on its shard of the environments. If JAX runs in several processes
(`jax.distributed`), all of them launch the same programs and exchange decisions with `allgather_ints`.
"""

import contextlib
import functools
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jppo.config.checks import check_int
from jppo.config.ppo import PPOConfig
from jppo.devices.signals import end_process_at
from jppo.errors import HostFailed, Refused

AXIS = "devices"
LEAST_SHARE = 2048  # minimum number of samples per CPU device and update; with fewer, devices mostly wait
_POLL_SECONDS = 5e-4
_WIDTH = 8  # numbers that the processes exchange at once: whether the sender was interrupted, then the values


class OtherProcessInterrupted(KeyboardInterrupt):
    """Another process was interrupted, see `interrupt_all_processes`."""


def max_usable_devices(config: PPOConfig) -> int:
    """Returns the largest number of devices that the environments can be sharded over.

    Every process has an equal number of them. On CPU, each device gets at least `LEAST_SHARE` samples.
    """
    hosts = _devices_by_process()
    limit = len(hosts) * min(map(len, hosts))
    if jax.default_backend() == "cpu":
        limit = min(limit, config.batch_size // LEAST_SHARE)
    fitting = (d for d in range(len(hosts), limit + 1, len(hosts)) if config.effective_strata % d == 0)
    return max(fitting, default=len(hosts))


def make_mesh(config: PPOConfig, num_devices: int) -> Mesh:
    """Returns a mesh of the first `num_devices` devices, an equal number from each process, with the axis `AXIS`.

    Raises:
      ValueError: JAX has fewer devices, or they cannot share the environments equally.
    """
    hosts = _devices_by_process()
    share, platform = min(map(len, hosts)), hosts[0][0].platform
    check_int("num_devices", num_devices)
    if num_devices > share * len(hosts):
        where = "here" if len(hosts) == 1 else f"in {len(hosts)} processes, {share} in each"
        raise Refused(f"num_devices = {num_devices!r}; JAX has {share * len(hosts)} {where} ({platform})")
    if num_devices % len(hosts):
        raise Refused(f"num_devices = {num_devices} cannot be spread evenly over {len(hosts)} processes")
    if config.effective_strata % num_devices:
        raise Refused(
            f"num_devices = {num_devices} must divide {config.effective_strata}, the number of strata of the shuffle "
            f"for num_envs = {config.num_envs}; set num_strata to a multiple of num_devices that divides num_envs"
        )
    return mesh_1d([device for devices in hosts for device in devices[: num_devices // len(hosts)]])


def mesh_1d(devices: list[Any]) -> Mesh:
    """Returns a mesh of these devices."""
    if jax.process_count() > 1:  # keeps the devices of a process together, which make_mesh may not
        return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def shard_over_devices(fun: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """Applies `jax.shard_map` if the mesh has more than one device.

    `check_vma` is off, because third-party environments would have to annotate their loops and branches for it.
    """
    if mesh.size == 1:
        return fun
    return jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def allgather_ints(values: Sequence[int]) -> np.ndarray:
    """Returns the values of every process, [processes, k] i32 with k < 8. All must call it at the same point.

    Raises:
      KeyboardInterrupt: another process was interrupted, see `interrupt_all_processes`.
    """
    if jax.process_count() == 1:
        return np.array([values], np.int32)
    rows = _exchange(False, values)
    if rows[:, 0].any():
        raise OtherProcessInterrupted("another process was interrupted")
    return rows[:, 1 : 1 + len(values)]


def _exchange(interrupted: bool, values: Sequence[int]) -> np.ndarray:
    """Returns the arguments of every process, [processes, _WIDTH] i32."""
    row = np.zeros((1, _WIDTH), np.int32)
    row[0, : 1 + len(values)] = interrupted, *values
    split, replicate = _make_allgather()
    rows = replicate(jax.make_array_from_callback((jax.process_count(), _WIDTH), split, lambda index: row))
    while not rows.is_ready():  # because a blocking fetch would delay Ctrl-C
        time.sleep(_POLL_SECONDS)
    return np.asarray(rows)


@contextlib.contextmanager
def interrupt_all_processes() -> Iterator[None]:
    """If a KeyboardInterrupt ends the block in one process, the next `allgather_ints` of the others raises one, too.

    This process waits until they call it. Another Ctrl-C ends it at once.
    """
    try:
        yield
    except OtherProcessInterrupted:
        raise
    except KeyboardInterrupt:
        if jax.process_count() > 1:
            with end_process_at(signal.SIGINT):
                _exchange(True, [])
        raise


@contextlib.contextmanager
def raise_on_all_processes() -> Iterator[None]:
    """Raises an exception in all processes if the block raises one in any process.

    Raises:
      HostFailed: the block raised an exception in another process.
    """
    try:
        yield
    except KeyboardInterrupt:  # see `interrupt_all_processes`
        raise
    except BaseException:
        allgather_ints([True])
        raise
    if (failed := allgather_ints([False])[:, 0]).any():
        raise HostFailed(f"process {int(np.argmax(failed))} failed; see the error message of that process")


def assert_same_settings(settings: str) -> None:
    """Raises ValueError in all processes if their settings differ."""
    sums = allgather_ints([zlib.crc32(settings.encode()) >> 1])[:, 0]
    if (sums != sums[0]).any():
        raise Refused(
            f"the settings of process {int(np.argmax(sums != sums[0]))} differ from those of process 0; set num_actors "
            "if machines have different numbers of cores, and install the same packages on all"
        )


def _devices_by_process() -> list[list[Any]]:
    return [[d for d in jax.devices() if d.process_index == number] for number in range(jax.process_count())]


@functools.cache
def _make_allgather() -> tuple[NamedSharding, Any]:
    """Returns the sharding of one row per process, and the program that copies all rows to all processes."""
    mesh = Mesh(np.array([devices[0] for devices in _devices_by_process()]), (AXIS,))
    return NamedSharding(mesh, PartitionSpec(AXIS)), jax.jit(
        lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec())
    )
