"""Actor-critic networks.

A network is anything with `init(key, obs) -> params` and `apply(params, obs) -> (distribution, value)`, where obs
leaves carry one leading batch dim [B, *obs], the distribution has distrax's methods and value is [B]. A flax linen
module is one as it is.
"""

import math
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from jppo.config.ppo import PPOConfig
from jppo.devices.jit import materialize_on_cpu
from jppo.envs.spaces import ActionSpec, ObsSpec
from jppo.ppo.distributions import Categorical, DiagGaussian
from jppo.ppo.types import Array, PyTree

_ACTIVATIONS = {"tanh": nn.tanh, "relu": nn.relu, "swish": nn.swish}
_KEPT = {"tanh": 3.0, "relu": 2.25, "swish": 4.0}  # for the backward pass: numbers of 32 bits per output of a layer
OUTPUT_GAINS = {"policy": 0.01, "value": 1.0}  # of the layers so called; of others sqrt(2)
_WIDE = 128  # inputs of a dense layer, from which on other forms are faster (docs/performance.md)
_PIXELS = 36  # images at least this wide get the strided convolutions made for screens
_LARGE_IMAGE = 10_000  # numbers
SCREEN_CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # features, kernel, stride


class Network(Protocol):
    """What a network must offer; obs leaves are float32 [B, *obs]."""

    def init(self, key: Array, obs: PyTree, /) -> PyTree: ...

    def apply(self, params: PyTree, obs: PyTree, /) -> tuple[Any, Array]: ...


class Dense(nn.Module):
    """`flax.linen.Dense` with orthogonal initial weights, and gradients by `affine`."""

    size: int
    gain: float

    def __call__(self, x: Array) -> Array:
        return affine(x.reshape(-1, x.shape[-1]), *self.weights(x.shape[-1])).reshape(*x.shape[:-1], self.size)

    @nn.compact
    def weights(self, num_inputs: int) -> tuple[Array, Array]:
        """kernel [num_inputs, size], bias [size]."""
        given: list[Any] = [self.get_variable("params", name) for name in ("kernel", "bias")]
        if [getattr(array, "shape", None) for array in given] == [(num_inputs, self.size), (self.size,)]:
            return given[0], given[1]  # flax would trace the initialisers again, to compare shapes
        kernel = self.param("kernel", nn.initializers.orthogonal(self.gain), (num_inputs, self.size))
        return kernel, self.param("bias", nn.initializers.zeros, (self.size,))


@jax.custom_jvp
def affine(x: Array, kernel: Array, bias: Array) -> Array:
    """x [B, I] @ kernel [I, O] + bias [O].

    Its derivatives are JAX's own, written so that XLA's CPU backend is faster at their transposes: the kernel's
    gradient is a product of a transposed copy of x unless that is wide, and the bias's one with a row of ones
    (docs/performance.md).
    """
    return x @ kernel + bias[None]


@affine.defjvp
def _affine_jvp(primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    (x, kernel, bias), (dx, dkernel, dbias) = primals, tangents
    across, ones = x.T, materialize_on_cpu(jnp.ones((1, x.shape[0]), bias.dtype))
    if x.shape[1] < _WIDE:
        across = materialize_on_cpu(across)
    return affine(x, kernel, bias), dx @ kernel + (dkernel.T @ across).T + ones.T @ dbias[None]


class MLP(nn.Module):
    """Dense layers with orthogonal initial weights of gain sqrt(2)."""

    sizes: tuple[int, ...]
    activation: str

    def setup(self) -> None:
        for number, size in enumerate(self.sizes):
            setattr(self, f"Dense_{number}", Dense(size, math.sqrt(2.0)))

    def layers(self) -> list[Dense]:
        return [getattr(self, f"Dense_{number}") for number in range(len(self.sizes))]

    def __call__(self, x: Array, first: Array | None = None) -> Array:
        """first: what the first layer makes of x, where that is known already."""
        for number, layer in enumerate(self.layers()):
            x = _ACTIVATIONS[self.activation](layer(x) if first is None or number else first)
        return x


class ConvTorso(nn.Module):
    """Convolutions over images [B, height, width, channels] (or [B, channels, height, width], as frame stacks come),
    flattened.

    Small images: one of 16 features, 3x3 (Young and Tian 2019, "MinAtar"). Others: 32, 64, 64 features of 8x8/4,
    4x4/2, 3x3/1 (Mnih et al. 2015, "Human-level control through deep reinforcement learning").
    """

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if channels_first(x.shape[1:]):
            x = jnp.moveaxis(x, 1, -1)
        if min(x.shape[1:3]) < _PIXELS:
            return _flat(_small_convolution(x))
        for features, kernel, stride in SCREEN_CONVOLUTIONS:
            init = nn.initializers.orthogonal(math.sqrt(2.0))
            x = nn.relu(nn.Conv(features, (kernel, kernel), stride, "VALID", kernel_init=init)(x))
        return _flat(x)


class ActorCritic(nn.Module):
    """Policy and value heads on one torso, or on one each."""

    action: ActionSpec
    kind: str = "mlp"
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    shared_torso: bool = False

    @nn.compact
    def __call__(self, obs: PyTree) -> tuple[Any, Array]:
        activation = "relu" if self.kind == "cnn" else self.activation
        names = ("shared",) if self.shared_torso else ("actor", "critic")
        torsos = [MLP(self.hidden_sizes, activation, name=name) for name in names]
        if self.kind == "cnn":
            outputs = [torso(ConvTorso(name=f"{name}_conv")(obs)) for name, torso in zip(names, torsos, strict=True)]
        else:
            leaves = [_flat(leaf) for leaf in jax.tree.leaves(obs)]
            x = leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves, axis=-1)
            firsts = _wide_products(torsos, x)
            outputs = [torso(x, first) for torso, first in zip(torsos, firsts, strict=True)]
        actor, critic = outputs[0], outputs[-1]
        value = Dense(1, OUTPUT_GAINS["value"], name="value")(critic)[:, 0]
        if self.action.num_actions:
            return Categorical(Dense(self.action.num_actions, OUTPUT_GAINS["policy"], name="policy")(actor)), value
        mean = Dense(self.action.size, OUTPUT_GAINS["policy"], name="policy")(actor)
        log_std = self.param("log_std", nn.initializers.zeros, (self.action.size,))
        return DiagGaussian(mean, jnp.broadcast_to(log_std, mean.shape)), value

    def residual_bytes(self, num_inputs: int) -> int:
        """What hidden dense layers and the loss keep of each row for the backward pass, within a tenth of what tracing
        counts, which takes a sixth of a second: inputs, each layer's outputs and its activation's derivative, loss."""
        torsos, sizes = 1 if self.shared_torso else 2, self.hidden_sizes
        inputs = num_inputs if num_inputs >= _WIDE else torsos * num_inputs
        layers = torsos * (_KEPT[self.activation] * sum(sizes) + sizes[0]) + (2 - torsos) * sizes[-1]
        loss = 6.5 * self.action.num_actions + 21 if self.action.num_actions else 3 * self.action.size + 20
        return round(4 * (inputs + layers + loss))


def _wide_products(torsos: list[MLP], x: Array) -> list[Array] | list[None]:
    """What the first layers make of x, by one product, which reads x once. Nones where that would be slower: x is
    narrow, or has so few rows (a dimension without a number, in exports, counts as few) that putting the kernels side
    by side is what takes the time."""
    rows, width = x.shape
    if width < _WIDE or not isinstance(rows, int) or rows < _WIDE or not torsos[0].sizes:
        return [None] * len(torsos)
    weights = [torso.layers()[0].weights(width) for torso in torsos]
    kernels, biases = zip(*weights, strict=True)
    return jnp.split(affine(x, jnp.concatenate(kernels, axis=1), jnp.concatenate(biases)), len(torsos), axis=1)


def make_network(config: PPOConfig, obs_spec: PyTree, action: ActionSpec) -> Network:
    """The network that the configuration names. Raises ValueError for a cnn without images."""
    shapes = [spec.feature_shape for spec in jax.tree.leaves(obs_spec, is_leaf=_is_spec)]
    if config.network == "cnn" and not (len(shapes) == 1 and _is_image(shapes[0])):
        raise ValueError(
            f'network = "cnn" needs one image [height, width, channels] of at least 3x3; the observation is '
            f'{", ".join(map(str, shapes))}: use network = "mlp"'
        )
    network: Any = ActorCritic(action, config.network, config.hidden_sizes, config.activation, config.shared_torso)
    return network


def hint(config: PPOConfig, obs_spec: PyTree) -> str | None:
    """What to say of a network that fits, but hardly suits."""
    shapes = [spec.feature_shape for spec in jax.tree.leaves(obs_spec, is_leaf=_is_spec)]
    if config.network == "cnn" or len(shapes) != 1 or not _is_image(shapes[0]) or math.prod(shapes[0]) < _LARGE_IMAGE:
        return None
    return (
        f"observations are images {shapes[0]}, which network = mlp reads as {math.prod(shapes[0]):,} numbers; "
        "network = cnn reads them as images"
    )


def _flat(x: Array) -> Array:
    """[B, ...] as [B, size]; B may be 0."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def _small_convolution(x: Array) -> Array:
    """A 3x3 convolution of 16 features as one matrix product over patches: inside a scan, XLA's gradient of a
    convolution takes 28 times as long on CPU (docs/performance.md)."""
    height, width = x.shape[1] - 2, x.shape[2] - 2
    patches = [x[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return nn.relu(Dense(16, math.sqrt(2.0), name="conv")(jnp.concatenate(patches, axis=-1)))


def channels_first(shape: tuple[int, ...]) -> bool:
    """Whether images of this shape come [channels, height, width]."""
    return shape[0] < min(shape[1:])


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and min(shape[1:] if channels_first(shape) else shape[:2]) >= 3


def _is_spec(node: Any) -> bool:
    return isinstance(node, ObsSpec)
