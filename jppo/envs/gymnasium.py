"""Adapter for Gymnasium: environments on the host, stepped n at a time."""

import copy
import difflib
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
from jppo.envs.action_spaces import action_spec_of
from jppo.envs.contract import BrokenContractError, probe_env
from jppo.envs.gymnasium_spaces import as_arrays, check_obs, dtypes_of, obs_spec_of
from jppo.envs.info_mask import InfoMask, has_info_mask
from jppo.envs.masks import check_mask_spec
from jppo.envs.modules import import_module_of, unknown_environment
from jppo.envs.spaces import ACTION_MASK, PyTree
from jppo.errors import end_of_process

ENVPOOL = "envpool:"


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
    obs_space: Any  # of one environment
    action_space: Any
    obs_spec: PyTree  # ObsSpec leaves, in dtypes that JAX has
    action_spec: PyTree  # ActionSpec leaves
    has_info_mask: bool = False  # whether the observations contain the mask of the info (`InfoMask`)

    def make(self, seeds: Sequence[int], render: bool = False) -> "HostEnvs":
        """Makes one environment per seed. Raises ValueError if `render` is set and they cannot be rendered."""
        return HostEnvs(self, list(seeds), render)


def _forbid_exit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function that calls an environment. sys.exit in it, and the like, raise RuntimeError."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise end_of_process("the environment", error) from error

    return wrapper


class HostEnvs:
    """n environments, each of which resets in the step that ends its episode."""

    @_forbid_exit
    def __init__(self, env: HostEnvironment, seeds: list[int], render: bool = False) -> None:
        self._name, self._seeds = env.name, seeds
        self._vector = _make_vector(env.source, seeds, "rgb_array" if render else None, env.has_info_mask)
        if render and self._vector.render_mode != "rgb_array":
            raise ValueError(
                f"{env.name} cannot be drawn: its render_mode is {self._vector.render_mode!r}; a function of yours can "
                'take render_mode and make the environment with it ("rgb_array")'
            )
        self._reset_done = _resetter(env.name, self._vector)
        self._action_dtypes = dtypes_of(env.action_space)

    @_forbid_exit
    def reset(self) -> PyTree:
        """Resets all environments with their seeds. Returns the observations [n, ...]."""
        seeds = {} if _is_envpool(self._vector) else {"seed": self._seeds}
        return self._vector.reset(**seeds)[0]

    @_forbid_exit
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

    def render(self) -> np.ndarray:
        """Returns a picture of the first environment, [height, width, 3] u8. Raises ValueError if drawing fails."""
        try:
            return _forbid_exit(self._vector.render)()[0]
        except Exception as error:  # from any graphics library
            hint = " (MUJOCO_GL=egl or osmesa may help)" if "mujoco" in type(error).__module__ else ""
            raise ValueError(f"{self._name} cannot be drawn here: {error}{hint}") from error

    @_forbid_exit
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


@_forbid_exit
def make_host_env(env: Any) -> HostEnvironment:
    """Returns a host environment. Makes one instance in this process, resets it and takes one step to check it.

    Args:
      env: a Gymnasium id; "module:name" for a class or function of your own (or an id that the module registers);
        "envpool:<task>"; a function () -> gymnasium.Env; a function (num_envs) -> gymnasium.vector.VectorEnv, with
        this parameter name; or a HostEnvironment.

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
    return HostEnvironment(name, env, obs_space, action_space, obs_spec, action_spec, masked)


def host_env_names() -> list[str]:
    """Returns the newest version of each id that Gymnasium has registered."""
    _import_atari(required=False)
    newest: dict[str, Any] = {}
    for spec in gymnasium.registry.values():
        if spec.namespace in ("phys2d", "tabular") or spec.name in ("GymV21Environment", "GymV26Environment"):
            continue  # functional variants of other environments, and adapters
        if spec.namespace is None and "ale_py" in str(spec.entry_point):
            continue  # old names of the ALE/ environments
        key = f"{spec.namespace}/{spec.name}" if spec.namespace else spec.name
        if key not in newest or (spec.version or 0) > (newest[key].version or 0):
            newest[key] = spec
    return sorted(spec.id for spec in newest.values())


def is_host_env(env: Any) -> bool:
    """Returns whether `make_host_env` accepts `env`: a name that Gymnasium knows, a function or an object."""
    if not isinstance(env, str):
        return isinstance(env, HostEnvironment | gymnasium.Env | VectorEnv) or callable(env)
    _import_atari(required=env.startswith("ALE/"))
    return ":" in env or env in gymnasium.registry


def make_source(source: Any, seeds: list[int]) -> Any:
    """Makes one environment or, if the function takes num_envs, a vector environment with one per seed."""
    if isinstance(source, str) and source.startswith(ENVPOOL):
        return _make_envpool(source.removeprefix(ENVPOOL), seeds)
    make = _maker(source, None)
    _check_call(make, source)
    return make(num_envs=len(seeds)) if _takes(make, "num_envs") else make()


def _make_vector(source: Any, seeds: list[int], render_mode: str | None = None, has_info_mask: bool = False) -> Any:
    if isinstance(source, str) and source.startswith(ENVPOOL):
        return _make_envpool(source.removeprefix(ENVPOOL), seeds)
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

    def make_one() -> gymnasium.Env:
        env = _checked(make(), source)
        return InfoMask(env) if has_info_mask else env

    vector = _side_by_side([make_one] * len(seeds))
    if len({id(env.unwrapped) for env in vector.envs}) < len(seeds):
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
    return functools.partial(_make_by_id, source, render_mode)


def _make_by_id(name: str, render_mode: str | None) -> Any:
    _import_atari(required=name.startswith("ALE/"))
    try:
        return gymnasium.make(name, render_mode=render_mode)
    except gymnasium.error.DependencyNotInstalled as error:
        extra = " (pip install 'jppo[mujoco]')" if "mujoco" in str(error).lower() else ""
        raise ValueError(f"{name} needs a package that is not installed: {error}{extra}") from None
    except ImportError as error:  # environments that moved to another package
        raise ValueError(f"{name}: {error}") from None
    except gymnasium.error.Error:
        if name in gymnasium.registry:
            raise
        raise unknown_environment(name, host_env_names()) from None


def _make_envpool(task: str, seeds: list[int]) -> Any:
    try:
        import envpool
    except ImportError:
        raise ValueError("envpool is not installed: pip install 'jppo[envpool]'") from None
    if task not in envpool.list_all_envs():
        near = difflib.get_close_matches(task, envpool.list_all_envs(), 3, 0.6)
        raise ValueError(f"envpool has no task {task!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    return envpool.make(task, env_type="gymnasium", num_envs=len(seeds), num_threads=1, env_seed=seeds)


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


def _is_envpool(vector: Any) -> bool:
    """Returns whether this is an EnvPool, which takes its seeds when it is made and resets environments by number."""
    return "envpool" in type(vector).__name__.lower()


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

    def by_number(obs: PyTree, infos: dict[str, Any], done: np.ndarray) -> tuple[PyTree, dict[int, PyTree]]:
        numbers = np.flatnonzero(done)
        final = {int(i): jax.tree.map(lambda x, i=i: np.array(x[i]), obs) for i in numbers}
        obs, fresh = jax.tree.map(np.array, obs), vector.reset(numbers.astype(np.int32))[0]
        jax.tree.map(lambda x, new: x.__setitem__(numbers, new), obs, fresh)
        return obs, final

    space = vector.single_observation_space
    if _is_envpool(vector):
        return by_number
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


def _import_atari(required: bool) -> None:
    """Registers the ALE/ ids. Raises ValueError if ale-py is missing and required."""
    try:
        import ale_py
    except ImportError:
        if required:
            raise ValueError("the ALE/ environments need ale-py: pip install 'jppo[atari]'") from None
    else:
        gymnasium.register_envs(ale_py)
