"""Checks of Gymnasium's vector environments: those that a function of num_envs makes, and EnvPool's."""

import time

import jax
import numpy as np

from jppo.envs.checks import rules
from jppo.envs.checks.report import FAIL, PASS, Check
from jppo.envs.checks.trajectory import RaisedError, Starts, Trace, draw_actions
from jppo.envs.gymnasium import HostEnvironment
from jppo.envs.observations import MisfitError, Observations

_RESETS = 32


def check(host: HostEnvironment, steps: int, seed: int, num_envs: int) -> list[Check]:
    """All findings, as jppo steps it: with the final observations that its autoreset mode promises.

    Raises MisfitError, and RaisedError for whatever the environment raises.
    """
    seeds = list(range(seed, seed + num_envs))
    actions = draw_actions(host.action_spec, seed, steps, num_envs)
    observations = Observations(host.obs_space, casts=True)
    begin = time.perf_counter()
    try:
        trace = _play(host, seeds, actions, observations)
        seconds = time.perf_counter() - begin
        again = _play(host, seeds, actions, observations)
        many = host.make(list(range(seed, seed + _RESETS)))
        obs, digest = observations.see(many.reset(), (_RESETS,))
        many.close()
    except MisfitError:
        raise
    except (Exception, SystemExit) as error:  # whatever the environment raises is a finding
        if "without final_obs in the infos" in str(error):
            return [Check("autoreset", FAIL, str(error), "do as the autoreset_mode in the metadata says")]
        raise RaisedError("playing it") from error
    starts = Starts(obs, digest, np.zeros(0, np.uint32))
    return [
        Check("runs", PASS, f"{2 * trace.reward.size:,} steps, {int(2 * trace.done.sum()):,} episodes"),
        Check("contract", PASS, "as Gymnasium's vector environments"),
        *rules.judge_all(observations, host.action_spec, trace, again, starts, "made anew"),
        Check("autoreset", PASS, f"final observations came with all {int(trace.done.sum()):,} ends"),
        rules.judge_speed(trace.reward.size, seconds, f"{num_envs} side by side"),
    ]


def _play(host: HostEnvironment, seeds: list[int], actions: np.ndarray, observations: Observations) -> Trace:
    envs, lead = host.make(seeds), (len(seeds),)
    try:
        seen = [observations.see(jax.tree.map(np.copy, envs.reset()), lead)]
        finals, ends = [], []
        for action in actions:
            after = envs.step(action)
            seen.append(observations.see(after.obs, lead))
            final = seen[-1][0].copy()
            for i, obs in after.final_obs.items():
                final[i] = observations.see(obs)[0]
            finals.append(final)
            ends.append((after.reward.copy(), after.terminated.copy(), after.truncated.copy()))
    finally:
        envs.close()
    obs, digest = (np.stack(values) for values in zip(*seen, strict=True))
    reward, terminated, truncated = (np.stack(values) for values in zip(*ends, strict=True))
    return Trace(obs, digest, np.stack(finals), reward, terminated, truncated, {}, np.zeros(reward.shape, np.int32))
