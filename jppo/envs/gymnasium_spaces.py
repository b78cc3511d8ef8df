"""Gymnasium's spaces as jppo's specifications, and observations held against them."""

from typing import Any

import jax
import numpy as np
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from jppo.envs.spaces import ActionSpec, ObsSpec, PyTree


def obs_spec_of(name: str, space: Any) -> PyTree:
    kind = type(space).__name__
    if kind == "Dict":
        if len({type(key) for key in space.spaces}) > 1:
            raise ValueError(f"{name}: names of different types in {space}, which JAX cannot put in order")
        return {key: obs_spec_of(name, part) for key, part in space.spaces.items()}
    if kind == "Tuple":
        return tuple(obs_spec_of(name, part) for part in space.spaces)
    if kind == "Discrete":
        return ObsSpec((), _jax_dtype(space.dtype), int(space.n), int(space.start))
    if kind not in ("Box", "MultiBinary") or not space.shape or 0 in space.shape:
        raise ValueError(
            f"{name}: observation space {space} is not supported; Box, Discrete, MultiBinary, and Dict and Tuple of "
            "them are (gymnasium.wrappers.FlattenObservation turns most others into a Box)"
        )
    return ObsSpec(tuple(space.shape), _jax_dtype(space.dtype))


def action_spec_of(name: str, space: Any) -> ActionSpec:
    kind = type(space).__name__
    if kind == "Discrete":
        return ActionSpec(shape=(), dtype=_jax_dtype(space.dtype), num_actions=int(space.n), start=int(space.start))
    if kind != "Box" or not np.issubdtype(space.dtype, np.floating):
        raise ValueError(f"{name}: action space {space} is not supported; Discrete and real-valued Box are")
    low, high = _inside(space.low, np.inf), _inside(space.high, -np.inf)
    return ActionSpec(shape=tuple(space.shape), dtype=_jax_dtype(space.dtype), low=low, high=high)


def _inside(bound: np.ndarray, inward: float) -> tuple[float, ...]:
    """The nearest float32 that are not beyond a bound."""
    with np.errstate(all="ignore"):
        near = bound.astype(np.float32)
        beyond = near < bound if inward > 0 else near > bound
        return tuple(np.where(beyond, np.nextafter(near, np.float32(inward)), near).ravel().tolist())


def check_obs(name: str, space: Any, obs_spec: PyTree, vector: Any) -> None:
    """The first observation against its space."""
    if isinstance(vector, SyncVectorEnv):  # whose own words would not say what is wrong
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
    given: Any = jax.tree.structure(obs)
    if given != jax.tree.structure(obs_spec):
        raise ValueError(f"{name}: reset returned {type(obs).__name__}, which is not as its observation space says")
    for leaf, spec in zip(jax.tree.leaves(obs), jax.tree.leaves(obs_spec), strict=True):
        if leaf.shape[1:] != spec.shape:
            raise ValueError(f"{name}: observations have shape {leaf.shape[1:]}; their space says {spec.shape}")


def as_arrays(space: Any, obs: PyTree) -> PyTree:
    """An observation in arrays, in the dtypes and the order of its space: environments may be less orderly."""
    return jax.tree.map(lambda leaf: leaf[0], concatenate(space, [obs], create_empty_array(space, 1)))


def _jax_dtype(dtype: Any) -> str:
    return str(jax.dtypes.canonicalize_dtype(dtype))
