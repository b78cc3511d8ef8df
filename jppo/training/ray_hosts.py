"""Several hosts for one program: Ray starts a process on each, `jax.distributed` makes them one."""

import math
import os
import pickle
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jppo.actors.ray_cluster import connect, defer_signals, disconnect, limit_process
from jppo.config.ppo import RayConfig
from jppo.devices.determinism import inherited_flags
from jppo.errors import HostFailed, first_line
from jppo.training.progress import NullReporter, Reporter

_POLL_SECONDS = 0.2
_ROOM_SECONDS = 20.0  # without a place in the cluster a host waits, for ever; after this long that is said
_GRACE_SECONDS = 10.0  # when one host has failed, the others may say why too, or come to the same end
_HEARTBEAT_SECONDS = 60  # after which a host that says nothing is given up, and with it all others
_PACKAGE = Path(__file__).parent


def run_on_hosts(
    function: Callable[[Any, Reporter, Callable[[], bool]], Any],
    item: Any,
    num_hosts: int,
    cpus: float,
    gpus: float,
    address: str | None,
    actor_cpus: float,
    reporter: Reporter,
    stop_requested: Callable[[], bool],
) -> list[Any]:
    """Calls `function(item, reporter, stop)` in a process on each host, in all of which JAX sees the devices of all.

    Args:
      function: what it tells its reporter, `reporter` is told here; its `stop` says whether a stop was requested.
      cpus, gpus: that Ray reserves for each host.
      address: see RayConfig.
      actor_cpus: that a Ray that is started here must have besides, for what the hosts start themselves.

    Returns:
      what it returned on each host.

    Raises:
      ValueError: there is no cluster at the address, or none with as many GPUs; the item cannot be sent to another
        process; or jppo's own in a host.
      HostFailed: a host died, or `function` raised something else.
      KeyboardInterrupt: function raised that, on request.
    """
    # connect() counts a CPU for a learner here: there is none
    needed = max(num_hosts * cpus + actor_cpus - 1, 1.0)
    owned = connect(RayConfig(num_actors=1, actor_cpus=needed, address=address))
    room, hosts = None, []
    try:
        has = ray.cluster_resources().get("GPU", 0.0)
        if num_hosts * gpus > has:
            raise ValueError(
                f"{num_hosts} hosts of host_gpus = {gpus:g} need {num_hosts * gpus:g} GPUs; Ray has {has:g}"
            )
        packed = ray.put(_pack((function, item)))
        room = placement_group(_bundles(num_hosts, cpus, gpus, reporter), strategy="SPREAD")
        _await_room(room, num_hosts, reporter, stop_requested)
        hosts = [_start(room, number, cpus, gpus) for number in range(num_hosts)]
        coordinator = _answer(hosts[0].handle.coordinator.remote())
        if isinstance(coordinator, Exception):
            raise HostFailed(f"host 0 ({hosts[0].where}) could not start: {coordinator}") from coordinator
        given = (packed, coordinator, {"CPU": cpus, "GPU": gpus}, inherited_flags(), num_hosts)
        calls = [host.handle.run.remote(*given, number) for number, host in enumerate(hosts)]
        return _await_outcomes(hosts, calls, reporter, stop_requested)
    finally:
        with defer_signals():
            for host in hosts:
                ray.kill(host.handle)
            if room is not None:
                remove_placement_group(room)
            if owned:
                disconnect()


class _Started(NamedTuple):
    """A host."""

    handle: Any
    where: str  # its node's address


class _Trouble(NamedTuple):
    """Why a host's function raised. Text, because an exception may not survive the way to another process."""

    kind: str  # interrupted; value: jppo's own ValueError; told: by another host; or other
    text: str


def _pack(given: Any) -> bytes:
    try:
        return ray.cloudpickle.dumps(given)
    except (TypeError, pickle.PicklingError) as error:
        raise ValueError(
            f"the environment, or another argument, cannot be sent to another process ({error.__cause__ or error}); "
            "what cannot be pickled must be made inside the function that makes the environment"
        ) from error


def _bundles(num_hosts: int, cpus: float, gpus: float, reporter: Reporter) -> list[dict[str, float]]:
    """What each host needs. The first one's is to be on this node, where the run directory belongs."""
    each = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    here = next(node for node in ray.nodes() if node["NodeID"] == ray.get_runtime_context().get_node_id())
    if any(here["Resources"].get(name, 0.0) < amount for name, amount in each.items()):
        reporter.message("this node has no room for a host; the run directory is written where the first host runs")
        return [each] * num_hosts
    return [each | {f"node:{here['NodeManagerAddress']}": 1e-3}] + [each] * (num_hosts - 1)


def _await_room(room: PlacementGroup, num_hosts: int, reporter: Reporter, stop_requested: Callable[[], bool]) -> None:
    """However long it takes. Raises KeyboardInterrupt."""
    begin, said, ready = time.monotonic(), False, room.ready()
    while not ray.wait([ready], timeout=_POLL_SECONDS)[0]:
        if stop_requested():
            raise KeyboardInterrupt
        reporter.tick()
        if not said and time.monotonic() - begin > _ROOM_SECONDS:
            said = True
            reporter.message(f"{num_hosts} hosts wait for room, each for {room.bundle_specs[-1]} (see `ray status`)")
    nodes = set(placement_group_table(room)["bundles_to_node_id"].values())
    reporter.message(f"{num_hosts} hosts on {len(nodes)} node{'s' * (len(nodes) > 1)}")


def _start(room: PlacementGroup, number: int, cpus: float, gpus: float) -> _Started:
    options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "max_concurrency": 4, "enable_task_events": False}
    strategy = PlacementGroupSchedulingStrategy(room, number)
    handle = ray.remote(_Host).options(**options, scheduling_strategy=strategy).remote()
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return _Started(handle, addresses[placement_group_table(room)["bundles_to_node_id"][number]])


def _await_outcomes(
    hosts: list[_Started], calls: list[Any], reporter: Reporter, stop_requested: Callable[[], bool]
) -> list[Any]:
    """What the hosts' calls return. Raises what came of them where one did not return."""
    numbers = {call: number for number, call in enumerate(calls)}
    pending, told, end = list(calls), False, math.inf
    outcomes: dict[int, Any] = {}
    asked: dict[int, Any] = {}
    while pending and time.monotonic() < end:
        if stop_requested() and not told:
            told = True
            for host in hosts:
                host.handle.stop.remote()
        _relay(asked, hosts, reporter)
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL_SECONDS)
        for call in done:
            outcome = outcomes[numbers[call]] = _answer(call)
            if isinstance(outcome, _Trouble | Exception):
                end = min(end, time.monotonic() + _GRACE_SECONDS)
    for _ in range(2):  # what was asked before the end, and what came after
        _relay(asked, hosts, reporter)
    troubles = {n: outcome for n, outcome in sorted(outcomes.items()) if isinstance(outcome, _Trouble | Exception)}
    if troubles:
        _raise(hosts, troubles)
    return [outcomes[number] for number in range(len(hosts))]


def _answer(call: Any) -> Any:
    try:
        return ray.get(call)
    except ray.exceptions.RayError as error:  # the process died
        return error


def _relay(asked: dict[int, Any], hosts: list[_Started], reporter: Reporter) -> None:
    """Tells the reporter here what the hosts told their own.

    Args:
      asked: by number of the host, the calls that have not been answered yet.
    """
    reporter.tick()
    for number, host in enumerate(hosts):
        if number not in asked:
            asked[number] = host.handle.news.remote()
    done = ray.wait(list(asked.values()), num_returns=len(asked), timeout=_POLL_SECONDS)[0]
    for number in [number for number, ref in asked.items() if ref in done]:
        news = _answer(asked.pop(number))
        for name, arguments in [] if isinstance(news, Exception) else news:
            getattr(reporter, name)(*arguments)


def _raise(hosts: list[_Started], troubles: dict[int, Any]) -> None:
    """The cause: a death rather than what others made of it, and what a host says of itself rather than of others."""
    for number, trouble in troubles.items():
        if isinstance(trouble, Exception):
            raise HostFailed(f"host {number} ({hosts[number].where}) died: {first_line(trouble)}") from trouble
    order = {"value": 0, "other": 1, "interrupted": 2, "told": 3}
    number, trouble = min(troubles.items(), key=lambda pair: order[pair[1].kind])
    if trouble.kind == "value":
        raise ValueError(trouble.text)
    if trouble.kind == "interrupted":
        raise KeyboardInterrupt
    raise HostFailed(f"host {number} ({hosts[number].where}) failed with:\n{trouble.text}")


class _Host:
    """A host's process. Its function runs in one thread, while others answer."""

    def __init__(self) -> None:
        self._relay, self._stop = _Relay(), threading.Event()

    def coordinator(self) -> str:
        """Where the hosts are to find each other: here."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def news(self) -> list[tuple[str, tuple]]:
        """What the function reported since the last time."""
        calls = []
        while not self._relay.calls.empty():
            calls.append(self._relay.calls.get())
        return calls

    def stop(self) -> None:
        self._stop.set()

    def run(
        self, packed: bytes, coordinator: str, resources: dict[str, float], flags: str, num_hosts: int, number: int
    ) -> Any:
        """Calls the function once JAX runs on all hosts. What is packed is opened when JAX may start."""
        limit_process(resources)
        if flags:  # of nothing but a space XLA would make the name of a file
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        try:
            jax.distributed.initialize(
                coordinator,
                num_hosts,
                number,
                cluster_detection_method="deactivate",  # SLURM's would leave a host one of its GPUs
                heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            )
            function, item = ray.cloudpickle.loads(packed)
            outcome = function(item, self._relay, self._stop.is_set)
            jax.distributed.shutdown()
        except KeyboardInterrupt:
            return _Trouble("interrupted", "")
        except HostFailed as error:
            return _Trouble("told", str(error))
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            if isinstance(error, ValueError) and Path(frames[-1].filename).is_relative_to(_PACKAGE):
                return _Trouble("value", str(error))
            return _Trouble("other", traceback.format_exc())
        return outcome


class _Relay(NullReporter):
    """Keeps what is reported until it is asked for."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[str, tuple]] = queue.SimpleQueue()

    def start(self) -> None:
        self.calls.put(("start", ()))

    def message(self, text: str) -> None:
        self.calls.put(("message", (text,)))

    def update(self, step: int, steps_per_second: float, recent_return: float) -> None:
        self.calls.put(("update", (step, steps_per_second, recent_return)))
