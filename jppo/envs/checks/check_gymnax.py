"""Checks of environments in gymnax's API, on the device."""

import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jppo.devices.jit import jit
from jppo.envs.base import Environment
from jppo.envs.checks import rules
from jppo.envs.checks.report import FAIL, PASS, SKIPPED, WARN, Check, refused
from jppo.envs.checks.trajectory import COUNTERS, Starts, Trace, draw_actions
from jppo.envs.gymnax import holds_bits, make_env, make_source
from jppo.envs.observations import MisfitError, Observations, space_of
from jppo.envs.spaces import Array, PyTree

NAMES: tuple[str, ...] = (
    *("jit", "contract", "carry", "vmap", "spaces", "actions", "finite", "determinism", "seeds", "starts"),
    *("time_limit", "final_obs", "hidden_reset", "speed"),
)
_ALONE_STEPS = 16  # of one environment alone, beside those side by side
_LIMIT = 5  # steps, a time limit that is soon reached
_RESETS = 64
_NEW_API = "gymnax >= 1.0.1: return obs, state, reward, terminated, truncated, info (docs/extending.md)"


class _Play(NamedTuple):
    """What one environment did; leaves [T, ...], and [N, T, ...] of N."""

    obs: PyTree  # [T+1, ...]
    final: PyTree
    reward: Array
    terminated: Array
    truncated: Array
    counters: dict[str, Array]  # [T+1]


def check(env: Any, params: Any, steps: int, seed: int, num_envs: int) -> list[Check]:
    """All findings; ends at one after which no other could be made.

    Args:
      env: a name, an object with gymnax's API, or an Environment.
      params: of the environment; its default_params when None.
      steps: of each environment.
    """
    source = make_source(env) if isinstance(env, str) else env
    found: list[Check] = []
    if not isinstance(source, Environment):
        found = _trace_once(source, params)
        if any(check.status == FAIL for check in found):
            return found
    try:
        made = make_env(source, params)
    except ValueError as error:  # in words of jppo's own
        return [*found, refused(error, _NEW_API)]
    return [*found, *_play(made, steps, seed, num_envs)]


def _trace_once(source: Any, params: Any) -> list[Check]:
    """What tracing tells: jit, contract and carry."""
    wanted = ("reset", "step", "action_space", "observation_space", *(("default_params",) if params is None else ()))
    if missing := [name for name in wanted if not hasattr(source, name)]:
        return [Check("contract", FAIL, f"it has no {', '.join(missing)}", _NEW_API)]
    try:
        params = source.default_params if params is None else params
        key = jax.eval_shape(lambda: jax.random.key(0))
        reset = jax.eval_shape(source.reset, key, params)
        if not isinstance(reset, tuple) or len(reset) != 2:
            return [Check("contract", FAIL, f"reset returned a {type(reset).__name__}", "return obs, state")]
        action = jax.eval_shape(source.action_space(params).sample, key)
        if hasattr(source, "step_env"):  # what auto-reset chooses from has to be alike, or the choice raises
            inner = _judge_inner(reset[1], jax.eval_shape(source.step_env, key, reset[1], action, params))
            if inner.status == FAIL:
                return [inner]
        returned = jax.eval_shape(source.step, key, reset[1], action, params)
    except (Exception, SystemExit) as error:  # whatever the environment raises is a finding
        return [rules.raised("jit", "tracing it", error, traceback.format_exc())]
    found = [Check("jit", PASS, "reset and step can be traced"), _judge_contract(returned)]
    return found if found[1].status == FAIL else [*found, _judge_carry(reset[1], returned[1])]


def _judge_inner(state: PyTree, returned: Any) -> Check:
    """gymnax's own step puts a step_env and a reset_env together."""
    if len(returned) == 5:
        return _judge_carry(state, returned[1])
    advice = "return obs, state, reward, terminated, info; gymnax's step adds truncated"
    return Check("contract", FAIL, f"step_env returned {len(returned)} values, not five", advice)


def _judge_contract(returned: Any) -> Check:
    """The six values of a step and their kinds; the five of gymnax 0.0.x do not tell truncated from terminated."""
    number = len(returned) if isinstance(returned, tuple) else 1
    if number != 6:
        old = " (as gymnax 0.0.x did, which does not tell truncated from terminated)" if number == 5 else ""
        return Check("contract", FAIL, f"step returned {number} value{'s' * (number > 1)}, not six{old}", _NEW_API)
    _, _, reward, terminated, truncated, info = returned
    if not isinstance(info, dict) or "final_observation" not in info:
        advice = "put the true successor there at every step; who overrides step_env, not step, inherits it"
        return Check("contract", FAIL, 'info has no "final_observation"', advice)
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if flag.dtype != bool or flag.shape:
            return Check(
                "contract", FAIL, f"{name} is {flag.dtype}{list(flag.shape)}, not bool[]", "return a scalar bool"
            )
    if reward.size != 1 or not (
        jnp.issubdtype(reward.dtype, jnp.floating) or jnp.issubdtype(reward.dtype, jnp.integer)
    ):
        return Check("contract", FAIL, f"reward is {reward.dtype}{list(reward.shape)}", "return a scalar number")
    if reward.shape:
        return Check("contract", WARN, f"reward is {reward.dtype}{list(reward.shape)}, not a scalar", "drop its dims")
    return Check("contract", PASS, "six values, terminated and truncated apart")


def _judge_carry(reset: PyTree, step: PyTree) -> Check:
    """State of a reset and of a step: a scan over steps needs the same structure, shapes and dtypes."""
    advice = "give both the same shapes and dtypes, for instance by jnp.zeros((), jnp.int32) where reset says 0"
    structures: list[Any] = [jax.tree.structure(reset), jax.tree.structure(step)]
    if structures[0] != structures[1]:
        return Check("carry", FAIL, "reset and step return states of another structure", advice)
    before, after = (jax.tree_util.tree_flatten_with_path(state)[0] for state in (reset, step))
    for (path, old), (_, new) in zip(before, after, strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            kinds = f"{old.dtype}{list(old.shape)} after a reset, {new.dtype}{list(new.shape)} after a step"
            return Check("carry", FAIL, f"state{jax.tree_util.keystr(path)} is {kinds}", advice)
    weak = sum(old.weak_type != new.weak_type for (_, old), (_, new) in zip(before, after, strict=True))
    note = f"; {weak} differ in weak types, which jppo evens out" if weak else ""
    return Check("carry", PASS, f"{len(before)} arrays, alike after reset and step{note}")


def _play(env: Environment, steps: int, seed: int, num_envs: int) -> list[Check]:
    """What running it tells."""
    actions = draw_actions(env.action_spec, seed, steps, num_envs)
    keys = jax.random.split(jax.random.key(seed), (num_envs, steps + 1))
    together = jit(jax.vmap(_episodes(env), in_axes=(0, 1)))
    try:
        play = jax.device_get(together(keys, actions))
        alone = jax.device_get(jit(_episodes(env))(keys[0, : _ALONE_STEPS + 1], actions[:_ALONE_STEPS, 0]))
    except (Exception, SystemExit) as error:  # whatever the environment raises is a finding
        return [rules.raised("vmap", "running it under vmap and scan", error, traceback.format_exc())]
    start = time.perf_counter()
    again = jax.device_get(together(keys, actions))
    seconds = time.perf_counter() - start
    observations, misfit = _observations(env, play)
    trace, repeated = _trace(observations, play), _trace(observations, again)
    starts = _starts(observations, env, seed)
    how = "the compiled program, called twice"
    found = rules.judge_all(observations, env.action_spec, trace, repeated, starts, how)
    found = [misfit if misfit and check.name == misfit.name else check for check in found]
    if limit := _judge_limit(env, observations, keys, actions, trace):
        found = [limit if check.name == limit.name else _despite(limit, check) for check in found]
    speed = rules.judge_speed(steps * num_envs, seconds, f"{num_envs} side by side, everything kept")
    repeats = all(check.status != FAIL for check in found if check.name == "determinism")
    return [_judge_alone(play, alone if repeats else None), *found, speed]


def _despite(limit: Check, check: Check) -> Check:
    """Where no episode ended by itself, those that a time limit ended tell of final observations."""
    if check.name == "final_obs" and check.status == SKIPPED and limit.status == PASS:
        return Check("final_obs", PASS, f"as without a time limit, when one of {_LIMIT} steps was set")
    return check


def _episodes(env: Environment) -> Callable[[Array, Array], _Play]:
    """A function of keys [T+1] and actions [T, ...] that plays one environment."""

    def step(state: PyTree, inputs: tuple[Array, Array]) -> tuple[PyTree, _Play]:
        after = env.step(inputs[0], state, inputs[1])
        ends = (after.reward, after.terminated, after.truncated)
        return after.state, _Play(after.obs, after.final_obs, *ends, _counters(after.state))

    def play(keys: Array, actions: Array) -> _Play:
        obs, state = env.reset(keys[0])
        _, steps = jax.lax.scan(step, state, (keys[1:], actions))
        first = (obs, _counters(state))
        begun = jax.tree.map(lambda x, rest: jnp.concatenate([x[None], rest]), first, (steps.obs, steps.counters))
        return steps._replace(obs=begun[0], counters=begun[1])

    return play


def _counters(state: PyTree) -> dict[str, Array]:
    """Numbers in the state with names of counters."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    named = ((jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves)
    scalars = ((name, leaf) for name, leaf in named if not jnp.shape(leaf) and not jnp.issubdtype(leaf.dtype, bool))
    return {name: leaf.astype(jnp.float32) for name, leaf in scalars if name.rpartition(".")[2] in COUNTERS}


def _observations(env: Environment, play: _Play) -> tuple[Observations, Check | None]:
    """Against the declared space or, where that does not fit at all, against what is there, which jppo goes by."""
    actual = space_of(env.obs_spec)
    as_is = env.source is None or holds_bits(env.source)
    declared = actual if as_is else env.source.observation_space(env.params)
    try:
        Observations(declared, casts=False).see(jax.tree.map(lambda x: x[0, 0], play.obs))
    except MisfitError as error:
        return Observations(actual, casts=False), Check("spaces", FAIL, str(error), "declare what you return")
    return Observations(declared, casts=False), None


def _trace(observations: Observations, play: _Play) -> Trace:
    """Of N environments, with time in front."""
    play = jax.tree.map(lambda x: np.moveaxis(x, 0, 1), play)
    obs, digest = observations.see(play.obs, (len(play.reward) + 1, play.reward.shape[1]))
    final, _ = observations.see(play.final, play.reward.shape)
    kept: Any = {name: getattr(play, name) for name in ("reward", "terminated", "truncated", "counters")}
    return Trace(obs=obs, digest=digest, final=final, resets=np.zeros(play.reward.shape, np.int32), **kept)


def _starts(observations: Observations, env: Environment, seed: int) -> Starts:
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), _RESETS)
    obs, digest = observations.see(jax.device_get(jit(jax.vmap(env.reset))(keys)[0]), (_RESETS,))
    return Starts(obs, digest, np.zeros(0, np.uint32))


def _judge_alone(play: _Play, alone: _Play | None) -> Check:
    """One environment alone, against the same one among others; None where it would not even do the same twice."""
    if alone is None:
        return Check("vmap", PASS, "runs under vmap and scan")
    for name, ours, theirs in zip(_Play._fields, alone, play, strict=True):
        same = jax.tree.map(lambda x, all_: _close(x, all_[0, : len(x)]), ours, theirs)
        if not all(jax.tree.leaves(same)):
            seen = f"{name} differs between one environment alone and the same one under vmap"
            return Check("vmap", FAIL, seen, "look for callbacks and reductions over what vmap batches")
    return Check("vmap", PASS, "runs under vmap and scan, and does the same there as alone")


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    return np.allclose(a, b, rtol=1e-3, atol=1e-3, equal_nan=True) if a.dtype.kind == "f" else bool((a == b).all())


def _judge_limit(
    env: Environment, observations: Observations, keys: Array, actions: np.ndarray, free: Trace
) -> Check | None:
    """Sets a time limit of five steps and compares with the same episodes without: the fifth step must then be
    truncated, terminated only if it was so without, and its final observation must be what it was without.

    Args:
      free: the trace of the same keys and actions.

    Returns:
      None where nothing can be told: there is no such parameter, or all episodes end sooner.
    """
    limit = getattr(env.params, "max_steps_in_episode", None)
    if limit is None or not hasattr(env.params, "replace") or len(actions) < _LIMIT:
        return None
    low = type(limit)(_LIMIT) if isinstance(limit, int | float) else jnp.full_like(limit, _LIMIT)
    try:
        made = make_env(env.source, env.params.replace(max_steps_in_episode=low))
        play = jit(jax.vmap(_episodes(made), in_axes=(0, 1)))(keys[:, : _LIMIT + 1], actions[:_LIMIT])
        cut = _trace(observations, jax.device_get(play))
    except Exception as error:  # it was not asked to take other parameters
        seen = f"with max_steps_in_episode = {_LIMIT} it raises {type(error).__name__}"
        return Check("time_limit", SKIPPED, seen, "nothing, if other time limits make no sense")
    return _judge_cut(cut, free)


def _judge_cut(cut: Trace, free: Trace) -> Check | None:
    """A trace with a time limit of all its steps, against one without. None where all episodes end sooner anyway."""
    reached = ~free.done[:_LIMIT].any(0) & ~cut.done[: _LIMIT - 1].any(0)
    if not reached.any():
        return None
    terminated, truncated = cut.terminated[-1][reached], cut.truncated[-1][reached]
    if terminated.any():
        seen = f"with max_steps_in_episode = {_LIMIT}, step {_LIMIT} is terminated; without a limit it is not"
        advice = "leave time out of what is terminated; gymnax's step makes truncated of it"
        return Check("time_limit", FAIL, seen, advice)
    if not truncated.any():
        seen = f"max_steps_in_episode = {_LIMIT} does not end episodes"
        return Check("time_limit", WARN, seen, "count steps in state.time, or remove the parameter")
    alike = np.isclose(cut.obs[:_LIMIT], free.obs[:_LIMIT], rtol=1e-3, atol=1e-3, equal_nan=True).all((0, 2))
    final = np.isclose(cut.final[-1], free.obs[_LIMIT], rtol=1e-3, atol=1e-3, equal_nan=True).all(-1)
    if (reached & alike & ~final).any():
        seen = f"with max_steps_in_episode = {_LIMIT}, the final observation is another than that without a limit"
        return Check("final_obs", FAIL, seen, "the final observation of a step is what the step led to")
    return Check("time_limit", PASS, f"max_steps_in_episode truncates, and terminates nothing (tried with {_LIMIT})")
