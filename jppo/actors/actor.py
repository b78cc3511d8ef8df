"""The process of an actor."""

import os
import pickle
import sys
import traceback
from typing import Any, NamedTuple

import jax
import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jppo.actors.env_runner import EnvRunner, RunnerSpec
from jppo.config.ray import RayConfig
from jppo.envs.contract import BrokenContractError
from jppo.envs.host_families import pickle_registrations, restore_registrations
from jppo.errors import describe_error, first_line, strip_colours
from jppo.ppo.types import PolicyState

_ONE_THREAD = dict.fromkeys(("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_XLA_FLAGS = "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=1"

CallArgs = tuple[PolicyState, float]  # arguments of EnvRunner.collect, or of EnvRunner.evaluate


class ActorError(NamedTuple):
    """Why an actor failed, as text, because an environment's exception may not be picklable."""

    short: str
    full: str = ""


def make_actor_error(error: Exception, full: str) -> ActorError:
    """Returns the error without Ray's colours. `full` is the traceback, which an invalid return value does not need."""
    if isinstance(error, BrokenContractError):
        return ActorError(short=first_line(error))
    return ActorError(short=strip_colours(describe_error(error)), full=strip_colours(full).strip())


class ActorProcess:
    """Owns an EnvRunner in its own process. Returns an ActorError if an environment raises an exception."""

    _runner: EnvRunner | None = None

    def __init__(self, import_path: list[str], registrations: list[bytes]) -> None:
        """Adds the directories of `import_path` to the end of this process's path, and restores `registrations`."""
        sys.path.extend(directory for directory in import_path if directory not in sys.path)
        # The policy's calls are too short for another thread: 29 us instead of 108 (docs/performance.md).
        # This must precede the start of JAX's backend, which unpickling an argument of `begin` may cause.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        restore_registrations(registrations)

    def place(self) -> str:
        """Returns the id of the node that this process runs on."""
        return ray.get_runtime_context().get_node_id()

    def begin(self, spec: RunnerSpec, env_index: np.ndarray) -> ActorError | None:
        """Makes the environments. Returns the error, or None."""
        try:
            self._runner = EnvRunner(spec, env_index)
        except Exception as error:
            return make_actor_error(error, traceback.format_exc())
        return None

    def call(self, method: str, args: bytes | CallArgs) -> Any:
        """Returns the result of a method of EnvRunner, or an ActorError. `args` may be pickled."""
        try:
            return getattr(self._runner, method)(*(pickle.loads(args) if isinstance(args, bytes) else args))
        except Exception as error:
            return make_actor_error(error, traceback.format_exc())

    def close(self) -> None:
        """Closes the environments."""
        if self._runner is not None:
            self._runner.close()


def start_actor(config: RayConfig, several_processes: bool) -> Any:
    """Starts an actor and returns its handle without waiting for it. It gets the XLA_FLAGS of this process.

    Args:
      several_processes: whether several processes train together. Each one's actors run on its own node.
    """
    platform = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if config.actor_gpus else {"JAX_PLATFORMS": "cpu"}
    flags = os.environ.get("XLA_FLAGS", "")
    flags = flags if flags.lstrip().startswith("-") else ""  # the actor's node may not have a file of flags
    options = {
        "num_cpus": config.actor_cpus,
        "num_gpus": config.actor_gpus,
        "enable_task_events": False,  # Ray's head would store the last 100,000 calls for its dashboard
        "scheduling_strategy": _strategy(several_processes),
        "runtime_env": {"env_vars": _ONE_THREAD | platform | {"XLA_FLAGS": f"{flags} {_XLA_FLAGS}".strip()}},
    }
    import_path = [os.path.abspath(directory) for directory in sys.path]
    return ray.remote(ActorProcess).options(**options).remote(import_path, pickle_registrations(ray.cloudpickle.dumps))


def _strategy(several_processes: bool) -> Any:
    """Returns Ray's scheduling strategy, or None."""
    if several_processes:
        return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    # a placement group (of a Tune trial) already reserves resources for the actors
    return None if ray.util.get_current_placement_group() else "SPREAD"
