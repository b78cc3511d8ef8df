"""Gymnasium environments for the benchmarks of Ray mode: fast, waiting for I/O, and CPU-bound.

Each environment is a factory `() -> gymnasium.Env`, named "host_envs:cartpole" and so on if this directory is on the
import path. This module does not import jppo, so that other libraries can use it in their own Python environments.
"""

import time
from typing import Any

import gymnasium

WAIT_SECONDS = 2e-3
BURN_SECONDS = 5e-4


class _Before(gymnasium.Wrapper):
    """Calls `_before_step` before each step."""

    def __init__(self, env: gymnasium.Env, seconds: float) -> None:
        super().__init__(env)
        self._seconds = seconds

    def _before_step(self) -> None:
        raise NotImplementedError

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._before_step()
        return self.env.step(action)


class Waiting(_Before):
    """Sleeps before each step, like the client of an external simulator."""

    def _before_step(self) -> None:
        time.sleep(self._seconds)


class Burning(_Before):
    """Computes before each step for a given CPU time of its thread.

    CPU time instead of wall-clock time: environments that share a core become slower, as with real work.
    """

    def _before_step(self) -> None:
        end = time.thread_time() + self._seconds
        while time.thread_time() < end:
            pass


def cartpole() -> gymnasium.Env:
    """Makes CartPole-v1, a fast environment: a step takes a few microseconds."""
    return gymnasium.make("CartPole-v1")


def waiting() -> gymnasium.Env:
    """Makes CartPole-v1 that sleeps 2 ms before each step."""
    return Waiting(cartpole(), WAIT_SECONDS)


def burning() -> gymnasium.Env:
    """Makes CartPole-v1 that computes for 0.5 ms before each step."""
    return Burning(cartpole(), BURN_SECONDS)
