"""`jppo.bench`: the speed of a run, and the time of its parts."""

import math
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from jppo.actors.sebulba import Sebulba
from jppo.benchmark.memory import largest_num_envs, memory_by_purpose
from jppo.benchmark.report import BenchResult, Speed
from jppo.benchmark.timing import device_programs, time_programs
from jppo.config.checks import to_float
from jppo.config.keywords import ActorKeywords
from jppo.config.overrides import explain_keywords, take_ray
from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.config.ray import RayConfig, num_cores
from jppo.devices.memory import bytes_free, bytes_needed, explain_out_of_memory, show_bytes
from jppo.envs.backends import require_device
from jppo.errors import Refused
from jppo.ppo.anakin import make_anakin
from jppo.ppo.losses import Advantages, Loss, LossModule
from jppo.ppo.minibatches import Optimizer, adam
from jppo.ppo.policy import Network
from jppo.runs.writer import RunWriter
from jppo.training.device_loop import DeviceLoop, compile_chunk, state_shapes
from jppo.training.interrupts import stop_on_interrupt
from jppo.training.logger import Logger, LoopResult
from jppo.training.progress import NullReporter
from jppo.training.ray_loop import RayLoop
from jppo.training.settings import PreparedRun, RunSettings, prepare_run

_TOTAL_STEPS = 2**31 - 1  # long enough that the measured run never ends
_MIN_UPDATES = 3  # of a run with actors, after the warm-up
_ALONE = {"environment": "actors/env_seconds", "policy": "actors/policy_seconds", "update": "time/update"}


@explain_keywords
def bench(
    env: Any,
    *,
    seed: int = 0,
    config: PPOConfig | Mapping[str, Any] | None = None,
    hyperparams: Hyperparams | Mapping[str, Any] | None = None,
    preset: str = "auto",
    network: Network | str | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | LossModule | None = None,
    advantages: Advantages | None = None,
    backend: str = "auto",
    num_devices: int | None = None,
    ray: RayConfig | Mapping[str, Any] | None = None,
    seconds: float = 2.0,
    dry_run: bool = False,
    message: Callable[[str], None] = lambda text: None,
    **overrides: Unpack[ActorKeywords],
) -> BenchResult:
    """Measures the speed and the memory of a run and the time of its parts. Saves nothing.

    Args:
      env, seed, config, hyperparams, preset, network, optimizer, loss, advantages: as for `jppo.train`.
      backend, num_devices, ray: as for `jppo.train`.
      seconds: measuring time of the run and, on the device, of its slowest part. Slow parts run at least five times.
      dry_run: only compile: the result has the memory, the compile time and the largest num_envs that fits, but no
        speeds. Evaluations during training need more memory. On the device only.
      message: gets a line of text at each stage.
      **overrides: fields of `jppo.PPOConfig`, `jppo.Hyperparams` and `jppo.RayConfig`, as for `jppo.train`.

    Raises:
      ValueError: an invalid argument, a run that diverges, or not enough memory; with dry_run, the message has the
        largest num_envs that fits.
      ActorsFailed: an actor failed too often in a row.
    """
    ray, others = take_ray(ray, overrides)
    if not 0.0 < to_float(seconds) < math.inf:
        raise Refused(f"seconds = {seconds!r} must be a number greater than 0")
    if jax.process_count() > 1:
        raise Refused(f"bench supports one process only; JAX runs in {jax.process_count()} (jax.distributed)")
    settings = RunSettings(
        env=env,
        total_steps=_TOTAL_STEPS,
        seed=seed,
        config=config,
        hyperparams=hyperparams,
        overrides=others,
        preset=preset,
        network=network,
        optimizer=optimizer,
        loss=loss,
        advantages=advantages,
        backend=backend,
        num_devices=num_devices,
        ray=ray,
    )
    if dry_run:
        require_device(env, "dry_run", "pass an environment of that kind")
        return _compile_only(prepare_run(settings), settings)
    prepared = prepare_run(settings)
    sizes = f"num_envs = {prepared.agent.config.num_envs} or num_steps = {prepared.agent.config.num_steps}"
    with (
        tempfile.TemporaryDirectory() as directory,
        stop_on_interrupt(NullReporter()) as stop_requested,
        explain_out_of_memory(f"lower {sizes}"),
    ):
        writer = RunWriter(Path(directory), prepared.config_json)
        log = Logger(prepared.agent.config.batch_size, writer, _MessageReporter(message))
        measure = _bench_actors if isinstance(prepared.agent, Sebulba) else _bench_device
        try:
            return measure(prepared, log, seconds, stop_requested)
        finally:
            writer.abort()


def _compile_only(prepared: PreparedRun, settings: RunSettings) -> BenchResult:
    """Compiles the training program, and a few larger ones to find the largest num_envs that fits.

    Raises ValueError if the run does not fit in memory.
    """
    agent: Any = prepared.agent
    devices, sizes = prepared.config_json["num_devices"], agent.config
    parts = {name: getattr(settings, name) for name in ("network", "optimizer", "loss", "advantages")}
    start, free = time.perf_counter(), bytes_free(devices)
    chunk, state = compile_chunk(agent, prepared.hyperparams), state_shapes(agent, prepared.hyperparams)
    compile_seconds, needed = time.perf_counter() - start, bytes_needed(chunk)

    def measure(num_envs: int) -> int:
        larger = make_anakin(agent.env, sizes.replace(num_envs=num_envs), num_devices=devices, **parts)
        return bytes_needed(compile_chunk(larger, prepared.hyperparams))

    largest = largest_num_envs(sizes, devices, needed, free, measure)
    if needed > free:
        remedy = f"the largest num_envs that fits is {largest}" if largest else "lower num_steps as well"
        raise Refused(
            f"num_envs = {sizes.num_envs} and num_steps = {sizes.num_steps} need {show_bytes(needed)} of device "
            f"memory and {show_bytes(free)} are free; {remedy}"
        )
    unknown = Speed(math.nan, math.nan, math.nan)
    return _make_result(
        prepared,
        compile_seconds=compile_seconds,
        **{"loop": unknown, "run": unknown, "alone": {}, "seconds": {}, "shares": {}},
        memory=memory_by_purpose(chunk, state.train, state.collect, devices),
        largest_num_envs=largest,
    )


class _MessageReporter(NullReporter):
    """Passes on messages and shows no progress."""

    def __init__(self, message: Callable[[str], None]) -> None:
        self._message = message

    def message(self, text: str) -> None:
        self._message(text)


def _bench_device(
    prepared: PreparedRun, log: Logger, seconds: float, stop_requested: Callable[[], bool]
) -> BenchResult:
    """Measures half of the run before its parts and half after, so that other load on the machine affects all."""
    agent: Any = prepared.agent
    loop = DeviceLoop(prepared, log)
    jax.block_until_ready(loop.launch(1))
    _run_for(0.5 * seconds, agent, loop, log, stop_requested)
    log.info("measuring the parts")
    state = jax.tree.map(lambda x: x.copy(), loop.state)  # launch() reuses the memory of loop.state
    programs = device_programs(agent, state, jax.random.key(prepared.seed))
    programs["whole"] = lambda count: jax.block_until_ready(loop.launch(count))
    times = time_programs(programs, seconds, stop_requested)
    _run_for(0.5 * seconds, agent, loop, log, stop_requested)
    whole = times.pop("whole")
    medians = {part: float(np.median(rounds)) for part, rounds in times.items()}
    other = max(0.0, float(np.median(whole)) - sum(medians.values()))
    parts = {"environment": medians["environment"], "policy": medians["policy"], "other": other}
    parts["update"] = medians["update"]
    num_devices = prepared.config_json["num_devices"]
    return _make_result(
        prepared,
        compile_seconds=loop.compile_seconds,
        loop=_speed(log.batch_size, whole),
        run=_with_quartiles(log.steps / log.seconds, log.history.arrays()["time/steps_per_second"]),
        alone={part: _speed(log.batch_size, rounds) for part, rounds in times.items()},
        seconds=parts,
        shares=_shares(parts),
        memory=memory_by_purpose(loop.chunk, state.train, state.collect, num_devices),
    )


def _run_for(seconds: float, agent: Any, loop: DeviceLoop, log: Logger, stop_requested: Callable[[], bool]) -> None:
    """Trains and logs for a time, at least one chunk."""
    before, deadline = log.updates, time.perf_counter() + seconds
    ended = loop.run(lambda: stop_requested() or (log.updates > before and time.perf_counter() > deadline))
    _check_result(ended, agent, log, stop_requested)


def _check_result(ended: LoopResult, agent: Any, log: Logger, stop_requested: Callable[[], bool]) -> None:
    """Raises an error if the run failed, diverged or was interrupted."""
    if ended.error is not None:
        raise ended.error
    if ended.status == "diverged":
        raise Refused(
            f"update {log.updates + 1} made a loss, gradient or parameter NaN or infinite; lower learning_rate or "
            "max_grad_norm, or check the environment's rewards and observations for NaN"
        )
    if stop_requested():
        raise KeyboardInterrupt


def _bench_actors(
    prepared: PreparedRun, log: Logger, seconds: float, stop_requested: Callable[[], bool]
) -> BenchResult:
    """Reads the times of the parts from the metrics of the run."""
    agent: Any = prepared.agent
    warm_up = 1 + prepared.ray.policy_lag  # updates
    loop = RayLoop(prepared, log)

    def is_done() -> bool:
        return stop_requested() or (log.updates >= warm_up + _MIN_UPDATES and log.seconds >= seconds)

    try:
        ended = loop.run(is_done)
    finally:
        loop.close()
    _check_result(ended, agent, log, stop_requested)
    columns = log.history.arrays()
    speeds = columns["time/steps_per_second"]
    warm_up = max(warm_up, int(np.argmax(speeds != speeds[0])))  # leave out all rows of the first write
    elapsed = float(columns["time/elapsed"][-1] - columns["time/elapsed"][warm_up - 1])
    columns = {name: column[warm_up:] for name, column in columns.items()}
    steps = log.batch_size * len(columns["time/update"])
    parts, shares = _read_parts(columns, prepared.ray.policy_lag)
    loop_seconds = columns["time/wait_rollouts"] + columns["time/host_to_device"] + columns["time/update"]
    return _make_result(
        prepared,
        compile_seconds=loop.compile_seconds,
        loop=_speed(log.batch_size, loop_seconds),
        run=_with_quartiles(steps / elapsed, columns["time/steps_per_second"]),
        alone={part: _speed(log.batch_size, columns[name]) for part, name in _ALONE.items()},
        seconds=parts,
        shares=shares,
        memory=memory_by_purpose(loop.update, loop.state),
    )


def _read_parts(columns: dict[str, np.ndarray], policy_lag: int) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the median seconds of the parts of an update, and their shares, from the metrics of a run with actors.

    Args:
      columns: metrics, [updates] each.
    """
    rollout, environment, policy = (columns[f"actors/{name}_seconds"] for name in ("rollout", "env", "policy"))
    columns_by_part = {
        "environment": environment,
        "policy": policy,
        "other": rollout - environment - policy,
        "update": columns["time/update"],
        "waiting": columns["time/wait_rollouts"] - (0.0 if policy_lag else rollout),
        "transfer": columns["time/host_to_device"],
    }
    parts = {part: max(0.0, float(np.median(seconds))) for part, seconds in columns_by_part.items()}
    sequential = ("update", "waiting", "transfer") if policy_lag else tuple(parts)
    return parts, _shares({part: parts[part] for part in sequential})


def _make_result(prepared: PreparedRun, **measured: Any) -> BenchResult:
    """Returns the measurements together with the settings."""
    agent, num_devices = prepared.agent, prepared.config_json["num_devices"]
    has_actors = isinstance(agent, Sebulba)
    actors = {name: getattr(prepared.ray, name) for name in ("num_actors", "envs_per_actor", "policy_lag")}
    return BenchResult(
        env=agent.env.name,
        backend=prepared.config_json["backend"],
        device=jax.devices()[0].device_kind,
        num_cores=num_cores(),
        num_envs=agent.config.num_envs,
        num_steps=agent.config.num_steps,
        num_devices=num_devices,
        **(actors if has_actors else dict.fromkeys(actors)),
        memory_free=bytes_free(num_devices),
        **measured,
    )


def _shares(parts: dict[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    return {part: seconds / total for part, seconds in parts.items()}


def _speed(batch_size: int, seconds: np.ndarray) -> Speed:
    """Returns the median speed of rounds that took `seconds` [rounds] for a batch each."""
    return _with_quartiles(batch_size / float(np.median(seconds)), batch_size / seconds)


def _with_quartiles(steps_per_second: float, rounds: np.ndarray) -> Speed:
    low, high = np.quantile(rounds, (0.25, 0.75))
    return Speed(steps_per_second=steps_per_second, low=float(low), high=float(high))
