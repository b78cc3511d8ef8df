"""Connects to a Ray cluster or starts a local one, checks its resources, and shuts it down."""

import contextlib
import functools
import os
import shutil
import socket
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from jppo.config.ray import RayConfig
from jppo.devices.signals import defer_signals
from jppo.errors import Refused

_REACH_SECONDS = 5.0
_MESSAGE_BYTES = 2**20  # fragments up to this size bypass Ray's object store, which saves 2 ms
_LOCAL_CPUS = 10_000  # for Ray on this machine, where runs in several threads may have any number of actors
_FOLDER_BYTES = 35  # of the path of the temporary folder; those of Ray's sockets have at most 103, on Linux 107
_GPU_SHARE = 0.9  # share of a GPU's memory for JAX arrays; the rest is for each process's CUDA context

_lock = threading.Lock()  # of the connection that jppo made
_starter = ThreadPoolExecutor(1)  # Ray's daemons end with the thread that has started them
_connection = types.SimpleNamespace(users=0, address=None, folder=None)  # users: number of runs


def cluster_address(config: RayConfig) -> str:
    """Returns the address of the cluster to join, or "local" to start one."""
    return config.address or os.environ.get("RAY_ADDRESS") or "local"


def connect(config: RayConfig) -> bool:
    """Connects to Ray unless it is connected already. Returns whether the connection is jppo's, which threads share.

    Raises:
      ValueError: Ray does not start, no cluster answers at the address, or Ray is connected to another one.
    """
    address = cluster_address(config)
    with _lock:
        if ray.is_initialized():
            if config.address not in (None, "auto", _connection.address):
                raise Refused(f"Ray is connected already; address = {config.address!r} would be another cluster")
            _connection.users += _connection.users > 0
            return _connection.users > 0
        if sys.stderr is None or sys.stderr.closed:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 Ray needs one, and keeps it
        _connection.users, _connection.address = 1, address
        try:
            is_main = threading.current_thread() is threading.main_thread()
            _init(address) if is_main else _starter.submit(_init, address).result()
        except BaseException as error:
            _stop()
            if isinstance(error, SystemExit):  # raised by Ray on SIGTERM while it starts
                raise KeyboardInterrupt from error
            if not isinstance(error, Exception):
                raise
            raise Refused(_explain(error, address, "address" if config.address else "RAY_ADDRESS")) from error
    _set_echo(False)
    return True


def _init(address: str) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if is_local := address == "local":
        options |= {"num_cpus": _LOCAL_CPUS, "include_dashboard": False}
        options["_system_config"] = {
            "max_direct_call_object_size": _MESSAGE_BYTES,
            "prestart_worker_first_driver": False,  # starting idle workers takes time, and actors cannot use them
        }
        if len(os.fsencode(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "")) > _FOLDER_BYTES:
            _connection.folder = options["_temp_dir"] = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    else:
        check_reachable(address)
        _check_token(address)
    if not address.startswith("ray://"):
        options["job_config"] = job_config = ray.job_config.JobConfig()
        job_config._py_driver_sys_path = _WorkerPath()
    # The daemons of a partly started Ray survive for a minute.
    local_defaults = _local_defaults() if is_local else contextlib.nullcontext()
    with defer_signals(interruptible=not is_local), local_defaults, warnings.catch_warnings():
        # Ray forks only to exec, which is safe with JAX's threads.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        ray.init(address, **options)


def _check_token(address: str) -> None:
    """Raises an error if a cluster at host:port needs another token. Ray itself would retry for 20 s."""
    if ":" not in address or "://" in address:
        return
    with contextlib.suppress(ImportError):  # Ray 2.51 has no tokens
        from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled

        ensure_token_if_auth_enabled(create_token_if_missing=False)  # a client without a token would end the process
        raylet: Any = ray._raylet
        raylet.GcsClient(address=address)


def _explain(error: Exception, address: str, name: str) -> str:
    """Returns the message for a failed connection. `name` is the setting that has the address."""
    if address == "local":
        return f"Ray cannot start on this machine: {error}"
    where = f"{name} = {address!r}"
    if type(error).__name__ == "AuthenticationError" or "InvalidAuthToken" in str(error.__cause__):
        remedy = "set RAY_AUTH_MODE=token and copy the cluster's token to ~/.ray/auth_token"
        return f"the Ray cluster at {where} needs a token that this process does not have; {remedy}"
    remedy = f"start one with `ray start --head`, or leave {name} out for a local one"
    return f"there is no Ray cluster to join at {where} ({error}); {remedy}"


class _WorkerPath(list):
    """The directories that Ray puts first on the path of its workers: of those that it wants to add, only the one that
    Python has put first on the path of this process, so that no file of another directory hides a package."""

    def extend(self, directories: Iterable[str]) -> None:
        first = os.path.abspath(sys.path[0])
        super().extend(directory for directory in directories if directory == first)


def disconnect(failed: bool = False) -> None:
    """Disconnects from Ray if no other run needs it, or if a daemon `failed`. Stops Ray if `connect` started it."""
    with defer_signals(), _lock:  # the daemons of a partly stopped Ray survive for a minute
        _connection.users = 0 if failed else _connection.users - 1
        if _connection.users <= 0:
            _stop(failed)


def _stop(failed: bool = False) -> None:
    node = getattr(ray._private.worker, "_global_node", None)
    with defer_signals():
        if failed and node is not None and node.head:  # Ray would wait for its daemons for up to two minutes
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        ray.shutdown()
    if _connection.folder and not failed:  # otherwise it has the logs
        shutil.rmtree(_connection.folder, ignore_errors=True)
    _connection.users, _connection.address, _connection.folder = 0, None, None
    _set_echo(True)


@contextlib.contextmanager
def _local_defaults() -> Iterator[None]:
    """Puts Ray's daemons into their own process groups, lets them listen to 127.0.0.1 only, and lets actors see this
    machine's files after `uv run`, instead of a copy of the project. Ray may change these private names.

    `timeout` and job schedulers send SIGTERM to the group of this process. It would stop the daemons, and their end
    stops this process before it saves the run. On other systems than Linux, Ray ends its daemons by their group.
    """
    private: Any = ray._private
    changes: list[Any] = [("ray_constants", "ENABLE_RAY_CLUSTER", lambda before: False)]
    changes.append(("ray_constants", "RAY_ENABLE_UV_RUN_RUNTIME_ENV", lambda before: False))
    if sys.platform.startswith("linux"):
        changes.append(("services", "ConsolePopen", lambda before: functools.partial(before, process_group=0)))
    with contextlib.ExitStack() as stack:
        for module, name, change in changes:
            if hasattr(owner := getattr(private, module, None), name):
                stack.callback(setattr, owner, name, before := getattr(owner, name))
                setattr(owner, name, change(before))
        yield


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
