"""Minibatches cut into pieces on a CPU, whose gradients are averaged: what the forward pass keeps for the backward one
is then small enough for the cache (docs/performance.md)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jppo.types import PyTree

_PIECE_BYTES = 16 << 20  # kept for the backward pass at a time, on all devices of a CPU; half of the last cache
_FEWEST_PIECES = 3  # two gain nothing


def pieces_of(loss: Callable[[PyTree], Any], params: PyTree, rows: int, axis_name: str | None) -> int:
    """Into how many pieces of equal size so many rows are best cut; 1 off a CPU.

    Args:
      loss: (params) -> a scalar and more, over all rows; is traced.
      axis_name: of the devices, each of which has as many rows; None for one.
    """
    if jax.default_backend() != "cpu":
        return 1
    kept = jax.eval_shape(lambda params: jax.vjp(loss, params, has_aux=True)[1], params)
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
    if axis_name is not None:  # those of a host share its cache
        num_bytes *= max(1, jax.lax.axis_size(axis_name) // jax.process_count())
    least = -(-num_bytes // _PIECE_BYTES)
    return 1 if least < _FEWEST_PIECES else next((n for n in range(least, 2 * least) if rows % n == 0), 1)


def in_pieces(
    fun: Callable[[PyTree], PyTree], samples: PyTree, pieces: int, varying: Callable[[PyTree], PyTree]
) -> PyTree:
    """fun(samples), as the mean over pieces of the samples, one after the other."""
    if pieces == 1:
        return fun(samples)
    cut = jax.tree.map(lambda x: x.reshape(pieces, -1, *x.shape[1:]), samples)
    shapes = jax.eval_shape(fun, jax.tree.map(lambda x: x[0], cut))

    def add(total: PyTree, piece: PyTree) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, fun(piece)), None

    total, _ = jax.lax.scan(add, varying(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)), cut)
    return jax.tree.map(lambda x: x / pieces, total)
