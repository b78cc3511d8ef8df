"""Recurrent cells, applied to one step or to a sequence of steps with episode starts in it.

A cell's products with its inputs are computed for all steps at once, outside the loop over steps.
"""

import functools
from typing import Literal

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from jppo.envs.spaces import Array, PyTree
from jppo.kernels.dense import affine
from jppo.kernels.recurrent_scan import multiply, scan_cell

Cell = Literal["gru", "lstm"]

NUM_GATES = {"gru": 3, "lstm": 4}


def initial_carry(cell: Cell, batch_size: int, size: int) -> PyTree:
    """Returns the carry at an episode's start, zeros: h [B, H] for a GRU, (c, h) for an LSTM."""
    zeros = jnp.zeros((batch_size, size))
    return zeros if cell == "gru" else (zeros, zeros)


def gru_step(gates: Array, h: Array, kernel: Array, bias: Array, dtype: str = "float32") -> tuple[Array, Array]:
    """Returns the carry and the output after one step of a gated recurrent unit, both [B, H].

        r = sigmoid(x_r + h W_r),   z = sigmoid(x_z + h W_z),   n = tanh(x_n + r * (h W_n + b)),
        h <- (1 - z) * n + z * h

    Cho et al. (2014), "Learning phrase representations using RNN encoder-decoder for statistical machine translation",
    with the reset gate after the product, as in cuDNN, PyTorch and flax.

    Args:
      gates: (x_r, x_z, x_n) [B, 3*H], the products with the input, biases included.
      h: [B, H].
      kernel: (W_r, W_z, W_n) [H, 3*H].
      bias: b [H].
      dtype: of the factors of the product with the kernel; everything else is float32.
    """
    x_r, x_z, x_n = jnp.split(gates, 3, axis=-1)
    h_r, h_z, h_n = jnp.split(multiply(h, kernel, dtype), 3, axis=-1)
    r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    n = jnp.tanh(x_n + r * (h_n + bias[None]))
    h = (1.0 - z) * n + z * h
    return h, h


def lstm_step(
    gates: Array, carry: tuple[Array, Array], kernel: Array, bias: Array, dtype: str = "float32"
) -> tuple[tuple[Array, Array], Array]:
    """Returns the carry (c, h) and the output h after one step of a long short-term memory, [B, H] each.

        i, f, o = sigmoid(x + h W),   g = tanh(x_g + h W_g),   c <- f * c + i * g,   h <- o * tanh(c)

    Hochreiter and Schmidhuber (1997), "Long short-term memory", with the forget gate of Gers et al. (2000).

    Args:
      gates, kernel: as in `gru_step`, (x_i, x_f, x_g, x_o) [B, 4*H] and (W_i, W_f, W_g, W_o) [H, 4*H].
      bias: unused; a GRU has one.
    """
    c, h = carry
    i, f, g, o = jnp.split(gates + multiply(h, kernel, dtype), 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (c, h), h


class Recurrent(nn.Module):
    """A GRU or LSTM layer with orthogonal weights and zero biases.

    `dtype` is that of the factors of products. Weights, carries and outputs are float32.
    """

    cell: Cell
    size: int
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array, carry: PyTree, reset: Array | None = None) -> tuple[Array, PyTree]:
        """Returns the outputs, [B, H] or [L, B, H], and the carry after the last step, leaves [B, H].

        Args:
          x: [B, I] for one step, or [L, B, I].
          carry: leaves [B, H], before the first step.
          reset: None for one step, or [L, B] bool: whether to reset the carry before the step.
        """
        num_gates = NUM_GATES[self.cell]
        kernel = self.param("input_kernel", _orthogonal_gates, (x.shape[-1], num_gates * self.size), num_gates)
        gate_bias = self.param("input_bias", nn.initializers.zeros, (num_gates * self.size,))
        recurrent = self.param("recurrent_kernel", _orthogonal_gates, (self.size, num_gates * self.size), num_gates)
        bias = (
            self.param("recurrent_bias", nn.initializers.zeros, (self.size,)) if self.cell == "gru" else jnp.zeros(())
        )
        rows, *weights = (array.astype(self.dtype) for array in (x.reshape(-1, x.shape[-1]), kernel, gate_bias))
        gates = affine(rows, *weights).reshape(*x.shape[:-1], num_gates * self.size).astype(jnp.float32)
        step = functools.partial(gru_step if self.cell == "gru" else lstm_step, dtype=self.dtype)
        if reset is None:
            carry, outputs = step(gates, carry, recurrent, bias)
        else:
            chex.assert_equal_shape_prefix([gates, reset], 2)
            carry, outputs = scan_cell(self.cell, step, gates, carry, reset, recurrent, bias, self.dtype)
        return outputs, carry


def _orthogonal_gates(key: Array, shape: tuple[int, int], num_gates: int) -> Array:
    """Returns an orthogonal matrix for each gate, side by side."""
    orthogonal, block = nn.initializers.orthogonal(), (shape[0], shape[1] // num_gates)
    return jnp.concatenate([orthogonal(key, block) for key in jax.random.split(key, num_gates)], axis=1)
