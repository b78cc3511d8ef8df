"""Validates observations that a user's function passes to the network."""

from typing import Any

import jax
import numpy as np

from jppo.envs.spaces import PyTree
from jppo.errors import Refused


def check_obs(obs_spec: PyTree, obs: PyTree, rows: tuple[int, ...] | None = None) -> None:
    """Raises ValueError unless observations have the tree structure and the shapes of their specs.

    Args:
      rows: the dimensions before those of one observation; None for any [B].
    """
    expected: Any = jax.tree.structure(obs_spec)
    structure = jax.tree.structure(obs)
    if structure != expected:
        raise Refused(f"the network got observations with the tree structure {structure}; it needs {expected}")
    for spec, leaf in zip(jax.tree.leaves(obs_spec), jax.tree.leaves(obs), strict=True):
        shape, num_dims = list(np.shape(leaf)), 1 if rows is None else len(rows)
        if shape[num_dims:] != list(spec.shape) or (rows is not None and shape[:num_dims] != list(rows)):
            needed = ", ".join(map(str, (*(rows or ("B",)), *spec.shape)))
            raise Refused(f"the network got observations of shape {shape}; it needs [{needed}]")
