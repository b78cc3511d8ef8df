"""The interface of on-device environments: pure functions for one environment, batched with `vmap`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jppo.envs.spaces import ActionSpec, Array, PyTree


class Step(NamedTuple):
    """The return value of one step of one environment."""

    obs: PyTree  # the next observation; after the end of an episode, the first of the next episode
    state: PyTree
    reward: Array  # [] f32
    terminated: Array  # [] bool
    truncated: Array  # [] bool
    final_obs: PyTree  # the true next observation, at every step


class Environment(NamedTuple):
    """One environment, which resets itself in the step that ends an episode."""

    name: str
    reset: Callable[[Array], tuple[PyTree, PyTree]]  # key -> obs, state
    step: Callable[[Array, PyTree, Array], Step]  # key, state, action -> Step
    obs_spec: PyTree  # ObsSpec leaves
    action_spec: ActionSpec
    source: Any = None  # the original object, for drawing
    params: Any = None
