"""A pool of Ray actor processes that step environments and return rollouts.

In each iteration, every actor receives the policy and returns one fragment. If an actor fails (its process or node
dies, or an environment raises or hangs), its fragment is lost, and a new actor collects it again. Between two
iterations, the first actor may evaluate a policy; if it fails, a new one repeats the evaluation.
"""

import dataclasses
import math
import pickle
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import ray

from jppo.actors.actor import ActorError, make_actor_error, start_actor
from jppo.actors.daemon_monitor import DaemonMonitor
from jppo.actors.env_runner import RunnerSpec
from jppo.actors.ray_cluster import (
    check_resources,
    cluster_address,
    connect,
    disconnect,
    explain_missing_resources,
)
from jppo.config.ray import RayConfig, num_cores
from jppo.devices.signals import defer_signals
from jppo.envs.host_families import pickle_registrations
from jppo.errors import ActorsFailed, Refused
from jppo.ppo.types import PolicyState

_UNPLACED_SECONDS = 20.0  # without a process, before the first message; actors wait for resources without limit
_UNPLACED_MESSAGE_SECONDS = 60.0  # between two such messages
_LEAST_TIMEOUT, _LEAST_START_TIMEOUT = 60.0, 300.0  # for a fragment, and for making an actor's environments
_TIMEOUT_FACTOR = 10.0  # times the longest duration so far
_FIRST_TIMEOUT = 1800.0  # before the first duration is known: on a busy machine, the first start takes minutes
_LATE_SECONDS = 1.0  # time limits exclude the time for which this process was stopped, beyond this one
_GET_SECONDS = 5.0  # time limit for reading a result that has arrived
_CLOSE_SECONDS = 2.0  # time limit for closing all environments
_INLINE_BYTES = 90_000  # smaller policies are sent with each call, which is 3 ms faster; Ray's limit is 100 kB
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
        self._lost, self._restarts, self._any_success = 0, 0, False
        self._longest_rollout, self._longest_start = 0.0, 0.0
        self._waited = 0.0  # seconds spent in poll and ready: the clock of all time limits, which excludes updates
        self._next_unplaced_message = 0.0
        self._slots: list[_Slot] = []
        self._method, self._asked = "", self._slots  # the current call, and who gets it
        self._args: Any = None
        self._max_rollouts = 1.0  # the largest duration of the call, in rollouts
        self._failure: str | None = None  # why the actors cannot continue
        self._owns_ray = connect(config)
        self._own_cluster = self._owns_ray and cluster_address(config) == "local"
        try:
            self._monitor = DaemonMonitor(self._own_cluster)
            check_resources(config, message)
            if self._own_cluster and share > num_cores():
                message(f"num_actors = {share} exceeds {num_cores()} CPU cores, which helps only if environments wait")
            self._spec = _put(spec)
            for number in range(process * share, (process + 1) * share):
                self._slots.append(_Slot(number=number, env_index=number * envs + np.arange(envs, dtype=np.int32)))
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
        self._begin("collect", (policy_state, gamma), self._slots, 1.0)

    def start_evaluation(
        self, policy_state: PolicyState, update: int, stop_requested: Callable[[], bool], max_rollouts: float
    ) -> None:
        """Tells the first actor to evaluate a policy and returns at once. No rollout may be running.

        Args:
          policy_state: NumPy leaves.
          update: number of updates so far.
          stop_requested: unused; `LocalRunner` needs it.
          max_rollouts: the largest duration of the evaluation, in durations of a rollout.
        """
        self._begin("evaluate", (policy_state, update), self._slots[:1], max_rollouts)

    def _begin(self, method: str, args: tuple[PolicyState, float], asked: "list[_Slot]", max_rollouts: float) -> None:
        """Calls a method of `EnvRunner` in these actors."""
        small = sum(leaf.nbytes for leaf in jax.tree.leaves(args[0])) <= _INLINE_BYTES
        if not self.check_daemons(at_once=not small):  # without a raylet, ray.put would block
            return
        self._args = ray.cloudpickle.dumps(args) if small else ray.put(args)  # serialized once for all actors
        self._method, self._asked, self._max_rollouts = method, asked, max(1.0, max_rollouts)
        for slot in asked:
            slot.due = True
        self._call()

    def poll(self, timeout: float) -> list[Any] | None:
        """Returns the fragments in the order of the actors, or the metrics of an evaluation.

        Returns None if a result is missing after `timeout` seconds.

        Raises:
          ActorsFailed: an actor failed more than max_restarts times in a row.
        """
        self._poll(timeout)
        results = [slot.result for slot in self._asked if slot.result is not None]
        if len(results) < len(self._asked):
            return None
        for slot in self._asked:
            slot.result = None
        return results

    def check_daemons(self, at_once: bool = False, closing: bool = False) -> bool:
        """Returns False if one of Ray's daemons stopped. Then `ready` and `poll` raise ActorsFailed.

        Disconnects from Ray in this case, because Ray would end this process. Returned fragments remain valid.
        `at_once` and `closing` check now; `closing` does not wait for a slow daemon.
        """
        at_once |= not ray.is_initialized()  # another run has found that a daemon stopped
        if self._failure is None and (failure := self._monitor.find_failure(at_once, closing)) is not None:
            self._failure, self._owns_ray = failure, False
            disconnect(failed=True)
        return self._failure is None

    def require_daemons(self, at_once: bool = False) -> None:
        """Raises ActorsFailed if one of Ray's daemons stopped."""
        if not self.check_daemons(at_once):
            raise ActorsFailed(self._failure)

    def counts(self) -> dict[str, int]:
        """Returns the numbers of lost fragments and of restarted actors."""
        return {"lost_fragments": self._lost, "restarts": self._restarts}

    def close(self) -> None:
        """Closes the environments, the actors and, if this made it, the connection to Ray."""
        with defer_signals():
            if self._slots and ray.is_initialized() and self.check_daemons(closing=True):
                if closing := [slot.handle.close.remote() for slot in self._slots if slot.started]:
                    ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS)
                for slot in self._slots:
                    _kill(slot.handle)
            if self._owns_ray:
                disconnect()

    def _poll(self, timeout: float) -> None:
        """Restarts failed actors, waits for results and processes them. Raises ActorsFailed."""
        self.require_daemons()
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
            try:
                done, _ = ray.wait(list(waiting), num_returns=count, timeout=timeout)
            except OSError:  # the connection to the raylet broke
                self.require_daemons(at_once=True)
                raise
        else:
            done = []
            time.sleep(timeout if retries else 0.0)
        self._waited += min(time.monotonic() - begin, timeout + _LATE_SECONDS)
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
        """Tells the user about actors whose processes have not started for a while."""
        unplaced = [slot for slot in self._slots if slot.pending is not None and slot.node is None]
        late = [slot for slot in unplaced if self._waited - slot.since > _UNPLACED_SECONDS]
        if not late or self._waited < self._next_unplaced_message:
            return
        self._next_unplaced_message = self._waited + _UNPLACED_MESSAGE_SECONDS
        self.require_daemons(at_once=True)
        if self._monitor.head_answers:  # otherwise Ray would block
            reason = None if self._own_cluster else explain_missing_resources(self._config)
            reason = reason or "still starting; Ray has resources for them, but the machine may be busy"
            self._message(f"{len(late)} of {len(self._slots)} actors are {reason}")

    def _receive(self, slot: "_Slot", ref: Any) -> None:
        """Processes the result of a call: starts the next call, stores the fragment or handles the failure."""
        try:
            answer = ray.get(ref, timeout=_GET_SECONDS)
        except ray.exceptions.RayError as error:  # the process died
            self.require_daemons(at_once=True)
            answer = make_actor_error(error, str(error))
        if isinstance(answer, ActorError):
            self._handle_failure(slot, answer)
        elif slot.node is None:
            slot.node, slot.since = answer, self._waited
            slot.pending = slot.handle.begin.remote(self._spec, slot.numbers)
        elif not slot.started:
            slot.started = True
            self._longest_start = max(self._longest_start, self._waited - slot.since)
        else:
            slot.result, slot.failures, self._any_success = answer, 0, True
            if self._method == "collect":
                self._longest_rollout = max(self._longest_rollout, answer.seconds["rollout"])

    def _time_limit(self, slot: "_Slot") -> float:
        """Returns the time limit of the pending call in seconds."""
        if slot.node is None:
            return math.inf
        if slot.started and self._config.actor_timeout is not None:
            return self._config.actor_timeout * self._max_rollouts
        longest = self._longest_rollout * self._max_rollouts if slot.started else self._longest_start
        least = _LEAST_TIMEOUT if slot.started else max(_LEAST_START_TIMEOUT, self._config.actor_timeout or 0.0)
        return max(least, _TIMEOUT_FACTOR * longest) if longest else _FIRST_TIMEOUT

    def _handle_failure(self, slot: "_Slot", error: ActorError) -> None:
        """Kills the actor and schedules its restart. Raises ActorsFailed if it has failed too often in a row."""
        _kill(slot.handle)
        self._lost += slot.started and self._method == "collect"
        slot.failures, slot.pending, slot.node, slot.started = slot.failures + 1, None, None, False
        slot.due = self._args is not None and slot in self._asked and slot.result is None
        first, last = int(slot.env_index[0]), int(slot.env_index[-1])
        who = f"actor {slot.number} (environments {first} to {last})"
        if slot.failures > (self._config.max_restarts if self._any_success else min(1, self._config.max_restarts)):
            times = "once" if slot.failures == 1 else f"{slot.failures} times in a row"
            text = f"\n{error.full}" if error.full else f" {error.short}"
            raise ActorsFailed(f"{who} failed {times}, the last time with:{text}")
        wait = _BACK_OFF * 2.0 ** (slot.failures - 1)
        slot.retry_at = self._waited + wait
        self._message(f"{who} failed ({error.short}); a new one starts in {wait:.1f} s")

    def _spawn(self, slot: "_Slot") -> None:
        """Starts an actor. A restarted actor's environments get new numbers, so that no random draw repeats."""
        slot.handle = start_actor(self._config, self._several_processes)
        slot.numbers = slot.env_index + self._num_envs * slot.spawned
        slot.pending, slot.since, slot.retry_at = slot.handle.place.remote(), self._waited, None
        slot.spawned += 1

    def _call(self) -> None:
        """Makes the current call of every actor that is due and ready."""
        for slot in self._slots:
            if slot.due and slot.started:
                slot.pending, slot.since, slot.due = (
                    slot.handle.call.remote(self._method, self._args),
                    self._waited,
                    False,
                )


@dataclasses.dataclass(eq=False)
class _Slot:
    """A share of the environments and its current actor."""

    number: int
    env_index: np.ndarray
    handle: Any = None
    numbers: Any = None  # global numbers of the current actor's environments
    node: str | None = None  # the actor's node; None until it is placed
    started: bool = False  # its environments exist
    due: bool = False  # it must get the pool's current call
    pending: Any = None  # the current remote call
    since: float = 0.0  # start of that call on the clock of `_waited`
    result: Any = None  # of the pool's current call
    failures: int = 0  # in a row
    spawned: int = 0
    retry_at: float | None = None


def _put(spec: RunnerSpec) -> Any:
    """Stores the spec in Ray. Raises ValueError if it cannot be pickled."""
    try:
        pickle_registrations(ray.cloudpickle.dumps, required=spec.env.source)
        return ray.put(spec)
    except (TypeError, pickle.PicklingError) as error:
        raise Refused(
            f"{spec.env.name}, or the network, cannot be sent to another process ({error.__cause__ or error}); "
            "create unpicklable objects inside the function that makes the environment"
        ) from error


def _kill(handle: Any) -> None:
    if handle is not None and ray.is_initialized():
        ray.kill(handle)
