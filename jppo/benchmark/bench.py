"""How fast a run is, and its parts alone."""

import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jppo.actors.sebulba import Sebulba
from jppo.benchmark.report import CEILINGS, BenchResult, Speed
from jppo.benchmark.timing import BareEnvironments, Program, device_programs, repeatedly, sample_rollout, time_programs
from jppo.config.ppo import Hyperparams, PPOConfig, RayConfig, num_cores
from jppo.devices.mesh import AXIS
from jppo.ppo.learner import Learner, make_learner
from jppo.ppo.losses import Loss
from jppo.ppo.networks import Network
from jppo.ppo.optimizer import Optimizer, adam
from jppo.ppo.types import Array
from jppo.runs.writer import RunWriter
from jppo.training.device_loop import DeviceLoop
from jppo.training.interrupts import stop_on_interrupt
from jppo.training.logger import Logger, LoopResult
from jppo.training.progress import NullReporter
from jppo.training.ray_loop import RayLoop
from jppo.training.settings import PreparedRun, RunSettings, prepare_run

_ENDLESS = 2**31 - 1  # steps: what is measured is a part of a run that long
_FEWEST_UPDATES = 3  # of actors and learner, after those that warm up


def bench(
    env: Any,
    *,
    seed: int = 0,
    config: PPOConfig | None = None,
    hyperparams: Hyperparams | None = None,
    preset: str = "auto",
    network: Network | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | None = None,
    backend: str = "auto",
    num_devices: int | None = None,
    seconds: float = 2.0,
    say: Callable[[str], None] = lambda text: None,
    **actors: Any,
) -> BenchResult:
    """Trains for some seconds, runs the parts of an update alone, and says which of them limits. Nothing is kept.

    Args:
      env, seed, config, hyperparams, preset, network, optimizer, loss, backend, num_devices: as for `jppo.train`.
      seconds: that the run gets, and the slowest part; what takes longer is done a few times all the same.
      say: gets told what is going on.
      **actors: num_actors, envs_per_actor and so on, see `jppo.RayConfig`.

    Raises:
      ValueError: anything given that cannot be, a run that diverges, or one that does not fit in memory with its parts.
      ActorsFailed: an actor failed too often in a row.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.0 < seconds < math.inf:
        raise ValueError(f"seconds = {seconds!r} must be a number of more than 0")
    if jax.process_count() > 1:
        raise ValueError(f"a bench is of one process; JAX runs in {jax.process_count()} (jax.distributed)")
    settings = RunSettings(
        env=env,
        total_steps=_ENDLESS,
        seed=seed,
        config=config,
        hyperparams=hyperparams,
        preset=preset,
        network=network,
        optimizer=optimizer,
        loss=loss,
        backend=backend,
        num_devices=num_devices,
        ray=RayConfig(**actors),
    )
    prepared = prepare_run(settings)
    config = prepared.agent.config
    with tempfile.TemporaryDirectory() as directory, stop_on_interrupt(NullReporter()) as stop_requested:
        writer = RunWriter(Path(directory), prepared.config_json)
        log = Logger(config.batch_size, writer, _Messages(say))
        try:
            if isinstance(prepared.agent, Sebulba):
                return _bench_actors(prepared, log, seconds, stop_requested)
            learner = _learner_of(prepared, optimizer, loss)
            return _bench_device(prepared, learner, log, seconds, stop_requested)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            sizes = f"num_envs = {config.num_envs} and num_steps = {config.num_steps}"
            raise ValueError(f"{sizes} need more memory than the device has, parts included; lower one") from error
        finally:
            writer.abort()


class _Messages(NullReporter):
    """Passes on what is said, and nothing else."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def message(self, text: str) -> None:
        self._say(text)


def _learner_of(prepared: PreparedRun, optimizer: Optimizer, loss: Loss | None) -> Learner:
    axis_name = AXIS if prepared.config_json["num_devices"] > 1 else None
    return make_learner(prepared.agent.policy, prepared.agent.config, optimizer, loss, axis_name)


def _bench_device(
    prepared: PreparedRun, learner: Learner, log: Logger, seconds: float, stop_requested: Callable[[], bool]
) -> BenchResult:
    """Half of the run before and half after the parts, so that whatever else the machine does falls on all of them."""
    agent: Any = prepared.agent
    loop = DeviceLoop(agent, prepared.seed, prepared.hyperparams, log)
    jax.block_until_ready(loop.launch(1))
    _run_for(0.5 * seconds, loop, log, stop_requested)
    log.info("measuring the parts")
    state = jax.tree.map(lambda x: x.copy(), loop.state)  # whose own memory launch() reuses
    programs = device_programs(agent, learner, state, _key_of_parts(prepared))
    programs["update"] = lambda count: jax.block_until_ready(loop.launch(count))
    times = time_programs(programs, seconds, stop_requested)
    _run_for(0.5 * seconds, loop, log, stop_requested)
    update, parts = times["update"], {part: float(np.median(times[part])) for part in CEILINGS}
    parts["rest"] = max(0.0, float(np.median(update)) - sum(parts.values()))
    return _benched(
        prepared,
        compile_seconds=loop.compile_seconds,
        steady=_speed(log.batch_size, update),
        end_to_end=_with_quartiles(log.steps / log.seconds, log.history.arrays()["time/steps_per_second"]),
        ceilings={part: _speed(log.batch_size, times[part]) for part in CEILINGS},
        seconds=parts,
        shares=_shares(parts),
    )


def _run_for(seconds: float, loop: DeviceLoop, log: Logger, stop_requested: Callable[[], bool]) -> None:
    """Trains and logs for so long, at least a chunk."""
    before, deadline = log.updates, time.perf_counter() + seconds
    ended = loop.run(lambda: stop_requested() or (log.updates > before and time.perf_counter() > deadline))
    _check(ended, log, stop_requested)


def _check(ended: LoopResult, log: Logger, stop_requested: Callable[[], bool]) -> None:
    """Raises what stands in the way of a result."""
    if ended.error is not None:
        raise ended.error
    if ended.status == "diverged":
        raise ValueError(
            f"update {log.updates + 1} made a loss, gradient or parameter NaN or infinite, so that there is nothing to "
            "measure; lower learning_rate or max_grad_norm, or check the environment's rewards and observations for NaN"
        )
    if stop_requested():
        raise KeyboardInterrupt


def _bench_actors(
    prepared: PreparedRun, log: Logger, seconds: float, stop_requested: Callable[[], bool]
) -> BenchResult:
    """The run with its own clocks, and then, when its actors are gone, environments and learner alone."""
    agent: Any = prepared.agent
    warm_up = 1 + prepared.ray.policy_lag  # updates
    loop = RayLoop(agent, prepared.seed, prepared.hyperparams, log, prepared.ray)

    def enough() -> bool:
        return stop_requested() or (log.updates >= warm_up + _FEWEST_UPDATES and log.seconds >= seconds)

    try:
        ended = loop.run(enough)
    finally:
        loop.close()
    _check(ended, log, stop_requested)
    log.info("measuring the parts")
    columns = log.history.arrays()
    speeds = columns["time/steps_per_second"]
    warm_up = max(warm_up, int(np.argmax(speeds != speeds[0])))  # all that were logged with the first
    later = {name: column[warm_up:] for name, column in columns.items()}
    elapsed, steps = (float(columns[name][-1] - columns[name][warm_up - 1]) for name in ("time/elapsed", "env_steps"))
    parts, shares = _of_clocks(later, prepared.ray.policy_lag)
    times, cores_busy = _time_alone(prepared, loop, seconds, stop_requested)
    return _benched(
        prepared,
        compile_seconds=loop.compile_seconds,
        steady=_speed(
            log.batch_size, later["time/wait_rollouts"] + later["time/host_to_device"] + later["time/update"]
        ),
        end_to_end=_with_quartiles(steps / elapsed, later["time/steps_per_second"]),
        ceilings={
            "environment": _speed(log.batch_size, times["environment"]),
            "policy": _speed(log.batch_size, later["actors/policy_seconds"]),
            "learner": _speed(log.batch_size, times["learner"]),
        },
        seconds=parts,
        shares=shares,
        cores_busy=cores_busy,
    )


def _of_clocks(columns: dict[str, np.ndarray], policy_lag: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of the parts of an update, and their shares of it.

    Args:
      columns: metrics, [updates] each.
    """
    total, environment, policy = (columns[f"actors/{name}_seconds"] for name in ("rollout", "env", "policy"))
    clocks = {
        "environment": environment,
        "policy": policy,
        "learner": columns["time/update"],
        "rest": total - environment - policy,
        "waiting": columns["time/wait_rollouts"] - (0.0 if policy_lag else total),
        "transfer": columns["time/host_to_device"],
    }
    parts = {part: max(0.0, float(np.median(seconds))) for part, seconds in clocks.items()}
    one_by_one = ("learner", "waiting", "transfer") if policy_lag else tuple(parts)
    return parts, _shares({part: parts[part] for part in one_by_one})


def _time_alone(
    prepared: PreparedRun, loop: RayLoop, seconds: float, stop_requested: Callable[[], bool]
) -> tuple[dict[str, np.ndarray], float]:
    """Seconds per update, [rounds], of the environments of all actors and of the learner, each without the other; and
    how many cores one actor's environments keep busy.

    One actor's environments are stepped, in this process. As many can step at once as there are actors, or, on this
    machine, as its cores have time for.
    """
    agent: Any = prepared.agent
    actors, key = prepared.ray, _key_of_parts(prepared)
    processes, num_envs = max(1, actors.num_actors or 0), actors.envs_per_actor or 1
    rollout_key, actions_key = jax.random.split(key)
    environments = BareEnvironments(agent.env, agent.config, num_envs, actions_key)
    try:
        rollout, stats = sample_rollout(agent, loop.state, rollout_key, processes, num_envs)
        programs: dict[str, Program] = {
            "environment": environments,
            "learner": repeatedly(loop.update, loop.state, rollout, stats),
        }
        times = time_programs(programs, seconds, stop_requested)
    finally:
        environments.close()
    at_once = float(processes)
    if _is_local(actors):
        at_once = min(at_once, max(1.0, num_cores() / max(environments.cores_busy, 1e-9)))
    times["environment"] = times["environment"] * processes / at_once
    return times, environments.cores_busy


def _benched(prepared: PreparedRun, **measured: Any) -> BenchResult:
    """With what was asked for."""
    agent, actors = prepared.agent, prepared.ray
    on_host = isinstance(agent, Sebulba)
    spread = {name: getattr(actors, name) for name in ("num_actors", "envs_per_actor", "policy_lag")}
    spread["local"] = _is_local(actors)
    return BenchResult(
        env=agent.env.name,
        backend="ray" if on_host else "anakin",
        device=jax.devices()[0].device_kind,
        cores=num_cores(),
        num_envs=agent.config.num_envs,
        num_steps=agent.config.num_steps,
        num_devices=prepared.config_json["num_devices"],
        actors=spread if on_host else {},
        **measured,
    )


def _is_local(actors: RayConfig) -> bool:
    """Whether the actors run on this machine; see `jppo.actors.actor_pool.connect`."""
    return (actors.address or os.environ.get("RAY_ADDRESS") or "local") == "local"


def _key_of_parts(prepared: PreparedRun) -> Array:
    """Not the run's."""
    return jax.random.key(2**32 - 1 - prepared.seed)


def _shares(parts: dict[str, float]) -> dict[str, float]:
    whole = sum(parts.values())
    return {part: seconds / whole for part, seconds in parts.items()}


def _speed(samples: int, seconds: np.ndarray) -> Speed:
    """Of so many samples in these times, [rounds]."""
    return _with_quartiles(samples / float(np.median(seconds)), samples / seconds)


def _with_quartiles(steps_per_second: float, by_round: np.ndarray) -> Speed:
    low, high = np.quantile(by_round, (0.25, 0.75))
    return Speed(steps_per_second, float(low), float(high))
