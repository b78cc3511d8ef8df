"""Runs functions as Ray tasks on a cluster."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import ray

from jppo.actors.ray_cluster import connect, defer_signals, disconnect, limit_process
from jppo.config.ray import RayConfig
from jppo.config.resources import Resources
from jppo.training.progress import Reporter

_POLL_SECONDS = 0.2
Item = TypeVar("Item")


def run_tasks(
    function: Callable[[Item], Any],
    items: Sequence[Item],
    address: str,
    resources: Resources,
    reporter: Reporter,
    stop_requested: Callable[[], bool],
) -> Iterator[tuple[Item, Any]]:
    """Calls `function` with each item in a separate process.

    Args:
      address: see RayConfig, or "local".
      resources: CPUs and GPUs that Ray reserves for each process.

    Yields:
      (item, result or exception), in the order in which they end.

    Raises:
      ValueError: no cluster is running at the address, or it has too few GPUs.
    """
    cpus, gpus = resources.cpus, resources.gpus
    owns_cluster = connect(RayConfig(num_actors=1, actor_cpus=cpus, actor_gpus=gpus, address=address))
    pending: dict[Any, Item] = {}
    try:
        available = ray.cluster_resources().get("GPU", 0.0)
        if gpus > available:
            raise ValueError(f"resources.gpus = {gpus:g}; the Ray cluster has {available:g} GPUs")
        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": 0}
        remote = ray.remote(_call).options(**options, scheduling_strategy="SPREAD")
        pending = {remote.remote(ray.cloudpickle.dumps((function, item))): item for item in items}
        while pending and not stop_requested():
            done, _ = ray.wait(list(pending), timeout=_POLL_SECONDS)
            reporter.tick()
            for ref in done:
                item = pending.pop(ref)
                try:
                    result = ray.get(ref)
                except ray.exceptions.RayError as error:
                    result = error
                yield item, result
    finally:
        with defer_signals():
            for ref in pending:
                ray.cancel(ref, force=True)
            if owns_cluster:
                disconnect()


def _call(pickled: bytes) -> Any:
    """Runs in a worker. Limits the process before unpickling, because importing gymnax starts JAX."""
    limit_process(ray.get_runtime_context().get_assigned_resources())
    function, item = ray.cloudpickle.loads(pickled)
    return function(item)
