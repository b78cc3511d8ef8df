"""Work spread over a Ray cluster, a task each."""

from collections.abc import Callable, Iterator
from typing import Any

import ray

from jppo.actors.ray_cluster import connect, defer_signals, disconnect, limit_process
from jppo.config.ppo import RayConfig
from jppo.training.progress import Reporter

_POLL_SECONDS = 0.2


def run_tasks(
    function: Callable[[Any], Any],
    items: dict[int, Any],
    address: str,
    cpus: float,
    gpus: float,
    reporter: Reporter,
    stop_requested: Callable[[], bool],
) -> Iterator[tuple[int, Any]]:
    """Calls `function` with each item in a process of its own, and yields (key, result or exception) as they end.

    Args:
      address: see RayConfig, or "local".
      cpus, gpus: that Ray reserves for each; a fraction of a GPU is a share of its memory too.

    Raises:
      ValueError: there is no cluster at the address, or none with as many GPUs.
    """
    owned = connect(RayConfig(num_actors=1, actor_cpus=cpus, actor_gpus=gpus, address=address))
    pending: dict[Any, int] = {}
    try:
        has = ray.cluster_resources().get("GPU", 0.0)
        if gpus > has:
            raise ValueError(f"task_gpus = {gpus:g}; Ray has {has:g}")
        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": 0}
        remote = ray.remote(_run).options(**options, scheduling_strategy="SPREAD")
        pending = {remote.remote(ray.cloudpickle.dumps((function, item))): key for key, item in items.items()}
        while pending and not stop_requested():
            done, _ = ray.wait(list(pending), timeout=_POLL_SECONDS)
            reporter.tick()
            for ref in done:
                key = pending.pop(ref)
                try:
                    result = ray.get(ref)
                except ray.exceptions.RayError as error:
                    result = error
                yield key, result
    finally:
        with defer_signals():
            for ref in pending:
                ray.cancel(ref, force=True)
            if owned:
                disconnect()


def _run(packed: bytes) -> Any:
    """In a worker. What is packed is opened when JAX may start: gymnax starts it when imported."""
    limit_process(ray.get_runtime_context().get_assigned_resources())
    function, item = ray.cloudpickle.loads(packed)
    return function(item)
