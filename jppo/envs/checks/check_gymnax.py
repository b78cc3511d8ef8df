"""Checks of environments with gymnax's API."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jppo.config.checks import names_module
from jppo.config.families import family_of
from jppo.devices.jit import jit
from jppo.envs.base import Environment, merge_dims, strip_weak_types
from jppo.envs.checks import rules
from jppo.envs.checks.masks import Masks
from jppo.envs.checks.report import (
    FAIL,
    PASS,
    SKIPPED,
    Check,
    failed,
    passed,
    report_exceptions,
    report_refusals,
    skipped,
    warning,
)
from jppo.envs.checks.signatures import judge_functions, judge_source
from jppo.envs.checks.trajectory import COUNTERS, Starts, Trace, actions_at, draw_actions, num_steps_of
from jppo.envs.contract import BrokenContractError
from jppo.envs.episodes import EpisodicEnv
from jppo.envs.gymnax import holds_bits, make_env, make_source
from jppo.envs.masks import check_mask_spec, has_mask, nearest_legal
from jppo.envs.modules import make_named
from jppo.envs.observations import Observations
from jppo.envs.spaces import ACTION_MASK, Array, PyTree

NAMES: tuple[str, ...] = (
    *("jit", "contract", "carry", "vmap", "spaces", "actions", "masks", "finite", "determinism", "seeds", "starts"),
    *("time_limit", "final_obs", "hidden_reset", "speed"),
)
_SINGLE_STEPS = 16  # steps of one environment without vmap
_TINY = 1e-6  # relative change of states that shows whether a simulation amplifies rounding errors
_LIMIT = 5  # steps, a time limit that most episodes reach
_RESETS = 64


class _Episodes(NamedTuple):
    """The steps of one environment; leaves [T, ...], and [N, T, ...] for N environments.

    With M agents, observations, rewards and flags have the dim M after T.
    """

    obs: PyTree  # [T+1, ...]
    final: PyTree
    reward: Array
    terminated: Array
    truncated: Array
    active: Array  # [T+1], whether an agent takes part in the next step; true for one agent
    counters: dict[str, Array]  # [T+1], without M


def check(env: Any, params: Any, steps: int, seed: int, num_envs: int) -> Iterator[Check]:
    """Yields the results of all checks.

    Args:
      env: an argument of `make_env`.
      params: parameters of the environment; its default_params when None.
      steps: number of steps of each environment.
    """
    source = env
    if isinstance(env, str) and family_of(env) is None:
        source = make_named(env) if names_module(env) else make_source(env)
    has_functions = isinstance(source, str | Environment | EpisodicEnv)
    if not has_functions:
        yield from judge_source(source, params)
    with report_exceptions("jit", "making it"), report_refusals():
        made = make_env(source, params)
    if has_functions:
        yield from judge_functions(made)
    with report_refusals():
        check_mask_spec(made.obs_spec, made.action_spec)
    yield from _judge_episodes(made, steps, seed, num_envs)


def _judge_episodes(env: Environment, steps: int, seed: int, num_envs: int) -> Iterator[Check]:
    """Yields the results of the checks that run the environment."""
    agents = env.num_agents
    actions = draw_actions(env.action_spec, seed, steps, num_envs, agents)
    if agents > 1:
        actions = jax.tree.map(lambda x: x.reshape(steps, num_envs, agents, *x.shape[2:]), actions)
    keys = jax.random.split(jax.random.key(seed), (num_envs, steps + 1))
    play_all = jit(jax.vmap(_player(env), in_axes=(0, 1)))
    with report_exceptions("vmap", "running it under vmap and scan"):
        episodes = jax.device_get(play_all(keys, actions))
        single = jax.device_get(
            jit(_player(env))(keys[0, : _SINGLE_STEPS + 1], actions_at(actions, slice(_SINGLE_STEPS), 0))
        )
    start = time.perf_counter()
    repeated = jax.device_get(play_all(keys, actions))
    seconds = time.perf_counter() - start
    observations = _observations(env)
    if agents > 1:
        yield from _judge_activity(episodes)
    trace, again = _trace(observations, episodes, agents), _trace(observations, repeated, agents)
    how = "the same compiled program, called twice"
    starts = _reset_often(observations, env, seed)
    judged = rules.judge_all(observations, env.action_spec, trace, again, starts, how, agents)
    found = {check.name: check for check in judged}
    if limit := _judge_limit(env, observations, keys, actions, trace):
        found[limit.name] = limit
        if limit.status == PASS and found["final_obs"].status == SKIPPED:
            seen = f"correct with max_steps_in_episode = {_LIMIT}; no episode ends without it"
            found["final_obs"] = passed("final_obs", seen)
    if found["determinism"].status == FAIL:
        yield passed("vmap", "runs under vmap and scan")
    else:

        def changed() -> _Episodes:
            play = jit(jax.vmap(_player(env, _change_slightly), in_axes=(0, 1)))
            first_steps = slice(_SINGLE_STEPS)
            return jax.device_get(play(keys[:, : _SINGLE_STEPS + 1], actions_at(actions, first_steps)))

        yield _judge_single(episodes, single, changed)
    yield from found.values()
    masks = Masks(env.obs_spec, env.action_spec)
    if masks.exist:
        masks.see(episodes.obs[ACTION_MASK], episodes.active.shape)
    yield masks.judge()
    rows = f"{num_envs * agents} agents" if agents > 1 else f"{num_envs} environments"
    yield rules.judge_speed(trace.reward.size, seconds, f"{rows} in one program, with recording")


def play_randomly(env: Environment, steps: int) -> PyTree:
    """Returns the observations [steps + 1, ...] with random actions; [steps + 1, M, ...] of M agents."""
    actions = draw_actions(env.action_spec, 0, steps, 1, env.num_agents)
    if env.num_agents == 1:
        actions = jax.tree.map(lambda x: x[:, 0], actions)
    return jax.device_get(jit(_player(env))(jax.random.split(jax.random.key(0), steps + 1), actions)).obs


def _judge_activity(episodes: _Episodes) -> Iterator[Check]:
    """Checks that agents become inactive where they end, and become active where the environment restarts."""
    active, following = episodes.active[:, :-1], episodes.active[:, 1:]
    done = episodes.terminated | episodes.truncated
    restarts = done.all(-1, keepdims=True)
    if (bad := active & ~done & ~following).any():
        seen = f"after step {_place(bad)} no longer takes part, but has not ended"
        raise BrokenContractError(seen, "set terminated or truncated where an agent leaves")
    if (bad := restarts & ~following).any():
        seen = f"after step {_place(bad)} does not take part, although all agents ended"
        raise BrokenContractError(seen, "set active = True for all agents in the step that ends the last episode")
    for name, wrong in (("terminated = False", ~episodes.terminated), ("a reward", episodes.reward != 0)):
        if (bad := ~active & wrong).any():
            seen = f"at step {_place(bad)} does not take part, but has {name}"
            raise BrokenContractError(seen, "set terminated = True and reward = 0 for agents with active = False")
    if (bad := done & active & following & ~restarts).any():
        seen = f"at step {_place(bad)} ends and takes part in the next step, while others have not ended"
        yield warning("contract", seen, "set active = False; ignore this if the agent starts a new episode")


def _place(where: Any) -> str:
    """Describes the first true element [N, T, M]."""
    env, step, agent = np.argwhere(where)[0]
    return f"{step} of environment {env}, agent {agent}"


def _player(env: Environment, change: Callable[[Array], Array] | None = None) -> Callable[[Array, Array], _Episodes]:
    """Returns a function of keys [T+1] and actions [T, ...] that plays one environment.

    Args:
      change: replaces each array of the state before each step.
    """

    def step(before: tuple[PyTree, PyTree], inputs: tuple[Array, Array]) -> tuple[tuple[PyTree, PyTree], _Episodes]:
        (obs, state), (key, action) = before, inputs
        if has_mask(env.obs_spec):
            action = nearest_legal(env.action_spec, obs[ACTION_MASK], action)
        after = env.step(key, state if change is None else jax.tree.map(change, state), action)
        return (after.obs, after.state), _Episodes(
            obs=after.obs,
            final=after.final_obs,
            reward=after.reward,
            terminated=after.terminated,
            truncated=after.truncated,
            active=after.active if env.num_agents > 1 else jnp.ones((), bool),
            counters=_counters(after.state),
        )

    def play(keys: Array, actions: Array) -> _Episodes:
        obs, state = strip_weak_types(env.reset(keys[0]))
        _, steps = jax.lax.scan(step, (obs, state), (keys[1:], actions))
        active = jnp.ones(steps.active.shape[1:], bool)
        first, rest = (obs, active, _counters(state)), (steps.obs, steps.active, steps.counters)
        obs, active, counters = jax.tree.map(lambda x, after: jnp.concatenate([x[None], after]), first, rest)
        return steps._replace(obs=obs, active=active, counters=counters)

    return play


def _counters(state: PyTree) -> dict[str, Array]:
    """Returns the scalar numbers of the state with names of counters."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {
        name: leaf.astype(jnp.float32)
        for name, leaf in named.items()
        if name.rpartition(".")[2] in COUNTERS and not jnp.shape(leaf) and not jnp.issubdtype(leaf.dtype, bool)
    }


def _observations(env: Environment) -> Observations:
    """Compares observations with the declared space. If there is none, or one per agent, uses jppo's specs."""
    declared = None if env.num_agents > 1 else getattr(env.source, "observation_space", None)
    if callable(declared):  # a method of gymnax's API
        declared = declared(env.params)
    space = env.obs_spec if declared is None or holds_bits(env.source) else declared
    return Observations(space, casts=False)


def _trace(observations: Observations, episodes: _Episodes, num_agents: int) -> Trace:
    if num_agents > 1:
        counters = {name: np.repeat(x, num_agents, axis=0) for name, x in episodes.counters.items()}
        episodes = jax.tree.map(_merge_agents, episodes._replace(counters={}))._replace(counters=counters)
    time_first = jax.tree.map(_steps_first, episodes)
    shape = time_first.reward.shape
    obs, digest = observations.see(time_first.obs, (shape[0] + 1, shape[1]))
    final, _ = observations.see(time_first.final, shape)
    resets = np.zeros(shape, np.int32)
    return Trace(**time_first._replace(obs=obs, final=final)._asdict(), digest=digest, resets=resets)


def _merge_agents(x: np.ndarray) -> np.ndarray:
    """Returns [N*M, T, ...] for [N, T, M, ...]."""
    return np.moveaxis(x, 2, 1).reshape(-1, x.shape[1], *x.shape[3:])


def _reset_often(observations: Observations, env: Environment, seed: int) -> Starts:
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), _RESETS)
    obs = jax.device_get(jit(jax.vmap(env.reset))(keys)[0])
    obs = merge_dims(obs) if env.num_agents > 1 else obs
    obs, digest = observations.see(obs, (_RESETS * env.num_agents,))
    return Starts(obs=obs, digest=digest, following=np.zeros(0, np.uint32))


def _judge_single(episodes: _Episodes, single: _Episodes, changed: Callable[[], _Episodes]) -> Check:
    """Compares the first environment without vmap and with vmap.

    The two programs round differently, and chaotic simulations amplify this. So a difference is only a warning if tiny
    changes of the states have such an effect, too.

    Args:
      changed: returns the first steps of the same episodes with slightly different states.
    """
    steps = _steps_of_difference(single, jax.tree.map(lambda x: x[0], episodes))
    name = min(steps, key=steps.__getitem__)
    if steps[name] == np.inf:
        return passed("vmap", "an environment gives the same results with and without vmap")
    seen = f"{name} of an environment differs with and without vmap from step {steps[name]:.0f} on"
    advice = "look for callbacks and for reductions over the batch axis"
    if min(_steps_of_difference(*jax.tree.map(_steps_first, (changed(), episodes))).values()) > steps[name]:
        return failed("vmap", seen, advice)
    seen += f"; states that differ by a factor of {1.0 - _TINY:g} have such an effect, too"
    return warning("vmap", seen, f"ignore this if the simulation is chaotic, otherwise {advice}")


def _steps_of_difference(a: _Episodes, b: _Episodes) -> dict[str, float]:
    """Returns the number of steps, 0 after the reset, after which each field differs first, or infinity.

    Time is the first axis; b may be longer.
    """
    steps = dict.fromkeys(_Episodes._fields, np.inf)
    for name, one, other in zip(_Episodes._fields, a, b, strict=True):
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            (differing,) = np.nonzero(~_is_close(x, y[: len(x)]).reshape(len(x), -1).all(axis=1))
            if len(differing):  # rewards and flags begin after step 1
                steps[name] = min(steps[name], differing[0] + len(a.reward) + 1 - len(x))
    return steps


def _steps_first(x: np.ndarray) -> np.ndarray:
    return np.moveaxis(x, 0, 1)


def _change_slightly(x: Array) -> Array:
    """Returns real numbers that are smaller by a millionth, except whole numbers, which are often thresholds."""
    return jnp.where(x == jnp.round(x), x, x * (1.0 - _TINY)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _is_close(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.isclose(a, b, rtol=1e-3, atol=1e-3, equal_nan=True) if a.dtype.kind == "f" else a == b


def _judge_limit(
    env: Environment, observations: Observations, keys: Array, actions: PyTree, free: Trace
) -> Check | None:
    """Sets max_steps_in_episode to 5 and compares with the same episodes without this limit.

    Step 5 must be truncated, not terminated, and its final observation must be the same as without the limit.

    Args:
      free: the trace without the limit.

    Returns:
      None if the parameter does not exist, or if all episodes are shorter.
    """
    limit = getattr(env.params, "max_steps_in_episode", None)
    if limit is None or not hasattr(env.params, "replace") or num_steps_of(actions) < _LIMIT:
        return None
    low = type(limit)(_LIMIT) if isinstance(limit, int | float) else jnp.full_like(limit, _LIMIT)
    try:
        made = make_env(env.source, env.params.replace(max_steps_in_episode=low))
        play = jit(jax.vmap(_player(made), in_axes=(0, 1)))(keys[:, : _LIMIT + 1], actions_at(actions, slice(_LIMIT)))
        limited = _trace(observations, jax.device_get(play), env.num_agents)
    except Exception as error:  # the environment may not support this value
        seen = f"it raises {type(error).__name__} with max_steps_in_episode = {_LIMIT}"
        return skipped("time_limit", seen, "ignore this if the environment does not support other limits")
    return _judge_limited(limited, free)


def _judge_limited(limited: Trace, free: Trace) -> Check | None:
    """Compares a trace of 5 steps with this time limit and a trace without. Returns None if no episode reaches it."""
    reached = ~free.done[:_LIMIT].any(0) & ~limited.done[: _LIMIT - 1].any(0)
    if not reached.any():
        return None
    setting = f"max_steps_in_episode = {_LIMIT}"
    if limited.terminated[-1][reached].any():
        seen = f"with {setting}, step {_LIMIT} is terminated; without a limit it is not"
        advice = "remove the time from the condition of termination; gymnax's step sets truncated"
        return failed("time_limit", seen, advice)
    if not limited.truncated[-1][reached].any():
        seen = f"{setting} does not end episodes"
        return warning("time_limit", seen, "count the steps in state.time, or remove the parameter")
    same = _is_close(limited.obs[:_LIMIT], free.obs[:_LIMIT]).all((0, 2))
    if (reached & same & ~_is_close(limited.final[-1], free.obs[_LIMIT]).all(-1)).any():
        seen = f"with {setting}, the final observation differs from the observation without a limit"
        return failed("final_obs", seen, "return the observation that the step led to as final_observation")
    return passed("time_limit", f"with {setting}, step {_LIMIT} is truncated and not terminated")
