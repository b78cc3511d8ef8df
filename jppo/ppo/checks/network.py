"""Validates a network against an environment before anything runs."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from jppo.envs.masks import check_mask_spec, has_mask, legal_categories
from jppo.envs.spaces import ACTION_MASK, ActionSpec, PyTree
from jppo.errors import Refused, describe_error
from jppo.networks.actor_critic import RecurrentActorCritic
from jppo.networks.distributions import Joint
from jppo.ppo.policy import is_recurrent, prepare_obs, sample_actions

_CHECK_BATCH = 7  # batch size of the trace; unlike the usual sizes of other dims
_CHECK_STEPS = 3  # of the trace of a network's unroll


def check_network(network: Any, obs_spec: PyTree, action_spec: PyTree) -> PyTree:
    """Returns the shapes of a network's parameters, without computing anything.

    Raises:
      ValueError: `init` or `apply` fails, parameters are not real floats, or outputs do not fit the environment.
    """
    if inspect.isfunction(inspect.getattr_static(network, "init", None)) and isinstance(network, type):
        raise Refused(f"network = {network.__name__} is a class; pass an instance, {network.__name__}(...)")
    if missing := [name for name in ("init", "apply") if not hasattr(network, name)]:
        raise Refused(f"{type(network).__name__} is not a valid network: it has no method {', '.join(missing)}")
    batch = _CHECK_BATCH
    obs = jax.tree.map(lambda s: jax.ShapeDtypeStruct((batch, *s.shape), s.dtype), obs_spec)
    features = jax.eval_shape(functools.partial(prepare_obs, obs_spec), obs)
    if not jax.tree.leaves(features):
        raise Refused("the observation has no leaves besides action_mask, so the network would see nothing")
    extra = (_check_carry(network, batch, features),) if is_recurrent(network) else ()
    params = _shapes_of("init", network.init, features, jax.eval_shape(lambda: jax.random.key(0)), features, *extra)
    for path, leaf in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise Refused(
                f"the network's parameter {jax.tree_util.keystr(path)} is {leaf.dtype}, but must be a real float: "
                "leave arrays that are not trained out of the result of init"
            )
    returned = _shapes_of("apply", network.apply, features, params, features, *extra)
    expected = "(distribution, value, carry)" if extra else "(distribution, value)"
    if not (isinstance(returned, tuple) and len(returned) == 2 + len(extra)):
        count = f" of {len(returned)}" if isinstance(returned, tuple) else ""
        raise Refused(f"the network returned a {type(returned).__name__}{count}; it must return {expected}")
    if extra and _shape_list(returned[2]) != _shape_list(extra[0]):
        raise Refused(
            f"the network's apply returned a carry {_shape_list(returned[2])}; initial_carry returned "
            f"{_shape_list(extra[0])}, and both must have the same structure, shapes and dtypes"
        )
    distribution = _check_mask(returned[0], obs_spec, action_spec, obs)
    _check_outputs(distribution, returned[1], batch, action_spec)
    if extra and hasattr(network, "unroll") and type(network) is not RecurrentActorCritic:
        _check_unroll(network, features, params, returned)
    return params


def _check_carry(network: Any, batch: int, features: PyTree) -> PyTree:
    """Returns the shapes of the initial carry. Raises ValueError unless its leaves have the leading dim B."""
    carry = _shapes_of("initial_carry", lambda: network.initial_carry(batch), features)
    shapes = [leaf.shape for leaf in jax.tree.leaves(carry)]
    if not shapes:
        raise Refused(
            f"the network's initial_carry({batch}) has no arrays; leave the method out of a network without memory"
        )
    if any(shape[:1] != (batch,) for shape in shapes):
        raise Refused(
            f"the network's initial_carry({batch}) has arrays of shapes {shapes}; the first dim of each must be {batch}"
        )
    return carry


def _check_unroll(network: Any, features: PyTree, params: PyTree, applied: tuple[Any, Any, PyTree]) -> None:
    """Raises ValueError if a network's `unroll` returns other shapes than its `apply` does for the same steps.

    Args:
      applied: shapes of the result of `apply` for features [B, ...].
    """

    def with_lead(*lead: int) -> Any:
        return lambda leaf: jax.ShapeDtypeStruct((*lead, *leaf.shape[1:]), leaf.dtype)

    distribution, value, carry = applied
    steps = jax.tree.map(with_lead(_CHECK_STEPS, _CHECK_BATCH), features)
    reset = jax.ShapeDtypeStruct((_CHECK_STEPS, _CHECK_BATCH), bool)
    returned: Any = _shapes_of("unroll", network.unroll, features, params, steps, carry, reset)
    expected = (*jax.tree.map(with_lead(_CHECK_STEPS * _CHECK_BATCH), (distribution, value)), carry)
    found, needed = ([leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (returned, expected))
    structure: Any = jax.tree.structure(expected)
    if jax.tree.structure(returned) != structure or found != needed:
        raise Refused(
            f"the network's unroll returned arrays of shapes {found} for {_CHECK_STEPS} steps of {_CHECK_BATCH} "
            f"sequences; it must return (distribution, value, carry) of shapes {needed}"
        )


def _check_mask(distribution: Any, obs_spec: PyTree, action_spec: PyTree, obs: PyTree) -> Any:
    """Returns the shapes of the masked distribution. Raises ValueError if the mask does not fit the actions."""
    if not has_mask(obs_spec):
        return distribution
    check_mask_spec(obs_spec, action_spec)
    if not hasattr(distribution, "mask"):
        raise Refused(
            f"the network's {type(distribution).__name__} has no method mask(legal), which observations with "
            "action_mask need; jppo.Categorical has one"
        )
    return jax.eval_shape(lambda d, mask: d.mask(legal_categories(action_spec, mask)), distribution, obs[ACTION_MASK])


def _check_outputs(distribution: Any, value: Any, batch: int, action_spec: PyTree) -> None:
    """Raises ValueError if a network's outputs for a batch do not fit the environment."""
    if value.shape != (batch,):
        raise Refused(f"the network's value has shape {value.shape} for a batch of {batch}; it must be ({batch},)")
    missing = [name for name in ("sample", "log_prob", "entropy", "mode") if not hasattr(distribution, name)]
    if missing:
        raise Refused(
            f"the network's {type(distribution).__name__} is not a valid distribution: it has no method "
            f"{', '.join(missing)}"
        )
    shapes = [leaf.shape for leaf in jax.tree.leaves(distribution)]
    if any(shape[:1] != (batch,) for shape in shapes):
        raise Refused(
            f"the network's distribution holds arrays of shapes {shapes} for a batch of {batch}; the first dim of each "
            f"must be {batch}, because every environment draws from its own row (use jnp.broadcast_to)"
        )
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    sample, log_prob = jax.eval_shape(
        lambda drawn, keys: (action := sample_actions(drawn, keys), drawn.log_prob(action)), distribution, keys
    )
    expected = jax.tree.map(lambda spec: (batch, *spec.policy_shape), action_spec)
    actual = jax.tree.map(lambda leaf: leaf.shape, sample)
    if actual != expected or log_prob.shape != (batch,):
        raise Refused(
            f"the network's distribution gives actions of shape {actual} with log_prob {log_prob.shape} for a "
            f"batch of {batch}; this environment needs {expected} and ({batch},)"
        )
    _check_logits(distribution, action_spec)


def _check_logits(distribution: Any, spec: PyTree) -> None:
    """Raises ValueError if a distribution has logits, and their number differs from that of the categories."""
    if isinstance(distribution, Joint):
        for part, part_spec in distribution.pairs(spec):
            _check_logits(part, part_spec)
    shape = getattr(getattr(distribution, "logits", None), "shape", None)
    if shape is None or not isinstance(spec, ActionSpec):
        return
    if spec.nvec and shape[-2:] != (wanted := (len(spec.nvec), max(spec.nvec))):
        raise Refused(
            f"the network has logits {list(shape[-2:])}; the MultiDiscrete action needs {list(wanted)} (see "
            "jppo.MultiCategorical.from_flat)"
        )
    if spec.num_actions and shape[-1] != spec.num_actions:
        raise Refused(f"the network has {shape[-1]} logits; the environment has {spec.num_actions} actions")


def _shape_list(tree: PyTree) -> Any:
    return jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)


def _shapes_of(name: str, function: Any, features: PyTree, *arguments: PyTree) -> Any:
    """Returns the output shapes of a network's function. Raises ValueError if it fails.

    The new function avoids an earlier trace: in a notebook, a function that this one calls may have been redefined.
    """
    try:
        return jax.eval_shape(lambda *arguments: function(*arguments), *arguments)  # noqa: PLW0108
    except Exception as error:
        shapes = ", ".join(str(leaf.shape) for leaf in jax.tree.leaves(features))
        reason = describe_error(error)
        raise Refused(f"the network's {name} failed for observations of shape {shapes}: {reason}") from error
