"""Adapter for MuJoCo Playground, tested with 0.2.0 (https://github.com/google-deepmind/mujoco_playground).

Its environments have no time limit without its wrapper, and its automatic reset returns to the first state of the run
by default. Here, the limit is `episode_length` of the environment's configuration, and each reset is a new one.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
from mujoco_playground import registry

from jppo.envs.base import Environment
from jppo.envs.episodes import with_limit_and_reset
from jppo.envs.families.physics import episodic_env
from jppo.envs.spaces import PyTree


def names() -> tuple[str, ...]:
    """Returns the names of the environments."""
    return tuple(sorted(registry.ALL_ENVS))


def make(
    name: str,
    max_steps_in_episode: int | None = None,
    pool: int | None = None,
    privileged: bool = False,
    **config: Any,
) -> Environment:
    """Returns an environment.

    Args:
      max_steps_in_episode: time limit; the `episode_length` of the configuration when None.
      privileged: return all observation leaves, for `critic_obs=("privileged_state",)`. Otherwise the policy's leaf
        `state` only.
      **config: fields of the environment's configuration, e.g. ctrl_dt=0.02.
    """
    settings = dict(registry.get_default_config(name))
    if "impl" in settings:  # AeroCubeRotateZAxis has no such field
        config = {"impl": "jax"} | config
    source = registry.load(name, config_overrides=config)
    settings |= config
    repeat = int(settings.get("action_repeat", 1))
    limit = max_steps_in_episode or -(-int(settings["episode_length"]) // repeat)
    env = episodic_env(name, source, repeat, select_observation(privileged), _renderer(source.mj_model))
    return with_limit_and_reset(env, limit, pool)


def select_observation(privileged: bool) -> Callable[[PyTree], PyTree]:
    """Returns a function that selects what the policy sees, so that it does not learn from the privileged state."""
    return lambda obs: obs["state"] if isinstance(obs, Mapping) and not privileged else obs


def _renderer(model: Any) -> Callable[[PyTree], Any]:
    """Returns a function that draws states with positions `state.data` of a model of MuJoCo."""

    @functools.cache
    def screen() -> Any:
        return importlib.import_module("mujoco").Renderer(model, height=240, width=320)

    def render(state: PyTree) -> Any:
        mujoco = importlib.import_module("mujoco")
        data = mujoco.MjData(model)
        data.qpos, data.qvel = jax.device_get((state.data.qpos, state.data.qvel))
        data.mocap_pos, data.mocap_quat = jax.device_get((state.data.mocap_pos, state.data.mocap_quat))
        mujoco.mj_forward(model, data)
        screen().update_scene(data, camera=0 if model.ncam else -1)
        return screen().render()

    return render
