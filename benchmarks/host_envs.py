"""Gymnasium environments that stand for those that only run on the host, for the benchmarks of Ray mode.

Each is a factory `() -> gymnasium.Env`, "host_envs:cartpole" and so on where this directory is importable. Nothing here
imports jppo, so that peers can use them in interpreters of their own.
"""

import time
from typing import Any

import gymnasium

WAIT_SECONDS = 2e-3
BURN_SECONDS = 5e-4


class _Before(gymnasium.Wrapper):
    """Does something before each step."""

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
    """Computes before each step, for seconds of this thread's CPU time.

    CPU time, not wall-clock time: of several that share a core, each then takes longer, as real work does.
    """

    def _before_step(self) -> None:
        end = time.thread_time() + self._seconds
        while time.thread_time() < end:
            pass


def cartpole() -> gymnasium.Env:
    """CartPole-v1: a few microseconds a step, so that everything but the environment is measured."""
    return gymnasium.make("CartPole-v1")


def waiting() -> gymnasium.Env:
    """CartPole-v1 that sleeps 2 ms before each step."""
    return Waiting(cartpole(), WAIT_SECONDS)


def burning() -> gymnasium.Env:
    """CartPole-v1 that burns 0.5 ms of CPU before each step."""
    return Burning(cartpole(), BURN_SECONDS)
