"""Adapter for Gymnasium: environments on the host, stepped n at a time."""

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import jax
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, iterate

from jppo.config.checks import names_module
from jppo.config.families import host_family_of
from jppo.envs.action_spaces import action_spec_of
from jppo.envs.agent_rows import AgentRows, is_parallel_env
from jppo.envs.contract import BrokenContractError, probe_env
from jppo.envs.envpool import is_envpool, make_envpool, reset_by_number
from jppo.envs.gymnasium_spaces import as_arrays, check_obs, dtypes_of, obs_spec_of
from jppo.envs.host_families import make_by_id, make_family_env, register_atari
from jppo.envs.info_mask import InfoMask, has_info_mask
from jppo.envs.masks import check_mask_spec
from jppo.envs.modules import import_module_of
from jppo.envs.spaces import ACTION_MASK, PyTree
from jppo.errors import forbid_exit


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
    has_info_mask: bool = False  # whether the observations contain the mask of the info (`InfoMask`)
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
        self._vector = _make_vector(env.source, seeds, "rgb_array" if render else None, env.has_info_mask)
        if render and self._vector.render_mode != "rgb_array":
            raise ValueError(
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
        if infos or type(self._vector) is not _Vector:  # _Vector has infos only if an episode ended
            done = terminated | truncated
            if np.count_nonzero(done):  # four times faster than any()
                obs, final = self._reset_done(obs, infos, done)
        return HostStep(obs, reward, terminated, truncated, final)

    @property
    def active(self) -> np.ndarray:
        """[n] bool: the rows whose agent takes part in the next step."""
        return self._vector.active if self.num_agents > 1 else np.ones(self._vector.num_envs, bool)

    def render(self) -> np.ndarray:
        """Returns a picture of the first environment, [height, width, 3] u8. Raises ValueError if drawing fails."""
        try:
            return forbid_exit(self._vector.render)()[0]
        except Exception as error:  # from any graphics library
            hint = " (MUJOCO_GL=egl or osmesa may help)" if "mujoco" in type(error).__module__ else ""
            raise ValueError(f"{self._name} cannot be drawn here: {error}{hint}") from error

    @forbid_exit
    def close(self) -> None:
        """Closes all environments."""
        self._vector.close()


class _Vector(SyncVectorEnv):
    """SyncVectorEnv with SAME_STEP autoreset that does not merge the infos, which jppo does not read.

    With SyncVectorEnv itself, CartPole-v1 with two actors trained 24 % slower (docs/notes/actor-step.md).
    """

    _in_a_row: np.ndarray | None = None  # view of the observation buffer, with environments joined along the first axis

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        """Resets each environment with its own seed."""
        seeds = [None] * self.num_envs if seed is None else seed
        pairs = zip(self.envs, seeds, strict=True)
        return self._joined([env.reset(seed=own, options=options)[0] for env, own in pairs]), {}

    def step(self, actions: Any) -> Any:
        """Steps as SyncVectorEnv does. The infos contain final_obs only, by environment, if an episode ended."""
        reward, ended = np.empty(self.num_envs), np.zeros((2, self.num_envs), bool)
        rows, final = [], {}
        if not isinstance(actions, np.ndarray):
            actions = list(iterate(self.action_space, actions))
        for i, env in enumerate(self.envs):
            obs, reward[i], terminated, truncated, _ = env.step(actions[i])
            if terminated or truncated:
                ended[0, i], ended[1, i] = terminated, truncated
                final[i] = copy.deepcopy(obs)  # reset may overwrite the buffer of the observation
                obs = env.reset(seed=None, options=None)[0]
            rows.append(obs)
        return self._joined(rows), reward, ended[0], ended[1], {"final_obs": final} if final else {}

    def _joined(self, rows: list[Any]) -> Any:
        space, into = self.single_observation_space, self._observations
        if isinstance(into, np.ndarray) and space.shape:
            if (lengths := set(map(len, rows))) != {space.shape[0]}:
                raise ValueError(f"observations have lengths {sorted(lengths)}; the space {space} has {space.shape[0]}")
            if self._in_a_row is None:
                self._in_a_row = into.reshape(-1, *space.shape[1:])
            np.concatenate(rows, out=self._in_a_row)  # twice as fast as Gymnasium's concatenate
        else:
            self._observations = concatenate(space, rows, into)
        return self._observations


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
    name = _name_of(env)
    if not isinstance(env, str) and not callable(env):
        what = "an environment" if isinstance(env, gymnasium.Env) else "neither a name nor a function"
        spec = env.spec if isinstance(env, gymnasium.Env) else None
        call = (
            f"{type(getattr(env, 'unwrapped', env)).__name__}(...)" if spec is None else f"gymnasium.make({spec.id!r})"
        )
        raise ValueError(
            f"{name} is {what}; pass a function that makes a new gymnasium environment, because a run needs "
            f"num_envs of them: lambda: {call}"
        )
    vector = _make_vector(env, [0])
    try:
        if masked := _has_info_mask(name, vector):
            single = InfoMask(vector.envs[0])
            vector = _side_by_side([lambda: single])
        obs_space, action_space = vector.single_observation_space, vector.single_action_space
        _resetter(name, vector)
        obs_spec, action_spec = obs_spec_of(name, obs_space), action_spec_of(name, action_space)
        check_mask_spec(obs_spec, action_spec)
        if probe is not None and isinstance(vector, SyncVectorEnv):
            with np.errstate(all="ignore"):  # the environment may have made NumPy strict
                probe(name, vector.envs[0])
        else:
            check_obs(name, obs_space, obs_spec, vector)
    finally:
        vector.close()
    agents = vector.num_agents if isinstance(vector, AgentRows) else 1
    return HostEnvironment(name, env, obs_space, action_space, obs_spec, action_spec, masked, agents)


def is_host_env(env: Any) -> bool:
    """Returns whether `make_host_env` accepts `env`: a name that Gymnasium knows, a function or an object."""
    if not isinstance(env, str):
        return isinstance(env, HostEnvironment | gymnasium.Env | VectorEnv) or callable(env)
    register_atari(required=env if env.startswith("ALE/") else "")
    return ":" in env or env in gymnasium.registry


def make_source(source: Any, seeds: list[int]) -> Any:
    """Makes one environment or, if the function takes num_envs, a vector environment with one per seed."""
    if host_family_of(source) == "envpool":
        return make_envpool(source, seeds)
    make = _maker(source, None)
    _check_call(make, source)
    return make(num_envs=len(seeds)) if _takes(make, "num_envs") else make()


def _make_vector(source: Any, seeds: list[int], render_mode: str | None = None, has_info_mask: bool = False) -> Any:
    if host_family_of(source) == "envpool":
        return make_envpool(source, seeds)
    make = _maker(source, render_mode)
    _check_call(make, source)
    if _takes(make, "num_envs"):
        vector = make(num_envs=len(seeds))
        if not isinstance(vector, VectorEnv):
            raise ValueError(
                f"{source} takes num_envs but returned a {type(vector).__name__}, not a vector environment"
            )
        if vector.num_envs != len(seeds):
            raise ValueError(
                f"{source} was called with num_envs = {len(seeds)} but made {vector.num_envs} environments"
            )
        return vector

    first = make()
    if is_parallel_env(first):
        count = max(1, len(seeds) // max(1, len(first.possible_agents)))
        return _check_distinct(AgentRows(_name_of(source), [lambda: first, *[make] * (count - 1)]), source)

    def adapt(env: Any) -> gymnasium.Env:
        return InfoMask(_checked(env, source)) if has_info_mask else _checked(env, source)

    makers = [lambda: adapt(first), *[lambda: adapt(make())] * (len(seeds) - 1)]
    return _check_distinct(_side_by_side(makers), source)


def _check_distinct(vector: Any, source: Any) -> Any:
    """Returns the vector environment. Raises ValueError if it contains the same environment twice."""
    if len({id(getattr(env, "unwrapped", env)) for env in vector.envs}) < len(vector.envs):
        raise ValueError(f"{source} returned the same environment twice; it must make a new one in each call")
    return vector


def _side_by_side(makers: list[Callable[[], gymnasium.Env]]) -> _Vector:
    return _Vector(makers, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)


def _has_info_mask(name: str, vector: Any) -> bool:
    """Returns whether to move masks from the info into the observations, which is possible for single environments."""
    if type(vector) is _Vector:
        with np.errstate(all="ignore"):  # the environment may have made NumPy strict
            return has_info_mask(vector.envs[0])
    space = vector.single_observation_space
    if not (isinstance(space, gymnasium.spaces.Dict) and ACTION_MASK in space.spaces) and ACTION_MASK in _infos(vector):
        problem = f"{name}: the vector environment has an action_mask in the infos"
        remedy = "pass a function that makes one environment, or make the mask a leaf of a Dict of observations"
        raise BrokenContractError(problem, remedy, check="masks")
    return False


def _infos(vector: Any) -> Any:
    returned = vector.reset()
    return returned[1] if isinstance(returned, tuple) and len(returned) == 2 else ()


def _maker(source: Any, render_mode: str | None) -> Callable[..., Any]:
    """Returns the function that makes one environment or, if it takes num_envs, a vector environment."""
    if not isinstance(source, str):
        return (
            functools.partial(source, render_mode=render_mode)
            if render_mode and _takes(source, "render_mode")
            else source
        )
    if host_family_of(source):
        return functools.partial(make_family_env, source, render_mode)
    if names_module(source):
        module, attribute = import_module_of(source)
        if hasattr(module, attribute):
            maker = getattr(module, attribute)
            if not callable(maker):
                raise ValueError(
                    f"{source} is a {type(maker).__name__}, not a class or function that makes a gymnasium.Env"
                )
            return _maker(maker, render_mode)
        if attribute not in gymnasium.registry:
            raise ValueError(f"{source}: module {module.__name__} has no {attribute} and registers no such environment")
        source = attribute
    return functools.partial(make_by_id, source, render_mode)


def _checked(env: Any, source: Any) -> gymnasium.Env:
    if not isinstance(env, gymnasium.Env):
        is_gymnax = hasattr(env, "default_params") or hasattr(env, "step_env")
        remedy = "pass the gymnax environment itself" if callable(source) else "set the backend to device"
        hint = f"; {remedy}" if is_gymnax else ""
        raise ValueError(f"{_name_of(source)} made a {type(env).__name__}; it must make a gymnasium.Env{hint}")
    for space in ("observation_space", "action_space"):
        if getattr(env, space, None) is None:
            raise ValueError(f"{type(env).__name__} has no {space}")
    return env


def _name_of(source: Any) -> str:
    if isinstance(source, functools.partial):
        source = source.func
    return source if isinstance(source, str) else str(getattr(source, "__qualname__", type(source).__name__))


def _check_call(make: Callable[..., Any], source: Any) -> None:
    """Raises ValueError if a function that makes an environment has required parameters other than num_envs."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # builtins have no signature
        return
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in kinds and p.name != "num_envs"]
    if required:
        name = _name_of(source)
        values = ", ".join(f"{one}=..." for one in required)
        raise ValueError(f"{name} needs the arguments {', '.join(required)}; pass lambda: {name}({values})")


def _takes(make: Callable[..., Any], argument: str) -> bool:
    try:
        return argument in inspect.signature(make).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return False


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
