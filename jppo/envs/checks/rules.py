"""The checks of recorded steps, which are the same for gymnax and Gymnasium."""

from collections.abc import Iterator

import jax
import numpy as np

from jppo.envs.checks.report import FAIL, PASS, SKIPPED, WARN, Check, failed, passed, skipped, warning
from jppo.envs.checks.trajectory import Starts, Trace, num_alike
from jppo.envs.observations import Observations
from jppo.envs.spaces import ActionSpec, PyTree

_WORST = (FAIL, WARN, PASS, SKIPPED)
_BEST = (PASS, SKIPPED, WARN)
_MIN_ENDS = 3  # minimum number of ended episodes for a conclusion
_MIN_STEPS = 20  # minimum number of steps outside the region of starts, likewise
_RETURN_NEXT = "return the observation that the step led to; the caller resets the environment afterwards"
_END_EPISODE = "return terminated or truncated where an episode ends; the caller resets the environment afterwards"
_KEEP_FINITE = "look for divisions by 0, logarithms and unstable simulations; end the episode before"
_SPACE_FAULTS = (  # kinds of Observations.faults, most severe first
    ("categories", FAIL, "declare the right number of categories (n, start), or a larger high"),
    ("loss", FAIL, "declare the dtype of the returned observations; the cast to the declared one loses digits"),
    ("range", WARN, "declare wider bounds, or clip the observations; PPO does not use the bounds"),
    ("dtype", WARN, "return the declared dtype"),
)


def judge_all(
    observations: Observations,
    action_spec: PyTree,
    trace: Trace,
    again: Trace,
    starts: Starts,
    how: str,
    num_agents: int = 1,
) -> Iterator[Check]:
    """Yields the results of the checks in this module.

    Args:
      again: a second trace with the same seeds and actions.
      how: how the second trace was made.
      num_agents: number of agents of each environment.
    """
    yield judge_spaces(observations)
    yield judge_actions(action_spec)
    agents = [
        (trace.of_agent(i, num_agents), again.of_agent(i, num_agents), starts.of_agent(i, num_agents))
        for i in range(num_agents)
    ]
    rewards = _choose([judge_rewards(one) for one, _, _ in agents], _WORST)
    yield rewards if rewards.status == FAIL else judge_finite(observations) or rewards
    yield _choose([judge_determinism(one, other, how) for one, other, _ in agents], _WORST)
    yield _choose([judge_seeds(one) for one, _, _ in agents], _BEST)  # one agent that sees a difference suffices
    yield _choose([judge_starts(begin, one) for one, _, begin in agents], _WORST)
    yield _choose([judge_time_limit(one) for one, _, _ in agents], _WORST)
    yield _choose([judge_final_obs(one, begin) for one, _, begin in agents], _WORST)
    yield _choose([judge_hidden_reset(one, begin) for one, _, begin in agents], _WORST)


def _choose(checks: list[Check], order: tuple[str, ...]) -> Check:
    """Returns the first result of several agents in the order of statuses, with the number of the agent."""
    agent = min(range(len(checks)), key=lambda i: order.index(checks[i].status))
    chosen = checks[agent]
    if all(check.seen == chosen.seen for check in checks):
        return chosen
    number, unjudged = (sum(check.status == status for check in checks) for status in (chosen.status, SKIPPED))
    who = f"{number} of {len(checks)} agents, for example agent" if number > 1 else "agent"
    rest = f"; {unjudged} of {len(checks)} agents not judged" if unjudged and chosen.status != SKIPPED else ""
    return chosen._replace(seen=f"{who} {agent}: {chosen.seen}{rest}")


def judge_spaces(observations: Observations) -> Check:
    """Checks observations against their space. Faults that do not change the training are warnings."""
    for kind, status, advice in _SPACE_FAULTS:
        if kind in observations.faults:
            return Check(name="spaces", status=status, seen=observations.faults[kind], advice=advice)
    return passed("spaces", "shapes, dtypes and values are in the observation space")


def judge_actions(action_spec: PyTree) -> Check:
    """Checks the spaces of all actions. Returns the worst result."""
    order = (FAIL, WARN, PASS)
    return min(map(_judge_action, jax.tree.leaves(action_spec)), key=lambda check: order.index(check.status))


def _judge_action(spec: ActionSpec) -> Check:
    """Checks that there are at least two actions. Warns of missing bounds: such actions are not scaled."""
    if spec.num_actions:
        if spec.num_actions == 1:
            return failed("actions", "there is only one action", "declare at least two actions")
        return passed("actions", f"{spec.num_actions} discrete actions, numbered from {spec.start}")
    if spec.nvec:
        return passed("actions", f"{len(spec.nvec)} components of {min(spec.nvec)} to {max(spec.nvec)} actions")
    low, high = np.asarray(spec.low, np.float64), np.asarray(spec.high, np.float64)
    if not (low < high).all():
        i = int(np.argmin(low < high))
        seen = f"dimension {i} has the bounds {low[i]:g} and {high[i]:g}"
        return failed("actions", seen, "the lower bound must be less than the upper bound")
    if num_unbounded := int((~np.isfinite(high - low)).sum()):
        seen = f"{num_unbounded} of {low.size} dimensions have no bounds"
        return warning("actions", seen, "declare bounds, so that jppo can scale the actions")
    return passed("actions", f"{low.size} real numbers, from {low.min():g} to {high.max():g}")


def judge_rewards(trace: Trace) -> Check:
    """Checks that no reward is NaN or infinite."""
    if (bad := ~np.isfinite(trace.reward)).any():
        return failed("finite", f"reward {trace.reward[bad][0]} at {_first(bad)}", _KEEP_FINITE)
    return passed("finite", f"all numbers are finite; rewards from {trace.reward.min():g} to {trace.reward.max():g}")


def judge_finite(observations: Observations) -> Check | None:
    """Returns a failed check if an observation of any agent is NaN or infinite."""
    seen = observations.faults.get("finite")
    return failed("finite", seen, _KEEP_FINITE) if seen else None


def judge_determinism(first: Trace, again: Trace, how: str) -> Check:
    """Checks that two traces with the same seeds and actions are equal, bit for bit."""
    advice = "take all random numbers from self.np_random or the key, and set the whole state in reset"
    if (differs := first.digest[0] != again.digest[0]).any():
        seen = f"the seed of environment {differs.argmax()} gives another start the second time ({how})"
        return failed("determinism", seen, advice)
    differences = {
        "observations": first.digest[1:] != again.digest[1:],
        "rewards": _differs(first.reward, again.reward),
        "terminated": first.terminated != again.terminated,
        "truncated": first.truncated != again.truncated,
    }
    if found := [(int(np.argwhere(differs)[0][0]), name) for name, differs in differences.items() if differs.any()]:
        step, name = min(found)
        return failed("determinism", f"{name} differ from step {step} on ({how})", advice)
    return passed("determinism", f"identical when repeated ({how})")


def judge_seeds(trace: Trace) -> Check:
    """Warns if environments with the same actions and different seeds give the same trajectory."""
    number = num_alike(trace.digest.shape[1])
    if number < 2:
        return skipped("seeds", "there is only one environment", "use num_envs = 2 and a name or a function")
    digest, reward = trace.digest[:, :number], trace.reward[:, :number]
    if (digest[0] != digest[0, 0]).any():
        return passed("seeds", "trajectories of different seeds differ from the start on")
    differs = ((digest[1:] != digest[1:, :1]) | _differs(reward, reward[:, :1])).any(axis=1)
    if not differs.any():
        seen = f"{number} seeds with the same actions give the same {len(reward):,} steps"
        return warning("seeds", seen, "take random numbers from the seed; ignore this if the game is deterministic")
    return passed("seeds", f"trajectories of different seeds differ from step {differs.argmax()} on")


def judge_starts(starts: Starts, trace: Trace) -> Check:
    """Checks that resets without a seed do not all give the same start if different seeds give different ones."""
    resets, different = len(starts.digest), len(np.unique(starts.digest))
    if len(starts.following):
        groups = [starts.following]
    else:
        groups = [trace.digest[1:, i][trace.begins[:, i]] for i in range(trace.digest.shape[1])]
    repeats = sum(max(0, len(group) - 1) for group in groups)
    if repeats >= _MIN_ENDS and different > resets // 2 and all(len(np.unique(group)) <= 1 for group in groups):
        seen = f"{resets} seeds give {different} different starts, but all later episodes have the same start"
        return failed("starts", seen, "do not use a fixed seed in a reset without a seed")
    return passed("starts", f"{different} different start{'s' * (different > 1)} in {resets} resets")


def judge_time_limit(trace: Trace) -> Check:
    """Warns if every episode terminates after the same number of steps: time limits must truncate."""
    steps = np.cumsum(trace.active[:-1], axis=0)
    rows = zip(steps.T, trace.ends.T, strict=True)
    lengths = np.concatenate([np.diff(taken[ends], prepend=0) for taken, ends in rows])
    terminated = int((trace.terminated & trace.ends).sum())
    truncated = len(lengths) - terminated
    seen = f"{len(lengths)} episodes: {terminated} terminated, {truncated} truncated"
    if len(lengths) < _MIN_ENDS:
        return skipped("time_limit", f"{seen} in {len(trace.done):,} steps", "use more --steps")
    if not truncated and len(np.unique(lengths)) == 1 and lengths[0] > 1:
        seen = f"every episode terminates after {lengths[0]} steps"
        return warning("time_limit", seen, "truncate if this is a time limit; ignore this if the game is over")
    return passed("time_limit", seen)


def judge_final_obs(trace: Trace, starts: Starts) -> Check:
    """Checks that the last observation of an episode is not the first observation of the next one."""
    done, ends = trace.done, trace.ends
    num_ends = int(ends.sum())
    if (done & (trace.resets > 0)).any():
        seen = "step calls reset when an episode ends, so the last observation is lost"
        return failed("final_obs", seen, _RETURN_NEXT)
    if num_ends < _MIN_ENDS:
        seen = f"{num_ends} episodes ended in {len(done):,} steps"
        return skipped("final_obs", seen, "use more --steps")
    differs = np.any(_differs(trace.final, trace.obs[1:]), axis=-1)
    restarts = ends & trace.begins  # without the ends of agents that do not take part in the next step
    varies = restarts.sum() >= _MIN_ENDS and np.ptp(trace.obs[1:][restarts], axis=0).any()
    if varies and not differs[restarts].any():
        seen = f"equals the first observation of the next episode at all {int(restarts.sum())} ends"
        return failed("final_obs", seen, _RETURN_NEXT)
    if differs[~done].any():
        seen = "final_observation differs from the observation within an episode"
        return failed("final_obs", seen, _RETURN_NEXT)
    inside, jumps = (of_step[ends] for of_step in _return_to_start(trace, starts, trace.final))
    if inside.all() and jumps.sum() >= _MIN_ENDS:
        seen = f"is in the region of starts at all {num_ends} ends, after a jump at {int(jumps.sum())}"
        return failed("final_obs", seen, _RETURN_NEXT)
    return passed("final_obs", f"{num_ends} final observations belong to the episode that ended")


def judge_hidden_reset(trace: Trace, starts: Starts) -> Check:
    """Checks that no episode starts without terminated or truncated before.

    Fails if a step within an episode calls reset, or if a counter decreases there. A counter is a state variable with a
    name such as `time` that increases in most steps. If no counter restarts with each episode, warns if an observation
    jumps to the region of starts.
    """
    within = ~trace.done
    if (resets := within & (trace.resets > 0)).any():
        seen = f"step calls reset at {_first(resets)}, without terminated or truncated"
        return failed("hidden_reset", seen, _END_EPISODE)
    increases = {name: np.diff(values, axis=0)[within] > 0 for name, values in trace.counters.items()}
    counters = {name: trace.counters[name] for name, grows in increases.items() if grows.size and grows.mean() > 0.5}
    for name, values in counters.items():
        if (decreases := within & (values[1:] < values[:-1])).any():
            change = f"from {values[:-1][decreases][0]:g} to {values[1:][decreases][0]:g}"
            seen = f"{name} decreases {change} at {_first(decreases)}, without terminated or truncated"
            return failed("hidden_reset", seen, _END_EPISODE)
    begins = trace.begins  # other counters may count the steps of all episodes
    restarting = [name for name, x in counters.items() if begins.any() and (x[1:] <= x[:-1])[begins].all()]
    if restarting:
        return passed("hidden_reset", f"{', '.join(restarting)} increases within all episodes")
    if (jumps := within & _return_to_start(trace, starts, trace.obs[1:])[1]).any():
        seen = f"the observation jumps to the region of starts {int(jumps.sum())} times, first at {_first(jumps)}"
        return warning("hidden_reset", seen, f"{_END_EPISODE}. Ignore this if the game has such jumps")
    return passed("hidden_reset", "no observation jumps to the region of starts")


def judge_speed(steps: int, seconds: float, how: str) -> Check:
    """Reports the speed; never fails."""
    return passed("speed", f"{steps / seconds:,.0f} steps/s ({how})")


def _first(where: np.ndarray) -> str:
    """Describes the first true element [T, N]."""
    step, env = np.argwhere(where)[0]
    return f"step {step} of environment {env}"


def _differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns where two arrays differ; NaN equals NaN."""
    return np.asarray(~np.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True))


def _return_to_start(trace: Trace, starts: Starts, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns whether a step ends in the region of starts, and whether it jumps there; [T, N] bool each.

    The region is the box around all starts, enlarged to twice its size. A jump enters the region and is more than twice
    as large as every step that ends outside, in units of each number's range. If few steps end outside, because starts
    are spread over the whole space, there are no jumps.
    """
    before, low, high = trace.obs[:-1], starts.obs.min(0), starts.obs.max(0)
    with np.errstate(invalid="ignore", over="ignore"):  # another check reports infinities
        margin = 0.5 * (high - low) + 1e-6
        inside = ((after >= low - margin) & (after <= high + margin)).all(-1)
        enters = inside & ((before < low - margin) | (before > high + margin)).any(-1)
        active = trace.active[:-1]
        extent = np.maximum(
            *(np.ptp(x[active], axis=0) if active.any() else np.zeros(x.shape[-1]) for x in (before, after))
        )
        distance = np.sqrt(np.mean(np.square((after - before) / np.where(extent > 0, extent, 1.0)), axis=-1))
    outside = distance[~inside & ~trace.done]
    if len(outside) < _MIN_STEPS:
        return inside, np.zeros_like(inside)
    return inside, enters & (distance > 2.0 * outside.max())
