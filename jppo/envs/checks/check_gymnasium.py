"""Checks of environments in Gymnasium's API, on the host."""

import contextlib
import copy
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jppo.envs.checks import check_vector, rules
from jppo.envs.checks.report import FAIL, PASS, SKIPPED, Check, refused
from jppo.envs.checks.trajectory import COUNTERS, RaisedError, Starts, Trace, draw_actions
from jppo.envs.contract import BrokenContractError, read_reset, read_step
from jppo.envs.gymnasium import HostEnvironment, make_source, open_host_env
from jppo.envs.observations import MisfitError, Observations
from jppo.envs.spaces import PyTree

NAMES: tuple[str, ...] = (
    *("runs", "contract", "spaces", "actions", "finite", "determinism", "seeds", "starts", "time_limit"),
    *("final_obs", "hidden_reset", "autoreset", "speed"),
)
_RESETS = 32
_SPEED_SECONDS = 0.3
_PACKAGE = Path(__file__).parent.parent
_AS_DECLARED = "reset returns two values, step five, of the right types"


def is_made(env: Any) -> bool:
    """Whether it is an environment itself, not what makes one."""
    return not isinstance(env, type) and hasattr(env, "reset") and hasattr(env, "step")


def check(env: Any, steps: int, seed: int, num_envs: int) -> list[Check]:
    """All findings; ends at one after which no other could be made.

    Args:
      env: see `make_host_env`; or an environment itself, of which there is then only one, and which stays open.
      steps: of each environment.
    """
    try:
        if is_made(env):
            if hasattr(env, "num_envs"):
                raise ValueError("give a function (num_envs) that makes the vector environment")
            return _check_singles(lambda: _lent(env), steps, seed, [env])
        first = _made(env, seed)
        if not hasattr(first, "num_envs"):
            with contextlib.ExitStack() as stack:
                envs = [first, *(_made(env, seed) for _ in range(num_envs - 1))]
                for one in envs:
                    stack.callback(one.close)
                return _check_singles(env, steps, seed, envs)
        first.close()
        host = _accept(env)
        return [host] if isinstance(host, Check) else check_vector.check(host, steps, seed, num_envs)
    except BrokenContractError as error:
        return [Check("runs", PASS, "reset and step raise nothing"), Check("contract", FAIL, *error.args)]
    except MisfitError as error:
        return [Check("spaces", FAIL, str(error), "declare the space of what you return")]
    except RaisedError as error:
        cause = error.__cause__
        assert cause is not None, "it is raised from what the environment raised"
        return [rules.raised("runs", str(error), cause, "".join(traceback.format_exception(cause)))]


def _made(source: Any, seed: int) -> Any:
    try:
        env = make_source(source, [seed])
    except (Exception, SystemExit) as error:  # whatever the environment raises is a finding
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if isinstance(error, ValueError) and raised_in.is_relative_to(_PACKAGE):  # of names and packages
            raise
        raise RaisedError("making it") from error
    if not hasattr(env, "reset") or not hasattr(env, "step"):
        raise BrokenContractError(f"a {type(env).__name__} was made", "make a gymnasium.Env")
    return env


def _lent(env: Any) -> Any:
    """The same one, which cannot be closed."""
    lent = copy.copy(env)
    lent.close = lambda: None
    return lent


def _check_singles(source: Any, steps: int, seed: int, envs: list[Any]) -> list[Check]:
    """One environment per seed, played one after the other; then again, each by the next one's seed."""
    seeds = list(range(seed, seed + len(envs)))
    if len({id(one.unwrapped) for one in envs}) < len(envs):
        raise BrokenContractError("the same environment was made twice", "make a new one in each call")
    for one in envs:
        _reset(one, seed)
    host = _accept(source)
    if isinstance(host, Check):
        return [_first_step(envs[0], seed), host]
    actions = draw_actions(host.action_spec, seed, steps, len(envs))
    observations = Observations(host.obs_space, casts=True)
    trace = _play_all(envs, seeds, actions, observations)
    again = _play_all([*envs[1:], envs[0]], seeds, actions, observations)
    starts = _starts(envs[0], seed, observations)
    how = "in another one of them, played before" if len(envs) > 1 else "in the same one, played before"
    return [
        Check("runs", PASS, f"{2 * trace.reward.size:,} steps, {int(2 * trace.done.sum()):,} episodes"),
        Check("contract", PASS, _AS_DECLARED),
        *rules.judge_all(observations, host.action_spec, trace, again, starts, how),
        Check("autoreset", SKIPPED, "one environment; jppo resets it in the step that ends an episode"),
        _speed(envs[0], actions[:, 0]),
    ]


def _accept(source: Any) -> HostEnvironment | Check:
    """As jppo takes it, or why it does not."""
    try:
        return open_host_env(source)
    except ValueError as error:
        return refused(error, "see docs/extending.md")


def _first_step(env: Any, seed: int) -> Check:
    """The contract, of an environment that cannot be played."""
    _reset(env, seed)
    _step(env, env.action_space.sample(), "the first step")
    return Check("contract", PASS, _AS_DECLARED)


def _reset(env: Any, seed: int | None) -> PyTree:
    """An observation. Raises BrokenContractError unless two values are returned, the second a dict."""
    try:
        returned = env.reset(seed=seed) if seed is not None else env.reset()
    except (Exception, SystemExit) as error:  # whatever the environment raises is a finding
        if isinstance(error, TypeError) and "seed" in str(error):
            raise BrokenContractError("reset takes no seed", "reset(self, *, seed=None, options=None)") from error
        raise RaisedError("reset") from error
    return read_reset(returned)


def _step(env: Any, action: Any, when: str) -> tuple[PyTree, float, bool, bool]:
    """Observation, reward, terminated and truncated. Raises BrokenContractError for other numbers or types."""
    try:
        returned = env.step(action)
    except (Exception, SystemExit) as error:  # whatever the environment raises is a finding
        raise RaisedError(f"{when} with action {action}") from error
    return read_step(returned)


def _play_all(envs: list[Any], seeds: list[int], actions: np.ndarray, observations: Observations) -> Trace:
    lanes = [
        _play(env, seed, actions[:, i], observations) for i, (env, seed) in enumerate(zip(envs, seeds, strict=True))
    ]
    names = set.intersection(*(set(lane.counters) for lane in lanes))
    bare = [lane._replace(counters={name: lane.counters[name] for name in names}) for lane in lanes]
    return jax.tree.map(lambda *leaves: np.stack(leaves, 1), *bare)


def _play(env: Any, seed: int, actions: np.ndarray, observations: Observations) -> Trace:
    """One environment; a Trace without N."""
    seen = [observations.see(_reset(env, seed))]
    counts, finals, ends, resets = [_counters(env)], [], [], []
    for t, action in enumerate(actions):
        with _counting_resets(env) as calls:
            obs, *end = _step(env, _taken(action), f"step {t}")
        resets.append(len(calls))
        final = observations.see(obs)
        finals.append(final[0])
        ends.append(end)
        seen.append(observations.see(_reset(env, None)) if end[1] or end[2] else final)
        counts.append(_counters(env))
    obs, digest = (np.stack(values) for values in zip(*seen, strict=True))
    reward, terminated, truncated = (np.array(values) for values in zip(*ends, strict=True))
    names = set.intersection(*map(set, counts))
    counters = {name: np.array([count[name] for count in counts], np.float64) for name in names}
    return Trace(obs, digest, np.stack(finals), reward, terminated, truncated, counters, np.array(resets, np.int32))


def _taken(action: np.ndarray) -> Any:
    """Gymnasium's Discrete actions are NumPy numbers; boxes are arrays, of which each step gets its own."""
    return action.copy() if action.ndim else action[()]


@contextlib.contextmanager
def _counting_resets(env: Any) -> Iterator[list[Any]]:
    """Meanwhile every layer of wrappers notes the calls of its reset, in the list."""
    calls: list[Any] = []
    layers = _layers(env)
    before = [vars(layer).get("reset") for layer in layers]
    for layer in layers:
        layer.reset = _noting(layer.reset, calls)
    try:
        yield calls
    finally:
        for layer, reset in zip(layers, before, strict=True):
            if reset is None:
                del layer.reset
            else:
                layer.reset = reset


def _layers(env: Any) -> list[Any]:
    inner = vars(env).get("env")
    return [env] if inner is None else [env, *_layers(inner)]


def _noting(reset: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return reset(*args, **kwargs)

    return noted


def _counters(env: Any) -> dict[str, float]:
    """Numbers of the innermost environment that are named like counters; of MuJoCo's and Atari's too."""
    inner = env.unwrapped
    names = {name: value for name, value in vars(inner).items() if name.lstrip("_") in COUNTERS}
    if hasattr(getattr(inner, "data", None), "time"):
        names["data.time"] = inner.data.time
    if hasattr(getattr(inner, "ale", None), "getEpisodeFrameNumber"):
        names["ale.getEpisodeFrameNumber()"] = inner.ale.getEpisodeFrameNumber()
    return {name: float(value) for name, value in names.items() if isinstance(value, int | float | np.number)}


def _starts(env: Any, seed: int, observations: Observations) -> Starts:
    seeded = [observations.see(_reset(env, seed + i)) for i in range(_RESETS)]
    following = [observations.see(_reset(env, None))[1] for _ in range(_RESETS)]
    obs, digest = (np.stack(values) for values in zip(*seeded, strict=True))
    return Starts(obs, digest, np.stack(following))


def _speed(env: Any, actions: np.ndarray) -> Check:
    _reset(env, None)
    begin, t = time.perf_counter(), 0
    while (seconds := time.perf_counter() - begin) < _SPEED_SECONDS:
        _, _, terminated, truncated = _step(env, _taken(actions[t % len(actions)]), "while timing")
        t += 1
        if terminated or truncated:
            _reset(env, None)
    return rules.judge_speed(t, seconds, "one environment in one process")
