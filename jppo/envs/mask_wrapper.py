"""Masks that a Gymnasium environment gives outside of its observations: in its info, or by `action_masks()`."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from jppo.envs.action_spaces import action_spec_of
from jppo.envs.contract import BrokenContractError
from jppo.envs.spaces import ACTION_MASK, ActionSpec

METHOD = "action_masks"  # of environments for MaskablePPO of sb3-contrib


class MaskWrapper(gymnasium.Wrapper):
    """Adds the mask of legal actions to the observations, as the leaf `action_mask`.

    The mask is the result of `action_masks()` if the environment has that method, otherwise info["action_mask"].
    Observations that are not a dict become one with the leaves `observation` and `action_mask`.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        """Raises BrokenContractError if the action space has no categories."""
        super().__init__(env)
        spec, inner = action_spec_of("", env.action_space), env.observation_space
        if not isinstance(spec, ActionSpec) or spec.is_box:
            problem = f"there is an action_mask, but the action space {env.action_space} has no categories"
            raise BrokenContractError(problem, "remove the mask with a wrapper", check="masks")
        self._size, self._get = spec.num_logits, env.get_wrapper_attr(METHOD) if env.has_wrapper_attr(METHOD) else None
        parts: Any = inner.spaces if isinstance(inner, spaces.Dict) else {"observation": inner}
        self.observation_space = spaces.Dict({**parts, ACTION_MASK: spaces.MultiBinary(self._size)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Raises BrokenContractError, as `step` does, if the mask is missing or invalid."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._joined(obs, info, "reset"), info

    def step(self, action: Any) -> Any:
        """Takes one step, see `reset`."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._joined(obs, info, "step"), reward, terminated, truncated, info

    def _joined(self, obs: Any, info: dict[str, Any], when: str) -> dict[Any, Any]:
        if self._get is None and ACTION_MASK not in info:
            problem = f"the info of {when} has no action_mask, but that of an earlier reset had one"
            raise BrokenContractError(problem, "return the mask in the info of each reset and step", check="masks")
        mask = _flat(info[ACTION_MASK] if self._get is None else self._get())
        if mask.size != self._size or mask.dtype.kind not in "biu" or not ((mask | 1) == 1).all():
            source = f"action_mask in the info of {when}" if self._get is None else f"{METHOD}() after {when}"
            problem = f"{source} is {mask.dtype} of {mask.size} entries, {np.array2string(mask, threshold=8)}"
            raise BrokenContractError(problem, f"return {self._size} bools, or integers 0 and 1", check="masks")
        parts = obs if isinstance(self.env.observation_space, spaces.Dict) else {"observation": obs}
        return {**parts, ACTION_MASK: mask}


def _flat(mask: Any) -> np.ndarray:
    """Returns a mask as one array. Those of MultiDiscrete spaces are (nested) tuples with one array per component."""
    if isinstance(mask, tuple | list) and any(isinstance(part, tuple | list | np.ndarray) for part in mask):
        return np.concatenate([_flat(part) for part in mask])
    return np.ravel(np.asarray(mask))
