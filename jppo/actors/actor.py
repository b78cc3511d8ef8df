"""What runs in an actor's process."""

import pickle
import re
import traceback
from typing import NamedTuple

import jax
import numpy as np
import ray

from jppo.actors.env_runner import EnvRunner, Fragment, RunnerSpec
from jppo.errors import describe_error
from jppo.ppo.types import PolicyState

ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    **dict.fromkeys(("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}  # environment variables of the process

Given = tuple[PolicyState, float]  # what EnvRunner.collect takes


class Trouble(NamedTuple):
    """Why an actor failed. Text, because an environment's exception may not survive the way to another process."""

    short: str
    full: str = ""


def trouble_of(error: Exception, full: str) -> Trouble:
    """Args: full: its traceback."""
    plain = re.compile(r"\x1b\[\d+m")  # Ray colours
    return Trouble(plain.sub("", describe_error(error)), plain.sub("", full).strip())


class ActorProcess:
    """Runs in a process of its own. Answers with a Trouble where its environments raise."""

    _runner: EnvRunner | None = None

    def __init__(self) -> None:
        # The policy's calls are too short to be handed to another thread: 29 us instead of 108 (docs/performance.md).
        # Only before JAX starts its backend, which the unpickling of what comes later may do.
        jax.config.update("jax_cpu_enable_async_dispatch", False)

    def place(self) -> str:
        """Returns the id of the node that this process runs on."""
        return ray.get_runtime_context().get_node_id()

    def begin(self, spec: RunnerSpec, env_index: np.ndarray) -> Trouble | None:
        """Makes the environments. Returns the error, or None."""
        try:
            self._runner = EnvRunner(spec, env_index)
        except Exception as error:
            return trouble_of(error, traceback.format_exc())
        return None

    def collect(self, given: bytes | Given) -> Fragment | Trouble:
        """Returns what EnvRunner.collect returns, or the error.

        Args:
          given: may be pickled.
        """
        assert self._runner is not None, "begin() comes first"
        try:
            return self._runner.collect(*(pickle.loads(given) if isinstance(given, bytes) else given))
        except Exception as error:
            return trouble_of(error, traceback.format_exc())

    def close(self) -> None:
        """Ends the environments."""
        if self._runner is not None:
            self._runner.close()
