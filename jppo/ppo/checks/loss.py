"""Validates the results of a user's loss and advantages."""

from typing import Any

import jax
import jax.numpy as jnp

from jppo.envs.spaces import Array, PyTree
from jppo.errors import Refused
from jppo.ppo.types import Metrics

_OWN_METRICS = (
    *("update", "env_steps", "finite", "reached", "learning_rate"),
    *("loss/total", "grad/norm", "value/mean", "value/explained_variance"),
)
_OWN_PREFIXES = ("episode/", "eval/", "time/", "actors/", "hyperparams/")


def as_pair(name: str, returned: Any, wanted: str) -> tuple[Any, Any]:
    """Returns the result of a user's function. Raises ValueError unless it is a tuple of two."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        count = f" of {len(returned)}" if isinstance(returned, tuple) else ""
        raise Refused(f"{name} returned {_kind(returned)}{count}; it must return {wanted}")
    return returned


def _kind(value: Any) -> str:
    """Returns the type of a value. A tracer is an array for the user."""
    return f"an array of shape {value.shape}" if isinstance(value, jax.Array) else type(value).__name__


def _is_real(value: Any) -> bool:
    """Returns whether a value is a real number, a bool, or an array of them."""
    dtype = getattr(value, "dtype", type(value))
    return dtype in (bool, int, float) or any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer))


def check_loss(returned: Any) -> tuple[Array, Metrics]:
    """Returns the result of a loss. Raises ValueError unless it is a scalar and a dict of scalars."""
    wanted = "(scalar, dict of scalar metrics)"
    total, metrics = as_pair("the loss", returned, wanted)
    if not isinstance(metrics, dict):
        raise Refused(f"the loss returned {_kind(metrics)} as metrics; it must return {wanted}")
    for name, value in [("the loss", total), *((f"the metric {name!r}", value) for name, value in metrics.items())]:
        if not _is_real(value):
            kind = getattr(value, "dtype", type(value).__name__)
            raise Refused(f"{name} is not a real number, but {kind}; the loss must return {wanted}")
        if jnp.shape(value) != ():
            raise Refused(f"{name} has shape {jnp.shape(value)}; the loss must return {wanted}, for example means")
    if not jnp.issubdtype(dtype := jnp.result_type(total), jnp.floating):
        raise Refused(f"the loss is {dtype}, which has no gradient; it must be a real float that depends on apply")
    for name in metrics:
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise Refused(f"the name of a metric must be a printable text, not {name!r}")
        if name in _OWN_METRICS or name.startswith(_OWN_PREFIXES):
            raise Refused(f"the metric {name!r} is one of jppo's; choose another name, for example 'my/{name}'")
    return total, metrics


def check_loss_init(returned: Any) -> tuple[PyTree, PyTree]:
    """Returns the parameters and the state of a `LossModule`. Raises ValueError if they are something else."""
    params, state = as_pair("LossModule.init", returned, "(parameters, state), () for none")
    for path, leaf in jax.tree.leaves_with_path(params):
        if not _is_real(leaf) or not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            dtype = jnp.result_type(leaf) if _is_real(leaf) else type(leaf).__name__
            name = f"parameters{jax.tree_util.keystr(path)} of the LossModule"
            raise Refused(f"the {name} are {dtype}, but must be real floats; put other arrays into the state")
    return params, state


def check_bonus(returned: Any, reward: Array, state: PyTree) -> tuple[Array, PyTree]:
    """Returns the result of `LossModule.reward`.

    Args:
      reward: [T, N], the rollout's rewards.
      state: the state before.

    Raises:
      ValueError: the rewards or the state have other shapes.
    """
    bonus, after = as_pair("LossModule.reward", returned, "(rewards [T, N], state)")
    shapes = jax.eval_shape(lambda: (state, after))
    before, now = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", shapes)
    if before != now:
        raise Refused(f"LossModule.reward returned the state {now}, but must keep its shapes and dtypes, {before}")
    return check_shape("the reward of the LossModule", bonus, reward), after


def check_advantages(returned: Any, reward: Array) -> tuple[Array, Array]:
    """Returns advantages and value targets as f32. Raises ValueError unless both have the shape of the rewards."""
    advantage, target = as_pair("the function of the advantages", returned, "(advantages, value targets), [T, N] each")
    advantage = check_shape("the array of advantages", advantage, reward)
    return advantage, check_shape("the array of value targets", target, reward)


def check_shape(name: str, array: Any, reward: Array) -> Array:
    """Returns an array as f32. Raises ValueError unless it has the shape of the rollout's rewards [T, N]."""
    if jnp.shape(array) != reward.shape:
        raise Refused(f"{name} has shape {jnp.shape(array)}; it must be [T, N] = {list(reward.shape)}")
    return jnp.asarray(array, jnp.float32)
