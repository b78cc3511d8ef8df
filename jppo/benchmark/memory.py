"""Device memory of a compiled training program by purpose, and the largest program that fits."""

import math
from collections.abc import Callable
from typing import Any

import jax

from jppo.config.ppo import PPOConfig
from jppo.envs.spaces import PyTree
from jppo.ppo.types import TrainState


def memory_by_purpose(
    compiled: Any, train_state: TrainState, collect_state: PyTree = None, num_devices: int = 1
) -> dict[str, int]:
    """Returns the memory that each device needs, in bytes, according to the compiler. The sum is the peak.

    Args:
      compiled: the compiled program of a training loop or of an update.
      train_state: the state of the learner (arrays or their shapes), with a copy on each device.
      collect_state: the state of on-device environments, sharded over the devices.
    """
    stats = compiled.memory_analysis()
    sizes = {
        "parameters": _num_bytes(train_state.policy_state.params),
        "optimizer": _num_bytes(train_state.opt_state),
        "environments": _num_bytes(collect_state) // num_devices,
    }
    sizes["other inputs"] = max(0, stats.argument_size_in_bytes - sum(sizes.values()))
    sizes["outputs"] = max(0, stats.output_size_in_bytes - stats.alias_size_in_bytes)
    sizes["temporaries"] = stats.temp_size_in_bytes  # on the device: the rollout, gradients and activations
    return {name: size for name, size in sizes.items() if size}


def _num_bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def largest_num_envs(config: PPOConfig, devices: int, needed: int, free: int, measure: Callable[[int], int]) -> int:
    """Returns the largest num_envs that fits, or 0 if none does.

    Estimates it from the memory of two sizes, then compiles the estimate, and lowers it until it fits.

    Args:
      needed: memory of `config` in bytes, on each device.
      measure: returns the memory for a num_envs.
    """
    if needed <= free:
        unit, limit = config.num_envs, (2**31 - 1) // config.num_steps
        per_env = max(1, measure(2 * unit) - needed) / unit if 2 * unit <= limit else needed / unit
        count = int(min(limit, unit + (free - needed) / per_env)) // unit
    else:
        unit = devices * config.num_minibatches // math.gcd(devices * config.num_steps, config.num_minibatches)
        count = int(config.num_envs * free / needed) // unit
    while count > 0:
        size = needed if count * unit == config.num_envs else measure(count * unit)
        if size <= free:
            return count * unit
        count = min(count - 1, int(count * free / size))
    return 0
