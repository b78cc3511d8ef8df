"""Running moments, and normalization of observations and rewards by them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.flatten_util import ravel_pytree

from jppo.envs.spaces import Array, PyTree


class Moments(struct.PyTreeNode, kw_only=True):
    """Count, mean and sum of squared deviations of a set of samples; `+` gives the moments of the union of two sets.

    Accurate in float32 even if the mean is large compared with the spread.
    Chan, Golub and LeVeque (1979), "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    count: Array  # [] f32
    mean: Array  # [...] f32
    m2: Array  # [...] f32, sum of (x - mean)^2

    def __add__(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        share = other.count / jnp.maximum(count, 1.0)
        delta = other.mean - self.mean
        return Moments(
            count=count, mean=self.mean + delta * share, m2=self.m2 + other.m2 + delta * delta * (self.count * share)
        )

    @property
    def variance(self) -> Array:
        """Population variance, [...] f32; 0 for an empty set."""
        return self.m2 / jnp.maximum(self.count, 1.0)

    @property
    def std(self) -> Array:
        """Population standard deviation, [...] f32; 0 for an empty set."""
        return jnp.sqrt(self.variance)


NORMALIZED_BOUND = 10.0
_EPS = 1e-8


def empty_moments(shape: tuple[int, ...] = ()) -> Moments:
    """Returns the moments of an empty set of samples of the given shape."""
    return Moments(count=jnp.zeros(()), mean=jnp.zeros(shape), m2=jnp.zeros(shape))


def moments_of(samples: Array, where: Array | None = None, num_batch_dims: int = 2) -> Moments:
    """Returns the moments of samples [*batch, ...] over the `num_batch_dims` dims of the batch.

    Args:
      where: [*batch] bool, the samples to include; None for all.
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


def where_active(active: PyTree) -> Array | None:
    """Returns `Transition.active` as an argument of `moments_of`: None where it is (), that is, all samples count."""
    return None if isinstance(active, tuple) else active


def pool_moments(moments: PyTree) -> PyTree:
    """Returns the moments of the union of K sets, for any pytree of `Moments` with leaves [K, ...]."""

    def pool(sets: Moments) -> Moments:
        count = sets.count.sum()
        weight = sets.count.reshape(-1, *(1,) * (sets.mean.ndim - 1))
        mean = jnp.sum(weight * sets.mean, axis=0) / jnp.maximum(count, 1.0)
        delta = sets.mean - mean[None]
        return Moments(count=count, mean=mean, m2=jnp.sum(sets.m2 + weight * (delta * delta), axis=0))

    return jax.tree.map(pool, moments, is_leaf=is_moments)


def all_reduce(moments: PyTree, axis_name: str | None) -> PyTree:
    """Returns the moments of all devices' samples, for any pytree of `Moments`; `moments` itself without an axis."""
    if axis_name is None:
        return moments
    flat, restore = ravel_pytree(moments)
    return pool_moments(jax.vmap(restore)(jax.lax.all_gather(flat, axis_name)))


def normalize(x: Array, stats: Moments) -> Array:
    """Returns (x - mean) / std for x [..., *shape of mean], clipped to [-10, 10]; without samples, only clips x."""
    mean, inverse_std = center_and_scale(stats)
    lead = tuple(range(x.ndim - mean.ndim))
    centred = x.astype(jnp.float32) - jnp.expand_dims(mean, lead)
    return jnp.clip(centred * jnp.expand_dims(inverse_std, lead), -NORMALIZED_BOUND, NORMALIZED_BOUND)


def center_and_scale(stats: Moments) -> tuple[Array, Array]:
    """Returns mean and 1 / std, both of the samples' shape; 0 and 1 without samples."""
    is_empty = stats.count == 0
    return jnp.where(is_empty, 0.0, stats.mean), jnp.where(is_empty, 1.0, jax.lax.rsqrt(stats.variance + _EPS))


def scale_reward(reward: Array, stats: Moments) -> Array:
    """Returns reward / std of the discounted return, clipped to [-10, 10]; without samples, rewards are only clipped.

    Rewards are not centred, because subtracting a mean would change which behaviour is best.
    Engstrom et al. (2020), "Implementation matters in deep policy gradients", section 3.
    """
    scale = jnp.where(stats.count == 0, 1.0, jax.lax.rsqrt(stats.variance + _EPS))
    return jnp.clip(reward * scale, -NORMALIZED_BOUND, NORMALIZED_BOUND)


def is_moments(node: Any) -> bool:
    """Returns whether a pytree's node is a `Moments`, for `is_leaf`."""
    return isinstance(node, Moments)
