"""The policy: a network with the preparation of observations in front of it and the action space behind it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jppo.envs.base import merge_dims
from jppo.envs.masks import has_mask, legal_categories, without_mask
from jppo.envs.spaces import ACTION_MASK, Array, ObsSpec, PyTree, component_categories, to_env_action
from jppo.kernels.initial_weights import make_init
from jppo.networks.actor_critic import OUTPUT_GAINS, ActorCritic
from jppo.networks.distributions import limit_categories
from jppo.ppo.normalization import normalize
from jppo.ppo.types import PolicyState


class Network(Protocol):
    """Policy and value function of an agent: any object with these two methods, such as a flax.linen module.

    Observations are pytrees of float32 leaves [B, *obs]: one-hot for discrete spaces, and normalized if
    config.normalize_obs. Each row of the outputs must depend on the same row of the observations only.
    """

    def init(self, key: Array, obs: PyTree, /) -> PyTree:
        """Returns initial parameters, a pytree of float arrays."""

    def apply(self, params: PyTree, obs: PyTree, /) -> tuple[Any, Array]:
        """Returns (distribution, value).

        The distribution is a pytree with leaves [B, ...] and the methods `sample(seed=key)`, `log_prob(action)`,
        `entropy()` and `mode()`, such as `Categorical` or `DiagGaussian`. The value has the shape [B].
        """


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

    def initial_carry(self, batch_size: int, /) -> PyTree:
        """Returns the carry at the start of an episode, leaves [batch_size, ...]."""

    def apply(self, params: PyTree, obs: PyTree, carry: PyTree, /) -> tuple[Any, Array, PyTree]:
        """Returns (distribution, value, carry after this step); see `Network` for the first two."""


class Policy(NamedTuple):
    """Pure functions that apply a network to raw observations, and the spaces that they are made for.

    A feed-forward network is one with the carry ().
    """

    prepare: Callable[[PyTree], PyTree]  # obs [B, *obs] -> features: float32, one-hot where the space is discrete
    init: Callable[[Array, PyTree], PyTree]  # (key, obs [B, *obs]) -> params
    initial_carry: Callable[[int], PyTree]  # B -> carry at an episode's start, leaves [B, ...]
    step: Callable[..., tuple[Any, Array, PyTree]]  # (state, obs [B, *obs], carry=()) -> distribution, value [B], carry
    unroll: Callable[[PolicyState, PyTree, PyTree, Array], tuple[Any, Array, PyTree]]
    """`(state, obs [L, B, *obs], carry [B, ...], reset [L, B]) -> distribution [L*B], value [L*B], carry [B, ...]`"""
    network: Network | RecurrentNetwork
    obs_spec: PyTree  # ObsSpec for each observation leaf
    action_spec: PyTree  # ActionSpec, or a pytree of them

    @property
    def is_recurrent(self) -> bool:
        """Whether the network has a carry."""
        return is_recurrent(self.network)

    @property
    def has_mask(self) -> bool:
        """Whether observations mark the legal actions."""
        return has_mask(self.obs_spec)


class ActOutput(NamedTuple):
    """Actions for a batch of observations, and the policy's view of them."""

    action: PyTree  # [B, *policy_shape]: the distribution's sample or mode
    env_action: PyTree  # [B, *shape], in the environment's dtype and bounds
    log_prob: Array  # [B] f32, of `action`
    value: Array  # [B] f32
    carry: PyTree  # [B, ...], for the next step of the same episode


def act(
    policy: Policy, policy_state: PolicyState, obs: PyTree, keys: Array | None = None, carry: PyTree = ()
) -> ActOutput:
    """Selects an action for each observation.

    Under `jax.jit`, results that the caller does not use cost nothing.

    Args:
      policy_state: the network's parameters and the observation statistics.
      obs: raw observations [B, *obs].
      keys: one random key per row, [B]; or one key [] for the whole batch; or None to take the distribution's mode.
      carry: of a recurrent network, leaves [B, ...].
    """
    distribution, value, carry = policy.step(policy_state, obs, carry)
    action = distribution.mode() if keys is None else sample_actions(distribution, keys)
    env_action, log_prob = to_env_action(policy.action_spec, action), distribution.log_prob(action)
    return ActOutput(action=action, env_action=env_action, log_prob=log_prob, value=value, carry=carry)


def sample_actions(distribution: Any, keys: Array) -> PyTree:
    """Samples actions [B, ...] with one key per row, [B], or with one key [] for the whole batch."""
    if keys.ndim == 0:
        return distribution.sample(seed=keys)
    return jax.vmap(lambda row, key: row.sample(seed=key))(distribution, keys)


def reset_carry(policy: Policy, carry: PyTree, done: Array) -> PyTree:
    """Returns the carry [N, ...] with its initial values where done, [N] bool."""
    return select_rows(done, policy.initial_carry(done.shape[0]), carry)


def episode_starts(done: Array) -> Array:
    """Returns where a carry must be reset before the step, [T, N] bool, for done [T, N]: after each episode's end.

    False at t = 0, because the carry that a rollout stores has already been reset.
    """
    return jnp.concatenate([jnp.zeros_like(done[:1]), done[:-1]])


def select_rows(where: Array, x: PyTree, y: PyTree) -> PyTree:
    """Returns leaves [N, ...] with the rows of x where `where`, [N] bool, is True, and those of y elsewhere."""
    return jax.tree.map(lambda x, y: jnp.where(where.reshape(-1, *[1] * (y.ndim - 1)), x, y), x, y)


def make_policy(network: Any, obs_spec: PyTree, action_spec: PyTree, params: PyTree | None = None) -> Policy:
    """Returns the policy that applies `network` to raw observations: cast, one-hot, normalize, apply, mask.

    Args:
      action_spec: the action space; its `bounds` decide how actions are fitted into a box.
      params: the parameters' shapes as `check_network` returns them. Avoids tracing the network's `init` again.
    """
    functions = _with_carry(network)

    def features_of(state: PolicyState, obs: PyTree) -> PyTree:
        features = prepare_obs(obs_spec, obs)
        return features if state.obs_stats == () else jax.tree.map(normalize, features, state.obs_stats)

    def finish(distribution: Any, value: Array, obs: PyTree) -> tuple[Any, Array]:
        chex.assert_rank(value, 1)
        if has_mask(obs_spec):
            distribution = distribution.mask(legal_categories(action_spec, obs[ACTION_MASK]))
        distribution = limit_categories(distribution, action_spec)
        return jax.tree.map(_to_float32, distribution), value.astype(jnp.float32)

    @jax.jit  # so that the same shapes are traced once; the function's name is part of the compiled program
    def step(state: PolicyState, obs: PyTree, carry: PyTree = ()) -> tuple[Any, Array, PyTree]:
        distribution, value, carry = functions.apply(state.params, features_of(state, obs), carry)
        return *finish(distribution, value, obs), carry

    @jax.jit
    def unroll(state: PolicyState, obs: PyTree, carry: PyTree, reset: Array) -> tuple[Any, Array, PyTree]:
        rows = merge_dims(obs)
        lead = jax.tree.leaves(obs)[0].shape[:2]
        features = jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), features_of(state, rows))
        distribution, value, carry = functions.unroll(state.params, features, carry, reset)
        return *finish(distribution, value, rows), carry

    def init(key: Array, obs: PyTree) -> PyTree:
        carry = functions.initial_carry(len(jax.tree.leaves(obs)[0]))
        return init_params(key, prepare_obs(obs_spec, obs), carry)

    init_params = make_init(functions.init, OUTPUT_GAINS if type(network) is ActorCritic else None, params)
    return Policy(
        prepare=functools.partial(prepare_obs, obs_spec),
        init=init,
        initial_carry=functions.initial_carry,
        step=step,
        unroll=unroll,
        network=network,
        obs_spec=obs_spec,
        action_spec=action_spec,
    )


def is_recurrent(network: Any) -> bool:
    """Returns whether a network fits the `RecurrentNetwork` protocol."""
    return hasattr(network, "initial_carry")


class _Functions(NamedTuple):
    """The functions of a `RecurrentNetwork` with `unroll`."""

    init: Callable[[Array, PyTree, PyTree], PyTree]
    initial_carry: Callable[[int], PyTree]
    apply: Callable[[PyTree, PyTree, PyTree], tuple[Any, Array, PyTree]]
    unroll: Callable[[PyTree, PyTree, PyTree, Array], tuple[Any, Array, PyTree]]


def _with_carry(network: Any) -> _Functions:
    """Returns the functions of a network. A feed-forward network gets the carry ()."""

    def apply(params: PyTree, features: PyTree, carry: PyTree) -> tuple[Any, Array, PyTree]:
        return *network.apply(params, features), carry

    def unroll_rows(params: PyTree, features: PyTree, carry: PyTree, reset: Array) -> tuple[Any, Array, PyTree]:
        return apply(params, merge_dims(features), carry)

    def unroll_steps(params: PyTree, features: PyTree, carry: PyTree, reset: Array) -> tuple[Any, Array, PyTree]:
        start = network.initial_carry(reset.shape[1])

        def step(carry: PyTree, inputs: tuple[PyTree, Array]) -> tuple[PyTree, tuple[Any, Array]]:
            features, reset_t = inputs
            distribution, value, carry = network.apply(params, features, select_rows(reset_t, start, carry))
            return carry, (distribution, value)

        carry, outputs = jax.lax.scan(step, carry, (features, reset))
        return *merge_dims(outputs), carry

    if not is_recurrent(network):
        init = lambda key, features, carry: network.init(key, features)  # noqa: E731
        return _Functions(init, lambda batch_size: (), apply, unroll_rows)
    return _Functions(network.init, network.initial_carry, network.apply, getattr(network, "unroll", unroll_steps))


def prepare_obs(obs_spec: PyTree, obs: PyTree) -> PyTree:
    """Returns the network's features for raw observations [B, *obs] as float32: categories one-hot, uint8 divided by
    the largest value of its space. The leaf `action_mask` is not part of them.

    `ObsArray.features` in `jppo.actors.numpy_policy` is the same function in NumPy."""
    return jax.tree.map(_to_features, without_mask(obs_spec), without_mask(obs))


def _to_float32(x: Array) -> Array:
    """Casts a distribution's parameter to float32: probability ratios need more digits than bfloat16 has."""
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _to_features(spec: ObsSpec, obs: Array) -> Array:
    if spec.num_categories:
        return jax.nn.one_hot(obs.astype(jnp.int32) - jnp.int32(spec.start), spec.num_categories, dtype=jnp.float32)
    if spec.nvec:
        columns, categories = component_categories(spec.nvec, spec.start)
        components = obs.astype(jnp.int32).reshape(obs.shape[0], len(spec.nvec))
        return (components[:, columns] == categories[None]).astype(jnp.float32)
    if obs.dtype == jnp.uint8:
        high = np.asarray(spec.high, np.float32)
        return obs.astype(jnp.float32) / (high.reshape(1, *spec.shape) if high.ndim else high)
    return obs.astype(jnp.float32)
