"""Adapter for environments with gymnax's API. `jppo.runs.render` draws them."""

import contextlib
import importlib
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp

from jppo.config.checks import MAX_INT32, check_int, names_module
from jppo.config.families import family_of, host_family_of
from jppo.envs.action_spaces import action_spec_of
from jppo.envs.base import Environment, Step, replace_fields, strip_weak_types
from jppo.envs.contract import BrokenContractError
from jppo.envs.device_contract import check_methods, trace_env
from jppo.envs.episodes import EpisodeParams, EpisodicEnv, with_limit_and_reset
from jppo.envs.families import make_family_env
from jppo.envs.gymnax_spaces import obs_spec_of
from jppo.envs.host_families import host_env_names
from jppo.envs.modules import make_named, unknown_environment
from jppo.envs.spaces import Array, PyTree
from jppo.errors import Refused, forbid_exit

OVERWRITTEN = "another package has overwritten gymnax with an older version, as stable-gymnax does"
REINSTALL = "pip install --force-reinstall --no-deps 'gymnax>=1.0.1,<2'"
REPAIR = f"pip uninstall -y stable-gymnax && {REINSTALL}"  # if it is overwritten

_BOOL_IMAGES = "gymnax.environments.minatar."  # bool images that gymnax casts to float32: four times the memory
_ONLY_FOR_DRAWINGS = ("matplotlib", "matplotlib.colors", "matplotlib.pyplot", "seaborn")


def available() -> list[str]:
    """Returns the names that `make_env` accepts."""
    return list(import_gymnax().registered_envs)


@forbid_exit
def make_env(env: Any, params: Any = None, **overrides: Any) -> Environment:
    """Returns an on-device environment.

    Args:
      env: a gymnax name such as "CartPole-v1", an id of a family such as "craftax:Craftax-Symbolic-v1", an object with
        gymnax's API (1.0.1 or later), an EpisodicEnv, an Environment, or "module:name" of such an object or of a
        function that makes one.
      params: the environment's parameters; its default_params when None.
      **overrides: fields of the parameters to replace, e.g. max_steps_in_episode=200. For families, also pool (see
        `jppo.with_limit_and_reset`) and the family's own options (docs/environments.md).

    Raises:
      ValueError: the name is unknown, a space is not supported, or reset or step returns invalid values.
    """
    if isinstance(env, Environment):
        if params is not None or overrides:
            raise Refused(f"{env.name} is already made; pass the parameters to the make_env call that makes it")
        return env
    if names_module(env):
        return make_env(make_named(env), params, **overrides)._replace(name=env)
    if family_of(env) is not None:
        return make_family_env(env, **(vars(params) if params else {}), **overrides)
    if overrides.get("max_steps_in_episode") is not None:
        limit = check_int("max_steps_in_episode", overrides["max_steps_in_episode"], maximum=MAX_INT32)
        overrides["max_steps_in_episode"] = limit
    if isinstance(env, EpisodicEnv):
        params = replace_fields(EpisodeParams() if params is None else params, overrides)
        return with_limit_and_reset(env, params.max_steps_in_episode, params.pool)
    source = make_source(env) if isinstance(env, str) else env
    check_methods(source, params)
    params = source.default_params if params is None else params
    params = replace_fields(params, overrides)
    name = env if isinstance(env, str) else getattr(source, "name", type(source).__name__)
    action_spec = action_spec_of(name, source.action_space(params))
    return _adapt(name, source, params, action_spec)


def make_source(name: str) -> Any:
    """Returns gymnax's object of this name. Raises ValueError for an unknown name."""
    if name not in available():
        if host_family_of(name) or name in host_env_names():
            remedy = "pass the name itself and backend='ray', or for options a function that makes the environment"
            raise Refused(f"{name} runs in actors, not on the device; {remedy}")
        raise unknown_environment(name, available())
    try:
        return import_gymnax().make(name)[0]
    except OSError as error:  # MNISTBandit-bsuite downloads its images
        raise Refused(f"{name} could not be made, because its download failed ({error})") from error


class _Placeholder(types.ModuleType):
    """A placeholder in sys.modules that imports its module on first use."""

    def __getattr__(self, name: str) -> Any:
        part = sys.modules.get(f"{self.__name__}.{name}")
        if name.startswith("__") or isinstance(part, _Placeholder):  # introspection, or another placeholder
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(self.__name__), name)

    def leave(self) -> None:
        """Removes the placeholder, so that the module can be imported."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


def import_gymnax() -> Any:
    """Imports gymnax without matplotlib and seaborn, which only its drawings use.

    Processor time with placeholders 0.20 s, without them 1.14 s (medians of seven processes; gymnax 1.0.1). A thread
    that imports matplotlib at the same time can see the placeholder.

    Raises:
      ValueError: another package has overwritten gymnax.
    """
    with contextlib.ExitStack() as stack:
        if "gymnax" not in sys.modules:
            for name in _ONLY_FOR_DRAWINGS:
                placeholder = _Placeholder(name)
                sys.modules.setdefault(name, placeholder)
                stack.callback(placeholder.leave)
        import gymnax
    if not hasattr(gymnax, "register"):
        raise Refused(f"{OVERWRITTEN}; {REPAIR}")
    return gymnax


def holds_bits(source: Any) -> bool:
    """Returns whether observations of this gymnax object are stored as bools instead of the dtype of its space."""
    return type(source).__module__.startswith(_BOOL_IMAGES)


def _adapt(name: str, source: Any, params: Any, action_spec: PyTree) -> Environment:
    is_bits = holds_bits(source)

    def seen(obs: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.astype(bool), obs) if is_bits else strip_weak_types(obs)

    def reset(key: Array) -> tuple[PyTree, PyTree]:
        obs, state = source.reset(key, params)
        return seen(obs), strip_weak_types(state)

    def step(key: Array, state: PyTree, action: PyTree) -> Step:
        obs, state, reward, terminated, truncated, info = source.step(key, state, action, params)
        return Step(
            obs=seen(obs),
            state=strip_weak_types(state),
            reward=jnp.asarray(reward, jnp.float32).reshape(()),
            terminated=jnp.asarray(terminated, bool).reshape(()),
            truncated=jnp.asarray(truncated, bool).reshape(()),
            final_obs=seen(info["final_observation"]),
        )

    try:
        obs = trace_env(source, params, action_spec)[0]
    except BrokenContractError as error:
        raise BrokenContractError(f"{name}: {error.args[0]}", error.args[1], error.check) from None
    obs_spec = obs_spec_of(name, source.observation_space(params), jax.eval_shape(seen, obs))
    return Environment(
        name=name,
        reset=reset,
        step=step,
        obs_spec=obs_spec,
        action_spec=action_spec,
        source=source,
        params=params,
    )
