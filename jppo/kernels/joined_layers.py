"""The first layers of several networks with the same input, as one matrix product.

Gain: updates with 400 inputs are 1.05 to 1.08 times faster (CPU), since the input is read once. With few inputs or few
rows the joined form is slower and not used.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jppo import kernels
from jppo.envs.spaces import Array
from jppo.kernels.dense import WIDE, affine


def apply_each(torsos: Sequence[Any], x: Array) -> list[Array]:
    """Returns the outputs of several `MLP` of the same sizes for the same x [B, I]."""
    if not torsos[0].sizes:
        return [x] * len(torsos)
    weights = [torso.layers()[0].weights(x.shape[-1]) for torso in torsos]
    first_layers = affine_each(x.astype(torsos[0].dtype), weights)
    return [torso.after_first(y) for torso, y in zip(torsos, first_layers, strict=True)]


def affine_each(x: Array, weights: Sequence[tuple[Array, Array]]) -> list[Array]:
    """Returns x @ kernel + bias, [B, O], for each (kernel [I, O], bias [O]) and x [B, I]."""
    rows, width = x.shape
    many = isinstance(rows, int) and rows >= WIDE  # a symbolic dimension, in exports, counts as few rows
    if kernels.ENABLED and width >= WIDE and many and len(weights) > 1:
        return affine_each_tuned(x, weights)
    return affine_each_plain(x, weights)


def affine_each_plain(x: Array, weights: Sequence[tuple[Array, Array]]) -> list[Array]:
    """Plain form of `affine_each`: one product for each layer."""
    return [affine(x, kernel, bias) for kernel, bias in weights]


def affine_each_tuned(x: Array, weights: Sequence[tuple[Array, Array]]) -> list[Array]:
    """Tuned form of `affine_each`: one product with the kernels side by side. The layers must have equal sizes."""
    kernel_list, bias_list = zip(*weights, strict=True)
    joined = affine(x, jnp.concatenate(kernel_list, axis=1), jnp.concatenate(bias_list))
    return jnp.split(joined, len(weights), axis=1)
