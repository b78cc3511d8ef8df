"""Adapter for EnvPool, whose environments reset themselves in the step after the end of an episode."""

import contextlib
import ctypes
import importlib
import sys
import warnings
from typing import Any

import jax
import numpy as np

from jppo.config.checks import find_similar
from jppo.envs.host_families import import_family
from jppo.envs.spaces import PyTree
from jppo.errors import Refused

_NOT_DRAWN = ("envpool.toy_text", "envpool.gfootball")  # modules of tasks without a renderer
_egl: list[ctypes.CDLL] = []  # the library EGL, if it was loaded before EnvPool


def envpool_names() -> list[str]:
    """Returns the names of EnvPool's tasks. EnvPool must be installed."""
    return sorted(f"envpool:{task}" for task in _import_envpool("envpool").list_all_envs())


def can_draw_envpool(name: str) -> bool:
    """Returns whether EnvPool has a renderer for "envpool:<task>"."""
    return _module_of(name) not in _NOT_DRAWN


def make_envpool(name: str, seeds: list[int], render_mode: str | None = None) -> Any:
    """Makes the vector environment "envpool:<task>".

    Raises:
      ValueError: EnvPool or the task does not exist, EnvPool cannot make the task, the task has several players, or
        `render_mode` is set and the task cannot be drawn.
    """
    task = name.partition(":")[2]
    tasks = (envpool := _import_envpool(name)).list_all_envs()
    if task not in tasks:
        similar = find_similar(task, tasks)
        hint = f"did you mean envpool:{similar}?" if similar else "`jppo envs envpool` lists all tasks"
        raise Refused(f"envpool has no task {task!r}; {hint}")
    if render_mode:
        _check_renderer(name)
    options = {"render_mode": render_mode} if render_mode else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*precision lowered by casting")  # from EnvPool's spaces
        try:
            vector = envpool.make(
                task, env_type="gymnasium", num_envs=len(seeds), num_threads=1, env_seed=seeds, **options
            )
        except (ImportError, RuntimeError) as error:  # a library or a file is missing
            raise Refused(f"EnvPool cannot make {name}: {error}") from error
        _ = vector.observation_space, vector.action_space  # makes the spaces, which EnvPool keeps
    if (num_players := vector.spec.config.max_num_players) > 1:
        vector.close()
        raise Refused(f"{name} has {num_players} players; jppo supports only EnvPool's tasks with one player")
    return vector


def _import_envpool(name: str) -> Any:
    """Imports EnvPool after EGL, because EnvPool's MuJoCo finds EGL only then.

    Raises ValueError if EnvPool is missing.
    """
    if not _egl and "envpool" not in sys.modules:
        with contextlib.suppress(OSError):  # needed for drawing only
            _egl.append(ctypes.CDLL("libEGL.so.1", ctypes.RTLD_GLOBAL))
    return import_family("envpool", name)


def _check_renderer(name: str) -> None:
    """Raises ValueError if a task cannot be drawn. MuJoCo would end the process if it did not find EGL."""
    if not can_draw_envpool(name):
        raise Refused(f"{name} cannot be drawn: EnvPool has no renderer for it")
    if "mujoco" in _module_of(name) and sys.platform == "linux" and not _egl:
        raise Refused(
            f"{name} cannot be drawn: the library libEGL.so.1 is missing (apt install libegl1), or envpool was "
            "imported before jppo made the environment"
        )


def _module_of(name: str) -> str:
    """Returns the module of a task, such as "envpool.mujoco.gym"."""
    registry = importlib.import_module("envpool.registration").registry
    return str(registry.specs[name.partition(":")[2]][0])


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
