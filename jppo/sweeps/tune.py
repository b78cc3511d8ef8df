"""Trainables for Ray Tune: single runs, and populations of runs in one program."""

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import numpy as np
import ray as ray_core
from ray import tune

from jppo.actors.ray_cluster import limit_process
from jppo.config.checks import check_int, check_seed, check_total_steps
from jppo.config.keywords import PopulationKeywords, TrialKeywords
from jppo.config.overrides import CONFIG_NAMES, as_record, explain_keywords, take_events, take_network, take_ray
from jppo.config.ppo import Hyperparams, PPOConfig, check_hyperparams
from jppo.config.presets import choose_preset
from jppo.config.ray import RayConfig, Resources
from jppo.config.run import RunConfig
from jppo.envs.backends import BACKENDS
from jppo.envs.host_families import pickle_registrations, restore_registrations
from jppo.errors import Refused
from jppo.ppo.losses import Advantages, Loss, LossModule
from jppo.ppo.minibatches import Optimizer, adam
from jppo.ppo.policy import Network
from jppo.runs.run_dir import safe_name
from jppo.runs.statistics import interquartile_mean
from jppo.sweeps.grid import check_seeds, check_settings, make_groups
from jppo.sweeps.halving import GroupTrainer
from jppo.sweeps.log import RunLog, SweepProgress
from jppo.sweeps.tune_trial import METRIC, train_trial
from jppo.training.progress import PrintReporter
from jppo.training.settings import RunSettings


@explain_keywords
def trainable(
    env: Any,
    *,
    total_steps: int | float | None = None,
    seed: int = 0,
    config: PPOConfig | Mapping[str, Any] | None = None,
    hyperparams: Hyperparams | Mapping[str, Any] | None = None,
    preset: str = "auto",
    network: Network | str | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | LossModule | None = None,
    advantages: Advantages | None = None,
    backend: str = "auto",
    ray: RayConfig | Mapping[str, Any] | None = None,
    resources: Resources | Mapping[str, Any] = Resources(),
    checkpoint_updates: int = 100,
    run: RunConfig | Mapping[str, Any] = RunConfig(),
    **overrides: Unpack[TrialKeywords],
) -> Callable[[dict[str, Any]], None]:
    """Returns a trainable for `ray.tune.Tuner`; each trial is one run.

    The search space names fields of `jppo.Hyperparams` and `jppo.PPOConfig`, and "seed"; its values replace those of
    the arguments. Every update is reported, with the metrics of docs/metrics.md and "return_mean", the mean return of
    about the last hundred episodes (NaN before the first episode has ended). On the device, several updates run as one
    program call of about 0.4 seconds and are reported one after the other when it ends. A checkpoint is a run directory
    that `jppo eval`, `jppo play` and `jppo.load_policy` accept.

    Args:
      env, total_steps, seed, config, hyperparams, preset, network, optimizer, loss, advantages, backend: as for
        `jppo.train`. An object that contains JAX arrays occupies this process's GPU; names and functions do not.
      ray: settings of the Ray actors, as for `jppo.train`; `num_actors` must be a number. Each actor reserves
        actor_cpus and actor_gpus in addition to `resources`. Default: the trial steps Gymnasium environments itself.
      resources: CPUs and GPUs that a trial reserves for itself. The trial uses as many of its GPUs as the number of
        environments allows; without GPUs, the CPU.
      checkpoint_updates: number of updates between two checkpoints; 0: only the last update saves one.
      run: eval_every, eval_episodes, eval_sampled, eval_max_steps, stop_at_return, callback and callback_every of
        `jppo.RunConfig`. A report contains the metrics eval/* of the newest evaluation, NaN before the first one, and
        the newest value of each number that the callback logged. The updates before the callback's first call are
        reported after it, with NaN. An exception in the callback fails the trial.
      **overrides: fields of `jppo.PPOConfig`, `jppo.Hyperparams`, `ray` and `run`, as for `jppo.train`.

    Raises:
      ValueError: an argument is invalid. Errors that only a trial can find, such as an unknown environment, fail the
        trial.
    """
    run, others = take_events(run, overrides, "jppo.tune.trainable")
    ray, others = take_ray(ray, others)
    resources = as_record("resources", resources, Resources)
    config = None if config is None else as_record("config", config, PPOConfig)
    hyperparams = None if hyperparams is None else as_record("hyperparams", hyperparams, Hyperparams)
    check_hyperparams(hyperparams or Hyperparams())
    if backend not in BACKENDS:
        raise Refused(f"backend = {backend!r} is not one of {', '.join(BACKENDS)}")
    choose_preset(preset, "")
    checkpoint_updates = check_int("checkpoint_updates", checkpoint_updates, 0)
    if ray is not None and ray.num_actors is None:
        raise Refused("ray.num_actors must be a number, because Tune reserves resources for each actor")
    settings = RunSettings(
        env=env,
        total_steps=None if total_steps is None else check_total_steps(total_steps),
        seed=check_seed(seed),
        config=config,
        hyperparams=hyperparams,
        overrides=others,
        preset=preset,
        network=network,
        optimizer=optimizer,
        loss=loss,
        advantages=advantages,
        backend=backend,
        ray=ray,
        run=run,
    )
    pickled = _pickle(settings)  # unpickling may import gymnax, which starts JAX
    registrations = pickle_registrations(ray_core.cloudpickle.dumps)

    def trial(space: dict[str, Any]) -> None:
        _limit_trial(resources)
        restore_registrations(registrations)
        train_trial(ray_core.cloudpickle.loads(pickled), space, checkpoint_updates)

    name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    trial.__name__ = safe_name(name)
    bundles = [{"CPU": resources.cpus, "GPU": resources.gpus}]
    if ray is not None:
        bundles += [{"CPU": ray.actor_cpus, "GPU": ray.actor_gpus}] * (ray.num_actors or 0)
    return tune.with_resources(trial, tune.PlacementGroupFactory(bundles))


@explain_keywords
def population(
    env: Any,
    *,
    seeds: int | Sequence[int] = 8,
    total_steps: int | float | None = None,
    config: PPOConfig | Mapping[str, Any] | None = None,
    hyperparams: Hyperparams | Mapping[str, Any] | None = None,
    preset: str = "auto",
    network: Network | str | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | LossModule | None = None,
    advantages: Advantages | None = None,
    resources: Resources | Mapping[str, Any] = Resources(),
    run: RunConfig | Mapping[str, Any] = RunConfig(),
    **settings: Unpack[PopulationKeywords],
) -> Callable[[dict[str, Any]], None]:
    """Returns a trainable for `ray.tune.Tuner`; each trial is a population of runs in one compiled program.

    A trial reports several times a second: "env_steps" (environment steps of all runs), "run/0", "run/1", ... (the mean
    return of each run over about its last hundred episodes) and "return_mean", the interquartile mean of these. With
    evaluations, it also reports "eval/run/0", ... (the newest evaluation of each run, NaN before the first one) and
    "eval/return_mean", their interquartile mean. It saves no checkpoints.

    Args:
      seeds, settings: each trial trains every combination, see `jppo.sweep`. The search space names fields of
        `jppo.Hyperparams` and `jppo.PPOConfig`; its values replace those of `settings`.
      env, total_steps, config, hyperparams, preset, network, optimizer, loss, advantages, resources: see `trainable`.
      run: see `jppo.sweep`. An exception in the callback fails the trial.

    Raises:
      ValueError: an argument is invalid. Errors that only a trial can find fail the trial.
    """
    run, others = take_events(run, settings, "jppo.tune.population")
    network, others = take_network(network, others)
    resources = as_record("resources", resources, Resources)
    for name, values in check_settings(others).items():
        if name in CONFIG_NAMES and len(values) > 1:
            raise Refused(f"{name} needs one program per value, and a trial is one program: use the search space")
    run_settings = RunSettings(
        env=env,
        total_steps=total_steps,
        config=config,
        hyperparams=hyperparams,
        preset=preset,
        network=network,
        optimizer=optimizer,
        loss=loss,
        advantages=advantages,
        run=run,
    )
    pickled = _pickle((run_settings, check_seeds(seeds), others))

    def trial(space: dict[str, Any]) -> None:
        _limit_trial(resources)
        run_settings, seeds, others = ray_core.cloudpickle.loads(pickled)
        values = check_settings(others | space)
        groups = make_groups(run_settings, seeds=seeds, values=values, num_devices=len(jax.local_devices()))
        if len(groups) > 1:
            raise Refused(
                f"the trial has {len(groups)} programs; pass one environment, one value per PPOConfig "
                "field and one kind of schedule per hyperparameter"
            )
        progress = _TuneProgress(bool(run_settings.run.eval_every))
        error = GroupTrainer(groups[0], progress, lambda: False, lambda *run: None).train()
        if error is not None:
            raise error

    return tune.with_resources(trial, {"CPU": resources.cpus, "GPU": resources.gpus})


def _pickle(arguments: Any) -> bytes:
    """Returns the arguments of a trial as bytes. Raises ValueError if they cannot be sent to another process."""
    try:
        return ray_core.cloudpickle.dumps(arguments)
    except (TypeError, pickle.PicklingError) as error:
        raise Refused(
            f"the arguments cannot be sent to the processes of Ray Tune: {error}; pass objects that can be pickled, or "
            "create them in a function"
        ) from error


def _limit_trial(resources: Resources) -> None:
    """Limits this process to its share of the machine."""
    limit_process(ray_core.get_runtime_context().get_assigned_resources())
    if resources.gpus and jax.default_backend() == "cpu":
        print(f"gpus = {resources.gpus:g} are reserved, but JAX finds no GPU; the trial uses the CPU", flush=True)


class _TuneProgress(SweepProgress):
    """Reports the progress of a population to Tune."""

    def __init__(self, evaluates: bool) -> None:
        """
        Args:
          evaluates: whether the runs have evaluations.
        """
        super().__init__(PrintReporter())
        prefixes = ("", "eval/") if evaluates else ("",)
        self._columns = {prefix: dict[int, float]() for prefix in prefixes}  # the newest return of each run

    def add(self, env_steps: int, seconds: float, runs: list[RunLog]) -> None:
        self.env_steps += env_steps
        report: dict[str, Any] = {"env_steps": self.env_steps, "steps_per_second": env_steps / max(seconds, 1e-9)}
        for run in runs:
            self._columns[""][run.spec.number] = run.recent_return
            if "eval/" in self._columns:
                self._columns["eval/"][run.spec.number] = math.nan if run.last_eval is None else run.last_eval
        for prefix, returns in self._columns.items():
            known = np.array([x for x in returns.values() if not np.isnan(x)])
            report[f"{prefix}{METRIC}"] = float(interquartile_mean(known)) if len(known) else math.nan
            report.update({f"{prefix}run/{number}": value for number, value in sorted(returns.items())})
        tune.report(report)
