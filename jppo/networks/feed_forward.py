"""Layers of actor-critic networks."""

import math

import flax.linen as nn
import jax.numpy as jnp

from jppo.envs.spaces import Array
from jppo.kernels.convolution import convolve, convolve_3x3
from jppo.kernels.dense import affine
from jppo.kernels.initial_weights import get_param

SCREEN_CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # features, kernel, stride
_ACTIVATIONS = {"tanh": nn.tanh, "relu": nn.relu, "swish": nn.swish}
_SCREEN_SIZE = 36  # images at least this wide and high get the strided convolutions made for screens


class Dense(nn.Module):
    """`flax.linen.Dense` with orthogonal initial weights. The weights are float32; `dtype` is that of the product."""

    size: int
    gain: float
    dtype: str = "float32"

    def __call__(self, x: Array) -> Array:
        outputs = affine(x.reshape(-1, x.shape[-1]).astype(self.dtype), *self.weights(x.shape[-1]))
        return outputs.reshape(*x.shape[:-1], self.size)

    @nn.compact
    def weights(self, num_inputs: int) -> tuple[Array, Array]:
        """Returns kernel [num_inputs, size] and bias [size], both in `dtype`."""
        kernel = get_param(self, "kernel", nn.initializers.orthogonal(self.gain), (num_inputs, self.size))
        bias = get_param(self, "bias", nn.initializers.zeros, (self.size,))
        return kernel.astype(self.dtype), bias.astype(self.dtype)


class MLP(nn.Module):
    """Dense layers, each followed by the activation, with orthogonal initial weights of gain sqrt(2)."""

    sizes: tuple[int, ...]
    activation: str
    dtype: str = "float32"

    def setup(self) -> None:
        for number, size in enumerate(self.sizes):
            setattr(self, f"Dense_{number}", Dense(size, math.sqrt(2.0), self.dtype))

    def layers(self) -> list[Dense]:
        """Returns the layers in order."""
        return [getattr(self, f"Dense_{number}") for number in range(len(self.sizes))]

    def __call__(self, x: Array) -> Array:
        return self.after_first(self.layers()[0](x)) if self.sizes else x

    def after_first(self, x: Array) -> Array:
        """Applies everything after the first layer to that layer's output before the activation."""
        activation = _ACTIVATIONS[self.activation]
        for layer in self.layers()[1:]:
            x = layer(activation(x))
        return activation(x)


class ConvTorso(nn.Module):
    """Convolutions over images [B, height, width, channels] (or [B, channels, height, width], the form of frame
    stacks), flattened to [B, size].

    Small images: 16 features, 3x3 (Young and Tian 2019, "MinAtar"). Others: 32, 64, 64 features of 8x8/4, 4x4/2, 3x3/1
    (Mnih et al. 2015, "Human-level control through deep reinforcement learning").
    """

    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x.astype(self.dtype)
        if channels_first(x.shape[1:]):
            x = jnp.moveaxis(x, 1, -1)
        if min(x.shape[1:3]) < _SCREEN_SIZE:
            weights = Dense(16, math.sqrt(2.0), self.dtype, name="conv").weights(9 * x.shape[-1])
            return flatten(nn.relu(convolve_3x3(x, *weights)))
        for number, (features, size, stride) in enumerate(SCREEN_CONVOLUTIONS):
            x = nn.relu(Convolution(features, size, stride, self.dtype, name=f"Conv_{number}")(x))
        return flatten(x)


class Convolution(nn.Module):
    """A convolution without padding, with orthogonal initial weights of gain sqrt(2)."""

    features: int
    size: int
    stride: int
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.orthogonal(math.sqrt(2.0)), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return convolve(x, kernel.astype(self.dtype), bias.astype(self.dtype), self.stride)


def channels_first(shape: tuple[int, ...]) -> bool:
    """Returns whether images of this shape have the order [channels, height, width]."""
    return shape[0] < min(shape[1:])


def is_image(shape: tuple[int, ...]) -> bool:
    """Returns whether a leaf of this shape is an image of at least 3x3, as a cnn needs."""
    return len(shape) == 3 and min(shape[1:] if channels_first(shape) else shape[:2]) >= 3


def flatten(x: Array) -> Array:
    """Reshapes [B, ...] to [B, size]; B may be 0."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))
