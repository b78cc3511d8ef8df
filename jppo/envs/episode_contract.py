"""Checks of the functions of an `EpisodicEnv`."""

from typing import Any

import jax

from jppo.envs.contract import BrokenContractError, describe_returned
from jppo.envs.gymnax_contract import check_same, describe_leaf
from jppo.envs.spaces import PyTree

_FIVE = "return obs, state, reward, terminated, truncated"


def trace_episodic_env(env: Any, action_spec: PyTree) -> PyTree:
    """Traces `reset` and `step` of an `EpisodicEnv`. Returns shapes and dtypes of an observation.

    Raises:
      BrokenContractError: the values are not as documented, or reset and step return different shapes or dtypes.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    returned = jax.eval_shape(env.reset, key)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise BrokenContractError(f"reset returned {describe_returned(returned)}", "return obs, state")
    obs, state = returned
    action = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), action_spec)
    step = jax.eval_shape(env.step, key, state, action)
    if not isinstance(step, tuple) or len(step) != 5:
        raise BrokenContractError(f"step returned {describe_returned(step)}, not 5", _FIVE)
    check_same("observations", obs, "step", step[0])
    check_same("state", state, "step", step[1], check="carry")
    for name, value, kinds in (("reward", step[2], "biuf"), ("terminated", step[3], "b"), ("truncated", step[4], "b")):
        if getattr(value, "shape", None) != () or value.dtype.kind not in kinds:
            found = describe_leaf(value) if hasattr(value, "dtype") else f"a {type(value).__name__}"
            raise BrokenContractError(f"{name} is {found}", f"return a scalar {'bool' if kinds == 'b' else 'number'}")
    return obs
