"""Actor-critic networks."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from jppo.config.ppo import PPOConfig
from jppo.envs.masks import without_mask
from jppo.envs.spaces import ACTION_MASK, ActionSpec
from jppo.ppo.distributions import Categorical, DiagGaussian, Joint, MultiCategorical
from jppo.ppo.kernels.joined_layers import affine_each
from jppo.ppo.layers import MLP, ConvTorso, Dense, channels_first, flatten
from jppo.ppo.recurrence import Cell, Recurrent, initial_carry
from jppo.ppo.types import Array, PyTree

OUTPUT_GAINS = {"policy": 0.01, "value": 1.0}  # gains of the output layers' initial weights; other layers: sqrt(2)
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


class RecurrentNetwork(Protocol):
    """A network with a memory: `carry` is a pytree with leaves [B, ...] that each step of an episode hands to the next.

    The first step of an episode gets `initial_carry`. A network may also have a method

        unroll(params, obs, carry, reset) -> (distribution, value, carry)

    that does the same as L calls of `apply`, for example with products for all steps at once. obs has leaves
    [L, B, ...]; carry [B, ...] is the carry before the first step; reset [L, B] is True where an episode starts: there
    the carry must be reset before the step. Distribution and value have leaves [L*B, ...].
    """

    def init(self, key: Array, obs: PyTree, carry: PyTree, /) -> PyTree:
        """Returns initial parameters, a pytree of float arrays."""
        ...

    def initial_carry(self, batch_size: int, /) -> PyTree:
        """Returns the carry at the start of an episode, leaves [batch_size, ...]."""
        ...

    def apply(self, params: PyTree, obs: PyTree, carry: PyTree, /) -> tuple[Any, Array, PyTree]:
        """Returns (distribution, value, carry after this step); see `Network` for the first two."""
        ...


class ActorCritic(nn.Module):
    """Policy and value heads on one shared torso, or on one torso each."""

    action: ActionSpec | tuple[ActionSpec, ...]
    kind: str = "mlp"
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    shared_torso: bool = False
    action_structure: Any = None  # pytree structure of the action specs; None for a single one
    actor_obs: tuple[str, ...] = ()  # names of the observation leaves that the actor sees; () for all
    critic_obs: tuple[str, ...] = ()  # the same for the critic
    compute_dtype: str = "float32"  # of the hidden layers

    @nn.compact
    def __call__(self, obs: PyTree) -> tuple[Any, Array]:
        activation = "relu" if self.kind == "cnn" else self.activation
        names = ("shared",) if self.shared_torso else ("actor", "critic")
        torsos = [MLP(self.hidden_sizes, activation, self.compute_dtype, name=name) for name in names]
        if self.kind == "mlp" and not (self.actor_obs or self.critic_obs):
            outputs = _apply_each(torsos, _concatenate(obs))
        else:
            inputs = [self._inputs(name, obs) for name in names]
            outputs = [torso(x) for torso, x in zip(torsos, inputs, strict=True)]
        return _action_head(self, outputs[0]), _value_head(outputs[-1])

    def _inputs(self, torso: str, obs: PyTree) -> Array:
        """Returns a torso's inputs [B, I]."""
        obs = _select(obs, self.critic_obs if torso == "critic" else self.actor_obs)
        return _concatenate(obs) if self.kind == "mlp" else _convolve(f"{torso}_conv", obs, self.compute_dtype)


class RecurrentActorCritic(nn.Module):
    """An encoder, a recurrent layer, and policy and value heads.

    The last of `hidden_sizes` is a hidden layer after the recurrent layer, the others form the encoder before it. The
    encoder and the recurrent layer are shared by actor and critic.
    """

    action: ActionSpec | tuple[ActionSpec, ...]
    cell: Cell
    size: int
    kind: str = "mlp"
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    shared_torso: bool = False
    action_structure: Any = None
    obs_names: tuple[str, ...] = ()  # names of the observation leaves that the network sees; () for all
    compute_dtype: str = "float32"  # of the hidden layers and of the recurrent layer's products

    @nn.compact
    def __call__(self, obs: PyTree, carry: PyTree, reset: Array | None = None) -> tuple[Any, Array, PyTree]:
        """Returns distribution and value for one step, [B, ...]; with reset [L, B], for L steps, [L*B, ...]."""
        activation = "relu" if self.kind == "cnn" else self.activation
        lead = jax.tree.leaves(obs)[0].shape[:1] if reset is None else reset.shape
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(lead) :]), _select(obs, self.obs_names))
        dtype = self.compute_dtype
        encoded = MLP(self.hidden_sizes[:-1], activation, dtype, name="encoder")(
            _convolve("encoder_conv", rows, dtype) if self.kind == "cnn" else _concatenate(rows)
        )
        memory = Recurrent(self.cell, self.size, dtype, name="recurrent")
        outputs, carry = memory(encoded.reshape(*lead, encoded.shape[-1]), carry, reset)
        names = ("shared",) if self.shared_torso else ("actor", "critic")
        torsos = [MLP(self.hidden_sizes[-1:], activation, dtype, name=name) for name in names]
        hidden = _apply_each(torsos, outputs.reshape(-1, self.size))
        return _action_head(self, hidden[0]), _value_head(hidden[-1]), carry

    @nn.nowrap
    def initial_carry(self, batch_size: int) -> PyTree:
        """Returns the carry at an episode's start."""
        return initial_carry(self.cell, batch_size, self.size)

    @nn.nowrap
    def unroll(self, params: PyTree, obs: PyTree, carry: PyTree, reset: Array, /) -> tuple[Any, Array, PyTree]:
        """See `RecurrentNetwork`."""
        outputs: Any = self.apply(params, obs, carry, reset)
        return outputs


def _action_head(network: ActorCritic | RecurrentActorCritic, x: Array) -> Any:
    """Returns the action distribution for the actor's last hidden layer x [B, I]. Call it in a compact method."""
    single = isinstance(network.action, ActionSpec)
    specs: Any = (network.action,) if single else network.action
    heads: list[Any] = []
    for number, spec in enumerate(specs):
        suffix = "" if single else f"_{number}"
        outputs = Dense(spec.num_logits or spec.size, OUTPUT_GAINS["policy"], name=f"policy{suffix}")(x)
        if spec.num_actions:
            heads.append(Categorical(outputs))
        elif spec.nvec:
            heads.append(MultiCategorical.from_flat(outputs, spec.nvec))
        else:
            log_std = network.param(f"log_std{suffix}", nn.initializers.zeros, (spec.size,))
            heads.append(DiagGaussian(outputs, jnp.broadcast_to(log_std, outputs.shape)))
    return heads[0] if single else Joint(jax.tree.unflatten(network.action_structure, heads))


def _value_head(x: Array) -> Array:
    return Dense(1, OUTPUT_GAINS["value"], name="value")(x)[:, 0]


def _select(obs: PyTree, names: tuple[str, ...]) -> PyTree:
    """Returns the named leaves of an observation; all of them if there are no names."""
    return {name: obs[name] for name in names} if names else obs


def _concatenate(obs: PyTree) -> Array:
    """Returns all observation leaves, flattened and side by side, [B, I]."""
    leaves = [flatten(leaf) for leaf in jax.tree.leaves(obs)]
    return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves, axis=-1)


def _convolve(name: str, obs: PyTree, dtype: str) -> Array:
    """Returns convolutions of the images and the other leaves, flattened and side by side, [B, I] of this dtype."""
    leaves = jax.tree.leaves(obs)
    if len(leaves) == 1 and _is_image(leaves[0].shape[1:]):
        return ConvTorso(dtype, name=name)(leaves[0])
    return _concatenate(
        [
            ConvTorso(dtype, name=f"{name}_{number}")(leaf) if _is_image(leaf.shape[1:]) else leaf.astype(dtype)
            for number, leaf in enumerate(leaves)
        ]
    )


def _apply_each(torsos: Sequence[MLP], x: Array) -> list[Array]:
    """Applies each torso to the same x [B, I]."""
    if not torsos[0].sizes:
        return [x] * len(torsos)
    weights = [torso.layers()[0].weights(x.shape[-1]) for torso in torsos]
    first_layers = affine_each(x.astype(torsos[0].dtype), weights)
    return [torso.after_first(y) for torso, y in zip(torsos, first_layers, strict=True)]


def make_network(config: PPOConfig, obs_spec: PyTree, action_spec: PyTree) -> Network:
    """Returns the network that the config describes.

    Raises:
      ValueError: a cnn without images, or names in actor_obs or critic_obs that the observation does not have.
    """
    obs_spec = without_mask(obs_spec)
    shapes = [spec.feature_shape for spec in jax.tree.leaves(obs_spec)]
    if config.network == "cnn" and not any(_is_image(shape) for shape in shapes):
        raise ValueError(
            f'network = "cnn" needs an image [height, width, channels] of at least 3x3; the observation is '
            f'{", ".join(map(str, shapes))}: use network = "mlp"'
        )
    for option in ("actor_obs", "critic_obs"):
        names = list(obs_spec) if isinstance(obs_spec, dict) else []
        for name in set(getattr(config, option)) - set(names):
            if name == ACTION_MASK:
                raise ValueError(f"{option} names {name!r}, which is never an input of the network; leave it out")
            known = f"it has {', '.join(map(str, names))}" if names else "it has no named leaves"
            raise ValueError(f"{option} names {name!r}, which the observation does not have; {known}")
    specs, structure = jax.tree.flatten(action_spec)
    single = isinstance(action_spec, ActionSpec)
    options: dict[str, Any] = {
        "action": action_spec if single else tuple(specs),
        "action_structure": None if single else structure,
        "kind": config.network,
        "hidden_sizes": config.hidden_sizes,
        "activation": config.activation,
        "shared_torso": config.shared_torso,
        "compute_dtype": config.compute_dtype,
    }
    network: Any
    if config.recurrent == "none":
        network = ActorCritic(actor_obs=config.actor_obs, critic_obs=config.critic_obs, **options)
    else:
        network = RecurrentActorCritic(
            cell=config.recurrent, size=config.recurrent_size, obs_names=config.actor_obs, **options
        )
    return network


def hint(config: PPOConfig, obs_spec: PyTree) -> str | None:
    """Returns a message if another network suits the observations better; None otherwise."""
    shapes = [spec.feature_shape for spec in jax.tree.leaves(obs_spec)]
    if config.network == "cnn" or len(shapes) != 1 or not _is_image(shapes[0]) or math.prod(shapes[0]) < _LARGE_IMAGE:
        return None
    return (
        f"observations are images {shapes[0]}, which network = mlp reads as {math.prod(shapes[0]):,} numbers; "
        "network = cnn reads them as images"
    )


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and min(shape[1:] if channels_first(shape) else shape[:2]) >= 3
