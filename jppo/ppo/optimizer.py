"""From a gradient to moved parameters: clipping, the optimiser, one step of the learning rate."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from jppo.config.ppo import Hyperparams
from jppo.errors import describe_error
from jppo.ppo.types import Array, PyTree

Optimizer = Callable[[Hyperparams], optax.GradientTransformation]

_CHECKED_STEPS = 8  # the first may do nothing


def adam(hyperparams: Hyperparams) -> optax.GradientTransformation:
    """The default optimiser: Adam's direction, which the learner scales by -learning_rate. Its moments are one float32
    vector each (docs/performance.md), whatever the parameters' shapes and dtypes; `optax.flatten` would make
    them of the parameters' dtypes, and refuses a network without any."""
    inner = optax.scale_by_adam(eps=hyperparams.adam_eps)

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        vector, restore = ravel_f32(grads)
        direction, state = inner.update(vector, state)
        return restore(direction), state

    return optax.GradientTransformation(lambda params: inner.init(ravel_f32(params)[0]), update)


def ravel_f32(tree: PyTree) -> tuple[Array, Callable[[Array], PyTree]]:
    """All numbers as one float32 vector, and what makes a float32 tree of such a vector. Arrays one by one are kernels
    each (docs/performance.md)."""
    return ravel_pytree(optax.tree.cast(tree, jnp.float32))


def check_optimizer(optimizer: Optimizer, params: PyTree) -> None:
    """Raises ValueError where `optimizer` fails, or what it makes of a gradient is not a direction to go against.

    Compiles and runs a few steps, of arrays as large as the parameters; nothing for the default.

    Args:
      params: the parameters' shapes.
    """
    if optimizer is adam:
        return

    def full(value: float) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.full(leaf.shape, value, leaf.dtype), params)

    def sums(hyperparams: Hyperparams) -> Array:
        """Two: of the directions for gradients of ones, and of their sizes."""
        made, ones, start = optimizer(hyperparams), full(1.0), full(1e-3)

        def step(state: PyTree, _: None) -> tuple[PyTree, Array]:
            direction, state = made.update(ones, state, start)
            if _shapes(direction) != _shapes(params):
                raise ValueError(f"of gradients {_shapes(params)} it makes {_shapes(direction)}")
            vector = ravel_f32(direction)[0]
            return state, jnp.stack([vector.sum(), jnp.abs(vector).sum()])

        return jax.lax.scan(step, made.init(start), length=_CHECKED_STEPS)[1].sum(0)

    try:
        with jax.ensure_compile_time_eval():  # also where an agent is made while a program is traced
            along, size = map(float, jax.jit(sums)(jax.tree.map(jnp.float32, Hyperparams())))
    except Exception as error:
        raise ValueError(
            f"optimizer failed ({describe_error(error)}); it must be a function of the "
            "hyperparameters that returns an optax transformation, such as lambda h: optax.scale_by_adam()"
        ) from error
    if along < -0.5 * size:
        raise ValueError(
            "optimizer goes uphill: the learner subtracts learning_rate times what it makes of a gradient. Give "
            "optax.scale_by_adam(), for example, and not optax.adam(...), whose output is to be added"
        )


def _shapes(tree: PyTree) -> list[tuple[str, tuple[int, ...]]]:
    return [(jax.tree_util.keystr(path), leaf.shape) for path, leaf in jax.tree.leaves_with_path(tree)]


def apply_gradient(
    optimizer: optax.GradientTransformation,
    params: PyTree,
    opt_state: PyTree,
    gradient: Array,
    max_grad_norm: Array | float,
    rate: Array | float,
) -> tuple[PyTree, PyTree, Array]:
    """One step against a gradient whose norm is clipped first, as in Pascanu et al. (2013), algorithm 1.

    Args:
      gradient: float32 vector of all parameters, as `ravel_f32` orders them.

    Returns:
      params and opt_state after the step, and the norm before clipping.
    """
    norm = jnp.linalg.norm(gradient)
    scaled = ravel_f32(params)[1](gradient * jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-12)))
    clipped = jax.tree.map(lambda grad, param: grad.astype(param.dtype), scaled, params)
    direction, opt_state = optimizer.update(clipped, opt_state, params)

    def moved(param: Array, direction: Array) -> Array:  # in float32, though the parameter may have fewer bits
        return (param.astype(jnp.float32) - rate * direction.astype(jnp.float32)).astype(param.dtype)

    return jax.tree.map(moved, params, direction), opt_state, norm
