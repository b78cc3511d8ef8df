"""Data-parallel programs: one program, on every device its own part of the environments."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from jppo.config import PPOConfig

AXIS = "devices"


def most_devices(config: PPOConfig) -> int:
    """The largest number of this process's devices over which the environments can be sharded."""
    return max(d for d in range(1, len(jax.local_devices()) + 1) if config.num_strata % d == 0)


def make_mesh(config: PPOConfig, num_devices: int) -> Mesh:
    """A mesh of the first `num_devices` devices of this process, its axis named `AXIS`.

    Raises:
      ValueError: there are fewer, or the environments cannot be sharded so.
    """
    devices = jax.local_devices()
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or not 1 <= num_devices <= len(devices):
        raise ValueError(f"num_devices = {num_devices!r}; JAX has {len(devices)} here ({devices[0].platform})")
    if config.num_strata % num_devices:
        raise ValueError(
            f"num_devices = {num_devices} must divide {config.num_strata}, the shards that num_envs = "
            f"{config.num_envs} environments are shuffled in"
        )
    return line_of(devices[:num_devices])


def line_of(devices: list[Any]) -> Mesh:
    """The mesh of these devices."""
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def over_devices(fun: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`jax.shard_map`, unless there is one device only.

    Which values differ between devices is not checked: environments of others loop and branch as they like, and would
    have to be rewritten for it.
    """
    if mesh.size == 1:
        return fun
    return jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
