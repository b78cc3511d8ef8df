"""A 3x3 convolution of small images as one matrix product.

Gain: training on 10x10 images is 10 times faster (CPU), since XLA's gradient of a convolution inside a scan takes 28
times as long as that of the product.
"""

import jax
import jax.numpy as jnp

from jppo.envs.spaces import Array
from jppo.ppo import kernels
from jppo.ppo.kernels.dense import affine


def convolve_3x3(x: Array, kernel: Array, bias: Array) -> Array:
    """Returns the convolution of images without padding, [B, height - 2, width - 2, O].

    Args:
      x: [B, height, width, C].
      kernel: [9 * C, O], ordered by row, column and channel.
      bias: [O].
    """
    return (convolve_3x3_tuned if kernels.ENABLED else convolve_3x3_plain)(x, kernel, bias)


def convolve_3x3_plain(x: Array, kernel: Array, bias: Array) -> Array:
    """Plain form of `convolve_3x3`."""
    kernel = kernel.reshape(3, 3, x.shape[-1], -1)
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=layout) + bias.reshape(
        1, 1, 1, -1
    )


def convolve_3x3_tuned(x: Array, kernel: Array, bias: Array) -> Array:
    """Tuned form of `convolve_3x3`: a product of the kernel and every 3x3 patch."""
    height, width = x.shape[1] - 2, x.shape[2] - 2
    patches = jnp.concatenate([x[:, i : i + height, j : j + width] for i in range(3) for j in range(3)], axis=-1)
    outputs = affine(patches.reshape(-1, patches.shape[-1]), kernel, bias)
    return outputs.reshape(*patches.shape[:-1], kernel.shape[-1])
