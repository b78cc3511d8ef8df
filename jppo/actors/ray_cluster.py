"""Connects to a Ray cluster or starts a local one, checks its resources, and shuts it down."""

import contextlib
import functools
import math
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ray

from jppo.config.ray import RayConfig, num_cores
from jppo.devices.signals import defer_signals
from jppo.errors import Refused

_REACH_SECONDS = 5.0
_MESSAGE_BYTES = 2**20  # fragments up to this size bypass Ray's object store, which saves 2 ms
_GPU_SHARE = 0.9  # share of a GPU's memory for JAX arrays; the rest is for each process's CUDA context


def cluster_address(config: RayConfig) -> str:
    """Returns the address of the cluster to join, or "local" to start one."""
    return config.address or os.environ.get("RAY_ADDRESS") or "local"


def connect(config: RayConfig) -> bool:
    """Connects to Ray unless it is connected already. Returns whether this made the connection.

    Raises:
      ValueError: there is no cluster at the address, or Ray is connected to another one.
    """
    if ray.is_initialized():
        if config.address not in (None, "auto"):
            raise Refused(f"Ray is connected already; address = {config.address!r} would be another cluster")
        return False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    address = cluster_address(config)
    if address == "local":
        needed = (config.num_actors or 0) * config.actor_cpus + 1  # one for the learner
        options |= {"num_cpus": max(num_cores(), math.ceil(needed)), "include_dashboard": False}
        options["_system_config"] = {
            "max_direct_call_object_size": _MESSAGE_BYTES,
            "prestart_worker_first_driver": False,  # starting idle workers takes time, and actors cannot use them
        }
    if not address.startswith("ray://"):
        options["job_config"] = job_config = ray.job_config.JobConfig()
        job_config._py_driver_sys_path = _WorkerPath()
    try:
        check_reachable(address)
        # The daemons of a partly started Ray survive for a minute.
        with defer_signals(interruptible=address != "local"), _separate_groups(), warnings.catch_warnings():
            # Ray forks only to exec, which is safe with JAX's threads.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init(address, **options)
    except (OSError, RuntimeError, ValueError) as error:
        disconnect()
        token = "; it requires a token: set RAY_AUTH_MODE=token" if "InvalidAuthToken" in str(error.__cause__) else ""
        raise Refused(
            f"there is no Ray cluster to join at address = {address!r} ({error}{token}); start one with `ray start "
            "--head`, or leave address out for a local one"
        ) from error
    except BaseException as error:
        disconnect()
        if isinstance(error, SystemExit):  # raised by Ray on SIGTERM while it starts
            raise KeyboardInterrupt from error
        raise
    _set_echo(False)
    return True


class _WorkerPath(list):
    """The directories that Ray puts first on the path of its workers: of those that it wants to add, only the one that
    Python has put first on the path of this process, so that no file of another directory hides a package."""

    def extend(self, directories: Iterable[str]) -> None:
        first = os.path.abspath(sys.path[0])
        super().extend(directory for directory in directories if directory == first)


def disconnect() -> None:
    """Disconnects from Ray. Stops Ray if `connect` started it."""
    with defer_signals():  # the daemons of a partly stopped Ray survive for a minute
        ray.shutdown()
    _set_echo(True)


@contextlib.contextmanager
def _separate_groups() -> Iterator[None]:
    """Puts Ray's daemons into their own process groups.

    `timeout` and job schedulers send SIGTERM to the group of this process. It would stop the daemons, and their end
    stops this process before it saves the run. On other systems than Linux, Ray ends its daemons by their group.
    """
    services: Any = getattr(ray._private, "services", None)  # a private module that Ray may change
    if not sys.platform.startswith("linux") or not hasattr(services, "ConsolePopen"):
        yield
        return
    start = services.ConsolePopen
    services.ConsolePopen = functools.partial(start, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = start


def _set_echo(echo: bool) -> None:
    """Sets whether Ray prints the messages of its daemons to standard output."""
    ray._private.worker._worker_logs_enabled = echo


def check_reachable(address: str) -> None:
    """Raises OSError if nothing listens at host:port. Ray itself would retry for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS).close()


def check_resources(config: RayConfig, message: Callable[[str], None]) -> None:
    """Raises ValueError if the cluster has too few GPUs. Tells the user if it has too few CPUs."""
    has = ray.cluster_resources()
    actors = config.num_actors or 0
    if config.actor_gpus and has.get("GPU", 0.0) < config.actor_gpus * actors:
        raise Refused(
            f"{actors} actors of actor_gpus = {config.actor_gpus:g} need {config.actor_gpus * actors:g} GPUs; Ray has "
            f"{has.get('GPU', 0.0):g}"
        )
    if has.get("CPU", 0.0) < config.actor_cpus * actors:
        message(
            f"{actors} actors of actor_cpus = {config.actor_cpus:g} need {config.actor_cpus * actors:g} CPUs; the "
            f"cluster has {has.get('CPU', 0.0):g}: waiting for it to grow"
        )


def explain_missing_resources(config: RayConfig) -> str | None:
    """Returns "waiting for resources ..." if the cluster has no room for another actor now, otherwise None."""
    needs = {name: need for name, need in (("CPU", config.actor_cpus), ("GPU", config.actor_gpus)) if need}
    free, total = ray.available_resources(), ray.cluster_resources()
    if all(free.get(name, 0.0) >= need for name, need in needs.items()):
        return None
    each = " and ".join(f"{need:g} {name}s" for name, need in needs.items())
    left = " and ".join(f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name}s" for name in needs)
    return f"waiting for resources: each needs {each}, and {left} are free (see `ray status`)"


def limit_process(resources: dict[str, float]) -> None:
    """Limits this process to its share of the machine. Has no effect after JAX has started.

    Args:
      resources: amounts of "CPU" and "GPU" that Ray has assigned to this process.
    """
    gpus, threads = resources.get("GPU", 0.0), max(1, int(resources.get("CPU", 1.0)))
    os.environ["NPROC"] = str(threads)  # the size of XLA's thread pools
    if threads == 1:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    if not gpus:
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax

        jax.config.update("jax_platforms", "cpu")  # the variable is read when JAX is imported
    elif gpus < 1 and "XLA_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{_GPU_SHARE * gpus:.4f}")
