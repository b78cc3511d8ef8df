"""A pool of Ray actor processes that step environments and return rollouts.

In each iteration, every actor receives the policy and returns one fragment. If an actor fails (its process or node
dies, or an environment raises or hangs), its fragment is lost, and a new actor collects it again.
"""

import dataclasses
import math
import os
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jppo.actors.actor import ONE_THREAD, ActorError, ActorProcess, make_actor_error
from jppo.actors.env_runner import Fragment, RunnerSpec
from jppo.actors.ray_cluster import connect, defer_signals, disconnect
from jppo.config.ray import RayConfig, num_cores
from jppo.devices.determinism import inherited_flags
from jppo.errors import ActorsFailed
from jppo.ppo.types import PolicyState

_START_SECONDS = 300.0  # time limit for making an actor's environments
_ROOM_SECONDS = 20.0  # time without resources in the cluster before the first message; the actor waits forever
_ROOM_MESSAGE_SECONDS = 60.0  # between two such messages
_LEAST_TIMEOUT, _TIMEOUT_FACTOR = 60.0, 10.0
_FIRST_TIMEOUT = 1800.0  # before the first fragment, when the duration of a fragment is unknown
_CLOSE_SECONDS = 2.0  # time limit for closing all environments
_INLINE_BYTES = (
    90_000  # policies up to this size are sent with each call, which is 3 ms faster; Ray's own limit is 100 kB
)
_BACK_OFF = 0.5  # seconds before the first restart; doubled for each further failure in a row


class ActorPool:
    """Owns the actor processes and, unless Ray was initialized before, the connection to Ray."""

    def __init__(
        self,
        spec: RunnerSpec,
        config: RayConfig,
        message: Callable[[str], None],
        process: int = 0,
        num_processes: int = 1,
    ) -> None:
        """Starts Ray or joins a cluster, and starts the actors without waiting for them.

        Args:
          config: the run's, with num_actors and envs_per_actor filled in.
          message: called with messages about actors for the user.
          process: index of this process of the run. Each process has an equal share of the actors, on its own node.
          num_processes: number of processes of the run.

        Raises:
          ValueError: there is no cluster at the address, it has too few GPUs, or the environment or network cannot be
            pickled.
        """
        assert config.num_actors, "use LocalRunner for 0 actors"
        share, envs = config.num_actors // num_processes, config.envs_per_actor or 0
        self._num_envs, self._several_processes = config.num_actors * envs, num_processes > 1
        config = dataclasses.replace(config, num_actors=share)
        self._config, self._message = config, message
        self._lost, self._restarts, self._longest, self._any_success = 0, 0, 0.0, False
        self._waited = (
            0.0  # seconds spent in poll and ready; the clock of all time limits, so that a long update does not count
        )
        self._next_room_message = 0.0
        self._args: Any = None
        self._slots: list[_Slot] = []
        self._owns_ray = connect(config)
        try:
            _check_resources(config, message)
            if self._owns_ray and config.address in (None, "local") and share > num_cores():
                message(f"num_actors = {share} exceeds {num_cores()} CPU cores; use one actor per core")
            self._spec = _put(spec)
            for number in range(process * share, (process + 1) * share):
                self._slots.append(_Slot(number, number * envs + np.arange(envs, dtype=np.int32)))
            for slot in self._slots:
                self._spawn(slot)
        except BaseException:
            self.close()
            raise

    def ready(self, timeout: float) -> str | None:
        """Returns a description of the actors, or None if they are not ready after `timeout` seconds.

        Raises:
          ActorsFailed: an actor failed too often in a row.
        """
        self._poll(timeout)
        nodes = {slot.node for slot in self._slots}
        if not all(slot.started for slot in self._slots):
            return None
        where = " of this process" if self._several_processes else ""
        count = len(self._slots)
        return f"{count} actor{'s' * (count > 1)}{where} on {len(nodes)} node{'s' * (len(nodes) > 1)}"

    def start(self, policy_state: PolicyState, gamma: float) -> None:
        """Tells every actor to collect a fragment and returns at once.

        Args:
          policy_state: NumPy leaves.
          gamma: discount of the returns that scale rewards.
        """
        args = (policy_state, gamma)
        small = sum(leaf.nbytes for leaf in jax.tree.leaves(policy_state)) <= _INLINE_BYTES
        self._args = ray.cloudpickle.dumps(args) if small else ray.put(args)  # serialized once for all actors
        for slot in self._slots:
            slot.due = True
        self._call()

    def poll(self, timeout: float) -> list[Fragment] | None:
        """Returns the fragments in the order of the actors, or None if one is missing after `timeout` seconds.

        Raises:
          ActorsFailed: an actor failed more than max_restarts times in a row.
        """
        self._poll(timeout)
        fragments = [slot.result for slot in self._slots if slot.result is not None]
        if len(fragments) < len(self._slots):
            return None
        for slot in self._slots:
            slot.result = None
        return fragments

    def counts(self) -> dict[str, int]:
        """Returns the numbers of lost fragments and of restarted actors."""
        return {"lost_fragments": self._lost, "restarts": self._restarts}

    def close(self) -> None:
        """Closes the environments, the actors and, if this made it, the connection to Ray."""
        with defer_signals():
            self._close()

    def _close(self) -> None:
        if ray.is_initialized():
            closing = [slot.handle.close.remote() for slot in self._slots if slot.started]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS)
            for slot in self._slots:
                _kill(slot.handle)
        if self._owns_ray:
            disconnect()

    def _poll(self, timeout: float) -> None:
        """Restarts failed actors, waits for results and processes them."""
        for slot in self._slots:
            if slot.retry_at is not None and self._waited >= slot.retry_at:
                self._restarts += 1
                self._spawn(slot)
        waiting = {slot.pending: slot for slot in self._slots if slot.pending is not None}
        retries = [slot.retry_at - self._waited for slot in self._slots if slot.retry_at is not None]
        timeout, begin = min([timeout, *retries]), time.monotonic()
        if waiting:
            # an actor that starts needs a second call, so stop waiting when any call is done; otherwise wait for all
            count = len(waiting) if all(slot.started for slot in self._slots) else 1
            done, _ = ray.wait(list(waiting), num_returns=count, timeout=timeout)
        else:
            done = []
            time.sleep(timeout if retries else 0.0)
        self._waited += time.monotonic() - begin
        for ref in done:
            waiting[ref].pending = None
        for ref in done:
            self._receive(waiting[ref], ref)
        for slot in waiting.values():
            limit = self._time_limit(slot)
            if slot.pending is not None and self._waited - slot.since > limit:
                problem = "no answer" if slot.started else "not started"
                self._handle_failure(slot, ActorError(f"{problem} within {limit:.0f} s"))
        self._call()
        self._report_unplaced_actors()

    def _report_unplaced_actors(self) -> None:
        """Tells the user about actors that have not started for a while, usually for lack of resources."""
        unplaced = [slot for slot in self._slots if slot.pending is not None and slot.node is None]
        late = [slot for slot in unplaced if self._waited - slot.since > _ROOM_SECONDS]
        if late and self._waited >= self._next_room_message:
            self._next_room_message = self._waited + _ROOM_MESSAGE_SECONDS
            each = f"{self._config.actor_cpus:g} CPUs" + (
                f" and {self._config.actor_gpus:g} GPUs" if self._config.actor_gpus else ""
            )
            self._message(
                f"{len(late)} of {len(self._slots)} actors have not started; each needs {each} (see `ray status`)"
            )

    def _receive(self, slot: "_Slot", ref: Any) -> None:
        """Processes the result of a call: starts the next call, stores the fragment or handles the failure."""
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayError as error:  # the process died
            answer = make_actor_error(error, str(error))
        if isinstance(answer, ActorError):
            self._handle_failure(slot, answer)
        elif slot.node is None:
            slot.node, slot.since = answer, self._waited
            slot.pending = slot.handle.begin.remote(self._spec, slot.numbers)
        elif not slot.started:
            slot.started = True
        else:
            slot.result, slot.failures, self._any_success = answer, 0, True
            self._longest = max(self._longest, answer.seconds["rollout"])

    def _time_limit(self, slot: "_Slot") -> float:
        """Returns the time limit of the pending call in seconds."""
        if slot.node is None:
            return math.inf
        if not slot.started:
            return max(_START_SECONDS, self._config.actor_timeout or 0.0)
        known = max(_LEAST_TIMEOUT, _TIMEOUT_FACTOR * self._longest) if self._longest else _FIRST_TIMEOUT
        return self._config.actor_timeout or known

    def _handle_failure(self, slot: "_Slot", error: ActorError) -> None:
        """Kills the actor and schedules its restart. Raises ActorsFailed if it has failed too often in a row."""
        _kill(slot.handle)
        self._lost += slot.started
        slot.failures, slot.pending, slot.node, slot.started = slot.failures + 1, None, None, False
        slot.due = self._args is not None and slot.result is None
        first, last = int(slot.env_index[0]), int(slot.env_index[-1])
        who = f"actor {slot.number} (environments {first} to {last})"
        if slot.failures > (self._config.max_restarts if self._any_success else min(1, self._config.max_restarts)):
            times = "once" if slot.failures == 1 else f"{slot.failures} times in a row"
            raise ActorsFailed(f"{who} failed {times}, the last time with:\n{error.full or error.short}")
        wait = _BACK_OFF * 2.0 ** (slot.failures - 1)
        slot.retry_at = self._waited + wait
        self._message(f"{who} failed ({error.short}); a new one starts in {wait:.1f} s")

    def _spawn(self, slot: "_Slot") -> None:
        """Starts an actor. A restarted actor's environments get new numbers, so that no random draw repeats."""
        config = self._config
        variables = ONE_THREAD | (
            {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if config.actor_gpus else {"JAX_PLATFORMS": "cpu"}
        )
        variables["XLA_FLAGS"] += f" {inherited_flags()}"
        options = {
            "num_cpus": config.actor_cpus,
            "num_gpus": config.actor_gpus,
            "enable_task_events": False,  # Ray's head would store the last 100,000 calls for its dashboard
            "scheduling_strategy": self._strategy(),
            "runtime_env": {"env_vars": variables},
        }
        import_path = [os.path.abspath(directory) for directory in sys.path]
        slot.handle = ray.remote(ActorProcess).options(**options).remote(import_path)
        slot.numbers = slot.env_index + self._num_envs * slot.spawned
        slot.pending, slot.since, slot.retry_at = slot.handle.place.remote(), self._waited, None
        slot.spawned += 1

    def _strategy(self) -> Any:
        if self._several_processes:
            return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        # a placement group (of a Tune trial) already reserves resources for the actors
        return None if ray.util.get_current_placement_group() else "SPREAD"

    def _call(self) -> None:
        """Starts the rollout of every actor that is due and ready."""
        for slot in self._slots:
            if slot.due and slot.started:
                slot.pending, slot.since, slot.due = slot.handle.collect.remote(self._args), self._waited, False


@dataclasses.dataclass
class _Slot:
    """A share of the environments and its current actor."""

    number: int
    env_index: np.ndarray
    handle: Any = None
    numbers: Any = None  # global numbers of the current actor's environments
    node: str | None = None  # the actor's node; None until it is placed
    started: bool = False  # its environments exist
    due: bool = False  # it should collect a rollout and has not started
    pending: Any = None  # the current remote call
    since: float = 0.0  # start of that call on the clock of `_waited`
    result: Fragment | None = None
    failures: int = 0  # in a row
    spawned: int = 0
    retry_at: float | None = None


def _put(spec: RunnerSpec) -> Any:
    """Stores the spec in Ray. Raises ValueError if it cannot be pickled."""
    try:
        return ray.put(spec)
    except (TypeError, pickle.PicklingError) as error:
        raise ValueError(
            f"{spec.env.name}, or the network, cannot be sent to another process ({error.__cause__ or error}); "
            "create unpicklable objects inside the function that makes the environment"
        ) from error


def _check_resources(config: RayConfig, message: Callable[[str], None]) -> None:
    """Raises ValueError if the cluster has too few GPUs. Tells the user if it has too few CPUs."""
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
