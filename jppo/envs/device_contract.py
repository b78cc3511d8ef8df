"""Checks of the return values of environments on the device: objects with gymnax's API, and `EpisodicEnv`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.config.checks import check_function
from jppo.envs.contract import BrokenContractError, describe_returned
from jppo.envs.spaces import Array, PyTree

_FIVE = "return obs, state, reward, terminated, truncated"
_SIX = "return obs, state, reward, terminated, truncated, info"
_METHODS = ("reset", "step", "action_space", "observation_space")


def check_methods(source: Any, params: Any) -> None:
    """Raises BrokenContractError if the object is a class, or lacks an attribute of gymnax's API."""
    if isinstance(source, type):
        raise BrokenContractError(f"{source.__name__} is a class", f"pass an instance: {source.__name__}()")
    names = (*_METHODS, "default_params") if params is None else _METHODS
    if missing := [name for name in names if not hasattr(source, name)]:
        is_function = callable(source) and "reset" in missing
        remedy = "pass the environment that the function makes" if is_function else "see docs/extending.md"
        if type(source) is tuple:
            remedy = "gymnax.make returns (env, params): pass jppo.make_env(env, params)"
        problem = f"{type(source).__name__} is not a gymnax environment: it has no {', '.join(missing)}"
        raise BrokenContractError(problem, remedy)


def shape_inputs(action_spec: PyTree, lead: tuple[int, ...] = ()) -> tuple[Any, PyTree]:
    """Returns shapes and dtypes of a key and of actions [*lead, *shape]."""
    action = jax.tree.map(lambda spec: jax.ShapeDtypeStruct((*lead, *spec.shape), spec.dtype), action_spec)
    return jax.eval_shape(lambda: jax.random.key(0)), action


def trace_anew(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns shapes and dtypes of a function's result.

    The new function avoids an earlier trace: in a notebook, a function that this one calls may have been redefined.
    """
    return jax.eval_shape(lambda *arguments: function(*arguments), *arguments)  # noqa: PLW0108


def trace_reset(reset: Callable[..., Any], *arguments: Any) -> tuple[PyTree, PyTree]:
    """Traces `reset`. Raises BrokenContractError unless it returns two values."""
    returned = trace_anew(reset, *arguments)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise BrokenContractError(f"reset returned {describe_returned(returned)}", "return obs, state")
    return returned


def trace_episodic_env(env: Any, action_spec: PyTree) -> PyTree:
    """Traces `reset` and `step` of an `EpisodicEnv`. Returns shapes and dtypes of an observation.

    Raises:
      BrokenContractError: the values are not as documented, or reset and step return different shapes or dtypes.
    """
    key, action = shape_inputs(action_spec)
    for name, arguments in (("reset", "key"), ("step", "key, state, action")):
        try:
            check_function(name, getattr(env, name), arguments)
        except (TypeError, ValueError) as error:
            raise BrokenContractError(str(error), f"define {name}({arguments})") from None
    obs, state = trace_reset(env.reset, key)
    step = trace_anew(env.step, key, state, action)
    if not isinstance(step, tuple) or len(step) != 5:
        raise BrokenContractError(f"step returned {describe_returned(step)}, not 5", _FIVE)
    check_same("observations", obs, "step", step[0])
    check_same("state", state, "step", step[1], check="carry")
    for name, value, kinds in (("reward", step[2], "biuf"), ("terminated", step[3], "b"), ("truncated", step[4], "b")):
        if getattr(value, "shape", None) != () or not (value.dtype == bool or (kinds != "b" and is_number(value))):
            found = describe_leaf(value) if hasattr(value, "dtype") else f"a {type(value).__name__}"
            raise BrokenContractError(f"{name} is {found}", f"return a scalar {'bool' if kinds == 'b' else 'number'}")
    return obs


def trace_env(source: Any, params: Any, action_spec: PyTree) -> tuple[PyTree, tuple[Any, ...]]:
    """Traces `reset` and `step` of gymnax's API.

    Returns:
      shapes and dtypes: the observation of reset, and the six values of step.

    Raises:
      BrokenContractError: the values differ from gymnax's API, or reset and step return different shapes or dtypes.
    """
    key, action = shape_inputs(action_spec)
    obs, state = trace_reset(source.reset, key, params)
    try:
        step = trace_anew(source.step, key, state, action, params)
    except (TypeError, ValueError):  # gymnax combines the results of step_env and reset_env
        _check_step_env(source, params, key, obs, state, action)
        raise
    _check_step(step)
    check_same("observations", obs, "step", step[0])
    check_same("observations", obs, 'info["final_observation"]', step[5]["final_observation"])
    check_same("state", state, "step", step[1], check="carry")
    return obs, step


def _check_step_env(source: Any, params: Any, key: Array, obs: PyTree, state: PyTree, action: PyTree) -> None:
    if not hasattr(source, "step_env"):
        return
    returned = trace_anew(source.step_env, key, state, action, params)
    if not isinstance(returned, tuple) or len(returned) != 5:
        remedy = "return obs, state, reward, terminated, info; gymnax's step adds truncated"
        raise BrokenContractError(f"step_env returned {describe_returned(returned)}, not 5", remedy)
    check_same("observations", obs, "step_env", returned[0])
    check_same("state", state, "step_env", returned[1], check="carry")


def _check_step(returned: Any) -> None:
    if not isinstance(returned, tuple) or len(returned) != 6:
        number = f"{len(returned)} values" if isinstance(returned, tuple) else describe_returned(returned)
        raise BrokenContractError(f"step returned {number}; gymnax >= 1.0.1 returns six", _SIX)
    info, reward = returned[5], returned[2]
    if not isinstance(info, dict) or "final_observation" not in info:
        remedy = "store the true next observation there at every step, or override step_env instead of step"
        raise BrokenContractError('the info of step has no "final_observation"', remedy)
    if int(np.prod(reward.shape)) != 1:
        raise BrokenContractError(f"the reward must be a scalar, not of shape {reward.shape}", "return a scalar number")


def is_number(leaf: Any) -> bool:
    """Returns whether the dtype of an array is a real or whole number, not bool."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.issubdtype(leaf.dtype, jnp.integer))


def check_same(name: str, first: PyTree, after: str, second: PyTree, check: str = "contract") -> None:
    """Raises BrokenContractError if structure, shapes or dtypes of two results differ."""
    remedy = "return the same structure, shapes and dtypes, for example jnp.zeros((), jnp.int32) instead of 0"
    structures: list[Any] = [jax.tree.structure(first), jax.tree.structure(second)]
    if structures[0] != structures[1]:
        problem = f"{name} of reset and {after} have different structures: {structures[0]}, {structures[1]}"
        raise BrokenContractError(problem, remedy, check)
    leaves = zip(jax.tree_util.tree_flatten_with_path(first)[0], jax.tree.leaves(second), strict=True)
    for (path, old), new in leaves:
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            kinds = f"{describe_leaf(old)} after reset, {describe_leaf(new)} after {after}"
            problem = f"{name}{jax.tree_util.keystr(path)}: {kinds}"
            raise BrokenContractError(problem, remedy, check)


def describe_leaf(leaf: Any) -> str:
    """Returns dtype and shape of an array, e.g. "float32[3]"."""
    return f"{leaf.dtype}{list(leaf.shape)}"
