"""Gymnasium's spaces as jppo's specifications."""

from typing import Any

import jax
import numpy as np
from gymnasium.vector.utils import create_empty_array

from jppo.envs.contract import check_kept
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


def casting_to(dtype: np.dtype) -> Any:
    """Returns NumPy's rule for copies of observations: integers keep their values, and float64 becomes float32."""
    return "safe" if dtype.kind in "iu" else "same_kind"


def stack(space: Any, rows: list[Any], out: PyTree, name: str = "observation") -> PyTree:
    """Copies observations to arrays [n, ...] of their space, and returns these in new dicts and tuples.

    Raises:
      BrokenContractError: an integer does not fit the dtype of its array.
      ValueError, TypeError: observations have another shape, or their numbers another kind.
    """
    if isinstance(out, dict):
        names = [(key, f"{name}[{key!r}]") for key in space.spaces]
        return {key: stack(space[key], [row[key] for row in rows], out[key], path) for key, path in names}
    if isinstance(out, tuple):
        parts = enumerate(space.spaces)
        return tuple(stack(part, [row[i] for row in rows], out[i], f"{name}[{i}]") for i, part in parts)
    try:
        return np.stack(rows, out=out, casting=casting_to(out.dtype))
    except TypeError:  # the integers are of another dtype, or there are no integers
        given = np.stack(rows)
        np.copyto(out, given, casting="same_kind")
        check_kept(name, given, out)
    return out


def as_arrays(space: Any, obs: PyTree) -> PyTree:
    """Returns an observation as arrays, with the dtypes and in the order of its space."""
    return jax.tree.map(lambda leaf: leaf[0], stack(space, [obs], create_empty_array(space, 1)))
