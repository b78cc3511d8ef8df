"""Adapter for XLand-MiniGrid, tested with 0.9.3 (https://github.com/dunnolab/xland-minigrid).

The last step of an episode is `LAST` for both ends; `discount` is 0 only after a termination. Its wrappers lose the
final observation. Observations are numbers of tiles and colours.
"""

import warnings
from typing import Any

import numpy as np
import xminigrid
from gymnasium import spaces
from xminigrid.core.constants import NUM_COLORS, NUM_TILES
from xminigrid.rendering.rgb_render import render as draw

from jppo.envs.base import Environment, replace_fields
from jppo.envs.episodes import EpisodicEnv, with_limit_and_reset
from jppo.envs.families.grids import one_hot_channels
from jppo.envs.spaces import Array, PyTree


def names() -> tuple[str, ...]:
    """Returns the names of the environments."""
    return tuple(xminigrid.registered_environments())


def make(name: str, max_steps_in_episode: int | None = None, pool: int | None = None, **fields: Any) -> Environment:
    """Returns an environment.

    Args:
      max_steps_in_episode: time limit, on which the reward depends; the environment's own one when None.
      **fields: fields of the environment's parameters, e.g. view_size=5 or ruleset=...
    """
    if name.startswith("XLand-") and "ruleset" not in fields:
        problem = f"xminigrid:{name} has no goal and no rewards without a rule set"
        warnings.warn(f'{problem}; pass, in Python, jppo.make_env("xminigrid:{name}", ruleset=...)', stacklevel=2)
    source, params = xminigrid.make(name)
    params = replace_fields(params, fields)
    limit = max_steps_in_episode or params.max_steps
    params = params.replace(max_steps=limit)

    def seen(timestep: PyTree) -> Array:
        return one_hot_channels(timestep.observation, (NUM_TILES, NUM_COLORS))

    def reset(key: Array) -> tuple[Array, PyTree]:
        timestep = source.reset(params, key)
        return seen(timestep), timestep

    def step(key: Array, timestep: PyTree, action: Array) -> tuple[Array, PyTree, Array, Array, Array]:
        timestep = source.step(params, timestep, action)
        terminated = timestep.discount == 0.0
        return seen(timestep), timestep, timestep.reward, terminated, timestep.last() & ~terminated

    def render(timestep: PyTree) -> Any:
        return draw(np.asarray(timestep.state.grid), timestep.state.agent, params.view_size)

    env = EpisodicEnv(
        name=name, reset=reset, step=step, action_space=spaces.Discrete(source.num_actions(params)), render=render
    )
    return with_limit_and_reset(env, limit, pool)
