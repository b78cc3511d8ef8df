"""Collecting in this process, in the place of actors."""

import traceback

import numpy as np

from jppo.actors.env_runner import EnvRunner, Fragment, RunnerSpec
from jppo.errors import ActorsFailed
from jppo.ppo.types import PolicyState


class LocalRunner:
    """One EnvRunner in this process, in the place of `ActorPool`: for debugging."""

    def __init__(self, spec: RunnerSpec, env_index: np.ndarray) -> None:
        self._runner = EnvRunner(spec, env_index)
        self._given: tuple[PolicyState, float] | None = None

    def ready(self, timeout: float) -> str | None:
        """In words what is ready."""
        return "environments in this process"

    def start(self, policy_state: PolicyState, gamma: float) -> None:
        """See Actors.start."""
        self._given = (policy_state, gamma)

    def poll(self, timeout: float) -> list[Fragment] | None:
        """Collects, however long it takes."""
        assert self._given is not None, "start() comes first"
        try:
            return [self._runner.collect(*self._given)]
        except Exception as error:
            raise ActorsFailed(f"the environments failed with:\n{traceback.format_exc()}") from error

    def counts(self) -> dict[str, int]:
        """See Actors.counts."""
        return {"lost_fragments": 0, "restarts": 0}

    def close(self) -> None:
        """Ends the environments."""
        self._runner.close()
