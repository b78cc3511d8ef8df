"""Gymnasium's spaces as jppo's specifications, and the check of observations against them."""

from typing import Any

import jax
import numpy as np
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from jppo.envs.action_spaces import jax_dtype
from jppo.envs.spaces import ObsSpec, PyTree


def obs_spec_of(name: str, space: Any) -> PyTree:
    """Returns the ObsSpec of a space; of a Dict or Tuple, a dict or tuple of them.

    Raises ValueError for a space that is not supported.
    """
    kind = type(space).__name__
    if kind == "Dict":
        if len({type(key) for key in space.spaces}) > 1:
            raise ValueError(f"{name}: observation space {space} has names of different types, which JAX cannot sort")
        return {key: obs_spec_of(name, part) for key, part in space.spaces.items()}
    if kind == "Tuple":
        return tuple(obs_spec_of(name, part) for part in space.spaces)
    if kind == "Discrete":
        return ObsSpec(shape=(), dtype=jax_dtype(space.dtype), num_categories=int(space.n), start=int(space.start))
    if kind not in ("Box", "MultiBinary", "MultiDiscrete") or 0 in space.shape:
        raise ValueError(
            f"{name}: observation space {space} is not supported; Box, Discrete, MultiDiscrete, MultiBinary, and "
            "Dict and Tuple of them are (gymnasium.wrappers.FlattenObservation turns most others into a Box)"
        )
    return ObsSpec(shape=tuple(space.shape), dtype=jax_dtype(space.dtype))


def dtypes_of(space: Any) -> PyTree:
    """Returns the dtype of each array of a space, in dicts and tuples as in the space."""
    kind = type(space).__name__
    if kind == "Dict":
        return {key: dtypes_of(part) for key, part in space.spaces.items()}
    return tuple(dtypes_of(part) for part in space.spaces) if kind == "Tuple" else space.dtype


def check_obs(name: str, space: Any, obs_spec: PyTree, vector: Any) -> None:
    """Raises ValueError if the first observation does not fit its space."""
    if isinstance(vector, SyncVectorEnv):  # its own error message would not name the mistake
        obs = vector.envs[0].reset(seed=None, options=None)[0]
        try:
            as_arrays(space, obs)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            shapes = jax.tree.map(lambda x: f"{np.asarray(x).dtype}{list(np.shape(x))}", obs)
            raise ValueError(
                f"{name}: reset returned an observation {shapes}, which does not fit its observation_space {space}"
            ) from error
        return
    obs = vector.reset()[0]
    structure: Any = jax.tree.structure(obs)
    if structure != jax.tree.structure(obs_spec):
        raise ValueError(
            f"{name}: reset returned an observation of type {type(obs).__name__}, which does not fit its "
            f"observation_space {space}"
        )
    for leaf, spec in zip(jax.tree.leaves(obs), jax.tree.leaves(obs_spec), strict=True):
        if leaf.shape[1:] != spec.shape:
            raise ValueError(f"{name}: observations have shape {leaf.shape[1:]}; their space says {spec.shape}")


def as_arrays(space: Any, obs: PyTree) -> PyTree:
    """Returns an observation as arrays, with the dtypes and in the order of its space."""
    return jax.tree.map(lambda leaf: leaf[0], concatenate(space, [obs], create_empty_array(space, 1)))
