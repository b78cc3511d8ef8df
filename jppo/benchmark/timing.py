"""The parts of an update as separate programs, and the time that each of them takes."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jppo.devices.jit import jit
from jppo.devices.mesh import AXIS, shard_over_devices
from jppo.envs.base import step_rows
from jppo.envs.masks import nearest_legal
from jppo.envs.spaces import ACTION_MASK, ActionSpec, Array, PyTree, to_env_action
from jppo.ppo.anakin import Anakin, AnakinState, collect_rollout
from jppo.ppo.normalization import pool_moments
from jppo.ppo.policy import act
from jppo.ppo.types import CollectState, EpisodeStats, Metrics, PolicyState, Rollout, TrainState
from jppo.training.device_loop import CHUNK_CAPACITY

Program = Callable[[int], Any]  # runs its part the given number of times, and returns when it has finished

_SAMPLE_SECONDS = 0.05
_MIN_ROUNDS = 5


def time_programs(
    programs: dict[str, Program], seconds: float, stop_requested: Callable[[], bool]
) -> dict[str, np.ndarray]:
    """Times programs in rounds. Each round runs every program, so that other load on the machine affects all of them.

    Args:
      seconds: total time of the slowest program; there are at least five rounds.

    Returns:
      seconds per run of each program, [rounds].

    Raises:
      KeyboardInterrupt: a stop was requested.
    """
    counts: dict[str, int] = {}
    rounds: list[list[float]] = []
    spent = 0.0
    for name, program in programs.items():
        program(1)
        counts[name] = max(1, min(int(_SAMPLE_SECONDS / _measure(program, 1)), CHUNK_CAPACITY))
    while spent < seconds or len(rounds) < _MIN_ROUNDS:
        if stop_requested():
            raise KeyboardInterrupt
        rounds.append([_measure(program, counts[name]) for name, program in programs.items()])
        spent += max(taken * counts[name] for name, taken in zip(programs, rounds[-1], strict=True))
    return dict(zip(programs, np.array(rounds).T, strict=True))


def _measure(program: Program, count: int) -> float:
    """Returns the seconds per run."""
    start = time.perf_counter()
    program(count)
    return (time.perf_counter() - start) / count


def repeat(function: Callable, *args: Any) -> Program:
    """Returns a program that calls a function with the same arguments and waits for each result."""

    def run(count: int) -> None:
        for _ in range(count):
            jax.block_until_ready(function(*args))

    return run


def random_actions(action_spec: PyTree, shape: tuple[int, ...], key: Array) -> PyTree:
    """Returns uniform random actions, leaves [*shape, *policy_shape]; continuous actions are between -1 and 1."""

    def draw(spec: ActionSpec, key: Array) -> Array:
        full = (*shape, *spec.policy_shape)
        if spec.is_box:
            return jax.random.uniform(key, full, minval=-1.0)
        return jax.random.randint(key, full, 0, np.broadcast_to(spec.nvec or spec.num_actions, full))

    specs, structure = jax.tree.flatten(action_spec)
    keys = jax.random.split(key, len(specs))
    return jax.tree.unflatten(structure, [draw(spec, key) for spec, key in zip(specs, keys, strict=True)])


def step_environments(agent: Anakin, state: CollectState, key: Array) -> CollectState:
    """Steps the environments num_steps times with random actions, without the policy."""
    env = agent.env
    shape = (agent.config.num_steps, len(state.episode.lengths))

    def step(state: CollectState, xs: tuple[Array, Array]) -> tuple[CollectState, None]:
        action, keys = xs
        env_action = to_env_action(agent.policy.action_spec, action)
        if agent.policy.has_mask:
            env_action = nearest_legal(agent.policy.action_spec, state.obs[ACTION_MASK], env_action)
        after = step_rows(env, keys, state.env_state, env_action)
        episode = state.episode.after(after.reward, 1.0)
        return state.replace(env_state=after.state, obs=after.obs, episode=episode), None

    actions_key, envs_key = jax.random.split(key)
    actions = random_actions(env.action_spec, shape, actions_key)
    return jax.lax.scan(step, state, (actions, jax.random.split(envs_key, shape)))[0]


def select_actions(agent: Anakin, state: PolicyState, obs: PyTree, key: Array) -> tuple[PyTree, Array, Array]:
    """Returns actions, log_probs and values for recorded observations [T, N, ...], as in a rollout."""

    def step(carry: PyTree, xs: tuple[PyTree, Array]) -> tuple[PyTree, tuple[PyTree, Array, Array]]:
        obs, keys = xs
        output = act(agent.policy, state, obs, keys, carry)
        return output.carry, (output.action, output.log_prob, output.value)

    shape = jax.tree.leaves(obs)[0].shape[:2]
    return jax.lax.scan(step, agent.policy.initial_carry(shape[1]), (obs, jax.random.split(key, shape)))[1]


def device_programs(agent: Anakin, state: AnakinState, key: Array) -> dict[str, Program]:
    """Returns the parts "environment", "policy" and "update" of an on-device run as programs over its devices.

    Policy and update get the data of a rollout that starts from `state`.
    """
    replicated, sharded, rollout_spec = PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(None, AXIS)

    def compile_over_devices(function: Callable, in_specs: Any, out_specs: Any) -> Any:
        return jit(shard_over_devices(function, agent.sharding.mesh, in_specs, out_specs))

    def roll_out(train_state: TrainState, collect_state: CollectState) -> tuple[Rollout, EpisodeStats]:
        _, rollout, stats = collect_rollout(agent.env, agent.policy, agent.config, train_state, collect_state)
        return rollout, jax.tree.map(lambda x: x[None], stats)  # [1] on each device

    def update(state: TrainState, rollout: Rollout, stats: EpisodeStats) -> tuple[TrainState, Metrics]:
        return agent.learner.update(state, rollout, pool_moments(stats))

    collect_data = compile_over_devices(roll_out, (replicated, sharded), (rollout_spec, sharded))
    rollout, stats = collect_data(state.train, state.collect)
    step = compile_over_devices(functools.partial(step_environments, agent), (sharded, replicated), sharded)
    select = compile_over_devices(
        functools.partial(select_actions, agent), (replicated, rollout_spec, replicated), rollout_spec
    )
    learn = compile_over_devices(update, (replicated, rollout_spec, sharded), (replicated, replicated))
    envs_key, policy_key = jax.random.split(key)
    return {
        "environment": repeat(step, state.collect, envs_key),
        "policy": repeat(select, state.train.policy_state, rollout.obs, policy_key),
        "update": repeat(learn, state.train, rollout, stats),
    }
