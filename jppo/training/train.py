"""`train`, the main function of the library."""

from collections.abc import Mapping
from typing import Any, Unpack

from jppo.config.keywords import TrainKeywords
from jppo.config.overrides import explain_keywords, take_ray, take_run
from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.config.ray import RayConfig
from jppo.config.run import RunConfig
from jppo.ppo.learner import LearnerFactory
from jppo.ppo.losses import Advantages, Loss, LossModule
from jppo.ppo.minibatches import Optimizer, adam
from jppo.ppo.policy import Network
from jppo.training.result import Result
from jppo.training.run import train_with_settings
from jppo.training.settings import RunSettings


@explain_keywords
def train(
    env: Any,
    *,
    total_steps: int | float | None = None,
    seed: int | None = None,
    config: PPOConfig | Mapping[str, Any] | None = None,
    hyperparams: Hyperparams | Mapping[str, Any] | None = None,
    preset: str = "auto",
    network: Network | str | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | LossModule | None = None,
    advantages: Advantages | None = None,
    learner: LearnerFactory | None = None,
    backend: str = "auto",
    num_devices: int | None = None,
    ray: RayConfig | Mapping[str, Any] | None = None,
    run: RunConfig | Mapping[str, Any] = RunConfig(),
    **overrides: Unpack[TrainKeywords],
) -> Result:
    """Trains PPO on the device, or with Ray actors that step Gymnasium environments on CPUs.

    Args:
      env: on the device, a name, an object with gymnax's API, or a `jppo.Environment`. With Ray, the argument of
        `jppo.make_host_env`: a Gymnasium id, "module:name", or a function that makes an environment.
      total_steps: environment steps, rounded up to whole updates. Default: the preset's.
      seed: seed of all random numbers. Default: 0.
      config: structure of the run, a `jppo.PPOConfig` or a mapping of its fields. It replaces the preset's config:
        fields that it does not name have the defaults of PPOConfig, not the preset's values.
      hyperparams: numbers of the run, a `jppo.Hyperparams` or a mapping of its fields. It replaces the preset's.
      preset: a name in `jppo.PRESETS`; "auto" selects the environment's preset.
      network: a `jppo.Network`, or "mlp" or "cnn". Default: the network that `config` describes.
      optimizer: a function of the hyperparams that returns an optax transformation, see docs/extending.md.
      loss: the loss function, see `jppo.ppo_loss`, or a `jppo.LossModule`. Default: the clipped PPO loss.
      advantages: the advantage function, see `jppo.gae_advantages`, which is the default.
      learner: a function (policy, config, axis_name) -> `jppo.Learner` that replaces the whole update, see
        docs/extending.md; optimizer, loss and advantages are then left out.
      backend: "device", "ray" or "auto". "auto" selects the device if gymnax has the environment.
      num_devices: devices that share the environments. Default: all devices that the number of environments allows.
        The number changes the training time and the rounding of floating-point numbers.
      ray: settings of the Ray actors, a `jppo.RayConfig` or a mapping of its fields.
      run: a `jppo.RunConfig` or a mapping of its fields. `run_dir` is the directory in which the run is saved; if it
        contains a run, that run is resumed (docs/checkpoints.md). `progress` is "auto" for a progress bar (or lines if
        the output is not a terminal), "none", or a `jppo.Reporter`. `callback` is a function of a `jppo.CallbackEvent`
        that jppo calls every `callback_every` updates (docs/callbacks.md). Other fields set checkpoints, logging,
        evaluations and early stopping.
      **overrides: fields of `jppo.PPOConfig`, `jppo.Hyperparams`, `jppo.RayConfig` and `jppo.RunConfig`, for example
        `num_envs=8, learning_rate=1e-3, num_actors=2, run_dir="runs/first", progress="auto", eval_every=10`. They
        replace single values of the preset, or of `config`, `hyperparams`, `ray` and `run`.

    Ctrl-C, SIGTERM or SIGHUP ends the run early, after the updates that have started, and returns the result so far
    (its `status` is "interrupted"). A second Ctrl-C raises KeyboardInterrupt. So does a first one while the run starts:
    on the device, at the end of the compilation; with actors, until the first rollout has arrived. SIGTERM ends the
    process at once while an on-device run compiles.

    If `jax.distributed.initialize` was called, all processes must call `train` with the same arguments. The first
    process writes the run directory and shows the progress.

    Raises:
      ValueError: an invalid argument. Nothing has been written.
      TypeError: an unknown argument.
      TrainingDiverged: a loss, gradient or parameter became NaN or infinite. The result so far is saved.
      ActorsFailed: an actor failed too often in a row. The result so far is saved.
    """
    run, others = take_run(run, overrides)
    ray, others = take_ray(ray, others)
    settings = RunSettings(
        env=env,
        total_steps=total_steps,
        seed=seed,
        config=config,
        hyperparams=hyperparams,
        overrides=others,
        preset=preset,
        network=network,
        optimizer=optimizer,
        loss=loss,
        advantages=advantages,
        learner=learner,
        backend=backend,
        num_devices=num_devices,
        ray=ray,
        run=run,
    )
    return train_with_settings(settings)
