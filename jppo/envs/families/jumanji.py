"""Adapter for Jumanji, tested with 1.1.2 (https://github.com/instadeepai/jumanji).

Time limits of most environments are terminations. The adapter puts them out of reach and truncates instead. An
`action_mask` over combinations of a MultiDiscrete action needs one Discrete action with a number for each combination.
Rewards of several agents are added.
"""

import functools
import inspect
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jumanji
import numpy as np
from gymnasium import spaces
from jumanji.environments import SearchAndRescue

from jppo.envs.base import Environment
from jppo.envs.episodes import EpisodicEnv, with_limit_and_reset
from jppo.envs.spaces import ACTION_MASK, Array, PyTree


def names() -> tuple[str, ...]:
    """Returns the names of the environments."""
    return tuple(sorted(jumanji.registered_environments()))


def make(name: str, max_steps_in_episode: int | None = None, pool: int | None = None, **options: Any) -> Environment:
    """Returns an environment.

    Args:
      max_steps_in_episode: time limit; Jumanji's own one, if there is one, when None.
      **options: arguments of Jumanji's class, e.g. num_rows=6.
    """
    source: Any = jumanji.make(name, **options)
    limit: Any = max_steps_in_episode or getattr(source, "time_limit", None)
    if "time_limit" in inspect.signature(type(source)).parameters:
        options |= {"time_limit": limit + 1}  # not more, because MMST's state has an array of this length
        if isinstance(source, SearchAndRescue):
            options |= {"reward_fn": functools.partial(_reward_of_limit, source._reward_fn, limit)}
        source = jumanji.make(name, **options)
    mask = getattr(jax.eval_shape(source.reset, jax.random.key(0))[1].observation, ACTION_MASK, None)
    action_space = _action_space(source.action_spec, mask)
    sizes = tuple(map(int, getattr(action_space, "nvec", ())))
    is_joint = bool(sizes) and mask is not None and mask.shape == sizes

    def observe(obs: PyTree) -> PyTree:
        if mask is None:
            return obs
        legal = obs.action_mask.reshape(len(sizes) if sizes and not is_joint else 1, -1)
        legal |= ~legal.any(axis=-1, keepdims=True)  # some episodes continue without a legal action; the next one ends
        return obs._replace(action_mask=legal.ravel())

    def reset(key: Array) -> tuple[PyTree, PyTree]:
        state, timestep = source.reset(key)
        return observe(timestep.observation), state

    def step(key: Array, state: PyTree, action: Array) -> tuple[PyTree, PyTree, Array, Array, Array]:
        if is_joint:
            action = jnp.stack(jnp.unravel_index(action, sizes))
        state, timestep = source.step(state, action)
        terminated = timestep.last() & jnp.all(timestep.discount == 0.0)
        truncated = timestep.last() & ~terminated
        return observe(timestep.observation), state, jnp.sum(timestep.reward), terminated, truncated

    space = spaces.Discrete(math.prod(sizes)) if is_joint else action_space
    return with_limit_and_reset(
        EpisodicEnv(name=name, reset=reset, step=step, action_space=space, render=_renderer(source)), limit, pool
    )


def _action_space(spec: Any, mask: Any) -> spaces.Space:
    """Returns the space of Jumanji's action spec. MultiCVRP's bounds allow one number more than its mask."""
    if hasattr(spec, "num_values"):
        sizes = np.asarray(spec.num_values)
        return spaces.MultiDiscrete(sizes) if sizes.ndim else spaces.Discrete(int(sizes))
    low, high = np.broadcast_to(spec.minimum, spec.shape), np.broadcast_to(spec.maximum, spec.shape)
    if np.issubdtype(spec.dtype, np.integer):
        return spaces.MultiDiscrete(high - low + 1 if mask is None else np.full(spec.shape, mask.shape[-1]), start=low)
    return spaces.Box(low, high, dtype=np.float32)


def _reward_of_limit(reward_fn: Any, limit: int, found_targets: Array, step: Array, time_limit: int) -> Array:
    """Returns SearchAndRescue's reward, which decreases to 0 at the time limit, for the limit of `make`."""
    return reward_fn(found_targets, step, limit)  # type: ignore[no-any-return]


def _renderer(source: Any) -> Any:
    """Returns a function that draws a state with Jumanji's viewer, which would open a window or return nothing."""
    viewer = next(value for name, value in vars(source).items() if name.endswith("viewer"))
    images: list[Any] = []
    viewer._display = lambda figure: images.append(viewer._display_rgb_array(figure))

    def render(state: PyTree) -> Any:
        with warnings.catch_warnings(action="ignore"):  # of windows that cannot be shown
            source.render(state)
        return images.pop()[::2, ::2, :3]

    return render
