"""From a gradient to moved parameters: clipping, the optimiser, one step of the learning rate."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from jppo.config import Hyperparams
from jppo.types import Array, PyTree

Optimizer = Callable[[Hyperparams], optax.GradientTransformation]


def adam(hyperparams: Hyperparams) -> optax.GradientTransformation:
    """The default optimiser: Adam's direction, which the learner scales by -learning_rate. Its moments are one float32
    vector each (docs/performance.md), whatever the parameters' shapes and dtypes; `optax.flatten` would make
    them of the parameters' dtypes, and refuses a network without any."""
    inner = optax.scale_by_adam(eps=hyperparams.adam_eps)

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        vector, restore = as_vector(grads)
        direction, state = inner.update(vector, state)
        return restore(direction), state

    return optax.GradientTransformation(lambda params: inner.init(as_vector(params)[0]), update)


def as_vector(tree: PyTree) -> tuple[Array, Callable[[Array], PyTree]]:
    """All numbers as one float32 vector, and what makes a float32 tree of such a vector. Arrays one by one are kernels
    each (docs/performance.md)."""
    return ravel_pytree(optax.tree.cast(tree, jnp.float32))


def descend(
    optimizer: optax.GradientTransformation,
    params: PyTree,
    opt_state: PyTree,
    gradient: Array,
    max_grad_norm: Array | float,
    rate: Array | float,
) -> tuple[PyTree, PyTree, Array]:
    """One step against a gradient whose norm is clipped first, as in Pascanu et al. (2013), algorithm 1.

    Args:
      gradient: float32 vector of all parameters, as `as_vector` orders them.

    Returns:
      params and opt_state after the step, and the norm before clipping.
    """
    norm = jnp.linalg.norm(gradient)
    scaled = as_vector(params)[1](gradient * jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-12)))
    clipped = jax.tree.map(lambda grad, param: grad.astype(param.dtype), scaled, params)
    direction, opt_state = optimizer.update(clipped, opt_state, params)

    def moved(param: Array, direction: Array) -> Array:  # in float32, though the parameter may have fewer bits
        return (param.astype(jnp.float32) - rate * direction.astype(jnp.float32)).astype(param.dtype)

    return jax.tree.map(moved, params, direction), opt_state, norm
