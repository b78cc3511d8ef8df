"""From a gradient to new parameters: clipping, the optimizer, one step of the learning rate."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jppo.config.ppo import Hyperparams
from jppo.ppo.kernels.flat_gradient import flatten, unpack
from jppo.ppo.types import Array, PyTree

Optimizer = Callable[[Hyperparams], optax.GradientTransformation]


def adam(hyperparams: Hyperparams) -> optax.GradientTransformation:
    """Returns the default optimizer: Adam's direction, which the learner multiplies by -learning_rate.

    Kingma and Ba (2015), "Adam: A method for stochastic optimization".
    """
    return flatten(optax.scale_by_adam(eps=hyperparams.adam_eps))


def apply_gradient(
    optimizer: optax.GradientTransformation,
    params: PyTree,
    opt_state: PyTree,
    gradient: PyTree,
    max_grad_norm: Array | float,
    learning_rate: Array | float,
) -> tuple[PyTree, PyTree, Array]:
    """Takes one step against a gradient with clipped norm.

        g <- g * min(1, max_grad_norm / ||g||),    params <- params - learning_rate * optimizer(g)

    Pascanu, Mikolov and Bengio (2013), "On the difficulty of training recurrent neural networks", algorithm 1.

    Args:
      gradient: float32, in the form that `kernels.flat_gradient.pack` returns.

    Returns:
      params and opt_state after the step, and the norm before clipping.
    """
    norm = jnp.sqrt(jnp.asarray(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(gradient)), jnp.float32))
    scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-12))
    clipped = unpack(jax.tree.map(lambda leaf: leaf * scale, gradient), params)
    clipped = jax.tree.map(lambda leaf, param: leaf.astype(param.dtype), clipped, params)
    direction, opt_state = optimizer.update(clipped, opt_state, params)

    def step(param: Array, direction: Array) -> Array:  # in float32, even if the parameter has fewer bits
        moved = param.astype(jnp.float32) - learning_rate * direction.astype(jnp.float32)
        return moved.astype(param.dtype)

    return jax.tree.map(step, params, direction), opt_state, norm
