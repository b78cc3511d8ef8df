"""The driver: picks the mode, runs its loop, and saves what comes out."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jppo import runs
from jppo.anakin import Anakin, AnakinState, make_anakin
from jppo.checkpoints import DEFAULT_SECONDS, Checkpoints, check_same_run
from jppo.config import PPOConfig, RayConfig, check_hyperparams, check_total_steps, num_cores, spread_envs
from jppo.devices import check_same, most_devices, together
from jppo.env_runner import ActorsFailed
from jppo.envs import make_env
from jppo.envs.gymnasium import make_host_env
from jppo.given import check_preset, check_run_dir, check_sizes, choose_backend, own_parts
from jppo.interrupts import never, stop_on_interrupt
from jppo.learner import Loss, Optimizer, adam
from jppo.load import read_summary
from jppo.loops import ActorLoop, AnakinLoop, Ended, Logbook
from jppo.networks import Network, hint
from jppo.policy import TrainedPolicy
from jppo.presets import PRESETS, preset_for
from jppo.progress import OneOfSeveral, Reporter, make_reporter
from jppo.runs import RunWriter
from jppo.sebulba import Sebulba, make_sebulba
from jppo.types import Hyperparams, PolicyState, TrainState


class Result(NamedTuple):
    """What a run gives back."""

    metrics: dict[str, np.ndarray]  # [updates] each, with "update" and "step"; NaN where no episode ended
    policy: TrainedPolicy
    summary: dict[str, Any]  # as in summary.json
    state: AnakinState | TrainState | None  # the latter two in the Ray mode, and where hosts were started for the run
    agent: Anakin | Sebulba
    run_dir: Path | None


class TrainingDiverged(RuntimeError):
    """A loss or a parameter became NaN or infinite; `result` holds the run up to the update before."""

    def __init__(self, update: int, result: Result) -> None:
        super().__init__(
            f"update {update} made a loss or parameter NaN or infinite; the policy is that of update {update - 1}. "
            "Lower learning_rate or max_grad_norm, or check the environment's rewards and observations for NaN"
        )
        self.update, self.result = update, result


def train(
    env: Any,
    *,
    total_steps: int | float | None = None,
    seed: int | None = None,
    config: PPOConfig | None = None,
    hyperparams: Hyperparams | None = None,
    preset: str = "auto",
    network: Network | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | None = None,
    run_dir: str | Path | None = None,
    checkpoint_every: float | None = None,
    keep: int = 2,
    resume: str | Path | None = None,
    progress: str | Reporter = "none",
    wandb: bool = False,
    backend: str = "auto",
    num_actors: int | None = None,
    envs_per_actor: int | None = None,
    policy_lag: int = 0,
    actor_cpus: float = 1.0,
    actor_gpus: float = 0.0,
    address: str | None = None,
    actor_timeout: float | None = None,
    max_restarts: int = 3,
    num_devices: int | None = None,
    num_hosts: int = 1,
    host_cpus: float = 1.0,
    host_gpus: float = 0.0,
) -> Result:
    """Trains PPO: on the device, or with Ray actors that step Gymnasium environments on CPUs.

    Args:
      env: for the device, a name, an object with gymnax's API, or an Environment; for Ray, what `jppo.make_host_env`
        takes: a Gymnasium id, "module:name", or a function that makes an environment.
      total_steps: environment steps, rounded up to whole updates; the preset's when None.
      seed: of everything random; 0 when None.
      config, hyperparams: the preset's when None.
      preset: a name in `jppo.PRESETS`; "auto" is the environment's own.
      network: see `jppo.networks.Network`; what config names when None.
      optimizer, loss: see `jppo.learner.make_learner`.
      run_dir: where to write config.json, metrics.jsonl, TensorBoard events, checkpoints, the policy and summary.json;
        nothing is written when None. A run that is there goes on from its newest checkpoint, and gives what is None
        here; whatever else is given must be as it was (docs/checkpoints.md).
      checkpoint_every: seconds between two checkpoints, a minute when None; the end of a run always makes one.
      keep: so many checkpoints stay, the newest.
      resume: as run_dir, of a run that must be there.
      progress: "auto" shows a bar (lines where there is no terminal), "none" nothing; or a reporter of your own.
      wandb: log to Weights & Biases too; needs run_dir.
      backend: "anakin" (on the device), "ray", or "auto": the device where gymnax has the environment.
      num_actors, envs_per_actor, policy_lag, actor_cpus, actor_gpus, address, actor_timeout, max_restarts: of the Ray
        backend, see `jppo.RayConfig`.
      num_devices: over which the environments' samples are spread, in both modes; as many as there are and fit when
        None. Their number changes the time a run takes, and rounding.
      num_hosts: Ray actors, one per machine where there are as many, that learn together; `address` says in which
        cluster. num_devices and num_actors are of all of them together.
      host_cpus, host_gpus: that Ray reserves for each host; the first is also its number of threads. Without GPUs it
        learns on its CPU.

    Where `jax.distributed.initialize` was called, all processes must call this, with the same arguments; the first one
    writes the run directory and shows the progress (docs/scaling.md).

    Ctrl-C (or SIGTERM) ends the run early and returns what was reached (summary["status"] is "interrupted"); a second
    one raises KeyboardInterrupt, as does one before the first update.

    Raises:
      ValueError: anything given that cannot be; before anything is written.
      TrainingDiverged: a loss or parameter became NaN or infinite; everything up to then is saved.
      ActorsFailed: an actor failed too often in a row; everything up to then is saved.
      HostFailed: one of several hosts failed; what was logged up to then is saved, but no policy.
    """
    actors = RayConfig(
        num_actors, envs_per_actor, _check_lag(policy_lag), actor_cpus, actor_gpus, address, actor_timeout, max_restarts
    )
    run_dir = check_run_dir(run_dir, resume, wandb, checkpoint_every, keep, num_hosts)
    of_ppo = (total_steps, seed, config, hyperparams, preset, network, optimizer, loss)
    given = Given(env, *of_ppo, run_dir, wandb, backend, actors, num_devices, checkpoint_every, keep)
    if num_hosts == 1 and (host_cpus, host_gpus) == (1.0, 0.0):
        return _train(given, progress)
    return _train_on_hosts(given, progress, num_hosts, host_cpus, host_gpus)


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


class Prepared(NamedTuple):
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

    def writer(self, settings: dict[str, Any]) -> RunWriter | None:
        """None where nothing is to be left."""
        return None if self.run_dir is None else RunWriter(self.run_dir, settings, self.wandb, self.goes_on)

    def checkpoints(self, log: Logbook) -> Checkpoints | None:
        """None where there are to be none. The log of a run that goes on is taken up at the newest."""
        if self.run_dir is None:
            return None
        if jax.process_count() > 1:
            log.say("no checkpoints: a run in several processes saves its policy at its end, and cannot go on after it")
            return None
        every = DEFAULT_SECONDS if self.checkpoint_every is None else self.checkpoint_every
        checkpoints = Checkpoints(self.run_dir, every, self.keep, log.reporter.message)
        if (start := checkpoints.start) is not None:
            log.say(f"goes on from {start.path}, after {start.update:,} updates")
            log.go_on(runs.metrics_until(self.run_dir, start.update), start.update, start.seconds)
        elif self.goes_on:
            log.say(f"{self.run_dir} has no checkpoint yet: the run begins anew")
        return checkpoints


def _train(
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
    with together():
        before = _settings_before(given)
        prepared = prepare(
            given if before is None else _as_before(given, before), num_cores() if cores is None else cores
        )
        if given.run_dir is not None and before is not None:
            finished = read_summary(given.run_dir).get("status") == "finished"
            check_same_run(given.run_dir, before, prepared.settings, finished)
        total_steps, number = prepared.settings["total_steps"], jax.process_index()
        reporter = make_reporter(progress, total_steps) if isinstance(progress, str) else progress
        if number:
            given, reporter = given._replace(run_dir=None, wandb=False), OneOfSeveral(reporter, number)
    check_same(json.dumps(prepared.settings, default=str))
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
        actors = dataclasses.replace(actors, num_actors=was["num_actors"])
    return given._replace(
        total_steps=before["total_steps"] if given.total_steps is None else given.total_steps,
        seed=before["seed"] if given.seed is None else given.seed,
        config=config if given.config is None and own else given.config,
        hyperparams=hyperparams if given.hyperparams is None and own else given.hyperparams,
        backend=before["backend"] if given.backend == "auto" else given.backend,
        actors=actors,
    )


def prepare(given: Given, cores: int) -> Prepared:
    """Raises ValueError for anything given that cannot be."""
    backend, hosts, actors = choose_backend(given.env, given.backend), jax.process_count(), given.actors
    env = make_host_env(given.env) if backend == "ray" else make_env(given.env)
    chosen = PRESETS[check_preset(preset_for(env.name) if given.preset == "auto" else given.preset)]
    hyperparams = chosen.hyperparams if given.hyperparams is None else given.hyperparams
    check_hyperparams(hyperparams)
    total_steps = check_total_steps(chosen.total_steps if given.total_steps is None else given.total_steps)
    seed = runs.check_seed(0 if given.seed is None else given.seed)
    config = chosen.config if given.config is None else given.config
    if backend == "ray":
        config, actors = spread_envs(config, actors, hosts * cores, given.config is not None, hosts)
    elif actors != RayConfig():
        raise ValueError(f"{env.name} runs on the device, without actors; give backend = 'ray' for them")
    parts: dict[str, Any] = {"network": given.network, "optimizer": given.optimizer, "loss": given.loss}
    num_devices = most_devices(config) if given.num_devices is None else given.num_devices
    make: Any = make_sebulba if backend == "ray" else make_anakin
    agent = make(env, config, total_steps=total_steps, num_devices=num_devices, **parts)
    check_sizes(config, total_steps)
    more: dict[str, Any] = dict.fromkeys(own_parts(given.env, parts), "custom")
    more |= {"actors": dataclasses.asdict(actors)} if backend == "ray" else {}
    more |= {"num_devices": num_devices} | _of_hosts()
    settings = runs.run_config(env.name, backend, seed, total_steps, config, hyperparams, **more)
    return Prepared(agent, actors, seed, hyperparams, settings)


def _run(prepared: Prepared, files: _Files, reporter: Reporter, stop: Callable[[], bool]) -> Result:
    """Everything that leaves a trace, and its tidying up."""
    agent, actors, seed, hyperparams, settings = prepared
    writer, loop, checkpoints, config = None, None, None, agent.config
    try:
        with stop_on_interrupt(reporter, stop) as stop_requested:
            with together():
                writer = files.writer(settings)
                reporter.start()
                if "network" not in settings and (said := hint(config, agent.env.obs_spec)):
                    reporter.message(said)
                log = Logbook(config.batch_size, writer, reporter)
                checkpoints = files.checkpoints(log)
                loop = _make_loop(agent, seed, hyperparams, log, actors, checkpoints)
                log.rewind()
                if stop_requested():
                    raise KeyboardInterrupt
            ended = loop.run(stop_requested)
            if not log.updates and ended.status in ("interrupted", "failed"):
                raise ended.error or KeyboardInterrupt
            result = _result(loop, agent, log, ended, checkpoints)
    except BaseException as error:
        if writer is not None:
            writer.abort()
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            sizes = f"num_envs = {config.num_envs} and num_steps = {config.num_steps}"
            raise ValueError(f"{sizes} need more memory than the device has; lower one of them") from error
        raise
    finally:
        for part in (checkpoints, loop, reporter):
            if part is not None:
                part.close()
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
    log: Logbook,
    actors: RayConfig,
    checkpoints: Checkpoints | None,
) -> AnakinLoop | ActorLoop:
    if isinstance(agent, Anakin):
        return AnakinLoop(agent, seed, hyperparams, log, checkpoints)
    return ActorLoop(agent, seed, hyperparams, log, actors, checkpoints)


def _result(
    loop: AnakinLoop | ActorLoop, agent: Anakin | Sebulba, log: Logbook, ended: Ended, checkpoints: Checkpoints | None
) -> Result:
    """Saves and sums up."""
    if ended.status != "diverged":
        loop.save()
    if checkpoints is not None:
        checkpoints.close()
    env, writer, recent = agent.env, log.writer, log.recent
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
        "run_dir": None if writer is None else str(writer.path),
    }
    policy_state = jax.device_put(jax.device_get(loop.policy_state), jax.local_devices()[0])
    policy = TrainedPolicy(agent.policy, policy_state, env.obs_spec, env.action_spec, agent.config.action_bounds)
    if writer is not None:
        writer.close(policy_state, summary)
    path = None if writer is None else writer.path
    return Result(log.history.arrays(), policy, summary, loop.state, agent, path)


def _of_hosts() -> dict[str, int]:
    """What several processes add to config.json and summary.json."""
    return {"num_hosts": jax.process_count()} if jax.process_count() > 1 else {}


class _Outcome(NamedTuple):
    """What a host sends to the process that started it: arrays in NumPy, and nothing that holds a program."""

    ended: str  # status, or "failed" without a result
    text: str  # why, where actors failed
    config: PPOConfig | None = None  # None, and all that follows, where not one update was made
    metrics: dict[str, np.ndarray] | None = None
    policy_state: PolicyState | None = None
    state: TrainState | None = None
    summary: dict[str, Any] | None = None


def _train_on_hosts(
    given: Given, progress: str | Reporter, num_hosts: int, host_cpus: float, host_gpus: float
) -> Result:
    """Starts the hosts, and sums up here what came of them. JAX does not start here before they have ended: the first
    host may need this machine's GPUs."""
    check_hosts(num_hosts, host_cpus, host_gpus)
    from jppo.hosts import run_on_hosts  # ray takes a second to import

    name = given.env if isinstance(given.env, str) else ""
    chosen = PRESETS[check_preset(preset_for(name) if given.preset == "auto" else given.preset)]
    total_steps = check_total_steps(chosen.total_steps if given.total_steps is None else given.total_steps)
    reporter = make_reporter(progress, total_steps) if isinstance(progress, str) else progress
    actors = given.actors
    run_dir = None if given.run_dir is None else given.run_dir.absolute()
    on_host = given._replace(actors=dataclasses.replace(actors, address=None), run_dir=run_dir)
    cpus = (actors.num_actors if actors.num_actors is not None else num_hosts * num_cores()) * actors.actor_cpus
    try:
        with stop_on_interrupt(reporter) as stop_requested:
            outcomes = run_on_hosts(
                _as_host,
                (on_host, host_cpus),
                num_hosts,
                host_cpus,
                host_gpus,
                actors.address,
                cpus,
                reporter,
                stop_requested,
            )
    finally:
        reporter.close()
    return _from_hosts(given, total_steps, outcomes)


def _as_host(given: tuple[Given, float], reporter: Reporter, stop: Callable[[], bool]) -> _Outcome:
    """A host's part."""
    cores, text = max(1, num_cores() - math.ceil(given[1])), ""
    try:
        result = _train(given[0], reporter, stop, cores)
    except TrainingDiverged as error:
        result = error.result
    except ActorsFailed as error:
        text = str(error)
        if error.result is None:
            return _Outcome("failed", text)
        result = error.result
    state = None
    if isinstance(result.state, TrainState):  # the on-device mode's is in parts, one on each host
        state = jax.device_get(result.state.replace(key=jax.random.key_data(result.state.key)))
    policy_state = jax.device_get(result.policy.state)
    return _Outcome(
        result.summary["status"], text, result.agent.config, result.metrics, policy_state, state, result.summary
    )


def _from_hosts(given: Given, total_steps: int, outcomes: list[_Outcome]) -> Result:
    """The first host's result as one of this process, raised where it is an error."""
    first = outcomes[0]
    # The host whose actors failed has their traceback, the others say where to look.
    failure = ActorsFailed(max((outcome.text for outcome in outcomes), key=len))
    if first.summary is None or first.config is None:
        raise failure
    host_env = first.summary["backend"] == "ray"
    env = make_host_env(given.env) if host_env else make_env(given.env)
    parts: dict[str, Any] = {"network": given.network, "optimizer": given.optimizer, "loss": given.loss}
    agent: Anakin | Sebulba = (make_sebulba if host_env else make_anakin)(
        env, first.config, total_steps=total_steps, **parts
    )
    policy_state = jax.device_put(first.policy_state, jax.local_devices()[0])
    policy = TrainedPolicy(agent.policy, policy_state, env.obs_spec, env.action_spec, first.config.action_bounds)
    state = first.state
    if state is not None:
        state = jax.device_put(state.replace(key=jax.random.wrap_key_data(state.key)), jax.local_devices()[0])
    path = None if first.summary["run_dir"] is None else Path(first.summary["run_dir"])
    result = Result(first.metrics or {}, policy, first.summary, state, agent, path)
    if first.ended == "failed":
        failure.result = result
        raise failure
    if first.ended == "diverged":
        raise TrainingDiverged(first.summary["updates"] + 1, result)
    return result


def check_hosts(num_hosts: int, host_cpus: float, host_gpus: float) -> None:
    """Raises ValueError for numbers that cannot be."""
    if not isinstance(num_hosts, int) or num_hosts < 1:
        raise ValueError(f"num_hosts = {num_hosts!r} must be a whole number of at least 1")
    for name, value in (("host_cpus", host_cpus), ("host_gpus", host_gpus)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < math.inf:
            raise ValueError(f"{name} = {value!r} must be a number of at least 0")
    if not host_cpus:
        raise ValueError("host_cpus = 0 must be more than 0")
    if num_hosts == 1:
        raise ValueError("host_cpus and host_gpus are for num_hosts > 1; one host is this process, with all it sees")
    if jax.distributed.is_initialized():
        raise ValueError("JAX runs in several processes already (jax.distributed); leave num_hosts out")


def _check_lag(policy_lag: int) -> Literal[0, 1]:
    if policy_lag not in (0, 1):
        raise ValueError(f"policy_lag = {policy_lag!r} is not one of 0, 1")
    return policy_lag  # type: ignore[return-value]
