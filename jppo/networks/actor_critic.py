"""Actor-critic networks."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jppo.config.ppo import PPOConfig
from jppo.envs.masks import without_mask
from jppo.envs.spaces import ACTION_MASK, ActionSpec, Array, PyTree
from jppo.errors import Refused
from jppo.kernels.joined_layers import apply_each
from jppo.networks.distributions import Categorical, DiagGaussian, Joint, MultiCategorical
from jppo.networks.feed_forward import MLP, ConvTorso, Dense, flatten, is_image
from jppo.networks.recurrent import Cell, Recurrent, initial_carry

OUTPUT_GAINS = {"policy": 0.01, "value": 1.0}  # gains of the output layers' initial weights; other layers: sqrt(2)
_CONFIG_FIELDS = ("hidden_sizes", "activation", "shared_torso", "actor_obs", "critic_obs", "compute_dtype")


class _ActorCriticBase(nn.Module):
    """Fields and output layers of jppo's networks."""

    action: ActionSpec | tuple[ActionSpec, ...]
    kind: str = "mlp"
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    shared_torso: bool = False
    action_structure: Any = None  # pytree structure of the action specs; None for a single one
    actor_obs: tuple[str, ...] = ()  # names of the observation leaves that the actor sees; () for all
    critic_obs: tuple[str, ...] = ()  # the same for the critic; equal to actor_obs if both share a torso
    compute_dtype: str = "float32"  # of the hidden layers and of a recurrent layer's products

    def _mlp(self, name: str, sizes: tuple[int, ...]) -> MLP:
        return MLP(sizes, "relu" if self.kind == "cnn" else self.activation, self.compute_dtype, name=name)

    def _torsos(self, sizes: tuple[int, ...]) -> list[MLP]:
        return [self._mlp(name, sizes) for name in (("shared",) if self.shared_torso else ("actor", "critic"))]

    def _inputs(self, name: str, obs: PyTree) -> Array:
        """Returns the inputs [B, I] of the MLP with this name."""
        names = self.critic_obs if name == "critic" else self.actor_obs
        obs = {leaf: obs[leaf] for leaf in names} if names else obs
        return _concatenate(obs) if self.kind == "mlp" else _convolve(f"{name}_conv", obs, self.compute_dtype)

    def _heads(self, hidden: list[Array]) -> tuple[Any, Array]:
        """Returns distribution and value for the last hidden layers [B, I] of actor and critic, or the shared one."""
        single = isinstance(self.action, ActionSpec)
        specs: Any = (self.action,) if single else self.action
        heads: list[Any] = []
        for number, spec in enumerate(specs):
            suffix = "" if single else f"_{number}"
            outputs = Dense(spec.num_logits or spec.size, OUTPUT_GAINS["policy"], name=f"policy{suffix}")(hidden[0])
            if spec.num_actions:
                heads.append(Categorical(outputs))
            elif spec.nvec:
                heads.append(MultiCategorical.from_flat(outputs, spec.nvec))
            else:
                log_std = self.param(f"log_std{suffix}", nn.initializers.zeros, (spec.size,))
                heads.append(DiagGaussian(outputs, jnp.broadcast_to(log_std, outputs.shape)))
        distribution = heads[0] if single else Joint(jax.tree.unflatten(self.action_structure, heads))
        return distribution, Dense(1, OUTPUT_GAINS["value"], name="value")(hidden[-1])[:, 0]


class ActorCritic(_ActorCriticBase):
    """Policy and value heads on one shared torso, or on one torso each."""

    @nn.compact
    def __call__(self, obs: PyTree) -> tuple[Any, Array]:
        torsos = self._torsos(self.hidden_sizes)
        if self.kind == "mlp" and not (self.actor_obs or self.critic_obs):
            return self._heads(apply_each(torsos, _concatenate(obs)))
        inputs = [self._inputs(str(torso.name), obs) for torso in torsos]
        return self._heads([torso(x) for torso, x in zip(torsos, inputs, strict=True)])


class RecurrentActorCritic(_ActorCriticBase):
    """An encoder, a recurrent layer, and policy and value heads.

    The last of `hidden_sizes` is a hidden layer after the recurrent layer, the others form the encoder before it. The
    encoder and the recurrent layer are shared by actor and critic.
    """

    cell: Cell = "gru"
    size: int = 128

    @nn.compact
    def __call__(self, obs: PyTree, carry: PyTree, reset: Array | None = None) -> tuple[Any, Array, PyTree]:
        """Returns distribution and value for one step, [B, ...]; with reset [L, B], for L steps, [L*B, ...]."""
        lead = jax.tree.leaves(obs)[0].shape[:1] if reset is None else reset.shape
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(lead) :]), obs)
        encoded = self._mlp("encoder", self.hidden_sizes[:-1])(self._inputs("encoder", rows))
        memory = Recurrent(self.cell, self.size, self.compute_dtype, name="recurrent")
        outputs, carry = memory(encoded.reshape(*lead, encoded.shape[-1]), carry, reset)
        hidden = apply_each(self._torsos(self.hidden_sizes[-1:]), outputs.reshape(-1, self.size))
        return *self._heads(hidden), carry

    @nn.nowrap
    def initial_carry(self, batch_size: int) -> PyTree:
        """Returns the carry at an episode's start."""
        return initial_carry(self.cell, batch_size, self.size)

    @nn.nowrap
    def unroll(self, params: PyTree, obs: PyTree, carry: PyTree, reset: Array, /) -> Any:
        """See `RecurrentNetwork`."""
        return self.apply(params, obs, carry, reset)


def _concatenate(obs: PyTree) -> Array:
    """Returns all observation leaves, flattened and side by side, [B, I]."""
    leaves = [flatten(leaf) for leaf in jax.tree.leaves(obs)]
    return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves, axis=-1)


def _convolve(name: str, obs: PyTree, dtype: str) -> Array:
    """Returns convolutions of the images and the other leaves, flattened and side by side, [B, I] of this dtype."""
    leaves = jax.tree.leaves(obs)
    names = [name] if len(leaves) == 1 else [f"{name}_{number}" for number in range(len(leaves))]
    parts = [
        ConvTorso(dtype, name=name)(leaf) if is_image(leaf.shape[1:]) else leaf.astype(dtype)
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return _concatenate(parts)


def make_network(config: PPOConfig, obs_spec: PyTree, action_spec: PyTree) -> Any:
    """Returns the network that the config describes, see `check_config`."""
    check_config(config, without_mask(obs_spec))
    specs, structure = jax.tree.flatten(action_spec)
    actions = (action_spec, None) if isinstance(action_spec, ActionSpec) else (tuple(specs), structure)
    options: dict[str, Any] = {name: getattr(config, name) for name in _CONFIG_FIELDS}
    options |= {"action": actions[0], "action_structure": actions[1], "kind": config.network}
    if config.recurrent == "none":
        return ActorCritic(**options)
    return RecurrentActorCritic(cell=config.recurrent, size=config.recurrent_size, **options)


def check_config(config: PPOConfig, obs_spec: PyTree) -> None:
    """Raises ValueError for a cnn without images, or names in actor_obs or critic_obs that do not exist.

    Args:
      obs_spec: the observations' specs without the mask.
    """
    shapes = [spec.feature_shape for spec in jax.tree.leaves(obs_spec)]
    if config.network == "cnn" and not any(is_image(shape) for shape in shapes):
        stacks = any(len(shape) == 4 for shape in shapes)
        remedy = "join a stack of images along the channels" if stacks else 'use network = "mlp"'
        raise Refused(
            f'network = "cnn" needs an image [height, width, channels] of at least 3x3; the observation is '
            f"{', '.join(map(str, shapes))}: {remedy}"
        )
    for option in ("actor_obs", "critic_obs"):
        names = list(obs_spec) if isinstance(obs_spec, dict) else []
        for name in set(getattr(config, option)) - set(names):
            if name == ACTION_MASK:
                raise Refused(f"{option} names {name!r}, which is never an input of the network; leave it out")
            known = f"it has {', '.join(map(str, names))}" if names else "it has no named leaves"
            raise Refused(f"{option} names {name!r}, which the observation does not have; {known}")
