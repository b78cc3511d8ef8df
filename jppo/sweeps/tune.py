"""Trainables for Ray Tune, `jppo.tune.trainable`."""

import pickle
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax
import ray as ray_core
from ray import tune

from jppo.actors.ray_cluster import limit_process
from jppo.config.checks import check_int, check_seed, check_total_steps
from jppo.config.keywords import TrialKeywords
from jppo.config.overrides import as_record, explain_keywords, take_events, take_ray
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
from jppo.sweeps.tune_trial import train_trial
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
