"""The door to Ray: actor processes that step environments and send rollouts.

Down goes one `ray.put` of the policy per iteration, up comes one fragment per actor. Whatever happens to an actor (its
process dies, its environment raises or hangs, its node vanishes) costs the fragment in flight: the actor is replaced,
and its successor collects in its place.
"""

import dataclasses
import math
import os
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import ray

from jppo.config import RayConfig
from jppo.env_runner import ActorsFailed, EnvRunner, Fragment, RunnerSpec
from jppo.types import PolicyState

_START_SECONDS = 300.0  # an actor may take this long to be placed, to start, and to make its environments
_LEAST_TIMEOUT, _TIMEOUT_FACTOR = 60.0, 10.0
_BACK_OFF = 0.5  # seconds before the first replacement in a row, doubled for each further one
_ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    **dict.fromkeys(("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


class InProcess:
    """One EnvRunner in this process, in the place of `Actors`: for debugging."""

    def __init__(self, spec: RunnerSpec, num_envs: int) -> None:
        self._runner = EnvRunner(spec, np.arange(num_envs))
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
        return [self._runner.collect(*self._given)]

    def counts(self) -> dict[str, int]:
        """See Actors.counts."""
        return {"lost_fragments": 0, "restarts": 0}

    def close(self) -> None:
        """Ends the environments."""
        self._runner.close()


class Actors:
    """Owns the actor processes, and the local Ray where it started one."""

    def __init__(self, spec: RunnerSpec, config: RayConfig, message: Callable[[str], None]) -> None:
        """Starts Ray (or joins a cluster) and the actors; does not wait for them.

        Args:
          config: with num_actors and envs_per_actor filled in.
          message: gets told, in words, what happens to actors.

        Raises:
          ValueError: no cluster at the address, or one without the GPUs asked for.
        """
        assert config.num_actors, "in-process running is InProcess"
        self._config, self._message = config, message
        self._owns_ray = _connect(config)
        self._lost, self._restarts, self._longest, self._any_success = 0, 0, 0.0, False
        try:
            _check_resources(config, message)
            self._spec = ray.put(spec)
            envs = config.envs_per_actor or 0
            self._slots = [
                _Slot(number, number * envs + np.arange(envs, dtype=np.int32)) for number in range(config.num_actors)
            ]
            self._given: Any = None
            for slot in self._slots:
                self._spawn(slot)
        except BaseException:
            self.close()
            raise

    def ready(self, timeout: float) -> str | None:
        """In words what is ready, or None where `timeout` seconds were not enough. Raises ActorsFailed."""
        if not self._poll(timeout):
            return None
        nodes = len({slot.result for slot in self._slots})
        for slot in self._slots:
            slot.result = None
        return f"{len(self._slots)} actors on {nodes} node{'s' if nodes > 1 else ''}"

    def start(self, policy_state: PolicyState, gamma: float) -> None:
        """Has every actor collect a fragment; returns at once.

        Args:
          policy_state: NumPy leaves.
        """
        self._given = ray.put((policy_state, gamma))
        for slot in self._slots:
            self._collect(slot)

    def poll(self, timeout: float) -> list[Fragment] | None:
        """The fragments, by actor, once all are there; None where `timeout` seconds were not enough.

        Raises:
          ActorsFailed: an actor failed more than max_restarts times in a row.
        """
        if not self._poll(timeout):
            return None
        fragments = [slot.result for slot in self._slots]
        for slot in self._slots:
            slot.result = None
        self._longest = max(self._longest, *(fragment.seconds["total"] for fragment in fragments))
        return fragments

    def counts(self) -> dict[str, int]:
        """Fragments lost and actors replaced since the start."""
        return {"lost_fragments": self._lost, "restarts": self._restarts}

    def close(self) -> None:
        """Ends the actors, and Ray where it was started here."""
        for slot in getattr(self, "_slots", []):
            _kill(slot.handle)
        if self._owns_ray:
            ray.shutdown()

    def _poll(self, timeout: float) -> bool:
        """Waits, receives, and replaces what failed; whether every slot has its result."""
        now = time.monotonic()
        for slot in self._slots:
            if slot.retry_at is not None and now >= slot.retry_at:
                self._restarts += 1
                self._spawn(slot)
                if self._given is not None:
                    self._collect(slot)
        waiting = {slot.pending: slot for slot in self._slots if slot.pending is not None}
        retries = [slot.retry_at - now for slot in self._slots if slot.retry_at is not None]
        timeout = max(0.0, min([timeout, *retries]))
        if waiting:
            done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=timeout)
            for ref in done:
                self._receive(waiting[ref], ref)
        elif retries:
            time.sleep(timeout)
        now = time.monotonic()
        for slot in waiting.values():
            limit = self._time_limit(slot)
            if slot.pending is not None and now - slot.since > limit:
                self._failed(slot, TimeoutError(f"no answer within {limit:.0f} s"))
        return all(slot.result is not None for slot in self._slots)

    def _receive(self, slot: "_Slot", ref: Any) -> None:
        try:
            slot.result = ray.get(ref)
        except ray.exceptions.RayError as error:
            self._failed(slot, error)
            return
        slot.pending = None
        if self._given is not None:  # a fragment, not the word that it is ready
            slot.failures, slot.fresh, self._any_success = 0, False, True

    def _time_limit(self, slot: "_Slot") -> float:
        fragment = self._config.actor_timeout or max(_LEAST_TIMEOUT, _TIMEOUT_FACTOR * self._longest)
        return fragment + _START_SECONDS if slot.fresh else fragment

    def _failed(self, slot: "_Slot", error: Exception) -> None:
        """Counts it and lays down when the slot's actor is replaced. Raises ActorsFailed when it was once too often."""
        _kill(slot.handle)
        slot.failures, slot.pending = slot.failures + 1, None
        self._lost += self._given is not None
        first, last = int(slot.env_index[0]), int(slot.env_index[-1])
        who = f"actor {slot.number} (environments {first} to {last})"
        if slot.failures > (self._config.max_restarts if self._any_success else min(1, self._config.max_restarts)):
            times = "once" if slot.failures == 1 else f"{slot.failures} times in a row"
            raise ActorsFailed(f"{who} failed {times}, the last time with:\n{_in_full(error)}") from error
        wait = _BACK_OFF * 2.0 ** (slot.failures - 1)
        slot.retry_at = time.monotonic() + wait
        self._message(f"{who} failed ({_in_short(error)}); a new one starts in {wait:.1f} s")

    def _spawn(self, slot: "_Slot") -> None:
        """A replacement's environments count as new ones, with numbers of their own, so that no draw is repeated."""
        config = self._config
        variables = _ONE_THREAD | (
            {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if config.actor_gpus else {"JAX_PLATFORMS": "cpu"}
        )
        options = {
            "num_cpus": config.actor_cpus,
            "num_gpus": config.actor_gpus,
            "scheduling_strategy": "SPREAD",
            "runtime_env": {"env_vars": variables},
        }
        total = sum(len(other.env_index) for other in self._slots)
        slot.handle = ray.remote(_Actor).options(**options).remote(self._spec, slot.env_index + total * slot.spawned)
        slot.spawned, slot.retry_at, slot.fresh = slot.spawned + 1, None, True
        slot.pending, slot.since, slot.result = slot.handle.node.remote(), time.monotonic(), None

    def _collect(self, slot: "_Slot") -> None:
        slot.pending, slot.since, slot.result = slot.handle.collect.remote(self._given), time.monotonic(), None


class _Actor:
    """Runs in a process of its own."""

    def __init__(self, spec: RunnerSpec, env_index: np.ndarray) -> None:
        # The policy's calls are too short to be handed to another thread: 16 us instead of 41 (docs/performance.md).
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        self._runner = EnvRunner(spec, env_index)

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def collect(self, given: tuple[PolicyState, float]) -> Fragment:
        return self._runner.collect(*given)


@dataclasses.dataclass
class _Slot:
    """A share of the environments, and the actor that has it at the moment."""

    number: int
    env_index: np.ndarray
    handle: Any = None
    pending: Any = None  # the call that is waited for
    since: float = 0.0  # when that was made
    result: Any = None
    fresh: bool = True  # this actor has not answered yet
    failures: int = 0  # in a row
    spawned: int = 0
    retry_at: float | None = None


def _connect(config: RayConfig) -> bool:
    """Makes sure that there is a Ray; returns whether it was started here."""
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    address = config.address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        needed = (config.num_actors or 0) * config.actor_cpus + 1  # the learner's
        options |= {"num_cpus": max(os.cpu_count() or 1, math.ceil(needed)), "include_dashboard": False}
    try:
        with warnings.catch_warnings():  # Ray forks only to become another program at once, which JAX's threads survive
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init(address, **options)
    except ConnectionError as error:
        raise ValueError(
            f"there is no Ray cluster at address = {address!r} ({error}); start one with `ray start --head`, or leave "
            "address out for a local one"
        ) from error
    return True


def _check_resources(config: RayConfig, message: Callable[[str], None]) -> None:
    has = ray.cluster_resources()
    actors = config.num_actors or 0
    if config.actor_gpus and has.get("GPU", 0.0) < config.actor_gpus * actors:
        raise ValueError(
            f"{actors} actors of actor_gpus = {config.actor_gpus:g} need {config.actor_gpus * actors:g} GPUs; Ray has "
            f"{has.get('GPU', 0.0):g}"
        )
    if has.get("CPU", 0.0) < config.actor_cpus * actors:
        message(
            f"{actors} actors of actor_cpus = {config.actor_cpus:g} need {config.actor_cpus * actors:g} CPUs; the "
            f"cluster has {has.get('CPU', 0.0):g}: waiting for it to grow"
        )


def _kill(handle: Any) -> None:
    if handle is not None and ray.is_initialized():
        ray.kill(handle)


def _in_short(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0]}" if text else type(cause).__name__


def _in_full(error: Exception) -> str:
    """With the traceback of the other process, which Ray puts into the message, in colour."""
    return re.sub(r"\x1b\[\d+m", "", str(error)).strip() or type(error).__name__
