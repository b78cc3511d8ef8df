"""A gradient as one float32 vector, computed over microbatches that fit the CPU's cache.

Gain of one vector instead of one array per parameter: a first start is up to 14 % shorter and a second start 8 to 19 %
shorter, since XLA compiles and runs several kernels for each array (CPU, four workloads).

Gain of microbatches: updates with minibatches of 16,384 rows or more are 1.10 to 1.62 times faster (CPU; convolutions
up to 2.5 times). Two microbatches at once keep two cores busy: another 1.01 to 1.20 on one device. Recurrent networks,
several devices on one CPU: 1.17 times faster with 128 sequences per minibatch and device. Elsewhere nothing is split.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from jppo import kernels
from jppo.envs.spaces import Array, PyTree

_CACHE_BYTES = 16 << 20  # for the activations of one microbatch on each device of a CPU; half of the last-level cache
_AT_ONCE = 2  # microbatches that one device computes at once; several devices already run at once
_MIN_IN_SEQUENCE = 3  # two microbatches one after the other are no faster than one
_MIN_SEQUENCES = 32  # per microbatch of a recurrent network; products with fewer rows per step are slower

Loss = Callable[[PyTree, PyTree], tuple[Array, dict[str, Array]]]


def value_and_grad(
    loss: Loss, rows: PyTree, *, is_mean: bool, axis_name: str | None
) -> Callable[[PyTree], tuple[tuple[Array, dict[str, Array]], PyTree]]:
    """Returns a function of the parameters: like `jax.value_and_grad` of params -> loss(params, rows) with metrics.

    Its gradient is packed, see `unpack`. Plain form: the gradient of all rows at once, not packed.

    Args:
      loss: (params, rows) -> a scalar and metrics, which are scalars.
      rows: leaves [L, M, ...], M sequences of L steps; or [1, M, ...], one row per sequence.
      is_mean: the loss and its metrics are means over sequences, so microbatches of sequences give the same.
      axis_name: mesh axis of the devices, each of which has as many rows; None for one device.
    """

    def gradient_of(params: PyTree, rows: PyTree) -> Any:
        outputs, gradient = jax.value_and_grad(loss, has_aux=True)(params, rows)
        return outputs, pack(gradient)

    def accumulated(params: PyTree) -> Any:
        count = num_microbatches(loss, params, rows, axis_name) if is_mean else 1
        if count == 1:
            return gradient_of(params, rows)

        def add(total: PyTree, microbatch: PyTree) -> tuple[PyTree, PyTree]:
            outputs, gradient = gradient_of(params, microbatch)
            return jax.tree.map(jnp.add, total, gradient), outputs

        # With an odd number, the last one would be a third copy of the gradient's program and gain nothing.
        at_once = _AT_ONCE if _devices_per_host(axis_name) == 1 and count % _AT_ONCE == 0 else 1
        zero = jax.tree.map(jnp.zeros_like, pack(params))
        total, outputs = jax.lax.scan(add, zero, split_rows(rows, count), unroll=at_once)
        return jax.tree.map(jnp.mean, outputs), jax.tree.map(lambda x: x / count, total)

    return accumulated


def pack(tree: PyTree) -> PyTree:
    """Returns a gradient as one float32 vector. Plain form: the same pytree in float32."""
    return ravel_f32(tree)[0] if kernels.ENABLED else optax.tree.cast(tree, jnp.float32)


def unpack(packed: PyTree, like: PyTree) -> PyTree:
    """Reverses `pack`: returns a packed gradient with the structure, shapes and dtypes of the pytree `like`."""
    tree = ravel_f32(like)[1](packed) if kernels.ENABLED else packed
    return jax.tree.map(lambda leaf, param: leaf.astype(param.dtype), tree, like)


def flatten(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer that keeps its state for one float32 vector. Plain form: `inner` itself.

    Unlike with `optax.flatten`, the vector is float32 for all dtypes, and a network may have no parameters.
    """
    if not kernels.ENABLED:
        return inner

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        vector, restore = ravel_f32(grads)
        updates, state = inner.update(vector, state)
        return restore(updates), state

    return optax.GradientTransformation(lambda params: inner.init(ravel_f32(params)[0]), update)


def ravel_f32(tree: PyTree) -> tuple[Array, Callable[[Array], PyTree]]:
    """Returns all numbers of a pytree as one float32 vector, and the function that makes a float32 pytree of it."""
    return ravel_pytree(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree))


def num_microbatches(loss: Loss, params: PyTree, rows: PyTree, axis_name: str | None) -> int:
    """Returns the number of equal microbatches to split rows into; the arguments are those of `value_and_grad`."""
    length, sequences = jax.tree.leaves(rows)[0].shape[:2]
    devices = _devices_per_host(axis_name)
    is_long = length > 1
    # One device computes sequences as a whole, because splitting them was not faster.
    if not kernels.on_cpu() or not sequences or (is_long and (devices == 1 or sequences < 2 * _MIN_SEQUENCES)):
        return 1
    num_bytes = residual_bytes(lambda params: loss(params, rows), params)
    if not is_long:
        return split(num_bytes, sequences, axis_name)
    most = min(num_bytes * devices // _CACHE_BYTES, sequences // _MIN_SEQUENCES)
    return max((n for n in range(1, most + 1) if sequences % n == 0), default=1)


def split(num_bytes: int, rows: int, axis_name: str | None) -> int:
    """Returns the number of equal microbatches for `rows` rows.

    Args:
      num_bytes: kept by a forward pass over all rows for the backward pass.
      axis_name: see `value_and_grad`.
    """
    devices = _devices_per_host(axis_name)
    needed = -(-num_bytes * devices // _CACHE_BYTES)  # devices share the cache
    minimum = _AT_ONCE if devices == 1 else _MIN_IN_SEQUENCE
    return 1 if needed < minimum else next((n for n in range(needed, 2 * needed) if rows % n == 0), 1)


def residual_bytes(loss: Callable[[PyTree], Any], params: PyTree) -> int:
    """Returns the bytes that a forward pass of loss, (params) -> (scalar, metrics), keeps for the backward pass.

    Traces the loss, which takes a sixth of a second.
    """
    kept = jax.eval_shape(lambda params: jax.vjp(loss, params, has_aux=True)[1], params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


def split_rows(rows: PyTree, count: int) -> PyTree:
    """Returns leaves [L, M, ...] as equal microbatches of sequences, leaves [count, L, M / count, ...]."""
    return jax.tree.map(lambda x: x.reshape(len(x), count, -1, *x.shape[2:]).swapaxes(0, 1), rows)


def _devices_per_host(axis_name: str | None) -> int:
    """Returns how many devices of the axis share a CPU."""
    return 1 if axis_name is None else max(1, jax.lax.axis_size(axis_name) // jax.process_count())
