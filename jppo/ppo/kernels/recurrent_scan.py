"""The loop of a recurrent cell over the steps of a sequence."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jppo.envs.spaces import Array, PyTree

# (gates [B, G*H], carry, kernel, bias) -> carry, output [B, H]
CellStep = Callable[[Array, PyTree, Array, Array], tuple[PyTree, Array]]


def scan_cell(
    step: CellStep, gates: Array, carry: PyTree, reset: Array, kernel: Array, bias: Array
) -> tuple[PyTree, Array]:
    """Applies a cell to each step. The carry is set to zero before steps with reset.

    Args:
      gates: [L, B, G*H].
      carry: leaves [B, H].
      reset: [L, B] bool.
      kernel, bias: the cell's weights.

    Returns:
      the carry after the last step, and the outputs [L, B, H].
    """

    def body(carry: PyTree, inputs: tuple[Array, Array]) -> tuple[PyTree, Array]:
        gates_t, reset_t = inputs
        carry = jax.tree.map(lambda x: jnp.where(reset_t.reshape(-1, *[1] * (x.ndim - 1)), 0.0, x), carry)
        return step(gates_t, carry, kernel, bias)

    return jax.lax.scan(body, carry, (gates, reset))
