"""Masks that a Gymnasium environment returns in the info of `reset` and `step`, like Taxi."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from jppo.envs.action_spaces import action_spec_of
from jppo.envs.contract import BrokenContractError, call_reset
from jppo.envs.spaces import ACTION_MASK, ActionSpec, PyTree

_CHECK = "masks"  # the check of `jppo check-env` that reports problems


class InfoMask(gymnasium.Wrapper):
    """Moves info["action_mask"] into the observation.

    A dict of observations gets the leaf `action_mask`. Other observations become a dict with the leaves `observation`
    and `action_mask`.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        """Raises BrokenContractError if the action space is neither Discrete nor MultiDiscrete."""
        super().__init__(env)
        inner, self._spec = env.observation_space, _mask_spec(env.action_space)
        self._is_dict = isinstance(inner, spaces.Dict)
        parts: dict[Any, Any] = dict(inner.spaces) if isinstance(inner, spaces.Dict) else {"observation": inner}
        self.observation_space = spaces.Dict(parts | {ACTION_MASK: spaces.MultiBinary(self._spec.num_logits)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[PyTree, dict[str, Any]]:
        """Returns the observation with the mask, and the info. See the class for errors of `step`, too."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._joined(obs, info, "reset"), info

    def step(self, action: Any) -> Any:
        """Steps the environment. Raises BrokenContractError if the mask is missing or invalid."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._joined(obs, info, "step"), reward, terminated, truncated, info

    def _joined(self, obs: Any, info: dict[str, Any], when: str) -> dict[Any, Any]:
        mask = self._read_mask(info, when)
        return {**obs, ACTION_MASK: mask} if self._is_dict else {"observation": obs, ACTION_MASK: mask}

    def _read_mask(self, info: dict[str, Any], when: str) -> np.ndarray:
        """Returns the mask [num_logits]."""
        if ACTION_MASK not in info:
            problem = f"the info of {when} has no action_mask, but that of an earlier reset had one"
            raise BrokenContractError(problem, "return the mask in the info of each reset and step", check=_CHECK)
        size, mask = self._spec.num_logits, _flat(info[ACTION_MASK])
        if mask.size != size or mask.dtype.kind not in "biu" or not ((mask | 1) == 1).all():
            found = f"{mask.dtype} of {mask.size} entries"
            if mask.dtype.kind in "iu" and mask.size == size:
                found = f"{mask.dtype} with the values {', '.join(map(str, np.unique(mask)))}"
            problem = f"action_mask in the info of {when} is {found}"
            raise BrokenContractError(problem, f"return {size} bools, or integers 0 and 1", check=_CHECK)
        return mask


def has_info_mask(env: gymnasium.Env) -> bool:
    """Returns whether the info of `reset` has a mask that is not part of the observation, too."""
    space = env.observation_space
    if isinstance(space, spaces.Dict) and ACTION_MASK in space.spaces:
        return False
    try:
        returned: Any = call_reset(env, 0)  # it may be invalid, which probe_env reports
    except BrokenContractError:
        return False
    is_valid = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)
    return is_valid and ACTION_MASK in returned[1]


def _mask_spec(space: Any) -> ActionSpec:
    spec = action_spec_of("", space)
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        problem = f"info has an action_mask, but the action space {space} is neither Discrete nor MultiDiscrete"
        raise BrokenContractError(problem, "remove action_mask from the info with a wrapper", check=_CHECK)
    assert isinstance(spec, ActionSpec), "of a Discrete or MultiDiscrete space"
    return spec


def _flat(mask: Any) -> np.ndarray:
    """Returns a mask as one array. Those of MultiDiscrete spaces are (nested) tuples with one array per component."""
    if isinstance(mask, tuple | list) and any(isinstance(part, tuple | list | np.ndarray) for part in mask):
        return np.concatenate([_flat(part) for part in mask])
    return np.ravel(np.asarray(mask))
