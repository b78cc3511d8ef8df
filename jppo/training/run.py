"""A run in this process: what is given is checked, its loop runs, and what comes out is saved."""

import contextlib
import dataclasses
import functools
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jppo.actors.sebulba import Sebulba, make_sebulba
from jppo.config.ppo import (
    PPOConfig,
    RayConfig,
    check_hyperparams,
    check_seed,
    check_total_steps,
    num_cores,
    spread_envs,
)
from jppo.config.presets import PRESETS, preset_for
from jppo.devices.determinism import check_determinism, fingerprint
from jppo.devices.mesh import assert_same_settings, max_usable_devices, raise_on_all_processes
from jppo.envs import make_env
from jppo.envs.backends import choose_backend
from jppo.envs.gymnasium import make_host_env
from jppo.errors import TrainingDiverged
from jppo.ppo.anakin import Anakin, AnakinState, make_anakin
from jppo.ppo.learner import Loss
from jppo.ppo.networks import Network, hint
from jppo.ppo.optimizer import Optimizer
from jppo.ppo.types import Hyperparams, TrainState
from jppo.runs import run_dir as runs
from jppo.runs.checkpoints import DEFAULT_SECONDS, Checkpoints, check_same_run
from jppo.runs.load import read_summary
from jppo.runs.policy import TrainedPolicy
from jppo.runs.writer import RunWriter
from jppo.training.device_loop import DeviceLoop
from jppo.training.interrupts import never, stop_on_interrupt
from jppo.training.logger import Logger, LoopResult
from jppo.training.progress import NullReporter, Reporter, WorkerReporter, make_reporter
from jppo.training.ray_loop import RayLoop
from jppo.training.settings import check_preset, check_sizes, own_parts


class Result(NamedTuple):
    """What a run gives back."""

    metrics: dict[str, np.ndarray]  # [updates] each, with "update" and "step"; NaN where no episode ended
    policy: TrainedPolicy
    summary: dict[str, Any]  # as in summary.json
    state: AnakinState | TrainState | None  # the latter two in the Ray mode, and where hosts were started for the run
    agent: Anakin | Sebulba
    run_dir: Path | None


class Given(NamedTuple):
    """What `train` was given, but for what says where."""

    env: Any
    total_steps: int | float | None
    seed: int | None
    config: PPOConfig | None
    hyperparams: Hyperparams | None
    preset: str
    network: Network | None
    optimizer: Optimizer
    loss: Loss | None
    run_dir: Path | None
    wandb: bool
    backend: str
    actors: RayConfig
    num_devices: int | None
    checkpoint_every: float | None = None
    keep: int = 2
    deterministic: bool | None = None


class PreparedRun(NamedTuple):
    """A run, checked but not begun."""

    agent: Anakin | Sebulba
    actors: RayConfig
    seed: int
    hyperparams: Hyperparams
    settings: dict[str, Any]  # config.json


class _Files(NamedTuple):
    """What a run leaves on disk, and how."""

    run_dir: Path | None
    wandb: bool
    goes_on: bool  # the run that is there
    checkpoint_every: float | None
    keep: int

    def writer(self, settings: dict[str, Any], reporter: Reporter) -> RunWriter | None:
        """None where nothing is to be left."""
        if self.run_dir is None:
            return None
        return RunWriter(self.run_dir, settings, self.wandb, self.goes_on, _loudly(reporter))

    def checkpoints(self, settings: dict[str, Any], log: Logger) -> Checkpoints | None:
        """None where there are to be none. The log of a run that goes on is taken up at the newest."""
        if self.run_dir is None:
            return None
        if jax.process_count() > 1:
            log.say("no checkpoints: a run in several processes saves its policy at its end, and cannot go on after it")
            return None
        every = DEFAULT_SECONDS if self.checkpoint_every is None else self.checkpoint_every
        checkpoints = Checkpoints(self.run_dir, settings, every, self.keep, _loudly(log.reporter))
        if (start := checkpoints.start) is not None:
            log.say(f"goes on from {start.path}, after {start.update:,} updates")
            log.go_on(runs.metrics_until(self.run_dir, start.update), start.update, start.seconds)
        elif self.goes_on:
            log.say(f"{self.run_dir} has no checkpoint yet: the run begins anew")
        return checkpoints


def _loudly(reporter: Reporter) -> Callable[[str], None]:
    """For what is wrong, and is said even where nothing is shown."""
    return functools.partial(warnings.warn, stacklevel=2) if type(reporter) is NullReporter else reporter.message


def run_here(
    given: Given,
    progress: str | Reporter,
    stop: Callable[[], bool] = never,
    cores: int | None = None,
) -> Result:
    """In this process, and where JAX runs in several, in all of them.

    Args:
      stop: asks for an early end, as Ctrl-C does.
      cores: of this machine, for actors.
    """
    with raise_on_all_processes():
        before = _settings_before(given)
        prepared = prepare(
            given if before is None else _as_before(given, before), num_cores() if cores is None else cores
        )
        if given.run_dir is not None and before is not None:
            summary = read_summary(given.run_dir)
            finished = summary.get("status") == "finished" and "unsaved" not in summary
            check_same_run(given.run_dir, before, prepared.settings, finished)
        total_steps, number = prepared.settings["total_steps"], jax.process_index()
        reporter = make_reporter(progress, total_steps)
        if number:
            given, reporter = given._replace(run_dir=None, wandb=False), WorkerReporter(reporter, number)
    assert_same_settings(json.dumps(prepared.settings | {"xla_flags": None}, default=str))
    files = _Files(given.run_dir, given.wandb, before is not None, given.checkpoint_every, given.keep)
    return _run(prepared, files, reporter, stop)


def _settings_before(given: Given) -> dict[str, Any] | None:
    """config.json of the run that goes on; None where it is a new one. Several processes cannot go on with any."""
    if given.run_dir is None or jax.process_count() > 1 or not (given.run_dir / "config.json").exists():
        return None
    return runs.read_config(given.run_dir)


def _as_before(given: Given, before: dict[str, Any]) -> Given:
    """What is not given is as it was."""
    assert given.run_dir is not None, "there was a run"
    config, hyperparams = runs.config_of(before, given.run_dir)
    own, actors, was = given.preset == "auto", given.actors, before.get("actors", {})
    if actors.num_actors is None and actors.envs_per_actor is None and was:
        actors = dataclasses.replace(actors, num_actors=was.get("num_actors"))
    return given._replace(
        total_steps=before["total_steps"] if given.total_steps is None else given.total_steps,
        seed=before["seed"] if given.seed is None else given.seed,
        config=config if given.config is None and own else given.config,
        hyperparams=hyperparams if given.hyperparams is None and own else given.hyperparams,
        backend=before["backend"] if given.backend == "auto" else given.backend,
        actors=actors,
        deterministic=before.get("deterministic", False) if given.deterministic is None else given.deterministic,
    )


def prepare(given: Given, cores: int) -> PreparedRun:
    """Raises ValueError for anything given that cannot be."""
    backend, hosts, actors = choose_backend(given.env, given.backend), jax.process_count(), given.actors
    env = make_host_env(given.env) if backend == "ray" else make_env(given.env)
    chosen = PRESETS[check_preset(preset_for(env.name) if given.preset == "auto" else given.preset)]
    hyperparams = chosen.hyperparams if given.hyperparams is None else given.hyperparams
    check_hyperparams(hyperparams)
    total_steps = check_total_steps(chosen.total_steps if given.total_steps is None else given.total_steps)
    seed = check_seed(0 if given.seed is None else given.seed)
    config = chosen.config if given.config is None else given.config
    if backend == "ray":
        config, actors = spread_envs(config, actors, hosts * cores, given.config is not None, hosts)
        actors = dataclasses.replace(actors, max_restarts=0) if given.deterministic else actors
    elif actors != RayConfig():
        raise ValueError(f"{env.name} runs on the device, without actors; give backend = 'ray' for them")
    parts: dict[str, Any] = {"network": given.network, "optimizer": given.optimizer, "loss": given.loss}
    num_devices = max_usable_devices(config) if given.num_devices is None else given.num_devices
    if given.deterministic:
        check_determinism()
    make: Any = make_sebulba if backend == "ray" else make_anakin
    agent = make(env, config, total_steps=total_steps, num_devices=num_devices, **parts)
    check_sizes(config, total_steps)
    more: dict[str, Any] = dict.fromkeys(own_parts(given.env, parts), "custom")
    more |= {"actors": dataclasses.asdict(actors)} if backend == "ray" else {}
    more |= {"num_devices": num_devices} | _of_hosts()
    if given.deterministic:
        more |= {"deterministic": True, "xla_flags": os.environ.get("XLA_FLAGS", "")}
    settings = runs.run_config(env.name, backend, seed, total_steps, config, hyperparams, **more)
    return PreparedRun(agent, actors, seed, hyperparams, settings)


def _run(prepared: PreparedRun, files: _Files, reporter: Reporter, stop: Callable[[], bool]) -> Result:
    """Everything that leaves a trace, and its tidying up."""
    agent, actors, seed, hyperparams, settings = prepared
    writer, loop, checkpoints, config = None, None, None, agent.config
    try:
        with stop_on_interrupt(reporter, stop) as stop_requested:
            with raise_on_all_processes():
                writer = files.writer(settings, reporter)
                reporter.start()
                if "network" not in settings and (said := hint(config, agent.env.obs_spec)):
                    reporter.message(said)
                log = Logger(config.batch_size, writer, reporter)
                checkpoints = files.checkpoints(settings, log)
                loop = _make_loop(agent, seed, hyperparams, log, actors, checkpoints)
                log.rewind()
                if stop_requested():
                    raise KeyboardInterrupt
            ended = loop.run(stop_requested)
            if not log.updates and ended.status in ("interrupted", "failed"):
                raise ended.error or KeyboardInterrupt
            result = _result(loop, agent, log, ended, checkpoints)
    except BaseException as error:
        with contextlib.ExitStack() as stack:  # checkpoints first; the writer even if Ctrl-C comes again meanwhile
            if writer is not None:
                stack.callback(writer.abort)
            if checkpoints is not None:
                stack.callback(checkpoints.close)  # while the directory is still locked
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            sizes = f"num_envs = {config.num_envs} and num_steps = {config.num_steps}"
            raise ValueError(f"{sizes} need more memory than the device has; lower one of them") from error
        raise
    finally:
        with contextlib.ExitStack() as stack:  # the last one first, and each whatever becomes of the others
            for part in (reporter, loop, checkpoints):
                if part is not None:
                    stack.callback(part.close)
    if ended.error is not None:
        ended.error.result = result
        raise ended.error
    if ended.status == "diverged":
        raise TrainingDiverged(log.updates + 1, result)
    return result


def _make_loop(
    agent: Anakin | Sebulba,
    seed: int,
    hyperparams: Hyperparams,
    log: Logger,
    actors: RayConfig,
    checkpoints: Checkpoints | None,
) -> DeviceLoop | RayLoop:
    if isinstance(agent, Anakin):
        return DeviceLoop(agent, seed, hyperparams, log, checkpoints)
    return RayLoop(agent, seed, hyperparams, log, actors, checkpoints)


def _result(
    loop: DeviceLoop | RayLoop, agent: Anakin | Sebulba, log: Logger, ended: LoopResult, checkpoints: Checkpoints | None
) -> Result:
    """Saves and sums up."""
    if ended.status != "diverged":
        loop.save()
    if checkpoints is not None:
        checkpoints.close()
    env, writer, recent = agent.env, log.writer, log.recent
    policy_state = jax.device_put(jax.device_get(loop.policy_state), jax.local_devices()[0])
    summary = {
        "env": env.name,
        "backend": "anakin" if isinstance(agent, Anakin) else "ray",
        "status": ended.status,
        "steps": log.steps,
        "updates": log.updates,
        "seconds": log.seconds,
        "compile_seconds": loop.compile_seconds,
        "steps_per_second": log.steps / log.seconds if log.seconds else 0.0,
        "episodes": recent.total,
        "return_mean": recent.mean,
        "return_std": recent.std,
        "device": jax.devices()[0].device_kind,
        **loop.summary(),
        **({} if checkpoints is None else {"checkpoint": checkpoints.update}),
        **_of_hosts(),
        "versions": runs.versions(),
        "policy_sha256": fingerprint(policy_state),
        "run_dir": None if writer is None else str(writer.path),
    }
    policy = TrainedPolicy(agent.policy, policy_state)
    if writer is not None and (unsaved := writer.close(policy_state, summary)):
        summary["unsaved"] = unsaved
    path = None if writer is None else writer.path
    return Result(log.history.arrays(), policy, summary, loop.state, agent, path)


def _of_hosts() -> dict[str, int]:
    """What several processes add to config.json and summary.json."""
    return {"num_hosts": jax.process_count()} if jax.process_count() > 1 else {}
