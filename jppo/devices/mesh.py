"""Data-parallel programs: one program, on every device its own part of the environments.

Where JAX runs in several processes (`jax.distributed`), one per host, all run the same program; what only one of them
knows, it tells the others with `gather`.
"""

import contextlib
import functools
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jppo.config.ppo import LEAST_SHARE, PPOConfig
from jppo.errors import HostFailed

AXIS = "devices"
_POLL_SECONDS = 5e-4
_WELL, _FAILED, _INTERRUPTED = 0, 1, 2


def max_usable_devices(config: PPOConfig) -> int:
    """The largest number of devices over which the environments can be sharded, of each process as many; of a CPU's
    devices no more than each have enough to do."""
    hosts = _by_process()
    most = len(hosts) * min(map(len, hosts))
    if jax.default_backend() == "cpu":
        most = min(most, config.batch_size // LEAST_SHARE)
    fitting = (d for d in range(len(hosts), most + 1, len(hosts)) if config.effective_strata % d == 0)
    return max(fitting, default=len(hosts))


def make_mesh(config: PPOConfig, num_devices: int) -> Mesh:
    """A mesh of the first `num_devices` devices (of each process as many), its axis named `AXIS`.

    Raises:
      ValueError: there are fewer, or the environments cannot be sharded so.
    """
    hosts = _by_process()
    share, platform = min(map(len, hosts)), hosts[0][0].platform
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        raise ValueError(f"num_devices = {num_devices!r} must be a whole number of at least 1")
    if num_devices > share * len(hosts):
        here = "here" if len(hosts) == 1 else f"in {len(hosts)} processes, {share} in each"
        raise ValueError(f"num_devices = {num_devices!r}; JAX has {share * len(hosts)} {here} ({platform})")
    if num_devices % len(hosts):
        raise ValueError(f"num_devices = {num_devices} cannot be spread evenly over {len(hosts)} processes")
    if config.effective_strata % num_devices:
        raise ValueError(
            f"num_devices = {num_devices} must divide {config.effective_strata}, the number of strata of the shuffle "
            f"for num_envs = {config.num_envs}; set num_strata to a multiple of num_devices that divides num_envs"
        )
    return mesh_1d([device for devices in hosts for device in devices[: num_devices // len(hosts)]])


def mesh_1d(devices: list[Any]) -> Mesh:
    """The mesh of these devices."""
    if jax.process_count() > 1:  # a process's devices stay together, as its environments do; make_mesh may part them
        return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def shard_over_devices(fun: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`jax.shard_map`, unless there is one device only.

    Which values differ between devices is not checked: environments of others loop and branch as they like, and would
    have to be rewritten for it.
    """
    if mesh.size == 1:
        return fun
    return jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def allgather_ints(values: Sequence[int]) -> np.ndarray:
    """What each process gives, [processes, k] i32, on all of them. All must call it, at the same point of the run."""
    row = np.array([values], np.int32)
    if jax.process_count() == 1:
        return row
    split, everywhere = _gathering()
    shape = (jax.process_count(), row.shape[1])
    rows = everywhere(jax.make_array_from_callback(shape, split, lambda index: row))
    while not rows.is_ready():  # a blocking fetch would keep Ctrl-C waiting
        time.sleep(_POLL_SECONDS)
    return np.asarray(rows)


@contextlib.contextmanager
def raise_on_all_processes() -> Iterator[None]:
    """For what each process does for itself: where it raises in one, it raises in all.

    Raises:
      HostFailed: here all went well, but not in another process.
      KeyboardInterrupt: that came in another process.
    """
    try:
        yield
    except BaseException as error:
        allgather_ints([_INTERRUPTED if isinstance(error, KeyboardInterrupt) else _FAILED])
        raise
    codes = allgather_ints([_WELL])[:, 0]
    if (codes == _FAILED).any():
        raise HostFailed(f"process {int(np.argmax(codes == _FAILED))} failed; its own error says why")
    if codes.any():
        raise KeyboardInterrupt


def assert_same_settings(settings: str) -> None:
    """Raises ValueError, in all processes, where they were not given the same."""
    sums = allgather_ints([zlib.crc32(settings.encode()) >> 1])[:, 0]
    if (sums != sums[0]).any():
        raise ValueError(
            f"process {int(np.argmax(sums != sums[0]))} was given other settings than process 0; give num_actors where "
            "machines have different numbers of cores, and install the same packages on all"
        )


def _by_process() -> list[list[Any]]:
    return [[d for d in jax.devices() if d.process_index == number] for number in range(jax.process_count())]


@functools.cache
def _gathering() -> tuple[NamedSharding, Any]:
    """How the rows of `allgather_ints` are spread over processes, and the program that puts them on all."""
    mesh = Mesh(np.array([devices[0] for devices in _by_process()]), (AXIS,))
    return NamedSharding(mesh, PartitionSpec(AXIS)), jax.jit(
        lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec())
    )
