"""Checks of environments with Gymnasium's API."""

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

from jppo.envs.agent_rows import is_parallel_env
from jppo.envs.checks import check_vector, rules
from jppo.envs.checks.masks import Masks
from jppo.envs.checks.report import Check, passed, report_exceptions, report_refusals, skipped
from jppo.envs.checks.trajectory import (
    COUNTERS,
    Starts,
    Trace,
    TraceStep,
    actions_at,
    draw_actions,
    num_steps_of,
    stack_trace,
)
from jppo.envs.contract import BrokenContractError, call_reset, call_step, read_reset, read_step
from jppo.envs.episodes import is_device_env
from jppo.envs.gymnasium import HostEnvironment, open_host_env
from jppo.envs.gymnasium_spaces import dtypes_of
from jppo.envs.gymnasium_vector import make_source
from jppo.envs.mask_wrapper import MaskWrapper
from jppo.envs.observations import Observations
from jppo.envs.spaces import PyTree
from jppo.errors import Refused

NAMES: tuple[str, ...] = (
    *("runs", "contract", "spaces", "actions", "masks", "finite", "determinism", "seeds", "starts", "time_limit"),
    *("final_obs", "hidden_reset", "autoreset", "speed"),
)
_RESETS = 32
_SPEED_SECONDS = 0.3


def is_instance(env: Any) -> bool:
    """Returns whether the argument is an environment instead of a name, class or function."""
    return not isinstance(env, type) and hasattr(env, "reset") and hasattr(env, "step")


def check(env: Any, steps: int, seed: int, num_envs: int) -> Iterator[Check]:
    """Yields the results of all checks.

    Args:
      env: an argument of `make_host_env`, or one environment, which is not closed.
      steps: number of steps of each environment.
    """
    if is_instance(env):
        if hasattr(env, "num_envs"):
            raise Refused("env is a vector environment; pass a function of num_envs that makes it")
        yield from _check_envs(lambda: _without_close(env), steps, seed, [env])
        return
    first = _make(env, seed)
    if hasattr(first, "num_envs") or is_parallel_env(first):
        first.close()
        host = _open(env)
        yield from check_vector.check(host, steps, seed, num_envs)
        return
    if not hasattr(first, "unwrapped"):
        raise _not_an_env(first)
    with contextlib.ExitStack() as stack:
        envs = [first, *(_make(env, seed) for _ in range(num_envs - 1))]
        for one in envs:
            stack.callback(one.close)
        yield from _check_envs(env, steps, seed, envs)


def _make(source: Any, seed: int) -> Any:
    try:
        env = make_source(source, [seed])
    except Refused:  # unknown name or missing package
        raise
    except (Exception, SystemExit):  # an environment may raise any exception
        with report_exceptions("runs", "making the environment"):
            raise
    if not is_instance(env) or not hasattr(env, "close"):
        raise _not_an_env(env)
    return env


def _not_an_env(made: Any) -> BrokenContractError:
    remedy = "use backend = 'device'" if is_device_env(made) else "make a gymnasium.Env"
    return BrokenContractError(f"a {type(made).__name__} was made, not a gymnasium.Env", remedy)


def _open(source: Any) -> HostEnvironment:
    with report_exceptions("runs", "making or resetting it"), report_refusals():
        return open_host_env(source)


def _without_close(env: Any) -> Any:
    result = copy.copy(env)
    result.close = lambda: None
    return result


def _check_envs(source: Any, steps: int, seed: int, envs: list[Any]) -> Iterator[Check]:
    """Plays one environment per seed, then plays each trajectory again in the next environment."""
    if len({id(env.unwrapped) for env in envs}) < len(envs):
        raise BrokenContractError("the same environment was made twice", "make a new one in each call")
    for env in envs:
        _reset(env, seed)
    host = _open(source)
    if host.adds_mask:
        envs = [MaskWrapper(env) for env in envs]
    actions = draw_actions(host.action_spec, seed, steps, len(envs))
    observations, masks = Observations(host.obs_space, casts=True), Masks(host.obs_spec, host.action_spec)
    trace = _play_all(envs, seed, actions, observations, masks)
    again = _play_all([*envs[1:], envs[0]], seed, actions, observations, masks)
    starts = _reset_often(envs[0], seed, observations)
    yield passed("runs", f"{2 * trace.reward.size:,} steps, {int(2 * trace.done.sum()):,} episodes")
    yield passed("contract", "reset returns two values and step five, with the right types")
    how = "in another instance, after other episodes" if len(envs) > 1 else "in the same instance, after other episodes"
    yield from rules.judge_all(observations, host.action_spec, trace, again, starts, how)
    yield masks.judge()
    yield skipped("autoreset", "applies only to vector environments")
    yield _measure_speed(envs[0], actions_at(actions, slice(None), 0), masks)


def _reset(env: Any, seed: int | None = None) -> PyTree:
    """Returns an observation."""
    with report_exceptions("runs", "reset"):
        return read_reset(env.reset() if seed is None else call_reset(env, seed))


def _play_all(envs: list[Any], seed: int, actions: PyTree, observations: Observations, masks: Masks) -> Trace:
    traces = [
        _play(env, seed + i, actions_at(actions, slice(None), i), observations, masks) for i, env in enumerate(envs)
    ]
    names = set.intersection(*(set(trace.counters) for trace in traces))
    common = [trace._replace(counters={name: trace.counters[name] for name in names}) for trace in traces]
    return jax.tree.map(lambda *leaves: np.stack(leaves, 1), *common)


def _play(env: Any, seed: int, actions: PyTree, observations: Observations, masks: Masks) -> Trace:
    """Returns the trace of one environment, without the axis N."""
    obs = _reset(env, seed)
    start, counters, trace_steps = observations.see(obs), _counters(env), []
    name, legal = ("masks", ", which action_mask marks as legal,") if masks.exist else ("runs", "")
    dtypes = dtypes_of(env.action_space)
    with _record_resets(env) as calls:
        for t in range(num_steps_of(actions)):
            action = masks.choose(obs, actions_at(actions, t))
            calls.clear()
            with report_exceptions(name, f"step {t} with action {action}{legal}"):
                obs, reward, terminated, truncated = read_step(call_step(env, _env_action(dtypes, action)))
            resets, final = len(calls), observations.see(obs)
            seen, digest = final
            if terminated or truncated:
                obs = _reset(env)
                seen, digest = observations.see(obs)
            step = TraceStep(
                obs=seen,
                digest=digest,
                final=final[0],
                reward=reward,
                terminated=terminated,
                truncated=truncated,
                resets=resets,
                active=True,
                counters=_counters(env),
            )
            trace_steps.append(step)
    return stack_trace(*start, np.ones((), bool), counters, trace_steps)


def _env_action(dtypes: PyTree, action: PyTree) -> Any:
    """Returns an action as Gymnasium's spaces sample it: a NumPy scalar or a new array, in the dtype of the space."""
    return jax.tree.map(lambda dtype, leaf: leaf.astype(dtype)[()], dtypes, action)


@contextlib.contextmanager
def _record_resets(env: Any) -> Iterator[list[None]]:
    """Yields a list that gets an element for each call of `reset` of the environment and its wrappers."""
    calls: list[None] = []
    with contextlib.ExitStack() as stack:
        layer = env
        while layer is not None:
            stack.enter_context(mock.patch.object(layer, "reset", _recording(layer.reset, calls)))
            layer = vars(layer).get("env")
        yield calls


def _recording(reset: Callable[..., Any], calls: list[None]) -> Callable[..., Any]:
    @functools.wraps(reset)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return reset(*args, **kwargs)

    return recorded


def _counters(env: Any) -> dict[str, float]:
    """Returns attributes of the innermost environment with names of counters, and the clocks of MuJoCo and Atari."""
    inner = env.unwrapped
    values = {name: value for name, value in vars(inner).items() if name.lstrip("_") in COUNTERS}
    if hasattr(getattr(inner, "data", None), "time"):
        values["data.time"] = inner.data.time
    if hasattr(getattr(inner, "ale", None), "getEpisodeFrameNumber"):
        values["ale.getEpisodeFrameNumber()"] = inner.ale.getEpisodeFrameNumber()
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float | np.number)}


def _reset_often(env: Any, seed: int, observations: Observations) -> Starts:
    seeded = [observations.see(_reset(env, seed + i)) for i in range(_RESETS)]
    following = [observations.see(_reset(env))[1] for _ in range(_RESETS)]
    obs, digest = (np.stack(values) for values in zip(*seeded, strict=True))
    return Starts(obs=obs, digest=digest, following=np.stack(following))


def _measure_speed(env: Any, actions: PyTree, masks: Masks) -> Check:
    dtypes = dtypes_of(env.action_space)
    obs, begin, steps = _reset(env), time.perf_counter(), 0
    with report_exceptions("runs", "step during the measurement of speed"):
        while (seconds := time.perf_counter() - begin) < _SPEED_SECONDS:
            action = masks.choose(obs, actions_at(actions, steps % num_steps_of(actions)))
            obs, _, terminated, truncated = read_step(env.step(_env_action(dtypes, action)))
            steps += 1
            if terminated or truncated:
                obs = _reset(env)
    return rules.judge_speed(steps, seconds, "one environment in one process")
