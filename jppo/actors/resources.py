"""Compares the resources that actors need with those of Ray's cluster."""

from collections.abc import Callable

import ray

from jppo.config.ray import RayConfig


def check_resources(config: RayConfig, message: Callable[[str], None]) -> None:
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


def explain_missing_resources(config: RayConfig) -> str | None:
    """Returns "waiting for resources ..." if the cluster has no room for another actor now, otherwise None."""
    needs = {name: need for name, need in (("CPU", config.actor_cpus), ("GPU", config.actor_gpus)) if need}
    free, total = ray.available_resources(), ray.cluster_resources()
    if all(free.get(name, 0.0) >= need for name, need in needs.items()):
        return None
    each = " and ".join(f"{need:g} {name}s" for name, need in needs.items())
    left = " and ".join(f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name}s" for name in needs)
    return f"waiting for resources: each needs {each}, and {left} are free (see `ray status`)"
