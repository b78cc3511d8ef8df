"""Compares four ways to compute the value of the final observation of truncated episodes.

    python benchmarks/truncation.py

cond        a critic pass at each step at which an episode was truncated (`jppo.ppo.rollout`)
batched     store all final observations; one critic pass over all T*N of them after the scan
every step  a critic pass at each step
compacted   store all final observations, gather the truncated ones; critic passes over N of them at a time

The program checks that all four give the same rollout. Under `vmap`, a condition becomes a selection that evaluates
both branches, so the forms are also timed with four seeds ("cond" then equals "every step").
"""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, WORKLOADS, Workload, hardware, interleaved

import jppo
from jppo.devices.jit import jit
from jppo.envs.spaces import Array, PyTree, to_env_action
from jppo.ppo.anakin import Anakin
from jppo.ppo.policy import Policy
from jppo.ppo.rollout import _values_where, collect, rollout_keys
from jppo.ppo.types import CollectState, PolicyState, Rollout, Transition
from jppo.runs.files import write_json

NUM_SEEDS = 4
TRAINED_UPDATES = 40


class Form(NamedTuple):
    """Functions of the final observations [N, ...] at each step, and of their results [T, N, ...] after the scan."""

    at_step: Callable[[Array, Policy, PolicyState, PyTree], PyTree]
    after_scan: Callable[[Array, Policy, PolicyState, PyTree], Array]  # V where truncated, [T, N]; arbitrary elsewhere


def keep(cut: Array, policy: Policy, state: PolicyState, x: PyTree) -> PyTree:
    return x


def value_of(cut: Array, policy: Policy, state: PolicyState, obs: PyTree) -> Array:
    return policy.step(state, obs)[1]


def value_of_all(cut: Array, policy: Policy, state: PolicyState, obs: PyTree) -> Array:
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)
    return policy.step(state, flat)[1].reshape(cut.shape)


def value_of_compacted(cut: Array, policy: Policy, state: PolicyState, obs: PyTree) -> Array:
    """Gathers the truncated rows and evaluates them in blocks of N."""
    num_envs, total = cut.shape[1], cut.size
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)
    (rows,) = jnp.nonzero(cut.reshape(-1), size=total, fill_value=total)

    def block(loop: tuple[Array, Array]) -> tuple[Array, Array]:
        first, values = loop
        chosen = jax.lax.dynamic_slice(rows, (first,), (num_envs,))
        value = policy.step(state, jax.tree.map(lambda x: x.at[chosen].get(mode="clip"), flat))[1]
        return first + num_envs, values.at[chosen].set(value, mode="drop")

    start = (jnp.zeros((), jnp.int32), jnp.zeros(total))
    _, values = jax.lax.while_loop(lambda loop: loop[0] < cut.sum(), block, start)
    return values.reshape(cut.shape)


def value_where_cut(cut: Array, policy: Policy, state: PolicyState, obs: PyTree) -> Array:
    return _values_where(cut, policy, state, obs, ())


FORMS = {
    "cond": Form(value_where_cut, keep),
    "batched": Form(keep, value_of_all),
    "every step": Form(value_of, keep),
    "compacted": Form(keep, value_of_compacted),
}


def collect_with(form: Form, agent: Anakin, policy_state: PolicyState, state: CollectState) -> Rollout:
    """Collects like `jppo.ppo.rollout.collect`, with another form of the final values and without statistics."""
    env, policy, config = agent.env, agent.policy, agent.config
    _, action_keys, step_keys = rollout_keys(state.key, config.num_steps)

    def step(
        carry: tuple[PyTree, PyTree], keys: tuple[Array, Array]
    ) -> tuple[tuple[PyTree, PyTree], tuple[Transition, PyTree]]:
        env_state, obs = carry
        distribution, value = policy.step(policy_state, obs)[:2]
        action = jax.vmap(lambda row, key: row.sample(seed=key))(distribution, keys[0])
        env_action = to_env_action(policy.action_spec, action)
        after = jax.vmap(env.step)(keys[1], env_state, env_action)
        transition = Transition(
            obs=obs,
            action=action,
            log_prob=distribution.log_prob(action),
            value=value,
            next_value=value,
            reward=after.reward,
            terminated=after.terminated,
            truncated=after.truncated,
        )
        final = form.at_step(cut_of(transition), policy, policy_state, after.final_obs)
        return (after.state, after.obs), (transition, final)

    (_, last_obs), (rollout, final) = jax.lax.scan(step, (state.env_state, state.obs), (action_keys, step_keys))
    cut = cut_of(rollout)
    final_value = jnp.where(cut, form.after_scan(cut, policy, policy_state, final), 0.0)
    following = jnp.concatenate([rollout.value[1:], policy.step(policy_state, last_obs)[1][None]])
    return rollout.replace(next_value=jnp.where(rollout.done, final_value, following))


def cut_of(transition: Transition) -> Array:
    return jnp.logical_and(transition.truncated, jnp.logical_not(transition.terminated))


def at_start(agent: Anakin, key: Array) -> tuple[PolicyState, CollectState]:
    """Returns a new policy, and environments at the first step of their episodes."""
    state = jit(agent.init)(key, jppo.Hyperparams())
    return state.train.policy_state, state.collect


def truncating(agent: Anakin, key: Array) -> tuple[PolicyState, CollectState]:
    """Returns a trained policy, and episodes with ages distributed evenly up to the time limit."""
    step = jit(agent.step, donate_argnums=0)
    state = jit(agent.init)(key, jppo.Hyperparams(learning_rate=1e-3))
    for _ in range(TRAINED_UPDATES):
        state, _ = step(state)
    num_envs, limit = agent.config.num_envs, agent.env.params.max_steps_in_episode
    age = jnp.arange(num_envs, dtype=jnp.int32) * limit // num_envs
    env_state = state.collect.env_state
    aged = env_state.replace(time=age.astype(env_state.time.dtype))
    return state.train.policy_state, state.collect.replace(env_state=aged)


def check_equal(rollouts: dict[str, Rollout], reference: Rollout) -> None:
    for name, rollout in rollouts.items():
        for field in ("action", "reward", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(rollout, field), getattr(reference, field), err_msg=f"{name} {field}")
        np.testing.assert_allclose(rollout.next_value, reference.next_value, rtol=1e-5, atol=1e-5, err_msg=name)


def measure(workload: Workload, start: Callable, repeats: int, max_others: float) -> dict[str, Any]:
    """Returns milliseconds of a rollout with each form, for one seed and for four seeds."""
    agent = jppo.make_anakin(workload.env, workload.config, total_steps=10**9)
    single = start(agent, jax.random.key(0))
    seeds = [single, *(start(agent, jax.random.key(i)) for i in range(1, NUM_SEEDS))]
    several = jax.tree.map(lambda *leaves: jnp.stack(leaves), *seeds)
    programs = {}
    for name, form in FORMS.items():
        function = functools.partial(collect_with, form, agent)
        programs[name] = jit(function).lower(*single).compile()
        if name != "every step":
            programs[f"{name}, {NUM_SEEDS} seeds"] = jit(jax.vmap(function)).lower(*several).compile()
    inputs = {name: several if "seeds" in name else single for name in programs}
    reference = jit(functools.partial(collect, agent.env, agent.policy, workload.num_steps))
    rollout = reference(*single, jnp.asarray(0.99))[1]
    check_equal({name: programs[name](*single) for name in FORMS}, rollout)
    times, others = interleaved(
        {name: functools.partial(program, *inputs[name]) for name, program in programs.items()}, repeats, max_others
    )
    cut = np.asarray(cut_of(rollout))
    return {
        "ms": {name: 1e3 * float(np.median(seconds)) for name, seconds in times.items()},
        "ratio_to_cond": {name: _ratio(times, name) for name in times},
        "temporary_mb": {name: p.memory_analysis().temp_size_in_bytes / 2**20 for name, p in programs.items()},
        **others,
        "truncated_samples": float(cut.mean()),
        "steps_with_truncation": float(cut.any(axis=1).mean()),
    }


def _ratio(times: dict[str, np.ndarray], name: str) -> float:
    """Returns the median over the rounds of the time divided by that of "cond"."""
    cond = f"cond, {NUM_SEEDS} seeds" if "seeds" in name else "cond"
    return float(np.median(times[name] / times[cond]))


def show(rows: list[dict[str, Any]]) -> None:
    names = list(rows[0]["ms"])
    table = Table("workload", "start", "steps with a truncation", *(f"{name} (ms, x)" for name in names))
    for row in rows:
        cells = (f"{row['ms'][name]:.1f}, {row['ratio_to_cond'][name]:.2f}" for name in names)
        table.add_row(row["workload"], row["start"], f"{row['steps_with_truncation']:.0%}", *cells)
    Console(width=170).print(table)


def main(
    workloads: tuple[str, ...] = ("W1", "W4", "W3"),
    repeats: int = 30,
    max_others: float = math.inf,
    output: Path = RESULTS / "truncation.json",
) -> None:
    """Compares four ways to compute the values of truncated episodes and writes JSON.

    Args:
      workloads: W1 to W4, see throughput.py.
      repeats: timed rollouts of each form.
      max_others: measure only while other processes keep at most this many cores busy (Linux).
      output: JSON file.
    """
    rows = []
    for name in workloads:
        for start in (at_start, truncating):
            row = {"workload": name, "env": WORKLOADS[name].env, "start": start.__name__.replace("_", " ")}
            rows.append(row | measure(WORKLOADS[name], start, repeats, max_others))
            print(json.dumps(rows[-1]), flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, {"rows": rows, **hardware()})
    show(rows)


if __name__ == "__main__":
    tyro.cli(main)
