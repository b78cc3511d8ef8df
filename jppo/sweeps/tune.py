"""The door to Ray Tune: runs, and populations, as what a Tuner tries."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import ray
from ray import tune

from jppo.actors.ray_cluster import limit_process
from jppo.config.ppo import PPOConfig, RayConfig, check_hyperparams, check_seed, check_total_steps
from jppo.envs.backends import BACKENDS
from jppo.ppo.losses import Loss
from jppo.ppo.networks import Network
from jppo.ppo.optimizer import Optimizer, adam
from jppo.ppo.types import Hyperparams
from jppo.runs.plots import interquartile_mean
from jppo.sweeps.grid import check_seeds, check_settings, make_groups
from jppo.sweeps.halving import GroupTrainer
from jppo.sweeps.population import SweepProgress
from jppo.sweeps.tune_trial import METRIC, Given, PrintReporter, train
from jppo.training.settings import check_preset


def trainable(
    env: Any,
    *,
    total_steps: int | float | None = None,
    config: PPOConfig | None = None,
    hyperparams: Hyperparams | None = None,
    seed: int = 0,
    preset: str = "auto",
    network: Network | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | None = None,
    checkpoint_every: int = 100,
    cpus: float = 1.0,
    gpus: float = 0.0,
    backend: str = "auto",
    num_devices: int = 1,
    num_actors: int = 0,
    envs_per_actor: int | None = None,
    policy_lag: Literal[0, 1] = 0,
    actor_cpus: float = 1.0,
    actor_gpus: float = 0.0,
    actor_timeout: float | None = None,
    max_restarts: int = 3,
) -> Callable[[dict[str, Any]], None]:
    """A trainable for `ray.tune.Tuner`: each trial is a run.

    A search space names fields of `jppo.Hyperparams` and `jppo.PPOConfig`, and `seed`; they override what is given
    here. Every update is reported: docs/metrics.md, and "return_mean", of the last hundred episodes or so (NaN before
    the first one has ended). A checkpoint holds the whole state, and is a run directory to `jppo eval` and `jppo play`.

    Args:
      env, total_steps, config, hyperparams, seed, preset, network, optimizer, loss, backend, num_devices: as for
        `jppo.train`. An object that holds JAX arrays puts them on this process's GPU; names and functions do not.
      checkpoint_every: updates between two checkpoints; the last update always makes one. 0: no other.
      cpus, gpus: what a trial reserves for itself, the GPUs as a fraction or whole. A fraction is its share of the
        memory too; without any, the trial stays on the CPU, with as many threads as CPUs.
      num_actors, envs_per_actor, policy_lag, actor_cpus, actor_gpus, actor_timeout, max_restarts: of the Ray backend,
        see `jppo.RayConfig`. Each actor reserves actor_cpus and actor_gpus besides; without actors, a trial steps its
        environments itself.

    Raises:
      ValueError: anything given that cannot be. What only a trial can see (an unknown environment, say) fails there.
    """
    if config is not None and not isinstance(config, PPOConfig):
        raise ValueError(f"config = {config!r} must be a PPOConfig; the search space goes to the Tuner, as param_space")
    if hyperparams is not None:
        check_hyperparams(hyperparams)
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r} is not one of {', '.join(BACKENDS)}")
    if preset != "auto":
        check_preset(preset)
    if isinstance(checkpoint_every, bool) or not isinstance(checkpoint_every, int) or checkpoint_every < 0:
        raise ValueError(f"checkpoint_every = {checkpoint_every!r} must be a whole number of at least 0")
    if not (cpus >= 0.0 and gpus >= 0.0):
        raise ValueError(f"cpus = {cpus!r} and gpus = {gpus!r} must be numbers of at least 0")
    actors = RayConfig(
        num_actors, envs_per_actor, policy_lag, actor_cpus, actor_gpus, None, actor_timeout, max_restarts
    )
    steps = None if total_steps is None else check_total_steps(total_steps)
    given = Given(
        *(env, steps, config, hyperparams, check_seed(seed), preset, network, optimizer, loss),
        *(backend, actors, num_devices, checkpoint_every),
    )
    packed = ray.cloudpickle.dumps(given)  # to be opened when JAX may start: gymnax starts it when imported

    def trial(space: dict[str, Any]) -> None:
        limit_process(ray.get_runtime_context().get_assigned_resources())
        if gpus and jax.default_backend() == "cpu":
            print(f"gpus = {gpus:g} are reserved, but JAX finds none: this trial stays on the CPU", flush=True)
        given = ray.cloudpickle.loads(packed)
        if (checkpoint := tune.get_checkpoint()) is None:
            train(given, space, None)
        else:
            with checkpoint.as_directory() as directory:
                train(given, space, Path(directory))

    name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    trial.__name__ = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    bundles = [{"CPU": cpus, "GPU": gpus}] + [{"CPU": actor_cpus, "GPU": actor_gpus}] * num_actors
    return tune.with_resources(trial, tune.PlacementGroupFactory(bundles))


def population(
    env: Any,
    *,
    seeds: int | Sequence[int] = 8,
    total_steps: int | float | None = None,
    config: PPOConfig | None = None,
    hyperparams: Hyperparams | None = None,
    preset: str = "auto",
    network: Network | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    **settings: Any,
) -> Callable[[dict[str, Any]], None]:
    """A trainable for `ray.tune.Tuner` of which each trial is a whole population, one compiled program.

    Reports several times per second: "env_steps" of all runs together; "run/0", "run/1", ..., the mean return of each
    over its last hundred episodes or so; and "return_mean", the interquartile mean of those. There are no checkpoints.

    Args:
      seeds, settings: the lanes of every trial are their product, see `jppo.sweep`. The search space names fields of
        `jppo.Hyperparams` and `jppo.PPOConfig`, and overrides settings.
      env, total_steps, config, hyperparams, preset, network, optimizer, loss, cpus, gpus: see `trainable`.

    Raises:
      ValueError: anything given that cannot be. What only a trial can see fails there.
    """
    structure = {field.name for field in dataclasses.fields(PPOConfig)}
    for name, values in check_settings(settings).items():
        if name in structure and len(values) > 1:
            raise ValueError(f"{name} changes the program, and a trial is one program: sweep it in Tune's search space")
    given = {"env": env, "seeds": check_seeds(seeds), "total_steps": total_steps, "config": config}
    given |= {"hyperparams": hyperparams, "preset": preset}
    options = {"parts": {"network": network, "optimizer": optimizer, "loss": loss}, "successive_halving": False}
    packed = ray.cloudpickle.dumps((given, options, settings))

    def trial(space: dict[str, Any]) -> None:
        limit_process(ray.get_runtime_context().get_assigned_resources())
        given, options, settings = ray.cloudpickle.loads(packed)
        devices = len(jax.local_devices())
        groups = make_groups(
            values=check_settings(settings | space), **given, **options, max_parallel_runs=None, num_devices=devices
        )
        if len(groups) > 1:
            raise ValueError(
                f"{len(groups)} programs; a trial is one: several shapes or environments are Tune's to sweep"
            )
        GroupTrainer(groups[0], _ToTune(), lambda: False, lambda outcome: None).train()

    return tune.with_resources(trial, {"CPU": cpus, "GPU": gpus})


class _ToTune(SweepProgress):
    """Reports the lanes of a population."""

    def __init__(self) -> None:
        super().__init__(PrintReporter())
        self._returns: dict[int, float] = {}

    def add(self, env_steps: int, seconds: float, returns: dict[int, float]) -> None:
        self.env_steps += env_steps
        self._returns |= returns
        known = np.array([x for x in self._returns.values() if not np.isnan(x)])
        middle = float(interquartile_mean(known)) if len(known) else float("nan")
        lanes = {f"run/{number}": value for number, value in sorted(self._returns.items())}
        tune.report(
            {METRIC: middle, "env_steps": self.env_steps, "steps_per_second": env_steps / max(seconds, 1e-9)} | lanes
        )
