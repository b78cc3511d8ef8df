"""Validates observations: those that a user's function passes to the network, and masks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.envs.masks import lacks_legal_action
from jppo.envs.spaces import Array, PyTree
from jppo.errors import Refused


def check_obs(obs_spec: PyTree, obs: PyTree, *lead: str) -> None:
    """Raises ValueError unless observations have the tree structure and the shapes of their specs.

    Args:
      lead: names of the dimensions before those of one observation.
    """
    expected: Any = jax.tree.structure(obs_spec)
    structure = jax.tree.structure(obs)
    if structure != expected:
        raise Refused(f"the network got observations with the tree structure {structure}; it needs {expected}")
    for spec, leaf in zip(jax.tree.leaves(obs_spec), jax.tree.leaves(obs), strict=True):
        shape = list(np.shape(leaf))
        if len(shape) < len(lead) or shape[len(lead) :] != list(spec.shape):
            needed = ", ".join(map(str, (*lead, *spec.shape)))
            raise Refused(f"the network got observations of shape {shape}; it needs [{needed}]")


def check_rows(obs: PyTree, num_rows: int) -> None:
    """Raises ValueError unless the leaves of observations have this many rows."""
    for shape in map(jnp.shape, jax.tree.leaves(obs)):
        if shape[:1] != (num_rows,):
            raise Refused(
                f"the network got observations of shape {shape}; a recurrent network needs all "
                f"{num_rows} rows of the batch, in their order"
            )


def first_empty_mask(action_spec: PyTree, mask: Array, total_envs: int, axis_name: str | None) -> Array:
    """Returns t*N + n for the first step t and environment n without a legal action, or -1; [] i32.

    Args:
      mask: [T, n, ...], the masks of this device's environments.
      total_envs: N, the number of environments of all devices.
    """
    num_steps, num_envs = mask.shape[:2]
    empty = lacks_legal_action(action_spec, mask, 2)
    first_env = 0 if axis_name is None else jax.lax.axis_index(axis_name) * num_envs
    index = total_envs * jnp.arange(num_steps)[:, None] + (first_env + jnp.arange(num_envs))[None]
    none = jnp.int32(2**31 - 1)
    first = jnp.min(jnp.where(empty, index.astype(jnp.int32), none))
    first = first if axis_name is None else jax.lax.pmin(first, axis_name)
    return jnp.where(first == none, -1, first)
