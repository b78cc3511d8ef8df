"""Masks that a Gymnasium environment returns in the info of `reset` and `step`, like Taxi."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from jppo.envs.action_spaces import action_spec_of
from jppo.envs.contract import BrokenContractError
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
        self._spec = _mask_spec(env.action_space)
        self.observation_space = _masked_space(env.observation_space, self._spec)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[PyTree, dict[str, Any]]:
        """Returns the observation with the mask, and the info. See the class for errors of `step`, too."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._joined(obs, info, "reset"), info

    def step(self, action: Any) -> Any:
        """Steps the environment. Raises BrokenContractError if the mask is missing or invalid."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._joined(obs, info, "step"), reward, terminated, truncated, info

    def _joined(self, obs: Any, info: dict[str, Any], when: str) -> dict[Any, Any]:
        if ACTION_MASK not in info:
            raise _missing(f"the info of {when} has no action_mask, but that of an earlier reset had one")
        mask = _flat(info[ACTION_MASK])
        _check_mask(mask, self._spec, f"the info of {when}")
        return _join(self.env.observation_space, obs, mask)


class InfoMaskVector(VectorWrapper):
    """Moves the masks in the infos of a vector environment into the observations, as `InfoMask` does.

    infos["action_mask"] has a row for each environment, and infos["_action_mask"] marks the valid rows. With SAME_STEP
    resets, the masks of final observations are in infos["final_info"].
    """

    def __init__(self, name: str, env: VectorEnv) -> None:
        """Raises BrokenContractError if the action space is neither Discrete nor MultiDiscrete."""
        super().__init__(env)
        self._name, self._spec, self._step = name, _mask_spec(env.single_action_space), 0
        self.single_observation_space = _masked_space(env.single_observation_space, self._spec)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self._masks = np.zeros((self.num_envs, self._spec.num_logits), np.int8)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[PyTree, dict[str, Any]]:
        """Resets all environments, or those in options["reset_mask"]. See the class for errors of `step`, too."""
        partly = options is not None and "reset_mask" in options
        rows = options["reset_mask"] if partly and options else np.ones(self.num_envs, bool)
        self._step = self._step if partly else 0
        obs, infos = self.env.reset(seed=seed, options=options)
        self._masks = self._masks.copy()
        self._masks[rows] = self._read(infos, rows)
        return self._joined(obs, self._masks), infos

    def step(self, actions: Any) -> Any:
        """Steps the environments. Raises BrokenContractError if a mask is missing or invalid."""
        obs, reward, terminated, truncated, infos = self.env.step(actions)
        self._step += 1
        self._masks = self._read(infos, np.ones(self.num_envs, bool))
        done = terminated | truncated
        if done.any() and "final_obs" in infos:
            rows = zip(np.flatnonzero(done).tolist(), self._read(infos.get("final_info", {}), done), strict=True)
            infos = {"final_obs": {i: self._joined(infos["final_obs"][i], mask) for i, mask in rows}}
        return self._joined(obs, self._masks), reward, terminated, truncated, infos

    def _joined(self, obs: PyTree, masks: np.ndarray) -> dict[Any, Any]:
        return _join(self.env.single_observation_space, obs, masks)

    def _read(self, infos: dict[str, Any], rows: np.ndarray) -> np.ndarray:
        """Returns the masks [sum(rows), num_logits] of these environments, [num_envs] bool."""
        valid = np.asarray(infos.get(f"_{ACTION_MASK}", [ACTION_MASK in infos] * self.num_envs))
        if (missing := rows & ~valid).any():
            where = f"environment {int(np.argmax(missing))} at step {self._step}"
            raise _missing(f"{self._name}: the infos have no action_mask of {where}, but those of an earlier reset had")
        found, where = infos[ACTION_MASK], f"the infos of step {self._step}"
        if len(found) != self.num_envs:
            problem = f"action_mask in {where} has {len(found)} rows"
            raise BrokenContractError(problem, f"return a row for each of the {self.num_envs} environments", _CHECK)
        if isinstance(found, np.ndarray) and found.dtype != object:
            masks = found[rows].reshape(np.count_nonzero(rows), -1)
            _check_mask(masks, self._spec, where)
        else:  # a list, or tuples of a MultiDiscrete space
            masks = np.stack([self._read_row(found[i], where) for i in np.flatnonzero(rows)])
        return masks.astype(np.int8)

    def _read_row(self, mask: Any, where: str) -> np.ndarray:
        mask = _flat(mask)
        _check_mask(mask, self._spec, where)
        return mask


def _masked_space(inner: spaces.Space, spec: ActionSpec) -> spaces.Dict:
    """Returns the observation space with the leaf `action_mask`."""
    parts: dict[Any, Any] = dict(inner.spaces) if isinstance(inner, spaces.Dict) else {"observation": inner}
    return spaces.Dict(parts | {ACTION_MASK: spaces.MultiBinary(spec.num_logits)})


def _join(inner: spaces.Space, obs: Any, mask: np.ndarray) -> dict[Any, Any]:
    """Returns observations of the space `inner` with their masks."""
    return {**obs, ACTION_MASK: mask} if isinstance(inner, spaces.Dict) else {"observation": obs, ACTION_MASK: mask}


def _missing(problem: str) -> BrokenContractError:
    return BrokenContractError(problem, "return the mask in the info of each reset and step", check=_CHECK)


def _check_mask(mask: np.ndarray, spec: ActionSpec, where: str) -> None:
    """Raises BrokenContractError if a mask [..., num_logits] is invalid."""
    size, num_entries = spec.num_logits, mask.shape[-1]
    if num_entries != size or mask.dtype.kind not in "biu" or not ((mask | 1) == 1).all():
        found = f"{mask.dtype} of {num_entries} entries"
        if mask.dtype.kind in "iu" and num_entries == size:
            found = f"{mask.dtype} with the values {', '.join(map(str, np.unique(mask)))}"
        problem = f"action_mask in {where} is {found}"
        raise BrokenContractError(problem, f"return {size} bools, or integers 0 and 1", check=_CHECK)


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
