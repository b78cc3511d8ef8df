"""Collects rollouts in the main process instead of actors."""

import traceback

import numpy as np
import threadpoolctl

from jppo.actors.env_runner import EnvRunner, Fragment, RunnerSpec
from jppo.envs.contract import BrokenContractError
from jppo.errors import ActorsFailed
from jppo.ppo.types import PolicyState


class LocalRunner:
    """Replaces ActorPool with one EnvRunner in this process. Useful for debugging environments.

    NumPy's products use one thread, as in actors. With two threads, MiniGrid-Empty-8x8-v0 on two busy cores ran at 250
    instead of 1,410 steps/s, because the threads wait for each other.
    """

    def __init__(self, spec: RunnerSpec, env_index: np.ndarray) -> None:
        self._name, self._runner = spec.env.name, EnvRunner(spec, env_index)
        self._numpy_threads = threadpoolctl.ThreadpoolController()
        self._args: tuple[PolicyState, float] | None = None

    def ready(self, timeout: float) -> str | None:
        """Returns a description of the environments."""
        return "environments in this process"

    def start(self, policy_state: PolicyState, gamma: float) -> None:
        """Sets the policy of the next rollout."""
        self._args = (policy_state, gamma)

    def poll(self, timeout: float) -> list[Fragment] | None:
        """Collects one fragment, regardless of the timeout."""
        assert self._args is not None, "start() comes first"
        try:
            with self._numpy_threads.limit(limits=1, user_api="blas"):
                return [self._runner.collect(*self._args)]
        except BrokenContractError as error:
            raise ActorsFailed(f"{self._name}: {error}") from error
        except Exception as error:
            raise ActorsFailed(f"the environments failed with:\n{traceback.format_exc()}") from error

    def check_daemons(self, at_once: bool = False, closing: bool = False) -> bool:
        """Returns True, because this runner needs no daemons. See ActorPool.check_daemons."""
        return True

    def require_daemons(self, at_once: bool = False) -> None:
        """Does nothing, see check_daemons."""

    def counts(self) -> dict[str, int]:
        """Returns zeros, see ActorPool.counts."""
        return {"lost_fragments": 0, "restarts": 0}

    def close(self) -> None:
        """Closes the environments."""
        self._runner.close()
