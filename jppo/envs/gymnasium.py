"""Adapter for Gymnasium: environments on the host, stepped n at a time."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import jax
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from jppo.envs.action_spaces import action_spec_of
from jppo.envs.agent_rows import AgentRows
from jppo.envs.contract import BrokenContractError, call_reset, probe_env, read_reset
from jppo.envs.envpool import is_envpool, reset_by_number
from jppo.envs.gymnasium_spaces import as_arrays, dtypes_of, obs_spec_of
from jppo.envs.gymnasium_vector import SameStepVector, make_vector, name_of
from jppo.envs.host_families import register_atari
from jppo.envs.mask_wrapper import METHOD
from jppo.envs.masks import check_mask_spec
from jppo.envs.observations import MisfitError, Observations
from jppo.envs.spaces import ACTION_MASK, PyTree
from jppo.errors import Refused, describe_error, forbid_exit


class HostStep(NamedTuple):
    """The return value of one step of n environments; leaves [n, ...]."""

    obs: PyTree  # the next observation; the first of the new episode if one ended. Valid until the next step
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_obs: dict[int, PyTree]  # the last observation of each episode that ended, by environment


class HostEnvironment(NamedTuple):
    """A description of a Gymnasium environment, from which any process can make instances."""

    name: str
    source: Any  # the argument of make_host_env
    obs_space: Any  # observation space of one environment
    action_space: Any
    obs_spec: PyTree  # ObsSpec leaves, in dtypes that JAX has
    action_spec: PyTree  # ActionSpec leaves
    adds_mask: bool = False  # whether the mask comes from `MaskWrapper`
    num_agents: int = 1  # M agents share the policy; there is one row per agent

    def make(self, seeds: Sequence[int], render: bool = False) -> "HostEnvs":
        """Makes one environment per seed. With M agents, there is a seed for each agent of each environment.

        Raises:
          ValueError: `render` is set and the environments cannot be rendered.
        """
        return HostEnvs(self, list(seeds), render)


class HostEnvs:
    """n environments, each of which resets in the step that ends its episode."""

    @forbid_exit
    def __init__(self, env: HostEnvironment, seeds: list[int], render: bool = False) -> None:
        self._name, self._seeds = env.name, seeds
        self._vector = make_vector(env.source, seeds, "rgb_array" if render else None, env.adds_mask)
        if render and self._vector.render_mode != "rgb_array":
            raise Refused(
                f"{env.name} cannot be drawn: its render_mode is {self._vector.render_mode!r}; a function of yours can "
                'take render_mode and make the environment with it ("rgb_array")'
            )
        self._reset_done = _resetter(env.name, self._vector)
        self.num_agents = env.num_agents
        self._action_dtypes = dtypes_of(env.action_space)

    @forbid_exit
    def reset(self) -> PyTree:
        """Resets all environments with their seeds. Returns the observations [n, ...]."""
        seeds = {} if is_envpool(self._vector) else {"seed": self._seeds}
        return self._vector.reset(**seeds)[0]

    @forbid_exit
    def step(self, action: PyTree) -> HostStep:
        """Steps all environments with actions [n, ...] from `to_env_action`."""
        if isinstance(action, np.ndarray):  # faster than tree.map
            action = action.astype(self._action_dtypes)
        else:
            action = jax.tree.map(lambda dtype, leaf: leaf.astype(dtype), self._action_dtypes, action)
        obs, reward, terminated, truncated, infos = self._vector.step(action)
        final: dict[int, PyTree] = {}
        if infos or type(self._vector) is not SameStepVector:  # SameStepVector has infos only if an episode ended
            done = terminated | truncated
            if np.count_nonzero(done):  # four times faster than any()
                obs, final = self._reset_done(obs, infos, done)
        return HostStep(obs=obs, reward=reward, terminated=terminated, truncated=truncated, final_obs=final)

    @property
    def active(self) -> np.ndarray:
        """[n] bool: the rows whose agent takes part in the next step."""
        return self._vector.active if self.num_agents > 1 else np.ones(self._vector.num_envs, bool)

    def render(self) -> np.ndarray:
        """Returns a picture of the first environment, [height, width, 3] u8. Raises ValueError if drawing fails."""
        try:
            return forbid_exit(self._vector.render)()[0]
        except Exception as error:  # from any graphics library
            is_mujoco = "mujoco" in f"{type(error).__module__} {error}".lower()
            hint = " (MUJOCO_GL=egl or osmesa may help)" if is_mujoco else ""
            raise Refused(f"{self._name} cannot be drawn here: {error}{hint}") from error

    @forbid_exit
    def close(self) -> None:
        """Closes all environments. Warns if that fails, because the caller has its results."""
        _close(self._name, self._vector)


def _close(name: str, vector: Any) -> None:
    """Closes environments. Warns if that fails, because the caller has its results."""
    try:
        vector.close()
    except Exception as error:
        warnings.warn(f"{name}: close() raised {describe_error(error)}", RuntimeWarning, stacklevel=3)


@forbid_exit
def make_host_env(env: Any) -> HostEnvironment:
    """Returns a host environment. Makes one instance in this process, resets it and takes one step to check it.

    Args:
      env: a Gymnasium id; a name with the prefix of a family, such as "atari:Pong-v5" (docs/host_environments.md);
        "module:name" for a class or function of your own (or an id that the module registers); a function
        () -> gymnasium.Env, or -> pettingzoo.ParallelEnv, whose agents then share the policy; a function
        (num_envs) -> gymnasium.vector.VectorEnv, with this parameter name; or a HostEnvironment.

    Raises:
      ValueError: an unknown name, a missing package, unsupported spaces, an autoreset mode that loses final
        observations, invalid return values, or observations that do not fit their space.
    """
    return env if isinstance(env, HostEnvironment) else open_host_env(env, probe_env)


def open_host_env(env: Any, probe: Callable[[str, Any], None] | None = None) -> HostEnvironment:
    """Does the same as `make_host_env`, with another function (or none) that checks a single environment."""
    name = name_of(env)
    if not isinstance(env, str) and not callable(env):
        what = "an environment" if isinstance(env, gymnasium.Env) else "neither a name nor a function"
        spec = env.spec if isinstance(env, gymnasium.Env) else None
        call = (
            f"{type(getattr(env, 'unwrapped', env)).__name__}(...)" if spec is None else f"gymnasium.make({spec.id!r})"
        )
        raise Refused(
            f"{name} is {what}; pass a function that makes a new gymnasium environment, because a run needs "
            f"num_envs of them: lambda: {call}"
        )
    vector = make_vector(env, [0])
    try:
        _resetter(name, vector)
        if masked := _has_mask_outside(name, vector):
            _close(name, vector)
            vector = make_vector(env, [0], adds_mask=True)
        obs_space, action_space = vector.single_observation_space, vector.single_action_space
        obs_spec, action_spec = obs_spec_of(name, obs_space), action_spec_of(name, action_space)
        if not jax.tree.leaves(obs_spec):
            raise Refused(f"{name}: observation space {obs_space} has no arrays, so the network would see nothing")
        check_mask_spec(obs_spec, action_spec)
        if not isinstance(vector, SyncVectorEnv):
            _check_obs(name, vector)
        elif probe is not None:
            with np.errstate(all="ignore"):  # the environment may have made NumPy strict
                probe(name, vector.envs[0])
    finally:
        _close(name, vector)
    agents = vector.num_agents if isinstance(vector, AgentRows) else 1
    return HostEnvironment(
        name=name,
        source=env,
        obs_space=obs_space,
        action_space=action_space,
        obs_spec=obs_spec,
        action_spec=action_spec,
        adds_mask=masked,
        num_agents=agents,
    )


def is_host_env(env: Any) -> bool:
    """Returns whether `make_host_env` accepts `env`: a name that Gymnasium knows, a function or an object."""
    if not isinstance(env, str):
        return isinstance(env, HostEnvironment | gymnasium.Env | VectorEnv) or callable(env)
    register_atari(required=env if env.startswith("ALE/") else "")
    return ":" in env or env in gymnasium.registry


def _has_mask_outside(name: str, vector: Any) -> bool:
    """Returns whether single environments have a mask outside of their observations: in the info, or as a method.

    Raises:
      BrokenContractError: a vector environment has one; `MaskWrapper` wraps single environments only.
    """
    space, is_single = vector.single_observation_space, type(vector) is SameStepVector
    if isinstance(space, gymnasium.spaces.Dict) and ACTION_MASK in space.spaces:
        return False
    single = [env for env in getattr(vector, "envs", ())[:1] if isinstance(env, gymnasium.Env)]
    is_method = hasattr(vector, METHOD) or any(env.has_wrapper_attr(METHOD) for env in single)
    if not is_method and ACTION_MASK not in _reset_infos(vector):
        return False
    if not is_single:
        problem = f"{name}: a vector environment has {'action_masks()' if is_method else 'an action_mask in its infos'}"
        remedy = "make the mask a leaf of a Dict of observations, or pass a function that makes one environment"
        raise BrokenContractError(problem, remedy, check="masks")
    return True


def _reset_infos(vector: Any) -> dict[str, Any]:
    """Returns the infos of a reset, and {} if it returns something else, which `probe_env` reports."""
    try:
        with np.errstate(all="ignore"):  # the environment may have made NumPy strict
            returned = call_reset(vector.envs[0], 0) if type(vector) is SameStepVector else vector.reset()
    except BrokenContractError:
        return {}
    is_valid = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)
    return returned[1] if is_valid else {}


def _check_obs(name: str, vector: Any) -> None:
    """Raises ValueError if the first observations do not fit their space."""
    observations = Observations(vector.single_observation_space, casts=True)
    obs = read_reset(vector.reset())
    try:
        observations.see(obs, (vector.num_envs,))
    except (MisfitError, TypeError) as error:  # TypeError: arrays of objects or strings
        raise Refused(f"{name}: the observation of reset does not fit observation_space: {error}") from None


def _resetter(
    name: str, vector: Any
) -> Callable[[PyTree, dict[str, Any], np.ndarray], tuple[PyTree, dict[int, PyTree]]]:
    """Returns a function that returns next and final observations after episodes have ended.

    Raises ValueError for the autoreset mode NEXT_STEP, which loses them.
    """

    def same_step(obs: PyTree, infos: dict[str, Any], done: np.ndarray) -> tuple[PyTree, dict[int, PyTree]]:
        if "final_obs" not in infos:
            problem = f"{name}: an episode ended without final_obs in the infos, which SAME_STEP requires"
            raise BrokenContractError(problem, "return the infos that the autoreset_mode requires", check="autoreset")
        return obs, {int(i): as_arrays(space, infos["final_obs"][i]) for i in np.flatnonzero(done)}

    def by_mask(obs: PyTree, infos: dict[str, Any], done: np.ndarray) -> tuple[PyTree, dict[int, PyTree]]:
        final = {int(i): jax.tree.map(lambda x, i=i: np.array(x[i]), obs) for i in np.flatnonzero(done)}
        return vector.reset(options={"reset_mask": done})[0], final

    def by_row(obs: PyTree, infos: dict[str, Any], done: np.ndarray) -> tuple[PyTree, dict[int, PyTree]]:
        return obs, {i: as_arrays(space, final) for i, final in infos.get("final_obs", {}).items()}

    space = vector.single_observation_space
    if isinstance(vector, AgentRows):
        return by_row
    if is_envpool(vector):
        return functools.partial(reset_by_number, vector)
    mode = vector.metadata.get("autoreset_mode")
    if mode == AutoresetMode.SAME_STEP:
        return same_step
    if mode == AutoresetMode.DISABLED:
        return by_mask
    problem = f"{name}: {type(vector).__name__} has autoreset_mode {mode}, which inserts a step after each episode"
    remedy = (
        "make it with autoreset_mode=AutoresetMode.SAME_STEP or DISABLED, or pass a function that makes one of them"
    )
    raise BrokenContractError(problem, remedy, check="autoreset")
