"""Adapter for Navix, tested with 0.7.4 (https://github.com/epignatelli/navix).

`step_type` is 1 after a truncation and 2 after a termination. `step` would reset in the step after the end of an
episode and ignore its action, so the adapter uses `_step`. The state contains images of the grid, 12 kB per environment
of 8 x 8, which are removed.
"""

import importlib
from typing import Any

import jax.numpy as jnp
import navix
import numpy as np
from gymnasium import spaces

from jppo.envs.base import Environment
from jppo.envs.episodes import EpisodicEnv, with_limit_and_reset
from jppo.envs.families.grids import one_hot_channels
from jppo.envs.spaces import Array, PyTree

_SYMBOLS = (11, 6, 4)  # numbers of tags, colours and states of `observations.symbolic`


def names() -> tuple[str, ...]:
    """Returns the names of the environments."""
    return tuple(sorted(navix.registry()))


def make(name: str, max_steps_in_episode: int | None = None, pool: int | None = None, **options: Any) -> Environment:
    """Returns an environment.

    Args:
      max_steps_in_episode: time limit; Navix's 100 when None.
      **options: arguments of `navix.make`. observation_fn is `symbolic` or `symbolic_first_person` of
        `navix.observations`.
    """
    options |= {} if max_steps_in_episode is None else {"max_steps": max_steps_in_episode}
    source = navix.make(name, **options)

    def seen(timestep: PyTree) -> Array:
        return one_hot_channels(timestep.observation, _SYMBOLS)

    def without_images(timestep: PyTree) -> PyTree:
        return timestep.replace(state=timestep.state.replace(cache=None))

    def reset(key: Array) -> tuple[Array, PyTree]:
        timestep = source.reset(key)
        return seen(timestep), without_images(timestep)

    def step(key: Array, timestep: PyTree, action: Array) -> tuple[Array, PyTree, Array, Array, Array]:
        timestep = source._step(timestep, action)
        return seen(timestep), timestep, timestep.reward, timestep.is_termination(), timestep.is_truncation()

    env = EpisodicEnv(
        name=name, reset=reset, step=step, action_space=spaces.Discrete(len(source.action_set)), render=_draw
    )
    return with_limit_and_reset(env, source.max_steps, pool)


def _draw(timestep: PyTree) -> np.ndarray:
    """Draws a time step. Its state has no cache of images, which the adapter removes."""
    cache = importlib.import_module("navix.rendering.cache").RenderingCache
    state = timestep.state.replace(cache=cache.init(jnp.asarray(timestep.state.grid)))
    return np.asarray(importlib.import_module("navix.observations").rgb(state)).repeat(4, axis=0).repeat(4, axis=1)
