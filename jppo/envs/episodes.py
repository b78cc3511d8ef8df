"""Time limits and automatic resets for environments that have neither."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jppo.config.checks import MAX_INT32, check_int
from jppo.devices.jit import jit
from jppo.envs.action_spaces import action_spec_of
from jppo.envs.base import Environment, Step, strip_weak_types
from jppo.envs.contract import BrokenContractError
from jppo.envs.device_contract import trace_episodic_env
from jppo.envs.gymnax_spaces import obs_spec_of
from jppo.envs.resets import Reset, make_restart
from jppo.envs.spaces import Array, PyTree
from jppo.errors import Refused


class EpisodicEnv(NamedTuple):
    """One environment without time limit and automatic resets: the argument of `with_limit_and_reset`."""

    name: str
    reset: Reset  # key -> obs, state
    step: Callable[[Array, PyTree, PyTree], tuple[PyTree, PyTree, Any, Any, Any]]
    """key, state, action -> obs, state, reward, terminated, truncated"""
    action_space: Any  # a space of Gymnasium or gymnax
    observation_space: Any = None  # a space of Gymnasium or gymnax; None for arrays of any numbers
    render: Callable[[PyTree], Any] | None = None  # state -> image [H, W, 3] u8


def is_device_env(env: Any) -> bool:
    """Returns whether an object is an environment for the device: gymnax's API, an EpisodicEnv or an Environment."""
    return isinstance(env, Environment | EpisodicEnv) or hasattr(env, "default_params")


class EpisodeState(NamedTuple):
    """The state of an environment, and the number of steps of its episode."""

    env_state: PyTree
    time: Array  # [] i32


@dataclasses.dataclass(frozen=True)
class EpisodeParams:
    """The arguments of `with_limit_and_reset`, under the names that gymnax's parameters have."""

    max_steps_in_episode: int | None = None
    pool: int | None = None

    def replace(self, **changes: Any) -> "EpisodeParams":
        """Returns a copy with other values."""
        return dataclasses.replace(self, **changes)


def with_limit_and_reset(env: EpisodicEnv, limit: int | None = None, pool: int | None = None) -> Environment:
    """Returns an environment that truncates episodes after `limit` steps, and starts the next episode in the same step.

    A step that terminates at the limit counts as terminated, not as truncated. `Step.final_obs` is the observation that
    the step led to, also at the end of an episode.

    Args:
      limit: number of steps of an episode; None if the environment ends its episodes itself.
      pool: number of initial states for resets at the end of episodes. They are computed once, from a fixed key, and
        all environments, seeds and devices share them: each reset draws one of them. The compiled program contains
        them, so it needs `pool` times the memory of one state. Training sees no other initial states, apart from the
        first episode of each environment; evaluations start from other states. None: each reset computes a new state.

    Raises:
      ValueError: an argument or a space is not supported, or reset or step returns invalid values.
    """
    if not isinstance(env, EpisodicEnv):
        raise Refused(f"env has the type {type(env).__name__}; it must be a jppo.EpisodicEnv")
    limit = None if limit is None else check_int("limit", limit, maximum=MAX_INT32)
    pool = None if pool is None else check_int("pool", pool, maximum=MAX_INT32)
    action_spec = action_spec_of(env.name, env.action_space)
    try:
        obs = _as_dicts(trace_episodic_env(env, action_spec))
    except BrokenContractError as error:
        raise BrokenContractError(f"{env.name}: {error.args[0]}", error.args[1], error.check) from None
    env = _without_empty_arrays(_with_plain_values(env))
    restart = make_restart(env.reset if pool is None else _pool_reset(env.reset, pool))

    def reset(key: Array) -> tuple[PyTree, EpisodeState]:
        obs, env_state = env.reset(key)
        return obs, EpisodeState(env_state=env_state, time=jnp.zeros((), jnp.int32))

    def step(key: Array, state: EpisodeState, action: PyTree) -> Step:
        step_key, reset_key = jax.random.split(key)
        final_obs, env_state, reward, terminated, truncated = env.step(step_key, state.env_state, action)
        time = state.time + 1
        terminated = jnp.asarray(terminated, bool).reshape(())
        truncated = jnp.asarray(truncated, bool).reshape(())
        truncated = (truncated if limit is None else truncated | (time >= limit)) & ~terminated
        done = terminated | truncated
        obs, env_state = restart(done, reset_key, final_obs, env_state)
        return Step(
            obs=obs,
            state=EpisodeState(env_state=env_state, time=jnp.where(done, 0, time)),
            reward=jnp.asarray(reward, jnp.float32).reshape(()),
            terminated=terminated,
            truncated=truncated,
            final_obs=final_obs,
        )

    obs_spec, render = obs_spec_of(env.name, env.observation_space, obs), env.render
    return Environment(
        name=env.name,
        reset=reset,
        step=step,
        obs_spec=obs_spec,
        action_spec=action_spec,
        source=env,
        params=EpisodeParams(limit, pool),
        render=render and (lambda state: render(state.env_state)),
    )


def _with_plain_values(env: EpisodicEnv) -> EpisodicEnv:
    """Returns an environment without weak types, and with dicts for the named tuples of observations."""

    def reset(key: Array) -> tuple[PyTree, PyTree]:
        obs, state = env.reset(key)
        return strip_weak_types((_as_dicts(obs), state))

    def step(key: Array, state: PyTree, action: PyTree) -> tuple[PyTree, PyTree, Any, Any, Any]:
        obs, state, *outcome = env.step(key, state, action)
        return *strip_weak_types((_as_dicts(obs), state)), *outcome

    return env._replace(reset=reset, step=step)


def _without_empty_arrays(env: EpisodicEnv) -> EpisodicEnv:
    """Returns an environment whose state has None for arrays without elements, such as MuJoCo's, which JAX cannot shard
    over devices."""
    specs, structure = jax.tree.flatten(jax.eval_shape(env.reset, jax.random.key(0))[1])
    if all(spec.size for spec in specs):
        return env

    def reduced(state: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x if x.size else None, state)

    def complete(state: PyTree) -> PyTree:
        leaves = iter(jax.tree.leaves(state))
        filled = [next(leaves) if spec.size else jnp.zeros(spec.shape, spec.dtype) for spec in specs]
        return jax.tree.unflatten(structure, filled)

    def reset(key: Array) -> tuple[PyTree, PyTree]:
        obs, state = env.reset(key)
        return obs, reduced(state)

    def step(key: Array, state: PyTree, action: PyTree) -> tuple[PyTree, PyTree, Any, Any, Any]:
        obs, state, *outcome = env.step(key, complete(state), action)
        return obs, reduced(state), *outcome

    render = env.render
    return env._replace(reset=reset, step=step, render=render and (lambda state: render(complete(state))))


def _as_dicts(obs: PyTree) -> PyTree:
    """Returns an observation with dicts instead of named tuples, so that its leaves have names."""
    if isinstance(obs, tuple):
        names = getattr(obs, "_fields", None)
        parts = tuple(map(_as_dicts, obs))
        return parts if names is None else dict(zip(names, parts, strict=True))
    return {name: _as_dicts(part) for name, part in obs.items()} if isinstance(obs, dict) else obs


def _pool_reset(reset: Reset, size: int) -> Reset:
    """Returns a reset function that draws one of `size` initial states, which are computed now."""
    states = jit(jax.vmap(reset))(jax.random.split(jax.random.key(0), size))

    def draw(key: Array) -> tuple[PyTree, PyTree]:
        number = jax.random.randint(key, (), 0, size)
        drawn: tuple[PyTree, PyTree] = jax.tree.map(lambda x: x[number], states)
        return drawn

    return draw
