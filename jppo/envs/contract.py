"""Checks of the values that `reset` and `step` of a Gymnasium environment return."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from jppo.envs.action_spaces import action_spec_of
from jppo.envs.masks import lacks_legal_action, nearest_legal
from jppo.envs.observations import MisfitError, Observations
from jppo.envs.spaces import ACTION_MASK, PyTree
from jppo.errors import EMPTY_MASK, Refused

_FIVE = "return obs, reward, terminated, truncated, info"


class BrokenContractError(Refused):
    """A value that an environment returns is invalid. The arguments are the problem and the remedy."""

    def __init__(self, problem: str, remedy: str = "", check: str = "contract") -> None:
        """Args: check: the check of `jppo check-env` that reports the problem."""
        super().__init__(problem, remedy)
        self.check = check

    def __str__(self) -> str:
        return "; ".join(filter(None, map(str, self.args)))


def check_kept(name: str, given: np.ndarray, kept: np.ndarray) -> None:
    """Raises BrokenContractError if copies of integers in another dtype differ, such as 2**32 as int32."""
    if (wrong := kept != given).any():
        problem = f"{name} has {given[wrong].flat[0]}, which is not {kept.dtype}"
        raise BrokenContractError(problem, "return integers of the observation space", check="spaces")


def call_reset(env: Any, seed: int) -> Any:
    """Calls `reset` like Gymnasium's vector environments do, and returns its result.

    Raises:
      BrokenContractError: reset has no parameter seed or options, as in old versions of Gym.
    """
    try:
        return env.reset(seed=seed, options=None)
    except TypeError as error:
        missing = [name for name in ("seed", "options") if f"unexpected keyword argument '{name}'" in str(error)]
        if not missing:
            raise
        remedy = "def reset(self, *, seed=None, options=None)"
        raise BrokenContractError(f"reset has no parameter {missing[0]}", remedy) from error


def call_step(env: Any, action: Any) -> Any:
    """Calls `step` and returns its result, also if a wrapper, such as TimeLimit, fails to unpack it."""
    try:
        return env.step(action)
    except (TypeError, ValueError) as error:
        if "unpack" not in str(error) or env is env.unwrapped:
            raise
        returned = call_step(env.env, action)
        if isinstance(returned, tuple) and len(returned) == 5:
            raise
        return returned


def read_reset(returned: Any) -> PyTree:
    """Returns the observation of `reset`. Raises BrokenContractError unless it returned (obs, info dict)."""
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
        remedy = "return obs, info (a dict); old versions of Gym returned obs only"
        raise BrokenContractError(f"reset returned {describe_returned(returned)}", remedy)
    return returned[0]


def read_step(returned: Any) -> tuple[PyTree, float, bool, bool]:
    """Returns observation, reward, terminated and truncated of `step`. Raises BrokenContractError for other values."""
    if not isinstance(returned, tuple) or len(returned) != 5:
        is_old = isinstance(returned, tuple) and len(returned) == 4
        old = "; the done flag of old versions of Gym does not separate termination from truncation" if is_old else ""
        raise BrokenContractError(f"step returned {describe_returned(returned)}", f"{_FIVE}{old}")
    obs, reward, terminated, truncated, info = returned
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            raise BrokenContractError(f"{name} is {flag!r}, a {type(flag).__name__}, not a bool", f"bool({name})")
    if isinstance(reward, bool | np.bool_):
        raise BrokenContractError(f"reward is {reward!r}, a {type(reward).__name__}, not a number", "float(reward)")
    _check_reward(reward)
    if not isinstance(info, dict):
        raise BrokenContractError(f"info is a {type(info).__name__}, not a dict", _FIVE)
    return obs, float(reward), bool(terminated), bool(truncated)


def _check_reward(reward: Any) -> None:
    if np.ndim(reward) or np.asarray(reward).dtype.kind not in "fiub":
        raise BrokenContractError(f"reward is {reward!r}, a {type(reward).__name__}, not a number", "float(reward)")


def probe_env(name: str, env: Any) -> None:
    """Resets an environment and takes one step, so that mistakes are reported before training.

    Warns of numbers outside a Box, which do not change the training.

    Raises:
      ValueError: a return value is invalid, or an observation does not fit its space.
    """
    observations = Observations(env.observation_space, casts=True)
    env.action_space.seed(0)
    when = "reset"
    try:
        obs = read_reset(call_reset(env, 0))
        observations.see(obs)
        when = "step"
        action = _legal_sample(env.action_space, obs)
        returned = call_step(env, action)
        if isinstance(returned, tuple) and len(returned) == 5:  # flags may be of other types
            observations.see(returned[0])
            _check_reward(returned[1])
        else:
            read_step(returned)
    except BrokenContractError as error:
        raise Refused(f"{name}: {error}") from None
    except MisfitError as error:
        raise Refused(f"{name}: the observation of {when} does not fit observation_space: {error}") from None
    faults = observations.faults
    for kind in ("categories", "loss"):
        if kind in faults:
            raise Refused(f"{name}: the observation does not fit observation_space: {faults[kind]}")
    if "range" in faults:
        text = f"{name}: {faults['range']} of its observation_space; declare wider bounds (PPO does not use them)"
        warnings.warn(text, stacklevel=3)


def _legal_sample(space: Any, obs: PyTree) -> Any:
    """Returns a random action that the observation's mask, if there is one, marks as legal."""
    action = space.sample()
    if not (isinstance(obs, Mapping) and ACTION_MASK in obs):
        return action
    spec, mask = action_spec_of("", space), np.asarray(obs[ACTION_MASK])
    if lacks_legal_action(spec, mask, 0):
        raise BrokenContractError("action_mask marks no legal action after reset", EMPTY_MASK, check="masks")
    return space.dtype.type(nearest_legal(spec, mask, action))


def describe_returned(returned: Any) -> str:
    """Returns the type of a return value or, for a tuple, the number and types of its values."""
    if not isinstance(returned, tuple):
        return f"a {type(returned).__name__}"
    return f"{len(returned)} values ({', '.join(type(value).__name__ for value in returned)})"
