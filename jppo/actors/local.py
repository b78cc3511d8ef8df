"""Collects rollouts in the main process instead of actors."""

import functools
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import threadpoolctl

from jppo.actors.env_runner import EnvRunner, RunnerSpec
from jppo.envs.contract import BrokenContractError
from jppo.errors import ActorsFailed
from jppo.ppo.types import PolicyState


class _StopRequest(Exception):
    """A stop was requested during an evaluation."""


class LocalRunner:
    """Replaces ActorPool with one EnvRunner in this process. Useful for debugging environments.

    NumPy's products use one thread, as in actors. With two threads, MiniGrid-Empty-8x8-v0 on two busy cores ran at 250
    instead of 1,410 steps/s, because the threads wait for each other.
    """

    def __init__(self, spec: RunnerSpec, env_index: np.ndarray) -> None:
        self._name, self._runner = spec.env.name, EnvRunner(spec, env_index)
        self._numpy_threads = threadpoolctl.ThreadpoolController()
        self._call: Callable[[], Any] = lambda: None

    def ready(self, timeout: float) -> str | None:
        """Returns a description of the environments."""
        return "environments in this process"

    def start(self, policy_state: PolicyState, gamma: float) -> None:
        """Sets the policy of the next rollout."""
        self._call = functools.partial(self._runner.collect, policy_state, gamma)

    def start_evaluation(
        self, policy_state: PolicyState, update: int, stop_requested: Callable[[], bool], max_rollouts: float
    ) -> None:
        """Sets the policy of the next evaluation, which a stop request ends. See ActorPool.start_evaluation."""

        def check_stop() -> None:
            if stop_requested():
                raise _StopRequest

        self._call = functools.partial(self._runner.evaluate, policy_state, update, check_stop)

    def poll(self, timeout: float) -> list[Any] | None:
        """Returns a fragment or the metrics of an evaluation, regardless of the timeout; None after a stop request."""
        try:
            with self._numpy_threads.limit(limits=1, user_api="blas"):
                return [self._call()]
        except _StopRequest:
            return None
        except BrokenContractError as error:
            raise ActorsFailed(f"{self._name}: {str(error).removeprefix(f'{self._name}: ')}") from error
        except Exception as error:
            raise ActorsFailed(f"the environments failed with:\n{traceback.format_exc()}") from error

    def check_daemons(self, at_once: bool = False, closing: bool = False) -> bool:
        """Returns True, because this runner needs no daemons. See ActorPool.check_daemons."""
        return True

    def counts(self) -> dict[str, int]:
        """Returns zeros, see ActorPool.counts."""
        return {"lost_fragments": 0, "restarts": 0}

    def close(self) -> None:
        """Closes the environments."""
        self._runner.close()
