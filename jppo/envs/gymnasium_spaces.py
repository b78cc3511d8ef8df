"""Gymnasium's spaces as jppo's specifications."""

from typing import Any

import jax
from gymnasium.vector.utils import concatenate, create_empty_array

from jppo.envs.spaces import PyTree, kind_of, obs_leaf_spec
from jppo.errors import Refused


def obs_spec_of(name: str, space: Any) -> PyTree:
    """Returns the ObsSpec of a space; of a Dict or Tuple, a dict or tuple of them.

    Raises ValueError for a space that is not supported.
    """
    kind = kind_of(space)
    if kind == "Dict":
        if len({type(key) for key in space.spaces}) > 1:
            raise Refused(f"{name}: observation space {space} has names of different types, which JAX cannot sort")
        return {key: obs_spec_of(name, part) for key, part in space.spaces.items()}
    if kind == "Tuple":
        return tuple(obs_spec_of(name, part) for part in space.spaces)
    if kind not in ("Box", "Discrete", "MultiBinary", "MultiDiscrete") or 0 in space.shape:
        raise Refused(
            f"{name}: observation space {space} is not supported; Box, Discrete, MultiDiscrete, MultiBinary, and "
            "Dict and Tuple of them are (gymnasium.wrappers.FlattenObservation turns most others into a Box)"
        )
    return obs_leaf_spec(name, space, tuple(space.shape), space.dtype)


def dtypes_of(space: Any) -> PyTree:
    """Returns the dtype of each array of a space, in dicts and tuples as in the space."""
    return jax.tree.map(lambda array: array.dtype, create_empty_array(space))


def as_arrays(space: Any, obs: PyTree) -> PyTree:
    """Returns an observation as arrays, with the dtypes and in the order of its space."""
    return jax.tree.map(lambda leaf: leaf[0], concatenate(space, [obs], create_empty_array(space, 1)))
