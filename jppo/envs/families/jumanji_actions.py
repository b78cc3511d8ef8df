"""Action spaces of Jumanji's environments.

An `action_mask` over the combinations of several numbers needs one Discrete action with a number for each combination.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from jppo.envs.spaces import Array


def action_space(spec: Any, mask: Any) -> tuple[spaces.Space, tuple[int, ...]]:
    """Returns the space of the policy's actions, and the sizes of the numbers that one action combines, or ().

    Args:
      spec: Jumanji's action spec.
      mask: the action mask, of which only the shape is used, or None.
    """
    space = _space_of(spec, mask)
    sizes = tuple(map(int, getattr(space, "nvec", ())))
    if sizes and mask is not None and mask.shape == sizes:
        return spaces.Discrete(math.prod(sizes)), sizes
    return space, ()


def legal_actions(mask: Array, space: spaces.Space) -> Array:
    """Returns a mask in the order of the space's numbers, with at least one legal action for each number.

    Some episodes continue without a legal action. The next action then ends them.
    """
    legal = mask.reshape(len(getattr(space, "nvec", (0,))), -1)
    return (legal | ~legal.any(axis=-1, keepdims=True)).ravel()


def split_action(action: Array, sizes: tuple[int, ...]) -> Array:
    """Returns Jumanji's action for an action of the policy."""
    return jnp.stack(jnp.unravel_index(action, sizes)) if sizes else action


def _space_of(spec: Any, mask: Any) -> spaces.Space:
    """Returns the space of a spec. MultiCVRP's bounds allow one number more than its mask."""
    if hasattr(spec, "num_values"):
        sizes = np.asarray(spec.num_values)
        return spaces.MultiDiscrete(sizes) if sizes.ndim else spaces.Discrete(int(sizes))
    low, high = np.broadcast_to(spec.minimum, spec.shape), np.broadcast_to(spec.maximum, spec.shape)
    if np.issubdtype(spec.dtype, np.integer):
        return spaces.MultiDiscrete(high - low + 1 if mask is None else np.full(spec.shape, mask.shape[-1]), start=low)
    return spaces.Box(low, high, dtype=np.float32)
