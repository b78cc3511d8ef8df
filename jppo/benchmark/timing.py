"""The parts of an update as programs of their own, and their time: what each could do if the others were free."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jppo.actors.env_runner import EnvRunner
from jppo.actors.sebulba import Sebulba
from jppo.config.ppo import PPOConfig
from jppo.devices.jit import jit
from jppo.devices.mesh import AXIS, shard_over_devices
from jppo.envs.gymnasium import HostEnvironment
from jppo.envs.spaces import ActionSpec, to_env_action
from jppo.ppo.anakin import CHUNK_CAPACITY, Anakin, AnakinState
from jppo.ppo.learner import Learner
from jppo.ppo.normalization import pool_moments
from jppo.ppo.policy import act as policy_act
from jppo.ppo.rollout import collect
from jppo.ppo.types import Array, CollectState, EpisodeStats, Metrics, PolicyState, PyTree, Rollout, TrainState

Program = Callable[[int], Any]  # does its part so many times, and returns when that is done

_SAMPLE_SECONDS = 0.05
_FEWEST_ROUNDS = 5


def time_programs(
    programs: dict[str, Program], seconds: float, stop_requested: Callable[[], bool]
) -> dict[str, np.ndarray]:
    """Times programs in rounds, each of which runs every program, so that whatever else the machine does falls on all
    of them alike.

    Args:
      seconds: that the slowest program gets; at least five rounds are made.

    Returns:
      seconds per time of each program, [rounds].

    Raises:
      KeyboardInterrupt: a stop was requested.
    """
    counts: dict[str, int] = {}
    rounds: list[list[float]] = []
    spent = 0.0
    for name, program in programs.items():
        program(1)
        counts[name] = max(1, min(int(_SAMPLE_SECONDS / _time(program, 1)), CHUNK_CAPACITY))
    while spent < seconds or len(rounds) < _FEWEST_ROUNDS:
        if stop_requested():
            raise KeyboardInterrupt
        rounds.append([_time(program, counts[name]) for name, program in programs.items()])
        spent += max(taken * counts[name] for name, taken in zip(programs, rounds[-1], strict=True))
    return dict(zip(programs, np.array(rounds).T, strict=True))


def _time(program: Program, count: int) -> float:
    """Seconds per time."""
    start = time.perf_counter()
    program(count)
    return (time.perf_counter() - start) / count


def repeatedly(function: Callable, *args: Any) -> Program:
    """Calls it with the same arguments again and again, each time to the end."""

    def run(count: int) -> None:
        for _ in range(count):
            jax.block_until_ready(function(*args))

    return run


def random_actions(spec: ActionSpec, shape: tuple[int, ...], key: Array) -> Array:
    """Actions as a policy might sample them, [*shape, *policy_shape]: uniform, in a box from -1 to 1."""
    if spec.num_actions:
        return jax.random.randint(key, shape, 0, spec.num_actions)
    return jax.random.uniform(key, (*shape, spec.size), minval=-1.0)


def step_environments(agent: Anakin, state: CollectState, key: Array) -> CollectState:
    """num_steps of random actions and nothing else."""
    env = agent.env
    shape = (agent.config.num_steps, len(state.episode.lengths))

    def step(state: CollectState, xs: tuple[Array, Array]) -> tuple[CollectState, None]:
        action, keys = xs
        env_action = to_env_action(agent.policy.action_spec, action)
        after = jax.vmap(env.step)(keys, state.env_state, env_action)
        episode = state.episode.after(after.reward, 1.0)
        return state.replace(env_state=after.state, obs=after.obs, episode=episode), None

    actions_key, envs_key = jax.random.split(key)
    actions = random_actions(env.action_spec, shape, actions_key)
    return jax.lax.scan(step, state, (actions, jax.random.split(envs_key, shape)))[0]


def act(agent: Anakin, state: PolicyState, obs: PyTree, key: Array) -> tuple[Array, Array, Array]:
    """What a rollout asks of the policy, on recorded observations [T, N, ...]: actions, log_probs and values."""

    def step(_: None, xs: tuple[PyTree, Array]) -> tuple[None, tuple[Array, Array, Array]]:
        obs, keys = xs
        chosen = policy_act(agent.policy, state, obs, keys)
        return None, (chosen.action, chosen.log_prob, chosen.value)

    keys = jax.random.split(key, jax.tree.leaves(obs)[0].shape[:2])
    return jax.lax.scan(step, None, (obs, keys))[1]


def device_programs(agent: Anakin, learner: Learner, state: AnakinState, key: Array) -> dict[str, Program]:
    """Environments only, policy only and learner only, each over the agent's devices and with what a rollout from
    `state` gives it.

    Args:
      learner: the agent's, over `AXIS` where it has several devices.
    """
    mesh = agent.sharding.mesh
    whole, split, rolled = PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(None, AXIS)

    def over(function: Callable, in_specs: Any, out_specs: Any) -> Any:
        return jit(shard_over_devices(function, mesh, in_specs, out_specs))

    def roll(state: AnakinState) -> tuple[Rollout, EpisodeStats]:
        gamma, num_steps = state.train.hyperparams.gamma, agent.config.num_steps
        _, rollout, stats = collect(agent.env, agent.policy, num_steps, state.train.policy, state.collect, gamma)
        return rollout, jax.tree.map(lambda x: x[None], stats)  # of each device

    def update(state: TrainState, rollout: Rollout, stats: EpisodeStats) -> tuple[TrainState, Metrics]:
        return learner.update(state, rollout, pool_moments(stats))

    held = AnakinState(train=whole, collect=split)  # type: ignore[arg-type]
    rollout, stats = over(roll, (held,), (rolled, split))(state)
    environment = over(functools.partial(step_environments, agent), (split, whole), split)
    policy = over(functools.partial(act, agent), (whole, rolled, whole), rolled)
    learning = over(update, (whole, rolled, split), (whole, whole))
    envs_key, policy_key = jax.random.split(key)
    return {
        "environment": repeatedly(environment, state.collect, envs_key),
        "policy": repeatedly(policy, state.train.policy, rollout.obs, policy_key),
        "learner": repeatedly(learning, state.train, rollout, stats),
    }


class BareEnvironments:
    """A program: num_steps of n Gymnasium environments with random actions and nothing else, in this process."""

    def __init__(self, env: HostEnvironment, config: PPOConfig, num_envs: int, key: Array) -> None:
        actions = random_actions(env.action_spec, (config.num_steps, num_envs), key)
        action_spec = dataclasses.replace(env.action_spec, bounds=config.action_bounds)
        self._actions = np.asarray(to_env_action(action_spec, actions))
        self._envs = env.make(list(range(num_envs)))
        self._envs.reset()
        self._seconds, self._cpu_seconds = 0.0, 0.0

    def __call__(self, count: int) -> None:
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(count):
            for action in self._actions:
                self._envs.step(action)
        self._seconds += time.perf_counter() - start
        self._cpu_seconds += time.process_time() - cpu_start

    @property
    def cores_busy(self) -> float:
        """Cores that they keep busy while they step: about 1, or less where they wait for something."""
        return self._cpu_seconds / self._seconds

    def close(self) -> None:
        """Ends the environments."""
        self._envs.close()


def sample_rollout(
    agent: Sebulba, state: TrainState, key: Array, processes: int, num_envs: int
) -> tuple[Rollout, EpisodeStats]:
    """What the learner gets from so many actors of `num_envs` environments, all of which saw the same."""
    runner = EnvRunner(agent.runner_spec(key), np.arange(num_envs, dtype=np.int32))
    try:
        fragment = runner.collect(jax.device_get(state.policy), float(state.hyperparams.gamma))
    finally:
        runner.close()
    return agent.place([fragment] * processes)
