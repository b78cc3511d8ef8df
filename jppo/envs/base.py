"""The interface of on-device environments: pure functions for one environment, batched with `vmap`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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


def replace_fields(params: Any, changes: dict[str, Any]) -> Any:
    """Returns parameters of an environment with other values. Raises ValueError for unknown names."""
    unknown = sorted(set(changes) - set(vars(params)))
    if unknown:
        raise ValueError(f"unknown parameters {', '.join(unknown)}; choose from {', '.join(sorted(vars(params)))}")
    return params.replace(**changes) if changes else params


def strip_weak_types(tree: PyTree) -> PyTree:
    """Removes weak types, which can differ between reset and step and would cause a second compilation."""
    return jax.tree.map(_strip, tree)


def _strip(leaf: Any) -> Array:
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):  # a key has no weak type
        return array
    return jax.lax.convert_element_type(array, array.dtype)
