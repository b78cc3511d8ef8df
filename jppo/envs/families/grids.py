"""Observations of grid worlds: integers that name categories."""

from collections.abc import Sequence

import jax.numpy as jnp

from jppo.envs.spaces import Array


def one_hot_channels(grid: Array, sizes: Sequence[int]) -> Array:
    """Returns categories [H, W, C] as bits [H, W, sum(sizes)]: a network must not read them as quantities."""
    channels = [grid[..., i, None] == jnp.arange(size, dtype=grid.dtype) for i, size in enumerate(sizes)]
    return jnp.concatenate(channels, axis=-1)
