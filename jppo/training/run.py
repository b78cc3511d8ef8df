"""Runs prepared training: the loop, the run directory, the result."""

import contextlib
import dataclasses
import json
import math
import signal
from typing import TYPE_CHECKING, Any

import jax

from jppo.config.ppo import PPOConfig
from jppo.devices.determinism import fingerprint
from jppo.devices.memory import explain_out_of_memory
from jppo.devices.mesh import assert_same_settings, interrupt_all_processes, raise_on_all_processes
from jppo.devices.signals import end_process_at
from jppo.envs.spaces import PyTree
from jppo.errors import TrainingDiverged
from jppo.networks.feed_forward import channels_first, is_image
from jppo.ppo.anakin import Anakin
from jppo.runs import run_dir as runs
from jppo.runs.checkpoints import Checkpoint, Checkpoints, latest_checkpoint
from jppo.runs.files import jsonable
from jppo.runs.load import read_summary
from jppo.runs.policy import TrainedPolicy
from jppo.runs.writer import RunWriter
from jppo.training.callback import RunInfo
from jppo.training.device_loop import DeviceLoop, init_state, state_shapes
from jppo.training.evaluator import DeviceEvaluator, Evaluator
from jppo.training.hooks import PeriodicCheckpoints, RunHooks
from jppo.training.interrupts import stop_on_interrupt
from jppo.training.logger import Logger, LoopResult
from jppo.training.monitor import Monitor
from jppo.training.progress import Reporter, WorkerReporter, make_reporter, warn_with
from jppo.training.result import Result
from jppo.training.return_target import count_needed_episodes
from jppo.training.settings import PreparedRun, RunSettings, decide_run, describe_processes, describe_start

if TYPE_CHECKING:
    from jppo.training.ray_loop import RayLoop

_END_SETTINGS = ("total_steps", "stop_at_return", "seed", "hyperparams")  # a run that ended continues with other ones
_LARGE_IMAGE = 10_000  # numbers in an observation
_MANY_STEPS = 10_000  # in fewer steps, episodes may be too long to end


def train_with_settings(settings: RunSettings, hooks: RunHooks | None = None) -> Result:
    """Trains in this process and, if JAX runs in several processes, together with them.

    Args:
      hooks: follow the run; `settings` then does not take missing arguments from a previous run.
    """
    if settings.run_dir is not None:  # an environment may change the working directory
        run = dataclasses.replace(settings.run, run_dir=settings.run_dir.absolute())
        settings = dataclasses.replace(settings, run=run)
    with interrupt_all_processes():
        with raise_on_all_processes():
            prepared, resumes = decide_run(settings, takes_missing=hooks is None)
            reporter = make_reporter(settings.run.progress, prepared.total_steps)
        same = {"xla_flags": None, "saves": settings.run_dir is not None, "resumes": resumes}
        assert_same_settings(json.dumps(prepared.config_json | same, default=str))
        if number := jax.process_index():
            reporter = WorkerReporter(reporter, number)
        if resumes and hooks is None and (result := _finished_result(prepared, reporter)):
            if prepared.run.video and result.run_dir is not None and not (result.run_dir / "video.gif").exists():
                reporter.message(f"this run has no video; write one with: jppo play {result.run_dir}")
            return result
        sizes = f"num_envs = {prepared.agent.config.num_envs} or num_steps = {prepared.agent.config.num_steps}"
        has_video = bool(prepared.run.video) and not number
        if has_video:
            from jppo.training.video import can_write_video, write_video  # drawing needs host modules

            has_video = can_write_video(prepared.agent.env, warn_with(reporter))
        with explain_out_of_memory(f"lower {sizes}"):
            result = _train(prepared, resumes, hooks, reporter)
    if has_video and result.run_dir is not None and result.summary["status"] != "interrupted":
        write_video(result.agent.env, result.policy, result.run_dir, reporter.message, warn_with(reporter))
    return result


def _finished_result(prepared: PreparedRun, reporter: Reporter) -> Result | None:
    """Returns the result of a run that is already finished; None if there are updates left to train.

    A run that ended early continues if total_steps or stop_at_return changed. A finished run writes its files again if
    writes failed or files are missing, and repeats its last updates if its last checkpoint is damaged.
    """
    run_dir, agent = prepared.run_dir, prepared.agent
    assert run_dir is not None, "a previous run has a directory"
    summary = read_summary(run_dir)
    is_whole = summary.keys() >= {"return_mean", "return_std", "steps_per_second", "compile_seconds", "updates"}
    is_whole &= "failed_writes" not in summary and (run_dir / runs.POLICY).exists()
    if summary.get("status") not in ("finished", "stopped", "solved") or not is_whole:
        return None
    if (checkpoint := latest_checkpoint(run_dir, warn_with(reporter))) is None:
        return None
    if checkpoint.update < agent.num_updates and _ended_before(prepared, checkpoint) is None:
        return None
    state: Any
    if isinstance(agent, Anakin):
        state = checkpoint.restore(init_state(agent, prepared.seed, prepared.hyperparams))
        policy_state = state.train.policy_state
    else:
        state = checkpoint.restore(agent.init(jax.random.key(prepared.seed), prepared.hyperparams), ".train")
        policy_state = state.policy_state
    log = Logger(agent.config.batch_size, None, reporter, log_every=prepared.run.log_every or 1)
    log.restore(run_dir, checkpoint)
    log.info(f"{run_dir} is already finished; nothing is left to train")
    policy_state = jax.device_put(jax.device_get(policy_state), jax.local_devices()[0])
    return Result(
        metrics=log.history.arrays(),
        policy=TrainedPolicy(agent.policy, policy_state, agent.env),
        summary=summary | {"run_dir": str(run_dir)},
        state=state,
        agent=agent,
        run_dir=run_dir,
        settings=prepared.config_json,
    )


def _end_identity(prepared: PreparedRun) -> dict[str, Any]:
    """Returns the settings with which a run that ended by itself does not continue, as JSON."""
    identity: dict[str, Any] = jsonable({name: prepared.config_json.get(name) for name in _END_SETTINGS})
    return identity


def _ended_before(prepared: PreparedRun, start: Checkpoint | None) -> LoopResult | None:
    """Returns why the run ended by itself at a checkpoint; None if it did not, or continues with other settings."""
    ended = None if start is None else start.log["ended"]
    if ended is None or ended["identity"] != _end_identity(prepared):
        return None
    return LoopResult(ended["status"], reason=ended["reason"])


def _open_writer(prepared: PreparedRun, resumes: bool, reporter: Reporter) -> RunWriter | None:
    """Opens the run directory in the first process; returns None if nothing is saved."""
    if prepared.run_dir is None or jax.process_index():
        return None
    return RunWriter(prepared.run_dir, prepared.config_json, prepared.run.wandb, resumes, warn_with(reporter))


def _open_checkpoints(prepared: PreparedRun, resumes: bool, log: Logger, hooks: RunHooks | None) -> Checkpoints | None:
    """Opens the checkpoints and, if a run is resumed, restores the log up to the newest one; None if nothing is saved.

    All processes of a run read and write the checkpoints, so the run directory must be on a shared disk.
    """
    run, run_dir = prepared.run, prepared.run_dir
    if run_dir is None:
        return None
    arguments = run_dir, run.checkpoint_seconds, run.max_checkpoints, warn_with(log.reporter)
    if hooks is None:
        checkpoints = Checkpoints(*arguments)
    else:
        checkpoints = PeriodicCheckpoints(hooks, prepared.agent.num_updates, *arguments)
    if (start := checkpoints.start) is not None:
        log.info(f"resuming from {start.path}, after {start.update:,} updates")
        log.restore(run_dir, start)
    elif resumes:
        log.info(f"{run_dir} has no checkpoint; starting from the beginning")
    return checkpoints


def _train(prepared: PreparedRun, resumes: bool, hooks: RunHooks | None, reporter: Reporter) -> Result:
    """Trains, saves and closes everything that was opened."""
    writer, loop, checkpoints = None, None, None
    agent, config = prepared.agent, prepared.agent.config
    try:
        with stop_on_interrupt(reporter) as stop_requested:
            with raise_on_all_processes():
                writer = _open_writer(prepared, resumes, reporter)
            with raise_on_all_processes():
                reporter.start()
                reporter.message(describe_start(prepared))
                if "network" not in prepared.config_json and (advice := suggest_network(config, agent.env.obs_spec)):
                    reporter.message(advice)
                log_every = prepared.run.log_every or 1
                log = Logger(config.batch_size, writer, reporter, hooks, log_every, prepared.run.callback_every)
                checkpoints = _open_checkpoints(prepared, resumes, log, hooks)
                loop = make_loop(prepared, log, checkpoints)
                if stop_requested():  # before a resumed run loses its summary
                    raise KeyboardInterrupt
                if writer is not None:
                    writer.truncate_after(log.updates, log.steps)
            ended = loop.monitor.check_target() or loop.run(stop_requested)
            if not log.updates and ended.status in ("interrupted", "failed"):
                raise ended.error or KeyboardInterrupt
            if log.steps >= _MANY_STEPS and not log.recent.total:
                warn_with(reporter)(f"no episode ended in {log.steps:,} steps; give the environment a time limit")
            result = _save_result(loop, prepared, log, ended, checkpoints)
    except BaseException:
        with contextlib.ExitStack() as stack:  # closes in reverse order; a second Ctrl-C skips nothing
            if writer is not None:
                stack.callback(writer.abort)
            if checkpoints is not None:
                stack.callback(checkpoints.close)  # while the writer holds the lock
        raise
    finally:
        with contextlib.ExitStack() as stack:
            for part in (reporter, loop, checkpoints):
                if part is not None:
                    stack.callback(part.close)
    _raise_failure(ended, log, prepared, result)
    return result


def suggest_network(config: PPOConfig, obs_spec: PyTree) -> str | None:
    """Returns a message if another network suits the observations better, or about the channels of images."""
    shapes = [spec.feature_shape for spec in jax.tree.leaves(obs_spec)]
    if config.network == "cnn":
        images = [shape for shape in shapes if is_image(shape)]
        parts = (f"{list(x)} as {x[0] if channels_first(x) else x[-1]} channels" for x in images)
        return f"network = cnn reads images {', '.join(parts)}"
    if len(shapes) != 1 or not is_image(shapes[0]) or math.prod(shapes[0]) < _LARGE_IMAGE:
        return None
    return (
        f"observations are images {shapes[0]}, which network = mlp reads as {math.prod(shapes[0]):,} numbers; "
        "network = cnn reads them as images"
    )


def _raise_failure(ended: LoopResult, log: Logger, prepared: PreparedRun, result: Result) -> None:
    """Raises the error that ended a run, with the result so far; does nothing if the run did not fail."""
    if ended.error is not None:
        ended.error.result = result  # type: ignore[attr-defined]
        raise ended.error
    if ended.status == "diverged":
        raise TrainingDiverged(log.updates + 1, result, prepared.agent.policy.has_mask)


def _make_monitor(prepared: PreparedRun, log: Logger, start: Checkpoint | None) -> Monitor:
    """Returns the monitor of a run, resumed from a checkpoint if there is one. Compiles its evaluation."""
    agent, run = prepared.agent, prepared.run
    evaluate: Evaluator | None = None
    if run.eval_every and isinstance(agent, Anakin):
        with end_process_at(signal.SIGTERM):
            shapes = state_shapes(agent, prepared.hyperparams).train.policy_state
            evaluate = DeviceEvaluator(agent, shapes, run, prepared.seed)
    best = None
    if prepared.run_dir is not None:
        try:
            best = runs.read_best(prepared.run_dir)
        except ValueError as error:
            log.info(f"WARNING: {error}; the run selects a new best policy")
    return Monitor(
        log,
        run,
        min_episodes=count_needed_episodes(agent.config),
        evaluate=evaluate,
        info=RunInfo(env=agent.env.name, seed=prepared.seed),
        best=best,
        identity=_end_identity(prepared),
        ended=_ended_before(prepared, start),
    )


def make_loop(prepared: PreparedRun, log: Logger, checkpoints: Checkpoints | None) -> "DeviceLoop | RayLoop":
    """Returns the training loop of the run's mode, compiled."""
    monitor = _make_monitor(prepared, log, None if checkpoints is None else checkpoints.start)
    if isinstance(prepared.agent, Anakin):
        return DeviceLoop(prepared, log, checkpoints, monitor)
    from jppo.training.ray_loop import RayLoop  # an on-device run does not need the actors package

    return RayLoop(prepared, log, checkpoints, monitor)


def _save_result(
    loop: "DeviceLoop | RayLoop", prepared: PreparedRun, log: Logger, ended: LoopResult, checkpoints: Checkpoints | None
) -> Result:
    """Writes the last checkpoint, the policy and the summary."""
    if ended.status != "diverged":
        loop.save()
    loop.monitor.save_best()
    if checkpoints is not None:
        checkpoints.close()
    log.finish()
    agent, writer, recent, best = prepared.agent, log.writer, log.recent, loop.monitor.best
    policy_state = jax.device_put(jax.device_get(loop.policy_state), jax.local_devices()[0])
    summary = {
        "env": agent.env.name,
        "backend": prepared.config_json["backend"],
        "status": ended.status,
        **({"stop_reason": ended.reason} if ended.reason else {}),
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
        **({} if best is None else {"best_update": best.update, "best_return": best.score}),
        **({} if loop.monitor.last_eval is None else {"eval_return_mean": loop.monitor.last_eval}),
        **describe_processes(),
        "versions": runs.versions(),
        "policy_sha256": fingerprint(policy_state),
        "run_dir": None if writer is None else str(writer.path),
    }
    if writer is not None and (failed_writes := writer.close(policy_state, summary)):
        summary["failed_writes"] = failed_writes
    return Result(
        metrics=log.history.arrays(),
        policy=TrainedPolicy(agent.policy, policy_state, agent.env),
        summary=summary,
        state=loop.state,
        agent=agent,
        run_dir=None if writer is None else writer.path,
        settings=prepared.config_json,
    )
