"""What a trace says: a function per check, the same ones for both kinds of environment."""

import numpy as np

from jppo.envs.checks.report import FAIL, PASS, SKIPPED, WARN, Check
from jppo.envs.checks.trajectory import Starts, Trace, alike
from jppo.envs.observations import Observations
from jppo.envs.spaces import ActionSpec
from jppo.errors import describe_error

_FEW = 3  # ends of episodes, below which nothing is concluded from them
_ORDINARY = 20  # ordinary steps, likewise


def judge_all(
    observations: Observations, action_spec: ActionSpec, trace: Trace, again: Trace, starts: Starts, how: str
) -> list[Check]:
    """The checks that need a trace only.

    Args:
      again: the same seeds and actions.
      how: that second time came about.
    """
    return [
        judge_spaces(observations),
        judge_actions(action_spec),
        judge_finite(observations, trace),
        judge_determinism(trace, again, how),
        judge_seeds(trace),
        judge_starts(starts, trace),
        judge_time_limit(trace),
        judge_final_obs(trace, starts),
        judge_hidden_reset(trace, starts),
    ]


def judge_spaces(observations: Observations) -> Check:
    """Observations against the space: fails where jppo would lose something (numbers that do not fit the dtype, and
    categories that there are not); a Box's bounds and the kind of float change nothing in training, and warn."""
    faults = observations.faults
    if "categories" in faults:
        return Check("spaces", FAIL, faults["categories"], "declare as many categories as there are (n, start)")
    if "loss" in faults:
        return Check("spaces", FAIL, faults["loss"], "declare the dtype that you return: casting would lose digits")
    if "range" in faults:
        return Check("spaces", WARN, faults["range"], "declare wider bounds, or clip; PPO does not use them")
    if "dtype" in faults:
        return Check("spaces", WARN, faults["dtype"], "return the dtype that you declare")
    return Check("spaces", PASS, "shapes, dtypes and bounds as declared")


def judge_actions(spec: ActionSpec) -> Check:
    """The action space: fails where it leaves nothing to choose; warns of boxes without bounds, since their samples
    reach the environment unscaled."""
    if spec.num_actions:
        if spec.num_actions == 1:
            return Check("actions", FAIL, "there is one action", "declare at least two")
        return Check("actions", PASS, f"{spec.num_actions} actions, from {spec.start}")
    low, high = np.asarray(spec.low, np.float64), np.asarray(spec.high, np.float64)
    if not (low < high).all():
        where = int(np.argmin(low < high))
        seen = f"dimension {where} is from {low[where]:g} to {high[where]:g}"
        return Check("actions", FAIL, seen, "low must be less than high")
    if not np.isfinite(high - low).all():
        seen = f"{int((~np.isfinite(high - low)).sum())} of {low.size} dimensions have no bounds"
        return Check("actions", WARN, seen, "declare bounds, to which PPO scales its samples")
    return Check("actions", PASS, f"{low.size} real numbers, from {low.min():g} to {high.max():g}")


def judge_finite(observations: Observations, trace: Trace) -> Check:
    """No NaN and no infinity in any observation or reward."""
    bad = ~np.isfinite(trace.reward)
    advice = "look for divisions by 0, logarithms, and simulations that blow up; end the episode before"
    if bad.any():
        step, env = np.argwhere(bad)[0]
        return Check("finite", FAIL, f"reward {trace.reward[step, env]} at step {step} of environment {env}", advice)
    if "finite" in observations.faults:
        return Check("finite", FAIL, observations.faults["finite"], advice)
    return Check("finite", PASS, f"rewards from {trace.reward.min():g} to {trace.reward.max():g}")


def judge_determinism(first: Trace, again: Trace, how: str) -> Check:
    """The same seeds and actions, twice: observations, rewards and ends must be equal to the bit.

    Args:
      how: the second time came about.
    """
    if (unlike := first.digest[0] != again.digest[0]).any():
        seen = f"the seed of environment {int(unlike.argmax())} gives another start the second time ({how})"
        return Check("determinism", FAIL, seen, "draw from what the seed seeds: self.np_random, or the key")
    pairs = (
        *(("observations", first.digest[1:], again.digest[1:]), ("rewards", first.reward, again.reward)),
        *(("terminated", first.terminated, again.terminated), ("truncated", first.truncated, again.truncated)),
    )
    differ = {name: _unlike(a, b) for name, a, b in pairs}
    found = [(int(np.argwhere(unlike)[0][0]), name) for name, unlike in differ.items() if unlike.any()]
    if found:
        step, name = min(found)
        seen = f"{name} differ from step {step} on ({how})"
        advice = "draw from what the seed seeds only, and set everything anew in reset"
        return Check("determinism", FAIL, seen, advice)
    return Check("determinism", PASS, f"equal to the bit ({how})")


def judge_seeds(trace: Trace) -> Check:
    """Environments with the same actions and different seeds: they should not do the same. Warns, since a
    deterministic game is a game; but N copies of it see only what the policy's own randomness makes different."""
    group = trace.digest[:, : alike(trace.digest.shape[1])]
    if group.shape[1] < 2:
        return Check("seeds", SKIPPED, "one environment", "check two or more, made by name or by a function")
    rewards = trace.reward[:, : group.shape[1]]
    unlike = (group[1:] != group[1:, :1]) | _unlike(rewards, rewards[:, :1])
    starts = group[0] != group[0, 0]
    if not unlike.any() and not starts.any():
        seen = f"{group.shape[1]} seeds, the same actions: the same {len(rewards):,} steps"
        return Check("seeds", WARN, seen, "if it should be random, draw from the seed; if not, nothing")
    since = "the start" if starts.any() else f"step {int(unlike.any(axis=1).argmax())}"
    return Check("seeds", PASS, f"seeds differ from {since} on")


def judge_starts(starts: Starts, trace: Trace) -> Check:
    """How many different starts there are, by seed and one after the other. Fails where seeds give different ones and
    resets that follow without a seed all give one: the environment seeds itself in every reset."""
    resets, by_seed = len(starts.digest), len(np.unique(starts.digest))
    if len(starts.following):
        repeats, varied = len(starts.following) - 1, len(np.unique(starts.following)) > 1
    else:
        ends = [trace.digest[1:, i][trace.done[:, i]] for i in range(trace.digest.shape[1])]
        repeats, varied = sum(max(0, len(e) - 1) for e in ends), any(len(np.unique(e)) > 1 for e in ends)
    if repeats >= _FEW and not varied and by_seed > resets // 2:
        seen = f"{by_seed} different starts of {resets} seeds, but the same one after every episode"
        return Check("starts", FAIL, seen, "reset without a seed must go on drawing, not begin with a fixed seed")
    seen = f"{by_seed} different start{'s' * (by_seed > 1)} in {resets} resets"
    return Check("starts", PASS, seen)


def judge_time_limit(trace: Trace) -> Check:
    """Ends by time must be truncated: warns where every episode is terminated after the same number of steps."""
    ended = np.concatenate([_lengths(trace.done[:, i]) for i in range(trace.done.shape[1])])
    truncated, terminated = int(trace.truncated.sum()), int(trace.terminated.sum())
    seen = f"{len(ended)} episodes: {terminated} terminated, {truncated} truncated"
    if len(ended) < _FEW:
        return Check("time_limit", SKIPPED, f"{seen} in {len(trace.done):,} steps", "use more --steps")
    if not truncated and len(np.unique(ended)) == 1 and ended[0] > 1:
        seen = f"every episode is terminated after {ended[0]} steps"
        return Check("time_limit", WARN, seen, "if that is a time limit, it is truncated; if the game is over, nothing")
    return Check("time_limit", PASS, seen)


def judge_final_obs(trace: Trace, starts: Starts) -> Check:
    """The last observation of each episode must be what its last step led to. Fails where it is always the start of
    the next episode, where the environment resets itself in the last step, or where it jumps to a start."""
    done = trace.done
    ends, advice = int(done.sum()), "return what the last step led to; who calls step resets"
    if (done & (trace.resets > 0)).any():
        seen = "step calls reset itself when an episode ends, so its last observation is lost"
        return Check("final_obs", FAIL, seen, advice)
    if ends < _FEW:
        seen = f"{ends} episodes ended in {len(done):,} steps"
        return Check("final_obs", SKIPPED, seen, "use more --steps")
    moved = np.any(_unlike(trace.final, trace.obs[1:]), axis=-1)
    starts_vary = bool(np.ptp(trace.obs[1:][done], axis=0).any())
    if starts_vary and not moved[done].any():
        return Check("final_obs", FAIL, f"after all {ends} ends it is the reset observation", advice)
    if moved[~done].any():
        seen = "in the midst of an episode it is another than the observation"
        return Check("final_obs", FAIL, seen, "the final observation of a step is what the step led to")
    inside, jumps = (of_step[done] for of_step in _starts_anew(trace, starts, trace.final))
    if inside.all() and jumps.sum() >= _FEW:
        seen = f"it is where episodes start in all {ends} ends, by a jump in {int(jumps.sum())}"
        return Check("final_obs", FAIL, seen, advice)
    return Check("final_obs", PASS, f"of the episode that ended, in {ends} ends")


def judge_hidden_reset(trace: Trace, starts: Starts) -> Check:
    """Nothing may begin anew in the midst of an episode.

    Fails where the environment calls its own reset there, and where a counter of steps goes back. A counter is a number
    of the state with a name such as `time` that grows in most steps. Where none begins anew with each episode, warns
    where an observation gets to where episodes start from elsewhere, by a jump of more than twice the largest of other
    steps.
    """
    within = ~trace.done
    advice = "return terminated or truncated where an episode ends, and leave the reset to who calls step"
    if (within & (trace.resets > 0)).any():
        step, env = np.argwhere(within & (trace.resets > 0))[0]
        seen = f"step calls reset itself at step {step} of environment {env}, without terminated or truncated"
        return Check("hidden_reset", FAIL, seen, advice)
    counters = {name: values for name, values in trace.counters.items() if _counts(values, within)}
    for name, values in counters.items():
        back = within & (values[1:] < values[:-1])
        if back.any():
            step, env = np.argwhere(back)[0]
            moved = f"from {values[step, env]:g} to {values[step + 1, env]:g}"
            seen = f"{name} goes back {moved} at step {step} of environment {env}, without terminated or truncated"
            return Check("hidden_reset", FAIL, seen, advice)
    of_episodes = [name for name, values in counters.items() if _restarts(values, trace.done)]
    if of_episodes:
        return Check("hidden_reset", PASS, f"{', '.join(of_episodes)} grows within episodes")
    jumps = within & _starts_anew(trace, starts, trace.obs[1:])[1]
    if jumps.any():
        step, env = np.argwhere(jumps)[0]
        seen = f"the observation jumps to a start {int(jumps.sum())} times, first at step {step} of environment {env}"
        return Check("hidden_reset", WARN, seen, f"if that is a reset, {advice}; if the game does so, nothing")
    return Check("hidden_reset", PASS, "no observation jumps to a start")


def judge_speed(steps: int, seconds: float, how: str) -> Check:
    """Says how fast it is; never fails."""
    return Check("speed", PASS, f"{steps / seconds:,.0f} steps/s ({how})")


def raised(name: str, what: str, error: BaseException, where: str) -> Check:
    """Of an environment that raised.

    Args:
      where: its traceback.
    """
    return Check(name, FAIL, f"{what} raised {describe_error(error)}", "see the traceback", where)


def _lengths(done: np.ndarray) -> np.ndarray:
    """Steps of each episode that ended; done [T]."""
    return np.diff(np.flatnonzero(done), prepend=-1)


def _unlike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where they differ; NaN is like NaN."""
    return np.asarray(~np.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True))


def _counts(values: np.ndarray, within: np.ndarray) -> bool:
    """Whether a number grows in most steps; values [T+1, N], within [T, N]."""
    return bool(within.any()) and bool((np.diff(values, axis=0)[within] > 0).mean() > 0.5)


def _restarts(values: np.ndarray, done: np.ndarray) -> bool:
    """Whether a counter does not grow wherever an episode ends; else it may count all steps there were."""
    return bool(done.any()) and bool((values[1:] <= values[:-1])[done].all())


def _starts_anew(trace: Trace, starts: Starts, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[T, N] bool each: whether a step leads to where episodes start, and whether by a jump unlike that of other steps.

    That is the box around the starts, twice as large each way. Jumps are measured in units of each number's own range
    over everything seen. Where starts are all over the place, hardly any step ends outside, and none counts as a jump.
    """
    before, low, high = trace.obs[:-1], starts.obs.min(0), starts.obs.max(0)
    with np.errstate(invalid="ignore", over="ignore"):  # infinities are another check's
        margin = 0.5 * (high - low) + 1e-6
        inside = ((after >= low - margin) & (after <= high + margin)).all(-1)
        came_in = inside & ((before < low - margin) | (before > high + margin)).any(-1)
        extent = np.maximum(np.ptp(before, axis=(0, 1)), np.ptp(after, axis=(0, 1)))
        jump = np.sqrt(np.mean(np.square((after - before) / np.where(extent > 0, extent, 1.0)), axis=-1))
    ordinary = jump[~inside & ~trace.done]
    if len(ordinary) < _ORDINARY:
        return inside, np.zeros_like(inside)
    return inside, came_in & (jump > 2.0 * ordinary.max())
