"""Actor-critic networks."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from jppo.config.ppo import PPOConfig
from jppo.envs.spaces import ActionSpec, ObsSpec
from jppo.ppo.distributions import Categorical, DiagGaussian
from jppo.ppo.kernels.convolution import convolve_3x3
from jppo.ppo.kernels.dense import affine
from jppo.ppo.kernels.joined_layers import affine_each
from jppo.ppo.types import Array, PyTree

OUTPUT_GAINS = {"policy": 0.01, "value": 1.0}  # gains of the output layers' initial weights; other layers: sqrt(2)
SCREEN_CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # features, kernel, stride
_ACTIVATIONS = {"tanh": nn.tanh, "relu": nn.relu, "swish": nn.swish}
_SCREEN_SIZE = 36  # images at least this wide and high get the strided convolutions made for screens
_LARGE_IMAGE = 10_000  # numbers in an observation


class Network(Protocol):
    """Policy and value function of an agent: any object with these two methods, such as a flax.linen module.

    Observations are pytrees of float32 leaves [B, *obs]: one-hot for discrete spaces, and normalized if
    config.normalize_obs.
    Each row of the outputs depends on the same row of the observations only, because rollouts, minibatches and
    evaluations split the rows differently.
    """

    def init(self, key: Array, obs: PyTree, /) -> PyTree:
        """Returns initial parameters, a pytree of float arrays."""
        ...

    def apply(self, params: PyTree, obs: PyTree, /) -> tuple[Any, Array]:
        """Returns (distribution, value).

        The distribution is a pytree with leaves [B, ...] and the methods `sample(seed=key)`, `log_prob(action)`,
        `entropy()` and `mode()`, such as `Categorical` or `DiagGaussian`. The value has the shape [B].
        """
        ...


class Dense(nn.Module):
    """`flax.linen.Dense` with orthogonal initial weights."""

    size: int
    gain: float

    def __call__(self, x: Array) -> Array:
        outputs = affine(x.reshape(-1, x.shape[-1]), *self.weights(x.shape[-1]))
        return outputs.reshape(*x.shape[:-1], self.size)

    @nn.compact
    def weights(self, num_inputs: int) -> tuple[Array, Array]:
        """Returns kernel [num_inputs, size] and bias [size]."""
        existing: list[Any] = [self.get_variable("params", name) for name in ("kernel", "bias")]
        if [getattr(array, "shape", None) for array in existing] == [(num_inputs, self.size), (self.size,)]:
            return existing[0], existing[1]  # self.param would trace the initializers again to compare shapes
        kernel = self.param("kernel", nn.initializers.orthogonal(self.gain), (num_inputs, self.size))
        return kernel, self.param("bias", nn.initializers.zeros, (self.size,))


class MLP(nn.Module):
    """Dense layers, each followed by the activation, with orthogonal initial weights of gain sqrt(2)."""

    sizes: tuple[int, ...]
    activation: str

    def setup(self) -> None:
        for number, size in enumerate(self.sizes):
            setattr(self, f"Dense_{number}", Dense(size, math.sqrt(2.0)))

    def layers(self) -> list[Dense]:
        """Returns the layers in order."""
        return [getattr(self, f"Dense_{number}") for number in range(len(self.sizes))]

    def __call__(self, x: Array) -> Array:
        return self.after_first(self.layers()[0](x)) if self.sizes else x

    def after_first(self, x: Array) -> Array:
        """Applies everything after the first layer to that layer's output before the activation."""
        activation = _ACTIVATIONS[self.activation]
        x = activation(x)
        for layer in self.layers()[1:]:
            x = activation(layer(x))
        return x


class ConvTorso(nn.Module):
    """Convolutions over images [B, height, width, channels] (or [B, channels, height, width], the form of frame
    stacks), flattened to [B, size].

    Small images: 16 features, 3x3 (Young and Tian 2019, "MinAtar"). Others: 32, 64, 64 features of 8x8/4, 4x4/2, 3x3/1
    (Mnih et al. 2015, "Human-level control through deep reinforcement learning").
    """

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if channels_first(x.shape[1:]):
            x = jnp.moveaxis(x, 1, -1)
        if min(x.shape[1:3]) < _SCREEN_SIZE:
            weights = Dense(16, math.sqrt(2.0), name="conv").weights(9 * x.shape[-1])
            return _flatten(nn.relu(convolve_3x3(x, *weights)))
        for features, kernel, stride in SCREEN_CONVOLUTIONS:
            init = nn.initializers.orthogonal(math.sqrt(2.0))
            x = nn.relu(nn.Conv(features, (kernel, kernel), stride, "VALID", kernel_init=init)(x))
        return _flatten(x)


class ActorCritic(nn.Module):
    """Policy and value heads on one shared torso, or on one torso each."""

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
            leaves = [_flatten(leaf) for leaf in jax.tree.leaves(obs)]
            outputs = _apply_each(torsos, leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves, axis=-1))
        actor, critic = outputs[0], outputs[-1]
        value = Dense(1, OUTPUT_GAINS["value"], name="value")(critic)[:, 0]
        if self.action.num_actions:
            return Categorical(Dense(self.action.num_actions, OUTPUT_GAINS["policy"], name="policy")(actor)), value
        mean = Dense(self.action.size, OUTPUT_GAINS["policy"], name="policy")(actor)
        log_std = self.param("log_std", nn.initializers.zeros, (self.action.size,))
        return DiagGaussian(mean, jnp.broadcast_to(log_std, mean.shape)), value


def _apply_each(torsos: Sequence[MLP], x: Array) -> list[Array]:
    """Applies each torso to the same x [B, I]."""
    if not torsos[0].sizes:
        return [x] * len(torsos)
    first_layers = affine_each(x, [torso.layers()[0].weights(x.shape[-1]) for torso in torsos])
    return [torso.after_first(y) for torso, y in zip(torsos, first_layers, strict=True)]


def make_network(config: PPOConfig, obs_spec: PyTree, action: ActionSpec) -> Network:
    """Returns the network that the config describes. Raises ValueError for a cnn without images."""
    shapes = [spec.feature_shape for spec in jax.tree.leaves(obs_spec, is_leaf=_is_spec)]
    if config.network == "cnn" and not (len(shapes) == 1 and _is_image(shapes[0])):
        raise ValueError(
            f'network = "cnn" needs one image [height, width, channels] of at least 3x3; the observation is '
            f'{", ".join(map(str, shapes))}: use network = "mlp"'
        )
    network: Any = ActorCritic(
        action=action,
        kind=config.network,
        hidden_sizes=config.hidden_sizes,
        activation=config.activation,
        shared_torso=config.shared_torso,
    )
    return network


def hint(config: PPOConfig, obs_spec: PyTree) -> str | None:
    """Returns a message if another network suits the observations better; None otherwise."""
    shapes = [spec.feature_shape for spec in jax.tree.leaves(obs_spec, is_leaf=_is_spec)]
    if config.network == "cnn" or len(shapes) != 1 or not _is_image(shapes[0]) or math.prod(shapes[0]) < _LARGE_IMAGE:
        return None
    return (
        f"observations are images {shapes[0]}, which network = mlp reads as {math.prod(shapes[0]):,} numbers; "
        "network = cnn reads them as images"
    )


def channels_first(shape: tuple[int, ...]) -> bool:
    """Returns whether images of this shape have the order [channels, height, width]."""
    return shape[0] < min(shape[1:])


def _flatten(x: Array) -> Array:
    """Reshapes [B, ...] to [B, size]; B may be 0."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and min(shape[1:] if channels_first(shape) else shape[:2]) >= 3


def _is_spec(node: Any) -> bool:
    return isinstance(node, ObsSpec)
