"""Action spaces of Gymnasium and gymnax as jppo's specifications."""

from typing import Any

import jax
import numpy as np

from jppo.config.checks import MAX_INT32
from jppo.envs.spaces import ActionSpec, PyTree, kind_of
from jppo.errors import Refused

_MAX_INTEGERS = 1024  # of a component of an action that counts as a category


def action_spec_of(name: str, space: Any) -> PyTree:
    """Returns the ActionSpec of a space; of a Dict or Tuple, a dict or tuple of them.

    Raises ValueError for a space that is not supported.
    """
    kind = kind_of(space)
    if kind == "Dict" and space.spaces:
        if len({type(key) for key in space.spaces}) > 1:
            raise Refused(f"{name}: action space {space} has names of different types, which JAX cannot sort")
        return {key: action_spec_of(name, part) for key, part in space.spaces.items()}
    if kind == "Tuple" and space.spaces:
        return tuple(action_spec_of(name, part) for part in space.spaces)
    if kind == "Discrete":
        start = int(getattr(space, "start", 0))
        return ActionSpec(shape=(), dtype=jax_dtype(space.dtype), num_actions=int(space.n), start=start)
    shape = tuple(getattr(space, "shape", None) or ())
    if kind == "MultiBinary":
        return ActionSpec(shape=shape, dtype=jax_dtype(space.dtype), nvec=_ints(np.full(shape, 2)))
    if categories := _categories(kind, space):
        nvec, starts = categories
        return ActionSpec(shape=shape, dtype=jax_dtype(space.dtype), nvec=_ints(nvec), start=_ints(starts))
    if kind != "Box" or not np.issubdtype(space.dtype, np.floating):
        raise Refused(
            f"{name}: action space {space} is not supported; use Discrete, MultiDiscrete, MultiBinary, a Box of "
            f"floats or of at most {_MAX_INTEGERS:,} integers per component, or a Dict or Tuple of them"
        )
    low, high = (np.broadcast_to(bound, shape) for bound in (space.low, space.high))
    return ActionSpec(shape=shape, dtype=jax_dtype(space.dtype), low=_inside(low, np.inf), high=_inside(high, -np.inf))


def jax_dtype(dtype: Any) -> str:
    """Returns the name of the dtype that JAX uses for arrays of this dtype."""
    return str(jax.dtypes.canonicalize_dtype(dtype))


def _categories(kind: str, space: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the numbers of categories of a MultiDiscrete or of a Box of few integers, and the first categories."""
    if kind == "MultiDiscrete":
        nvec = np.asarray(space.nvec)
        return nvec, np.broadcast_to(getattr(space, "start", 0), nvec.shape)
    if kind != "Box" or np.dtype(space.dtype).kind not in "biu" or 0 in space.shape:
        return None
    low, high = (np.broadcast_to(np.asarray(bound, np.float64), space.shape) for bound in (space.low, space.high))
    fits = np.isfinite(low) & np.isfinite(high) & (abs(low) <= MAX_INT32) & (abs(high) <= MAX_INT32)
    low, high = np.ceil(np.where(fits, low, 0)), np.floor(np.where(fits, high, -1))
    nvec = high - low + 1
    return (nvec, low) if (nvec >= 1).all() and (nvec <= _MAX_INTEGERS).all() else None


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(map(int, np.ravel(values)))


def _inside(bound: np.ndarray, inward: float) -> tuple[float, ...]:
    """Returns the nearest float32 numbers that are not beyond a bound."""
    with np.errstate(all="ignore"):
        near = bound.astype(np.float32)
        beyond = near < bound if inward > 0 else near > bound
        return tuple(np.where(beyond, np.nextafter(near, np.float32(inward)), near).ravel().tolist())
