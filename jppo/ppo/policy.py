"""The policy: a network with the preparation of observations in front of it and the action space behind it."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jppo.envs.spaces import ActionSpec, ObsSpec, to_env_action
from jppo.errors import describe_error
from jppo.ppo.kernels.initial_weights import make_init
from jppo.ppo.networks import OUTPUT_GAINS, ActorCritic, Network
from jppo.ppo.normalization import normalize
from jppo.ppo.types import Array, PolicyState, PyTree

_CHECK_BATCH = 7  # batch size that check_network traces with; unlike the usual sizes of other dims


class Policy(NamedTuple):
    """Pure functions that apply a network to raw observations, and the spaces that they are made for."""

    prepare: Callable[[PyTree], PyTree]  # obs [B, *obs] -> features: float32, one-hot where the space is discrete
    init: Callable[[Array, PyTree], PyTree]  # (key, obs [B, *obs]) -> params
    apply: Callable[[PolicyState, PyTree], tuple[Any, Array]]  # (state, obs [B, *obs]) -> (distribution, value [B])
    network: Network
    obs_spec: PyTree  # ObsSpec for each observation leaf
    action_spec: ActionSpec


class ActOutput(NamedTuple):
    """Actions for a batch of observations, and the policy's view of them."""

    action: Array  # [B, *policy_shape]: the distribution's sample or mode
    env_action: Array  # [B, *shape], in the environment's dtype and bounds
    log_prob: Array  # [B] f32, of `action`
    value: Array  # [B] f32


def act(policy: Policy, policy_state: PolicyState, obs: PyTree, keys: Array | None = None) -> ActOutput:
    """Selects an action for each observation.

    Under `jax.jit`, results that the caller does not use cost nothing.

    Args:
      policy_state: the network's parameters and the observation statistics.
      obs: raw observations [B, *obs].
      keys: one random key per row, [B]; or one key [] for the whole batch; or None to take the distribution's mode.
    """
    distribution, value = policy.apply(policy_state, obs)
    action = distribution.mode() if keys is None else sample_actions(distribution, keys)
    return ActOutput(
        action=action,
        env_action=to_env_action(policy.action_spec, action),
        log_prob=distribution.log_prob(action),
        value=value,
    )


def sample_actions(distribution: Any, keys: Array) -> Array:
    """Samples actions [B, ...] with one key per row, [B], or with one key [] for the whole batch."""
    if keys.ndim == 0:
        return distribution.sample(seed=keys)
    return jax.vmap(lambda row, key: row.sample(seed=key))(distribution, keys)


def make_policy(network: Network, obs_spec: PyTree, action_spec: ActionSpec, params: PyTree | None = None) -> Policy:
    """Returns the policy that applies `network` to raw observations: cast, one-hot, normalize, apply.

    Args:
      action_spec: the action space; its `bounds` decide how actions are fitted into a box.
      params: the parameters' shapes as `check_network` returns them. Avoids tracing the network's `init` again.
    """

    def apply(state: PolicyState, obs: PyTree) -> tuple[Any, Array]:
        features = prepare_obs(obs_spec, obs)
        if state.obs_stats != ():
            features = jax.tree.map(normalize, features, state.obs_stats)
        distribution, value = network.apply(state.params, features)
        chex.assert_rank(value, 1)
        return jax.tree.map(_to_float32, distribution), value.astype(jnp.float32)

    init = make_init(network.init, OUTPUT_GAINS if type(network) is ActorCritic else None, params)
    return Policy(
        prepare=lambda obs: prepare_obs(obs_spec, obs),
        init=lambda key, obs: init(key, prepare_obs(obs_spec, obs)),
        apply=jax.jit(apply),  # so that the same shapes are traced once
        network=network,
        obs_spec=obs_spec,
        action_spec=action_spec,
    )


def prepare_obs(obs_spec: PyTree, obs: PyTree) -> PyTree:
    """Returns the network's features for raw observations [B, *obs]: float32; one-hot for discrete spaces; images of
    uint8 divided by 255."""
    return jax.tree.map(_to_features, obs_spec, obs, is_leaf=_is_spec)


def check_network(network: Network, obs_spec: PyTree, action: ActionSpec) -> PyTree:
    """Returns the shapes of a network's parameters, without computing anything.

    Raises:
      ValueError: `init` or `apply` fails, parameters are not real floats, or outputs do not fit the environment.
    """
    if inspect.isfunction(inspect.getattr_static(network, "init", None)) and isinstance(network, type):
        raise ValueError(f"network = {network.__name__} is a class; pass an instance, {network.__name__}(...)")
    if missing := [name for name in ("init", "apply") if not hasattr(network, name)]:
        raise ValueError(f"{type(network).__name__} is not a valid network: it has no method {', '.join(missing)}")
    batch = _CHECK_BATCH
    obs = jax.tree.map(lambda s: jax.ShapeDtypeStruct((batch, *s.shape), s.dtype), obs_spec, is_leaf=_is_spec)
    features = jax.eval_shape(lambda obs: prepare_obs(obs_spec, obs), obs)
    params = _shapes_of("init", network.init, jax.eval_shape(lambda: jax.random.key(0)), features)
    for path, leaf in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"the network's parameter {jax.tree_util.keystr(path)} is {leaf.dtype}, but must be a real float: "
                "leave arrays that are not trained out of the result of init"
            )
    returned = _shapes_of("apply", network.apply, params, features)
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise ValueError(f"the network returned {type(returned).__name__}; it must return (distribution, value)")
    _check_outputs(*returned, batch, action)
    return params


def _check_outputs(distribution: Any, value: Any, batch: int, action: ActionSpec) -> None:
    """Raises ValueError if a network's outputs for a batch do not fit the environment."""
    if value.shape != (batch,):
        raise ValueError(f"the network's value has shape {value.shape} for a batch of {batch}; it must be ({batch},)")
    missing = [name for name in ("sample", "log_prob", "entropy", "mode") if not hasattr(distribution, name)]
    if missing:
        raise ValueError(
            f"the network's {type(distribution).__name__} is not a valid distribution: it has no method "
            f"{', '.join(missing)}"
        )
    shapes = [leaf.shape for leaf in jax.tree.leaves(distribution)]
    if any(shape[:1] != (batch,) for shape in shapes):
        raise ValueError(
            f"the network's distribution holds arrays of shapes {shapes} for a batch of {batch}; the first dim of each "
            f"must be {batch}, because every environment draws from its own row (use jnp.broadcast_to)"
        )
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    sample, log_prob = jax.eval_shape(_sample_with_log_prob, distribution, keys)
    expected = (batch, *action.policy_shape)
    if sample.shape != expected or log_prob.shape != (batch,):
        raise ValueError(
            f"the network's distribution gives actions of shape {sample.shape} with log_prob {log_prob.shape} for a "
            f"batch of {batch}; this environment needs {expected} and ({batch},)"
        )
    logits = getattr(distribution, "logits", None)
    if action.num_actions and logits is not None and logits.shape[-1] != action.num_actions:
        raise ValueError(f"the network has {logits.shape[-1]} logits; the environment has {action.num_actions} actions")


def _shapes_of(name: str, function: Any, first: PyTree, features: PyTree) -> Any:
    """Returns the output shapes of a network's function. Raises ValueError if it fails."""
    try:
        return jax.eval_shape(function, first, features)
    except Exception as error:
        shapes = ", ".join(str(leaf.shape) for leaf in jax.tree.leaves(features))
        reason = describe_error(error)
        raise ValueError(f"the network's {name} failed for observations of shape {shapes}: {reason}") from error


def _sample_with_log_prob(distribution: Any, keys: Array) -> tuple[Array, Array]:
    action = sample_actions(distribution, keys)
    return action, distribution.log_prob(action)


def _to_float32(x: Array) -> Array:
    """Casts a distribution's parameter to float32: probability ratios need more digits than bfloat16 has."""
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _to_features(spec: ObsSpec, obs: Array) -> Array:
    if spec.num_categories:
        return jax.nn.one_hot(obs - spec.start, spec.num_categories, dtype=jnp.float32)
    if obs.dtype == jnp.uint8:
        return obs.astype(jnp.float32) / 255.0
    return obs.astype(jnp.float32)


def _is_spec(node: Any) -> bool:
    return isinstance(node, ObsSpec)
