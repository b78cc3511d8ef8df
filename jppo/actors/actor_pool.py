"""The door to Ray: actor processes that step environments and send rollouts.

Down goes the policy, once per iteration (one `ray.put`, or with the calls where it is small), up comes one fragment per
actor. Whatever happens to an actor (its process dies, its environment raises or hangs, its node vanishes) costs the
fragment in flight: the actor is replaced, and its successor collects in its place.
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
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jppo.actors.actor import ONE_THREAD, ActorProcess, Trouble, trouble_of
from jppo.actors.env_runner import Fragment, RunnerSpec
from jppo.actors.ray_cluster import connect, defer_signals, disconnect
from jppo.config.ppo import RayConfig, num_cores
from jppo.devices.determinism import inherited_flags
from jppo.errors import ActorsFailed
from jppo.ppo.types import PolicyState

_START_SECONDS = 300.0  # an actor may take this long to make its environments
_ROOM_SECONDS = 20.0  # without a place in the cluster it waits, for ever; after this long that is said
_SAY_SECONDS = 60.0
_LEAST_TIMEOUT, _TIMEOUT_FACTOR = 60.0, 10.0
_FIRST_TIMEOUT = 1800.0  # while no actor has shown how long a fragment takes
_CLOSE_SECONDS = 2.0  # for environments to be closed, whether or not they are in a step
_INLINE_BYTES = 90_000  # of a policy, sent with each call: any Ray does so up to 100 kB, and it saves 3 ms
_BACK_OFF = 0.5  # seconds before the first replacement in a row, doubled for each further one


class ActorPool:
    """Owns the actor processes, and the connection to Ray where it made one."""

    def __init__(
        self, spec: RunnerSpec, config: RayConfig, message: Callable[[str], None], host: int = 0, num_hosts: int = 1
    ) -> None:
        """Starts Ray (or joins a cluster) and the actors; does not wait for them.

        Args:
          config: of the run, with num_actors and envs_per_actor filled in.
          message: gets told, in words, what happens to actors.
          host, num_hosts: which of the run's processes this is; it has its own share of the actors, and near it.

        Raises:
          ValueError: no cluster at the address, one without the GPUs asked for, or an environment or network that
            cannot be sent to another process.
        """
        assert config.num_actors, "use LocalRunner for 0 actors"
        share, envs = config.num_actors // num_hosts, config.envs_per_actor or 0
        self._num_envs, self._near = config.num_actors * envs, num_hosts > 1
        config = dataclasses.replace(config, num_actors=share)
        self._config, self._message = config, message
        self._lost, self._restarts, self._longest, self._any_success = 0, 0, 0.0, False
        self._waited = 0.0  # seconds in poll and ready, by which limits go: neither a long update counts nor a pause
        self._say_at = 0.0
        self._given: Any = None
        self._slots: list[_Slot] = []
        self._owns_ray = connect(config)
        try:
            _check_resources(config, message)
            if self._owns_ray and config.address in (None, "local") and share > num_cores():
                message(f"num_actors = {share} exceeds {num_cores()} CPU cores; use one actor per core")
            self._spec = _put(spec)
            for number in range(host * share, (host + 1) * share):
                self._slots.append(_Slot(number, number * envs + np.arange(envs, dtype=np.int32)))
            for slot in self._slots:
                self._spawn(slot)
        except BaseException:
            self.close()
            raise

    def ready(self, timeout: float) -> str | None:
        """In words what is ready, or None where `timeout` seconds were not enough. Raises ActorsFailed."""
        self._poll(timeout)
        nodes = {slot.node for slot in self._slots}
        if not all(slot.started for slot in self._slots):
            return None
        near = " of this host" if self._near else ""
        count = len(self._slots)
        return f"{count} actor{'s' * (count > 1)}{near} on {len(nodes)} node{'s' * (len(nodes) > 1)}"

    def start(self, policy_state: PolicyState, gamma: float) -> None:
        """Has every actor collect a fragment; returns at once.

        Args:
          policy_state: NumPy leaves.
        """
        given = (policy_state, gamma)
        small = sum(leaf.nbytes for leaf in jax.tree.leaves(policy_state)) <= _INLINE_BYTES
        self._given = ray.cloudpickle.dumps(given) if small else ray.put(given)  # once, not for each
        for slot in self._slots:
            slot.due = True
        self._call()

    def poll(self, timeout: float) -> list[Fragment] | None:
        """The fragments, by actor, once all are there; None where `timeout` seconds were not enough.

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
        """Fragments lost and actors replaced since the start."""
        return {"lost_fragments": self._lost, "restarts": self._restarts}

    def close(self) -> None:
        """Ends the environments, the actors, and the connection to Ray where it was made here."""
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
        """Replaces what failed, waits for answers and receives them."""
        for slot in self._slots:
            if slot.retry_at is not None and self._waited >= slot.retry_at:
                self._restarts += 1
                self._spawn(slot)
        waiting = {slot.pending: slot for slot in self._slots if slot.pending is not None}
        retries = [slot.retry_at - self._waited for slot in self._slots if slot.retry_at is not None]
        timeout, begin = min([timeout, *retries]), time.monotonic()
        if waiting:
            # an actor that starts needs a second call, so return as soon as any call is done; otherwise wait for all
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
                what = "no answer" if slot.started else "not started"
                self._failed(slot, Trouble(f"{what} within {limit:.0f} s"))
        self._call()
        self._say_who_waits()

    def _say_who_waits(self) -> None:
        homeless = [slot for slot in self._slots if slot.pending is not None and slot.node is None]
        late = [slot for slot in homeless if self._waited - slot.since > _ROOM_SECONDS]
        if late and self._waited >= self._say_at:
            self._say_at = self._waited + _SAY_SECONDS
            each = f"{self._config.actor_cpus:g} CPUs" + (
                f" and {self._config.actor_gpus:g} GPUs" if self._config.actor_gpus else ""
            )
            self._message(f"{len(late)} of {len(self._slots)} actors wait for room, {each} each (see `ray status`)")

    def _receive(self, slot: "_Slot", ref: Any) -> None:
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayError as error:  # the process died
            answer = trouble_of(error, str(error))
        if isinstance(answer, Trouble):
            self._failed(slot, answer)
        elif slot.node is None:
            slot.node, slot.since = answer, self._waited
            slot.pending = slot.handle.begin.remote(self._spec, slot.numbers)
        elif not slot.started:
            slot.started = True
        else:
            slot.result, slot.failures, self._any_success = answer, 0, True
            self._longest = max(self._longest, answer.seconds["rollout"])

    def _time_limit(self, slot: "_Slot") -> float:
        if slot.node is None:
            return math.inf
        if not slot.started:
            return max(_START_SECONDS, self._config.actor_timeout or 0.0)
        known = max(_LEAST_TIMEOUT, _TIMEOUT_FACTOR * self._longest) if self._longest else _FIRST_TIMEOUT
        return self._config.actor_timeout or known

    def _failed(self, slot: "_Slot", trouble: "Trouble") -> None:
        """Counts it and lays down when the slot's actor is replaced. Raises ActorsFailed when it was once too often."""
        _kill(slot.handle)
        self._lost += slot.started
        slot.failures, slot.pending, slot.node, slot.started = slot.failures + 1, None, None, False
        slot.due = self._given is not None and slot.result is None
        first, last = int(slot.env_index[0]), int(slot.env_index[-1])
        who = f"actor {slot.number} (environments {first} to {last})"
        if slot.failures > (self._config.max_restarts if self._any_success else min(1, self._config.max_restarts)):
            times = "once" if slot.failures == 1 else f"{slot.failures} times in a row"
            raise ActorsFailed(f"{who} failed {times}, the last time with:\n{trouble.full or trouble.short}")
        wait = _BACK_OFF * 2.0 ** (slot.failures - 1)
        slot.retry_at = self._waited + wait
        self._message(f"{who} failed ({trouble.short}); a new one starts in {wait:.1f} s")

    def _spawn(self, slot: "_Slot") -> None:
        """A replacement's environments count as new ones, with numbers of their own, so that no draw is repeated."""
        config = self._config
        variables = ONE_THREAD | (
            {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if config.actor_gpus else {"JAX_PLATFORMS": "cpu"}
        )
        variables["XLA_FLAGS"] += f" {inherited_flags()}"
        options = {
            "num_cpus": config.actor_cpus,
            "num_gpus": config.actor_gpus,
            "enable_task_events": False,  # which Ray's head would keep, of 100,000 calls, for its dashboard
            "scheduling_strategy": self._strategy(),
            "runtime_env": {"env_vars": variables},
        }
        slot.handle = ray.remote(ActorProcess).options(**options).remote()
        slot.numbers = slot.env_index + self._num_envs * slot.spawned
        slot.pending, slot.since, slot.retry_at = slot.handle.place.remote(), self._waited, None
        slot.spawned += 1

    def _strategy(self) -> Any:
        if self._near:
            return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        # inside a placement group (a Tune trial's) there is room for the actors already
        return None if ray.util.get_current_placement_group() else "SPREAD"

    def _call(self) -> None:
        """Has those collect that are due and ready."""
        for slot in self._slots:
            if slot.due and slot.started:
                slot.pending, slot.since, slot.due = slot.handle.collect.remote(self._given), self._waited, False


@dataclasses.dataclass
class _Slot:
    """A share of the environments, and the actor that has it at the moment."""

    number: int
    env_index: np.ndarray
    handle: Any = None
    numbers: Any = None  # of the environments that its actor has
    node: str | None = None  # where its actor runs; None until it has been placed
    started: bool = False  # whether its environments are made
    due: bool = False  # whether it is to collect, and has not begun
    pending: Any = None  # the call that is waited for
    since: float = 0.0  # when that was made
    result: Fragment | None = None
    failures: int = 0  # in a row
    spawned: int = 0
    retry_at: float | None = None


def _put(spec: RunnerSpec) -> Any:
    try:
        return ray.put(spec)
    except (TypeError, pickle.PicklingError) as error:
        raise ValueError(
            f"{spec.env.name}, or the network, cannot be sent to another process ({error.__cause__ or error}); what "
            "cannot be pickled must be made inside the function that makes the environment"
        ) from error


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
