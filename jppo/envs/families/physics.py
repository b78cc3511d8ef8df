"""Environments with the interface of Brax, which MuJoCo Playground has, too."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from gymnasium import spaces

from jppo.envs.episodes import EpisodicEnv
from jppo.envs.spaces import Array, PyTree


def episodic_env(
    name: str,
    source: Any,
    action_repeat: int,
    observe: Callable[[PyTree], PyTree],
    render: Callable[[PyTree], Any],
) -> EpisodicEnv:
    """Returns an environment that neither limits nor resets episodes.

    Args:
      source: an object with reset(key) and step(state, action), without Brax's wrappers.
      action_repeat: number of simulated steps per action; rewards are added.
      observe: selects what the policy sees from `state.obs`.
      render: draws a state.
    """

    def reset(key: Array) -> tuple[PyTree, PyTree]:
        state = source.reset(key)
        return observe(state.obs), state

    def step(key: Array, state: PyTree, action: Array) -> tuple[PyTree, PyTree, Array, Array, bool]:
        def once(state: PyTree, _: None) -> tuple[PyTree, Array]:
            state = source.step(state, action)
            return state, state.reward

        if action_repeat == 1:
            state, reward = once(state, None)
        else:
            state, rewards = jax.lax.scan(once, state, None, action_repeat)
            reward = jnp.sum(rewards)
        return observe(state.obs), state, reward, state.done.astype(bool), False

    action_space = spaces.Box(-1.0, 1.0, (source.action_size,))
    return EpisodicEnv(name=name, reset=reset, step=step, action_space=action_space, render=render)
