"""Tests the environments of the memory benchmarks: the forms for JAX and for Gymnasium are the same."""

import sys
from pathlib import Path

import jax
import numpy as np
from lenient import lenient

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from memory_envs import AHEAD, CORRIDOR, TIME_LIMIT, HiddenVelocities, HostHiddenVelocities, HostTMaze, TMaze

STEP = jax.jit(TMaze().step)


def play(actions, seed=0):
    """Plays both forms of the T-maze. Returns the rewards of the first episode and how it ended."""
    host, maze = HostTMaze(), TMaze()
    params = maze.default_params
    seen, _ = host.reset(seed=seed)
    _, state = maze.reset(jax.random.key(0), params)
    state = state.replace(cue=state.cue * 0.0 + seen[0])
    np.testing.assert_array_equal(maze.get_obs(state), seen)
    rewards = []
    for action in actions:
        seen, *outcome, _ = host.step(action)
        _, state, *expected, info = STEP(jax.random.key(0), state, action, params)
        np.testing.assert_allclose(outcome, expected, rtol=1e-6)
        np.testing.assert_array_equal(info["final_observation"], seen)
        rewards.append(outcome[0])
        if outcome[1] or outcome[2]:
            return rewards, outcome
    raise AssertionError("the episode must end")


def test_both_forms_of_the_maze_are_the_same():
    for seed in (0, 1, 2):
        goal = int(1.5 + 0.5 * HostTMaze().reset(seed=seed)[0][0])
        there = [AHEAD] * CORRIDOR
        rewards, end = play([*there[:3], 1, 2, *there[3:], AHEAD, goal], seed)
        np.testing.assert_allclose(rewards, [0.0] * 3 + [-0.1] * 2 + [0.0] * 17 + [-0.1, 1.0])
        assert end[1:] == [True, False]
        assert play([*there, 3 - goal], seed)[0][-1] == -1.0
    assert play([1] * (TIME_LIMIT + 1))[1][1:] == [False, True]


def test_velocities_are_hidden_in_both_forms():
    host, env = HostHiddenVelocities(), HiddenVelocities()
    seen, _ = host.reset(seed=3)
    _, state = env.reset(jax.random.key(0), env.default_params)
    x, x_dot, angle, angle_dot = map(float, host.unwrapped.state)
    state = state.replace(x=x, x_dot=x_dot, theta=angle, theta_dot=angle_dot)
    for action in (0, 1, 1):
        seen = host.step(action)[0]
        with lenient():
            obs, state, *_ = env.step(jax.random.key(0), state, action, env.default_params)
        np.testing.assert_allclose(obs, seen, rtol=1e-5)
        assert obs.shape == host.observation_space.shape == env.observation_space(env.default_params).shape
