"""Adapter for Jumanji, tested with 1.1.2 (https://github.com/instadeepai/jumanji).

Time limits of most environments are terminations. The adapter puts them out of reach and truncates instead. Rewards of
several agents are added.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import jumanji
from jumanji.environments import SearchAndRescue

from jppo.config.checks import MAX_INT32
from jppo.envs.base import Environment
from jppo.envs.episodes import EpisodicEnv, with_limit_and_reset
from jppo.envs.families.jumanji_actions import action_space, legal_actions, split_action
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
        # not more than limit + 1, because MMST's state has an array of this length
        options["time_limit"] = min(limit + 1, MAX_INT32)
        if isinstance(source, SearchAndRescue):  # its reward decreases to 0 at the time limit
            reward = source._reward_fn
            options |= {"reward_fn": lambda found, time, time_limit: reward(found, time, limit)}
        source = jumanji.make(name, **options)
    mask = getattr(jax.eval_shape(source.reset, jax.random.key(0))[1].observation, ACTION_MASK, None)
    space, sizes = action_space(source.action_spec, mask)

    def observe(obs: PyTree) -> PyTree:
        return obs if mask is None else obs._replace(action_mask=legal_actions(obs.action_mask, space))

    def reset(key: Array) -> tuple[PyTree, PyTree]:
        state, timestep = source.reset(key)
        return observe(timestep.observation), state

    def step(key: Array, state: PyTree, action: Array) -> tuple[PyTree, PyTree, Array, Array, Array]:
        state, timestep = source.step(state, split_action(action, sizes))
        terminated = timestep.last() & jnp.all(timestep.discount == 0.0)
        truncated = timestep.last() & ~terminated
        return observe(timestep.observation), state, jnp.sum(timestep.reward), terminated, truncated

    env = EpisodicEnv(name=name, reset=reset, step=step, action_space=space)
    return with_limit_and_reset(env, limit, pool)
