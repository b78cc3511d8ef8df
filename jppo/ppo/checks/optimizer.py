"""Validates an optimizer before anything runs."""

import jax
import jax.numpy as jnp

from jppo.config.ppo import Hyperparams
from jppo.envs.spaces import Array, PyTree
from jppo.errors import Refused, describe_error
from jppo.kernels.flat_gradient import ravel_f32
from jppo.ppo.minibatches import Optimizer, adam
from jppo.ppo.types import evaluate_schedules

_CHECKED_STEPS = 8  # the first steps may do nothing


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
                raise Refused(f"for gradients {_shapes(params)} it returns {_shapes(direction)}")
            vector = ravel_f32(direction)[0]
            return state, jnp.stack([vector.sum(), jnp.abs(vector).sum()])

        return jax.lax.scan(step, transformation.init(start), length=_CHECKED_STEPS)[1].sum(0)

    try:
        with jax.ensure_compile_time_eval():  # an agent may be made while a program is traced
            total, size = map(float, jax.jit(sums)(jax.tree.map(jnp.float32, evaluate_schedules(Hyperparams(), 0.0))))
    except Exception as error:
        raise Refused(
            f"optimizer failed ({describe_error(error)}); it must be a function of the "
            "hyperparameters that returns an optax transformation, such as lambda h: optax.scale_by_adam()"
        ) from error
    if total < -0.5 * size:
        raise Refused(
            "optimizer goes uphill: the learner subtracts learning_rate times the optimizer's output. Pass "
            "optax.scale_by_adam(), for example, instead of optax.adam(...), which returns updates to be added"
        )


def _shapes(tree: PyTree) -> list[tuple[str, tuple[int, ...]]]:
    return [(jax.tree_util.keystr(path), leaf.shape) for path, leaf in jax.tree.leaves_with_path(tree)]
