"""What an environment's spaces mean to a policy."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
PyTree = Any


@dataclass(frozen=True)
class ObsSpec:
    """One observation array (a leaf, where observations are a pytree)."""

    shape: tuple[int, ...]
    dtype: str
    num_categories: int = 0  # of a Discrete space, whose integers reach the network one-hot; 0 for a Box
    start: int = 0  # the first of them

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of what the network sees."""
        return (*self.shape, self.num_categories) if self.num_categories else self.shape


@dataclass(frozen=True)
class ActionSpec:
    """A discrete action (num_actions > 0), or a box of real numbers."""

    shape: tuple[int, ...]
    dtype: str
    num_actions: int = 0
    low: tuple[float, ...] = ()  # bounds of the flattened box; infinite where there is none
    high: tuple[float, ...] = ()
    start: int = 0  # what the environment calls the first of num_actions; the policy calls it 0
    bounds: Literal["clip", "tanh"] = "clip"  # how samples fit into a box; see PPOConfig.action_bounds

    @property
    def size(self) -> int:
        """Dimensions of the box."""
        return math.prod(self.shape)

    @property
    def policy_shape(self) -> tuple[int, ...]:
        """Shape of the policy's sample: () if discrete, else (size,)."""
        return () if self.num_actions else (self.size,)


def to_env_action(spec: ActionSpec, action: Array) -> Array:
    """What the environment gets for a policy's sample; runs at the environment's edge, so log_prob never sees it.

    Dimensions bounded on both sides: the sample is clipped to [-1, 1] (or goes through tanh) and scaled to
    [low, high]. Others: clipped to what bound there is.

    Args:
      action: [..., *policy_shape].

    Returns:
      [..., *shape] of the space's dtype.
    """
    if spec.num_actions:
        return action.astype(spec.dtype) + spec.start
    low, high = np.asarray(spec.low, np.float32), np.asarray(spec.high, np.float32)
    with np.errstate(over="ignore"):
        boxed = np.isfinite(high - low)  # the largest floats, given as bounds, are none
    unit_low, unit_high = np.where(boxed, low, 0), np.where(boxed, high, 0)
    lead = (1,) * (action.ndim - 1) + (-1,)
    unit = jnp.tanh(action) if spec.bounds == "tanh" else jnp.clip(action, -1.0, 1.0)
    scaled = (unit + 1.0) * (0.5 * (unit_high - unit_low)).reshape(lead) + unit_low.reshape(lead)
    # also what is scaled, since that may end up a rounding beyond its bounds
    edge = jnp.clip(jnp.where(boxed.reshape(lead), scaled, action), low.reshape(lead), high.reshape(lead))
    return edge.reshape(*action.shape[:-1], *spec.shape).astype(spec.dtype)
