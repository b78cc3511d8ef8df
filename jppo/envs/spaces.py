"""Specifications of observations and actions, and the conversion of a policy's samples to actions."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jppo.errors import Refused

Array = jax.Array
PyTree = Any

ACTION_MASK = "action_mask"  # name of the observation leaf that marks legal actions
MAX_CATEGORIES = 10_000  # of one observation array, whose one-hot form is the network's input


@dataclass(frozen=True)
class ObsSpec:
    """One observation array (one leaf if observations are a pytree)."""

    shape: tuple[int, ...]
    dtype: str
    num_categories: int = 0  # of a Discrete space, whose integers reach the network one-hot; 0 for a Box
    start: int | tuple[int, ...] = 0  # the first category; of a MultiDiscrete space, that of each component
    nvec: tuple[int, ...] = ()  # numbers of categories of a flattened MultiDiscrete space, each of which is one-hot
    high: float | tuple[float, ...] = 255.0  # of uint8: the space's largest value(s), which divide the network's input

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of the network's input."""
        if self.nvec:
            return (sum(self.nvec),)
        return (*self.shape, self.num_categories) if self.num_categories else self.shape

    @property
    def is_checked(self) -> bool:
        """Whether values outside the space would reach the network as something else: categories, and scaled uint8."""
        return bool(self.num_categories or self.nvec or (self.dtype == "uint8" and np.min(self.high) < 255))


_KINDS = ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Dict", "Tuple")


def kind_of(space: Any) -> str:
    """Returns the name of the known class of a space of Gymnasium or gymnax, also of a subclass; else its class."""
    names = [cls.__name__ for cls in type(space).__mro__]
    return next((name for name in names if name in _KINDS), names[0])


def obs_leaf_spec(name: str, space: Any, shape: tuple[int, ...], dtype: Any) -> ObsSpec:
    """Returns the spec of one observation array, on the device and on the host.

    64-bit integers of a Box become float32, because JAX would wrap them to 32 bits.

    Args:
      space: a Discrete, MultiDiscrete or other space of Gymnasium or gymnax, or None.
      dtype: of the environment's arrays.

    Raises:
      ValueError: the space has more than 10,000 categories, or categories that are not int32.
    """
    dtype, kind = np.dtype(dtype), kind_of(space)
    if kind not in ("Discrete", "MultiDiscrete"):
        high: Any = 255.0
        if dtype == np.uint8 and getattr(space, "dtype", None) == dtype:  # declared bounds of floats are of others
            highs = np.maximum(np.broadcast_to(getattr(space, "high", 255), shape), 1).astype(float).ravel().tolist()
            high = highs[0] if len(set(highs)) == 1 else tuple(highs)
        is_wide = dtype.kind in "iu" and dtype.itemsize == 8
        name_of_dtype = "float32" if is_wide else str(jax.dtypes.canonicalize_dtype(dtype))
        return ObsSpec(shape=shape, dtype=name_of_dtype, high=high)
    sizes = np.ravel(space.n if kind == "Discrete" else space.nvec).astype(np.int64)
    starts = np.ravel(np.broadcast_to(getattr(space, "start", 0), np.shape(getattr(space, "nvec", 0)))).astype(np.int64)
    if sizes.sum() > MAX_CATEGORIES:
        raise Refused(
            f"{name}: the observation space {kind} has {sizes.sum():,} categories, which would be one-hot; at most "
            f"{MAX_CATEGORIES:,} are possible: return an embedding or features of the category, or its digits as a Box"
        )
    if (starts < -(2**31)).any() or (starts + sizes > 2**31 - 1).any():
        raise Refused(f"{name}: the observation space {space} has categories beyond int32; let it start at 0")
    dtype_name = str(jax.dtypes.canonicalize_dtype(dtype))
    if kind == "Discrete":
        return ObsSpec(shape=shape, dtype=dtype_name, num_categories=int(sizes[0]), start=int(starts[0]))
    return ObsSpec(shape=shape, dtype=dtype_name, nvec=tuple(sizes.tolist()), start=tuple(starts.tolist()))


def component_categories(nvec: tuple[int, ...], start: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns, for each one-hot feature of a MultiDiscrete space, its component and its category, [sum(nvec)]."""
    columns = np.repeat(np.arange(len(nvec)), nvec)
    first = np.concatenate([np.arange(n) for n in nvec])
    return columns, (first + np.repeat(np.broadcast_to(start, len(nvec)), nvec)).astype(np.int32)


@dataclass(frozen=True)
class ActionSpec:
    """One action array (one leaf if actions are a pytree): a category, several categories, or a box of real numbers."""

    shape: tuple[int, ...]
    dtype: str
    num_actions: int = 0  # number of categories of a Discrete space; 0 for the others
    nvec: tuple[int, ...] = ()  # numbers of categories of a flattened MultiDiscrete or MultiBinary space; () for others
    low: tuple[float, ...] = ()  # lower bounds of a flattened box; -inf for a side without a bound
    high: tuple[float, ...] = ()  # upper bounds
    start: int | tuple[int, ...] = 0  # the environment's number of the first category, which the policy calls 0
    bounds: Literal["clip", "tanh"] = "clip"  # how samples fit into a box; see PPOConfig.action_bounds

    @property
    def size(self) -> int:
        """Number of components of the action."""
        return math.prod(self.shape)

    @property
    def is_box(self) -> bool:
        """Whether the action consists of real numbers."""
        return not (self.num_actions or self.nvec)

    @property
    def num_logits(self) -> int:
        """Number of logits of all categories; 0 for a box."""
        return self.num_actions or sum(self.nvec)

    @property
    def policy_shape(self) -> tuple[int, ...]:
        """Shape of the policy's sample: () for a Discrete space, else (size,)."""
        return () if self.num_actions else (self.size,)


def to_env_action(action_spec: PyTree, action: PyTree) -> PyTree:
    """Returns the environment's actions for a policy's samples. Log-probabilities always refer to the samples.

    Dimensions bounded on both sides: the sample is clipped to [-1, 1] (or goes through tanh) and scaled to
    [low, high]. Other real dimensions: clipped to the bound, if there is one. Categories: shifted by `start`.

    Args:
      action_spec: an ActionSpec, or a pytree of them.
      action: leaves [..., *policy_shape].

    Returns:
      leaves [..., *shape] of the space's dtype.
    """
    return jax.tree.map(_to_env_leaf, action_spec, action)


def _to_env_leaf(spec: ActionSpec, action: Array) -> Array:
    if not spec.is_box:
        start = np.asarray(spec.start, spec.dtype)
        shifted = action.astype(spec.dtype) + start.reshape((1,) * (action.ndim - start.ndim) + start.shape)
        return shifted.reshape(*action.shape[:-1], *spec.shape) if spec.nvec else shifted
    low, high = np.asarray(spec.low, np.float32), np.asarray(spec.high, np.float32)
    with np.errstate(over="ignore"):
        boxed = np.isfinite(high - low)  # an interval between the largest floats is no bound
    unit_low, unit_high = np.where(boxed, low, 0), np.where(boxed, high, 0)
    lead = (1,) * (action.ndim - 1) + (-1,)
    unit = jnp.tanh(action) if spec.bounds == "tanh" else jnp.clip(action, -1.0, 1.0)
    scaled = (unit + 1.0) * (0.5 * (unit_high - unit_low)).reshape(lead) + unit_low.reshape(lead)
    # clip scaled values, too: rounding may put them just outside their bounds
    edge = jnp.clip(jnp.where(boxed.reshape(lead), scaled, action), low.reshape(lead), high.reshape(lead))
    return edge.reshape(*action.shape[:-1], *spec.shape).astype(spec.dtype)
