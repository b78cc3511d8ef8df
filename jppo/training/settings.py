"""From the arguments of a run to a validated run. Train, sweep, bench and Tune share this path."""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import jax

from jppo.config.checks import check_seed, check_total_steps
from jppo.config.overrides import SCALE_ENVS, SCALED, resolve_settings, take_network
from jppo.config.ppo import Hyperparams, PPOConfig, check_hyperparams
from jppo.config.presets import PRESETS, choose_preset
from jppo.config.ray import RayConfig, num_cores, spread_envs
from jppo.config.run import EVALUATION_DETAILS, SAVED_FIELDS, RunConfig
from jppo.devices.determinism import check_determinism
from jppo.devices.mesh import max_usable_devices
from jppo.envs import make_env
from jppo.envs.backends import choose_backend
from jppo.errors import Refused
from jppo.ppo.anakin import Anakin, make_anakin
from jppo.ppo.learner import LearnerFactory
from jppo.ppo.losses import Advantages, Loss, LossModule
from jppo.ppo.minibatches import Optimizer, adam
from jppo.ppo.policy import Network
from jppo.runs import run_dir as runs
from jppo.runs.checkpoints import check_same_run
from jppo.runs.load import read_summary

if TYPE_CHECKING:
    from jppo.actors.sebulba import Sebulba

OWN_PARTS = ("network", "optimizer", "loss", "advantages", "learner")  # arguments that may be the user's own objects
Agent = Union[Anakin, "Sebulba"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The arguments of a run, see `jppo.train`.

    None stands for the previous run's value when a run is resumed, otherwise for the preset's or a default.
    """

    env: Any
    total_steps: int | float | None = None
    seed: int | None = None
    config: PPOConfig | Mapping[str, Any] | None = None
    hyperparams: Hyperparams | Mapping[str, Any] | None = None
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    searched: frozenset[str] = frozenset()  # names of the overrides from a search space, see `override`
    preset: str = "auto"
    network: Network | str | None = None
    optimizer: Optimizer = adam
    loss: Loss | LossModule | None = None
    advantages: Advantages | None = None
    learner: LearnerFactory | None = None
    backend: str = "auto"
    num_devices: int | None = None
    ray: RayConfig | None = None
    run: RunConfig = RunConfig()

    @property
    def run_dir(self) -> Path | None:
        """The run directory, or None if nothing is saved."""
        return None if self.run.run_dir is None else Path(self.run.run_dir)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A validated run that has not started."""

    agent: Agent
    ray: RayConfig  # with num_actors and envs_per_actor filled in if the run uses actors
    seed: int
    hyperparams: Hyperparams
    total_steps: int
    preset: str
    run: RunConfig  # with log_every filled in
    config_json: dict[str, Any]  # content of config.json

    @property
    def run_dir(self) -> Path | None:
        """The run directory, or None if nothing is saved."""
        return None if self.run.run_dir is None else Path(self.run.run_dir)


def prepare_run(settings: RunSettings) -> PreparedRun:
    """Validates the arguments of a run, fills in the missing ones and makes the agent.

    Raises:
      ValueError: an argument is invalid.
    """
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise Refused("jppo needs jit; leave out JAX_DISABLE_JIT or jax.disable_jit() and use jax.debug.print")
    backend = choose_backend(settings.env, settings.backend)
    env = _make_env(settings.env, backend)
    preset_name = choose_preset(settings.preset, env.name)
    preset = PRESETS[preset_name]
    network, overrides = take_network(settings.network, settings.overrides)
    config, hyperparams = resolve_settings(preset, settings.config, settings.hyperparams, overrides, settings.searched)
    total_steps = check_total_steps(preset.total_steps if settings.total_steps is None else settings.total_steps)
    seed = check_seed(0 if settings.seed is None else settings.seed)
    check_hyperparams(hyperparams)
    fixed = settings.config is not None or bool({"num_envs", SCALE_ENVS} & set(overrides))
    config, ray = _spread_over_actors(settings, config, env, backend, fixed)
    num_devices = settings.num_devices
    if num_devices is None:
        num_devices = math.gcd(max_usable_devices(config), config.num_envs // env.num_agents)
    if settings.run.deterministic:
        check_determinism()
    parts = {name: getattr(settings, name) for name in OWN_PARTS} | {"network": network}
    agent = _make_agent(backend, env, config, total_steps=total_steps, num_devices=num_devices, **parts)
    check_sizes(config, total_steps)
    _check_periods(settings, agent.num_updates)
    optional: dict[str, Any] = dict.fromkeys(list_own_parts(settings.env, parts), "custom")
    if backend == "ray":
        optional["actors"] = dataclasses.asdict(ray)
    optional["num_devices"] = num_devices
    optional |= describe_processes()
    if settings.run.deterministic:
        optional |= {"deterministic": True, "xla_flags": os.environ.get("XLA_FLAGS", "")}
    if (log_every := settings.run.log_every or 1) > 1:
        optional["log_every"] = log_every
    optional |= {name: value for name in SAVED_FIELDS if (value := getattr(settings.run, name)) is not None}
    if settings.run.callback is not None:
        optional["callback_every"] = settings.run.callback_every
    if SCALE_ENVS in overrides and not settings.searched & set(SCALED):  # otherwise it multiplied only one of them
        optional[SCALE_ENVS] = overrides[SCALE_ENVS]
    return PreparedRun(
        agent=agent,
        ray=ray,
        seed=seed,
        hyperparams=hyperparams,
        total_steps=total_steps,
        preset=preset_name,
        run=dataclasses.replace(settings.run, log_every=log_every),
        config_json=runs.run_config(env.name, backend, seed, total_steps, config, hyperparams, **optional),
    )


def _check_periods(settings: RunSettings, num_updates: int) -> None:
    """Raises ValueError if a callback or an evaluation would never happen."""
    settings.run.check_evaluations()
    periods = {"eval_every": settings.run.eval_every or 0}
    if settings.run.callback is not None:
        periods["callback_every"] = settings.run.callback_every
    for name, every in periods.items():
        if every > num_updates:
            raise Refused(f"{name} = {every} is more than the {num_updates} updates of the run; lower it")


def describe_start(prepared: PreparedRun) -> str:
    """Returns the steps and sizes of a run, its preset and the settings that differ from it, in two or three lines."""
    agent, ray, preset = prepared.agent, prepared.ray, PRESETS[prepared.preset]
    num_devices = prepared.config_json["num_devices"]
    sizes = f"num_envs = {agent.config.num_envs}, num_steps = {agent.config.num_steps}"
    lines, parts = [f"{agent.env.name}: {agent.num_updates * agent.config.batch_size:,} steps, {sizes}"], []
    if prepared.config_json["backend"] == "ray":
        actors = f"{ray.num_actors} actor{'s' * (ray.num_actors != 1)} of {ray.envs_per_actor} environments"
        parts.append(actors if ray.num_actors else "no actors")
    parts += [f"{num_devices} device{'s' * (num_devices != 1)}", f"preset {prepared.preset}"]
    changes = [
        f"{name} = {value} (preset: {before})"
        for record, base in ((agent.config, preset.config), (prepared.hyperparams, preset.hyperparams))
        for (name, value), before in zip(vars(record).items(), vars(base).values(), strict=True)
        if value != before
    ]
    lines += [", ".join(parts), *([f"with {', '.join(changes)}"] if changes else [])]
    return "\n  ".join(lines)


def _make_env(env: Any, backend: str) -> Any:
    if backend != "ray":
        return make_env(env)
    from jppo.envs.gymnasium import make_host_env

    return make_host_env(env)


def _make_agent(backend: str, env: Any, config: PPOConfig, **options: Any) -> Agent:
    if backend != "ray":
        return make_anakin(env, config, **options)
    from jppo.actors.sebulba import make_sebulba  # an on-device run does not need the actors package

    return make_sebulba(env, config, **options)


def _spread_over_actors(
    settings: RunSettings, config: PPOConfig, env: Any, backend: str, fixed: bool
) -> tuple[PPOConfig, RayConfig]:
    """Returns the sizes of a run with actors; an on-device run keeps its config and must not have actors."""
    ray, processes = settings.ray or RayConfig(), jax.process_count()
    if backend == "ray":
        config, ray = spread_envs(config, ray, processes * num_cores(), fixed, processes, env.num_agents)
        return config, dataclasses.replace(ray, max_restarts=0) if settings.run.deterministic else ray
    if ray != RayConfig():
        remedy = "use backend='ray' (--backend ray) to train with actors"
        raise Refused(f"{env.name} runs on the device, without actors; {remedy}")
    return config, ray


def decide_run(settings: RunSettings, takes_missing: bool) -> tuple[PreparedRun, bool]:
    """Returns the validated run, and whether it resumes the run in its directory.

    Args:
      takes_missing: missing arguments come from the previous run, and the others must be equal to it.

    Raises:
      ValueError: an argument is invalid, differs from the previous run, or there is no run to resume.
    """
    run_dir = settings.run_dir
    if run_dir is None:
        for name in ("resume", "wandb", "video"):
            if getattr(settings.run, name):
                raise Refused(f"{name} needs a run_dir")
    if run_dir is None or not (settings.run.resume or os.path.exists(run_dir / "config.json")):
        return prepare_run(settings), False
    previous = runs.read_config(run_dir)
    if not takes_missing:
        return prepare_run(settings), True
    prepared = prepare_run(fill_from_previous_run(settings, previous))
    has_ended = read_summary(run_dir).get("status") in ("finished", "stopped", "solved")
    check_same_run(run_dir, previous, prepared.config_json, has_ended)
    return prepared, True


def fill_from_previous_run(settings: RunSettings, previous: dict[str, Any]) -> RunSettings:
    """Returns the settings with missing arguments taken from the previous run's config.json.

    A preset in the arguments replaces the previous run's config and hyperparams.
    """
    assert settings.run_dir is not None, "a previous run has a directory"
    config, hyperparams = runs.config_of(previous, settings.run_dir)
    ray = settings.ray
    if actors := previous.get("actors"):
        ray = ray or RayConfig(policy_lag=actors.get("policy_lag", 0))
        if ray.num_actors is None and ray.envs_per_actor is None:
            ray = dataclasses.replace(ray, num_actors=actors.get("num_actors"))
    run_defaults = {"deterministic": previous.get("deterministic", False), "log_every": previous.get("log_every", 1)}
    eval_every = previous.get("eval_every") if settings.run.eval_every is None else settings.run.eval_every
    names = [name for name in SAVED_FIELDS if eval_every or name not in EVALUATION_DETAILS]
    run_defaults |= {name: previous.get(name) for name in names}
    run_defaults = {name: value for name, value in run_defaults.items() if getattr(settings.run, name) is None}
    values: dict[str, Any] = {"total_steps": previous["total_steps"], "seed": previous["seed"]}
    if settings.preset == "auto":
        factor = previous.get(SCALE_ENVS, 1)
        if settings.config is None and factor > 1 and not set(SCALED) & set(settings.overrides):
            config = config.replace(**{name: getattr(config, name) // factor for name in SCALED})
            settings = dataclasses.replace(settings, overrides={SCALE_ENVS: factor} | dict(settings.overrides))
        values |= {"config": config, "hyperparams": hyperparams}
    values = {name: value for name, value in values.items() if getattr(settings, name) is None}
    return dataclasses.replace(
        settings,
        **values,
        backend=previous["backend"] if settings.backend == "auto" else settings.backend,
        ray=ray,
        run=dataclasses.replace(settings.run, **run_defaults),
    )


def check_sizes(config: PPOConfig, total_steps: int) -> None:
    """Raises ValueError if the run has 2**31 updates or more: devices count updates in 32 bits."""
    if (updates := config.num_updates(total_steps)) >= 2**31:
        raise Refused(f"total_steps = {total_steps:,} makes {updates:,} updates; there must be less than 2**31")


def list_own_parts(env: Any, parts: dict[str, Any]) -> tuple[str, ...]:
    """Returns which parts of a run, such as its network, are objects that config.json cannot describe."""
    own = tuple(name for name in OWN_PARTS if parts.get(name) not in (None, adam))
    return own if isinstance(env, str) else ("environment", *own)


def describe_processes() -> dict[str, int]:
    """Returns the entry that several processes add to config.json and summary.json; {} for one process."""
    return {"num_processes": jax.process_count()} if jax.process_count() > 1 else {}
