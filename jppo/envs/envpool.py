"""Adapter for EnvPool, whose environments reset themselves in the step after the end of an episode."""

from typing import Any

import jax
import numpy as np

from jppo.config.checks import did_you_mean
from jppo.envs.host_families import import_family
from jppo.envs.spaces import PyTree


def envpool_names() -> list[str]:
    """Returns the names of EnvPool's tasks. EnvPool must be installed."""
    return sorted(f"envpool:{task}" for task in import_family("envpool", "envpool").list_all_envs())


def make_envpool(name: str, seeds: list[int]) -> Any:
    """Makes the vector environment "envpool:<task>". Raises ValueError if EnvPool or the task does not exist."""
    task = name.partition(":")[2]
    tasks = (envpool := import_family("envpool", name)).list_all_envs()
    if task not in tasks:
        hint = did_you_mean(task, tasks, otherwise="envpool.list_all_envs() returns all names")
        raise ValueError(f"envpool has no task {task!r}; {hint}")
    return envpool.make(task, env_type="gymnasium", num_envs=len(seeds), num_threads=1, env_seed=seeds)


def is_envpool(vector: Any) -> bool:
    """Returns whether this is an EnvPool, which takes its seeds when it is made and resets environments by number."""
    return "envpool" in type(vector).__name__.lower()


def reset_by_number(
    vector: Any, obs: PyTree, infos: dict[str, Any], done: np.ndarray
) -> tuple[PyTree, dict[int, PyTree]]:
    """Resets the environments whose episode ended. Without this, EnvPool would ignore their next action and reset them.

    Args:
      obs: [n, ...], of the last step.
      done: [n] bool.

    Returns:
      the next observations [n, ...], and the last observation of each episode that ended, by environment.
    """
    numbers = np.flatnonzero(done)
    final = {int(i): jax.tree.map(lambda x, i=i: np.array(x[i]), obs) for i in numbers}
    obs, fresh = jax.tree.map(np.array, obs), vector.reset(numbers.astype(np.int32))[0]
    jax.tree.map(lambda x, new: x.__setitem__(numbers, new), obs, fresh)
    return obs, final
