"""Adapter for Craftax, tested with 1.6.1 (https://github.com/MichaelTMatthews/Craftax).

`done` of Craftax merges death and the time limit. Here, Craftax's own limit is out of reach, so that `done` is death.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from craftax.craftax_env import make_craftax_env_from_name

from jppo.envs.base import Environment, replace_fields
from jppo.envs.episodes import EpisodicEnv, with_limit_and_reset
from jppo.envs.spaces import Array, PyTree

_NAMES = ("Craftax-Classic-Symbolic-v1", "Craftax-Classic-Pixels-v1", "Craftax-Symbolic-v1", "Craftax-Pixels-v1")
_NEVER = 2**30  # steps


def names() -> tuple[str, ...]:
    """Returns the names of the environments."""
    return _NAMES


def make(name: str, max_steps_in_episode: int | None = None, pool: int | None = None, **fields: Any) -> Environment:
    """Returns an environment.

    Args:
      max_steps_in_episode: time limit; Craftax's own one when None.
      **fields: fields of Craftax's EnvParams, e.g. day_length=100.
    """
    source = make_craftax_env_from_name(name, auto_reset=False)
    params = replace_fields(source.default_params, fields)
    limit = max_steps_in_episode or params.max_timesteps
    params = params.replace(max_timesteps=_NEVER)
    is_image = "Pixels" in name

    def seen(obs: Array) -> Array:
        return jnp.round(obs * 255).astype(jnp.uint8) if is_image else obs  # a quarter of the memory of a rollout

    def reset(key: Array) -> tuple[Array, PyTree]:
        obs, state = source.reset(key, params)
        return seen(obs), state

    def step(key: Array, state: PyTree, action: Array) -> tuple[Array, PyTree, Array, Array, bool]:
        obs, state, reward, done, _ = source.step(key, state, action, params)
        return seen(obs), state, reward, done, False

    env = EpisodicEnv(
        name=name, reset=reset, step=step, action_space=source.action_space(params), render=_renderer(name)
    )
    return with_limit_and_reset(env, limit, pool)


def _renderer(name: str) -> Callable[[PyTree], np.ndarray]:
    """Returns a function that draws a state of the environment with this name. It imports Craftax's images at first."""

    @functools.cache
    def compiled() -> Any:
        game = "craftax_classic" if "Classic" in name else "craftax"
        block_size = importlib.import_module("craftax.craftax.constants").BLOCK_PIXEL_SIZE_IMG
        renderer = importlib.import_module(f"craftax.{game}.renderer")
        return jax.jit(renderer.make_craftax_pixel_renderer(block_size))

    return lambda state: np.asarray(compiled()(state)).astype(np.uint8)
