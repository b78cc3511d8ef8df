"""The on-device environment: pure functions for one environment, batched by `vmap`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jppo.envs.spaces import ActionSpec, Array, PyTree


class Step(NamedTuple):
    """What one step of one environment returns."""

    obs: PyTree  # to act on next: of the new episode if this one ended
    state: PyTree
    reward: Array  # [] f32
    terminated: Array  # [] bool
    truncated: Array  # [] bool
    final_obs: PyTree  # the true successor, at every step


class Environment(NamedTuple):
    """One environment, auto-resetting within the step."""

    name: str
    reset: Callable[[Array], tuple[PyTree, PyTree]]  # key -> obs, state
    step: Callable[[Array, PyTree, Array], Step]  # key, state, action of the space -> Step
    obs_spec: PyTree  # ObsSpec leaves
    action_spec: ActionSpec
    source: Any = None  # the object that this was made from, for drawing
    params: Any = None
