"""A dense layer with fast derivatives on XLA's CPU backend.

Gain: a gradient step is 1.06 to 1.15 times faster (CPU, four workloads).
"""

import jax
import jax.numpy as jnp

from jppo import kernels
from jppo.devices.jit import materialize_on_cpu
from jppo.envs.spaces import Array

WIDE = 128  # inputs from which on a transposed copy of them costs more than it gains


def affine(x: Array, kernel: Array, bias: Array) -> Array:
    """Returns x @ kernel + bias, [B, O], for x [B, I], kernel [I, O] and bias [O]."""
    return (affine_tuned if kernels.ENABLED else affine_plain)(x, kernel, bias)


def affine_plain(x: Array, kernel: Array, bias: Array) -> Array:
    """Plain form of `affine`."""
    return x @ kernel + bias[None]


@jax.custom_jvp
def affine_tuned(x: Array, kernel: Array, bias: Array) -> Array:
    """Tuned form of `affine`, with JAX's derivatives written so that their transposes are fast.

    XLA's CPU backend is slow if it reads the left side of a product transposed, and at sums over rows. Here the
    kernel's gradient is a product of a transposed copy of x (for x narrower than WIDE), and the bias's gradient is a
    product with a row of ones.
    """
    return affine_plain(x, kernel, bias)


@affine_tuned.defjvp
def _affine_jvp(primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    (x, kernel, bias), (dx, dkernel, dbias) = primals, tangents
    ones = materialize_on_cpu(jnp.ones((1, x.shape[0]), bias.dtype))
    product = (dkernel.T @ materialize_on_cpu(x.T)).T if x.shape[1] < WIDE else x @ dkernel
    return affine_tuned(x, kernel, bias), dx @ kernel + product + ones.T @ dbias[None]
