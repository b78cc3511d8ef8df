"""Running moments and what is scaled by them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jppo.ppo.types import Array, Moments, PyTree

NORMALIZED_BOUND = 10.0
_EPS = 1e-8


def empty_moments(shape: tuple[int, ...] = ()) -> Moments:
    """Moments of no samples, each of the given shape."""
    return Moments(count=jnp.zeros(()), mean=jnp.zeros(shape), m2=jnp.zeros(shape))


def moments_of(samples: Array, where: Array | None = None, num_batch_dims: int = 2) -> Moments:
    """Moments over the leading dims.

    Args:
      samples: [*batch, ...] any real dtype; the first `num_batch_dims` dims are reduced.
      where: [*batch] bool, the samples that count (all when None).
      num_batch_dims: how many leading dims are the batch.
    """
    axes = tuple(range(num_batch_dims))
    samples = samples.astype(jnp.float32)
    mask, count = None, jnp.float32(math.prod(samples.shape[:num_batch_dims]))
    if where is not None:
        mask = jnp.expand_dims(where, tuple(range(num_batch_dims, samples.ndim)))
        count = jnp.sum(where, dtype=jnp.float32)
    mean = jnp.sum(samples, axes, where=mask) / jnp.maximum(count, 1.0)
    centred = samples - jnp.expand_dims(mean, axes)
    return Moments(count=count, mean=mean, m2=jnp.sum(centred * centred, axes, where=mask))


def pooled(moments: PyTree) -> PyTree:
    """Moments of the union of K sets.

    Takes any pytree whose nodes are `Moments`, with leaves [K, ...].
    """

    def pool(sets: Moments) -> Moments:
        count = sets.count.sum()
        weight = sets.count.reshape(-1, *(1,) * (sets.mean.ndim - 1))
        mean = jnp.sum(weight * sets.mean, axis=0) / jnp.maximum(count, 1.0)
        delta = sets.mean - mean[None]
        return Moments(count=count, mean=mean, m2=jnp.sum(sets.m2 + weight * (delta * delta), axis=0))

    return jax.tree.map(pool, moments, is_leaf=_is_moments)


def all_reduce(moments: PyTree, axis_name: str | None) -> PyTree:
    """Moments of the union of all devices' samples, by one collective; the identity without an axis name.

    Takes any pytree whose nodes are `Moments`.
    """
    if axis_name is None:
        return moments
    flat, restore = ravel_pytree(moments)
    own = jnp.zeros((jax.lax.axis_size(axis_name), len(flat))).at[jax.lax.axis_index(axis_name)].set(flat)
    everyones = jax.lax.psum(own, axis_name)  # all_gather, but known to check_vma as the same on all
    return pooled(jax.vmap(restore)(everyones))


def normalize(x: Array, stats: Moments) -> Array:
    """(x - mean) / std, clipped to +-10; only clipped while there are no samples.

    Args:
      x: [..., *shape of stats.mean].
      stats: of the same trailing shape.
    """
    mean, inverse_std = centre_and_scale(stats)
    lead = tuple(range(x.ndim - mean.ndim))
    centred = x.astype(jnp.float32) - jnp.expand_dims(mean, lead)
    return jnp.clip(centred * jnp.expand_dims(inverse_std, lead), -NORMALIZED_BOUND, NORMALIZED_BOUND)


def centre_and_scale(stats: Moments) -> tuple[Array, Array]:
    """Mean and 1/std, both of the samples' shape; 0 and 1 while there are no samples."""
    fresh = stats.count == 0
    return jnp.where(fresh, 0.0, stats.mean), jnp.where(fresh, 1.0, jax.lax.rsqrt(stats.variance + _EPS))


def scale_reward(reward: Array, stats: Moments) -> Array:
    """reward / std of the discounted return, clipped to +-10; only clipped while there are no samples.

    Rewards are scaled, not centred: subtracting a mean would change which behaviour is best.
    Engstrom et al. (2020), "Implementation matters in deep policy gradients", section 3.
    """
    scale = jnp.where(stats.count == 0, 1.0, jax.lax.rsqrt(stats.variance + _EPS))
    return jnp.clip(reward * scale, -NORMALIZED_BOUND, NORMALIZED_BOUND)


def _is_moments(node: Any) -> bool:
    return isinstance(node, Moments)
