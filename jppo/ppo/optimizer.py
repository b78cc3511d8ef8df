"""From a gradient to new parameters: clipping, the optimizer, one step of the learning rate."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jppo.config.ppo import Hyperparams
from jppo.errors import describe_error
from jppo.ppo.hyperparams import evaluate_schedules
from jppo.ppo.kernels.flat_gradient import flatten, ravel_f32, unpack
from jppo.ppo.types import Array, PyTree

Optimizer = Callable[[Hyperparams], optax.GradientTransformation]

_CHECKED_STEPS = 8  # the first steps may do nothing


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


def check_optimizer(optimizer: Optimizer, params: PyTree) -> None:
    """Raises ValueError if `optimizer` fails, or if its output for a gradient is not a direction to subtract.

    Compiles and runs a few steps on arrays as large as the parameters; does nothing for the default optimizer.

    Args:
      params: the parameters' shapes.
    """
    if optimizer is adam:
        return

    def full(value: float) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.full(leaf.shape, value, leaf.dtype), params)

    def sums(hyperparams: Hyperparams) -> Array:
        """Returns (sum, sum of absolute values) of the directions for gradients of ones."""
        transformation, ones, start = optimizer(hyperparams), full(1.0), full(1e-3)

        def step(state: PyTree, _: None) -> tuple[PyTree, Array]:
            direction, state = transformation.update(ones, state, start)
            if _shapes(direction) != _shapes(params):
                raise ValueError(f"for gradients {_shapes(params)} it returns {_shapes(direction)}")
            vector = ravel_f32(direction)[0]
            return state, jnp.stack([vector.sum(), jnp.abs(vector).sum()])

        return jax.lax.scan(step, transformation.init(start), length=_CHECKED_STEPS)[1].sum(0)

    try:
        with jax.ensure_compile_time_eval():  # an agent may be made while a program is traced
            total, size = map(float, jax.jit(sums)(jax.tree.map(jnp.float32, evaluate_schedules(Hyperparams(), 0.0))))
    except Exception as error:
        raise ValueError(
            f"optimizer failed ({describe_error(error)}); it must be a function of the "
            "hyperparameters that returns an optax transformation, such as lambda h: optax.scale_by_adam()"
        ) from error
    if total < -0.5 * size:
        raise ValueError(
            "optimizer goes uphill: the learner subtracts learning_rate times the optimizer's output. Pass "
            "optax.scale_by_adam(), for example, instead of optax.adam(...), which returns updates to be added"
        )


def _shapes(tree: PyTree) -> list[tuple[str, tuple[int, ...]]]:
    return [(jax.tree_util.keystr(path), leaf.shape) for path, leaf in jax.tree.leaves_with_path(tree)]
