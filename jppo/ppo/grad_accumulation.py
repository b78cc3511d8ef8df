"""Minibatches cut into pieces on a CPU, whose gradients are averaged: what the forward pass keeps for the backward one
is then small enough for the cache, and two pieces keep both of two cores busy (docs/performance.md)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jppo.ppo.types import Array, PyTree

_PIECE_BYTES = 16 << 20  # kept for the backward pass by pieces of all devices of a CPU; half of the last cache
_AT_ONCE = 2  # pieces, by a device with minibatches of its own; devices that share one are at once already
_FEWEST_IN_TURN = 3  # of two, one after the other, nothing is gained


def num_microbatches(num_bytes: int, rows: int, axis_name: str | None) -> int:
    """Into how many pieces of equal size so many rows are best cut on a CPU.

    Args:
      num_bytes: what a forward pass over all rows keeps for the backward one.
      axis_name: of the devices, each of which has as many rows; None for one.
    """
    devices = _devices_of_a_host(axis_name)
    least = -(-num_bytes * devices // _PIECE_BYTES)  # they share its cache
    fewest = _AT_ONCE if devices == 1 else _FEWEST_IN_TURN
    return 1 if least < fewest else next((n for n in range(least, 2 * least) if rows % n == 0), 1)


def residual_bytes(loss: Callable[[PyTree], Any], params: PyTree) -> int:
    """What a forward pass keeps for the backward one of loss: (params) -> a scalar and more; is traced."""
    kept = jax.eval_shape(lambda params: jax.vjp(loss, params, has_aux=True)[1], params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


def accumulate_gradients(
    gradient: Callable[[PyTree], tuple[PyTree, Array]],
    samples: PyTree,
    pieces: int,
    zero: Array,
    axis_name: str | None,
) -> tuple[PyTree, Array]:
    """gradient(samples), scalars and a vector like zero, as the mean over pieces of the samples.

    Args:
      axis_name: as for num_microbatches.
    """
    if pieces == 1:
        return gradient(samples)
    cut = jax.tree.map(lambda x: x.reshape(pieces, -1, *x.shape[1:]), samples)

    def add(total: Array, piece: PyTree) -> tuple[Array, PyTree]:
        scalars, vector = gradient(piece)
        return total + vector, scalars

    # Of an odd number the last would be a third copy of the gradient, and nothing gained.
    at_once = _AT_ONCE if _devices_of_a_host(axis_name) == 1 and pieces % _AT_ONCE == 0 else 1
    total, scalars = jax.lax.scan(add, zero, cut, unroll=at_once)
    return jax.tree.map(jnp.mean, scalars), total / pieces


def _devices_of_a_host(axis_name: str | None) -> int:
    """How many of the axis share a CPU."""
    return 1 if axis_name is None else max(1, jax.lax.axis_size(axis_name) // jax.process_count())
