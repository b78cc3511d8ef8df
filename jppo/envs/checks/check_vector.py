"""Checks of Gymnasium's vector environments, made by a function of num_envs or by EnvPool, and of several agents.

With several agents, there are num_envs environments, and each agent is a row.
"""

import contextlib
import time
from collections.abc import Iterator

import jax
import numpy as np

from jppo.envs.checks import rules
from jppo.envs.checks.masks import Masks
from jppo.envs.checks.report import Check, passed, report_exceptions
from jppo.envs.checks.trajectory import Starts, Trace, TraceStep, actions_at, draw_actions, num_steps_of, stack_trace
from jppo.envs.gymnasium import HostEnvironment
from jppo.envs.observations import Observations
from jppo.envs.spaces import PyTree

_RESETS = 32


def check(host: HostEnvironment, steps: int, seed: int, num_envs: int) -> Iterator[Check]:
    """Yields the results of all checks. Final observations come from the autoreset mode, as in a run."""
    seeds = list(range(seed, seed + num_envs * host.num_agents))
    actions = draw_actions(host.action_spec, seed, steps, num_envs, host.num_agents)
    observations, masks = Observations(host.obs_space, casts=True), Masks(host.obs_spec, host.action_spec)
    begin = time.perf_counter()
    with report_exceptions("runs", "reset or step"):
        trace = _play(host, seeds, actions, observations, masks)
        seconds = time.perf_counter() - begin
        again = _play(host, seeds, actions, observations, masks)
        with contextlib.closing(host.make(list(range(seed, seed + _RESETS * host.num_agents)))) as many:
            obs, digest = observations.see(many.reset(), (_RESETS * host.num_agents,))
    starts = Starts(obs=obs, digest=digest, following=np.zeros(0, np.uint32))
    yield passed("runs", f"{2 * trace.reward.size:,} steps, {int(2 * trace.ends.sum()):,} episodes")
    yield passed("contract", "the values are those of Gymnasium's vector environments")
    how = "in new instances"
    yield from rules.judge_all(observations, host.action_spec, trace, again, starts, how, host.num_agents)
    yield masks.judge()
    yield passed("autoreset", f"all {int(trace.ends.sum()):,} ended episodes have final observations")
    rows = "agents" if host.num_agents > 1 else "environments"
    yield rules.judge_speed(trace.reward.size, seconds, f"{len(seeds)} {rows} in one process")


def _play(host: HostEnvironment, seeds: list[int], actions: PyTree, observations: Observations, masks: Masks) -> Trace:
    lead, no_resets = (len(seeds),), np.zeros(len(seeds), np.int32)
    trace_steps = []
    with contextlib.closing(host.make(seeds)) as envs:
        inputs = jax.tree.map(np.copy, envs.reset())
        start = *observations.see(inputs, lead), envs.active.copy()
        for t in range(num_steps_of(actions)):
            after = envs.step(masks.choose(inputs, actions_at(actions, t), lead))
            inputs = after.obs
            obs, digest = observations.see(after.obs, lead)
            final = obs.copy()
            for i, last in after.final_obs.items():
                final[i] = observations.see(last)[0]
            step = TraceStep(
                obs=obs,
                digest=digest,
                final=final,
                reward=after.reward.copy(),
                terminated=after.terminated.copy(),
                truncated=after.truncated.copy(),
                resets=no_resets,
                active=envs.active.copy(),
                counters={},
            )
            trace_steps.append(step)
    return stack_trace(*start, {}, trace_steps)
