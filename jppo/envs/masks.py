"""Action masks: the observation leaf `action_mask`, whose nonzero entries mark the legal actions.

Each function accepts NumPy arrays or JAX arrays, with any leading dims.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.envs.spaces import ACTION_MASK, ActionSpec, PyTree
from jppo.errors import Refused

AnyArray = Any  # a NumPy or a JAX array


def has_mask(obs_spec: PyTree) -> bool:
    """Returns whether observations have the leaf `action_mask`."""
    return isinstance(obs_spec, dict) and ACTION_MASK in obs_spec


def without_mask(obs: PyTree) -> PyTree:
    """Returns observations, or their specs, without the leaf `action_mask`."""
    if has_mask(obs):
        return {name: leaf for name, leaf in obs.items() if name != ACTION_MASK}
    return obs


def check_mask_spec(obs_spec: PyTree, action_spec: PyTree) -> None:
    """Raises ValueError if observations have a mask that does not fit the actions."""
    if not has_mask(obs_spec):
        return
    if not isinstance(action_spec, ActionSpec) or action_spec.is_box:
        raise Refused("action_mask needs a Discrete or MultiDiscrete action space")
    shape = getattr(obs_spec[ACTION_MASK], "shape", None)
    if shape is None:
        raise Refused("action_mask must be one array; it is a dict or tuple")
    if (size := math.prod(shape)) != action_spec.num_logits:
        has_combinations = action_spec.nvec and size == math.prod(action_spec.nvec)
        remedy = "; for a mask of combinations, use one Discrete action" if has_combinations else ""
        raise Refused(
            f"action_mask has shape {shape}, {size} entries; the action space has {action_spec.num_logits} categories"
            f"{remedy}"
        )


def legal_categories(spec: ActionSpec, mask: AnyArray, num_batch_dims: int = 1) -> AnyArray:
    """Returns a mask [B, ...] as bool: [B, A] for a Discrete space, [B, K, M] for a MultiDiscrete one.

    Args:
      mask: any dtype, nonzero for legal categories; of a MultiDiscrete space, all components one after the other.
      num_batch_dims: number of leading dims B.
    """
    flat = mask.reshape(*mask.shape[:num_batch_dims], spec.num_logits).astype(bool)
    return unflatten_categories(flat, spec.nvec, False) if spec.nvec else flat


def lacks_legal_action(spec: ActionSpec, mask: AnyArray, num_batch_dims: int = 1) -> AnyArray:
    """Returns whether a mask [B, ...] marks no legal category for some component of the action, [B] bool."""
    some = legal_categories(spec, mask, num_batch_dims).any(axis=-1)
    return ~(some.all(axis=-1) if spec.nvec else some)


def nearest_legal(spec: ActionSpec, mask: AnyArray, action: AnyArray) -> AnyArray:
    """Replaces each illegal category of an environment's actions by the next legal one, counted cyclically.

    Args:
      mask: [*B, ...], with a legal category for each component.
      action: [*B, *shape].
    """
    lead = action.shape[: action.ndim - len(spec.shape)]
    legal = legal_categories(spec, mask, len(lead))
    xp: Any = jnp if isinstance(legal, jax.Array) else np
    start, sizes = np.asarray(spec.start, np.int32), np.asarray(spec.nvec or spec.num_actions)
    start, sizes = (np.broadcast_to(x, legal.shape[:-1]) for x in (start, sizes))
    category = action.reshape(legal.shape[:-1]).astype(np.int32) - start  # int8 might overflow
    distance = (np.broadcast_to(np.arange(legal.shape[-1]), legal.shape) - category[..., None]) % sizes[..., None]
    category = xp.argmin(xp.where(legal, distance, legal.shape[-1]), axis=-1)
    return (category + start).astype(spec.dtype).reshape(action.shape)


def unflatten_categories(flat: AnyArray, nvec: tuple[int, ...], fill: Any) -> AnyArray:
    """Returns [..., K, M] for the entries [..., sum(nvec)] of K components one after the other, padded with `fill`."""
    largest = max(nvec)
    if len(set(nvec)) == 1:
        return flat.reshape(*flat.shape[:-1], len(nvec), largest)
    starts, sizes = np.cumsum([0, *nvec[:-1]])[:, None], np.array(nvec)[:, None]
    column = np.arange(largest)[None]
    exists = column < sizes  # [K, M]
    padded = flat[..., np.where(exists, starts + column, 0)]
    exists = exists.reshape(*[1] * (flat.ndim - 1), *exists.shape)
    return (np if isinstance(flat, np.ndarray) else jnp).where(exists, padded, fill)
