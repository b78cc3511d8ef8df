"""The driver: picks the mode, runs its loop, and saves what comes out."""

import contextlib
import dataclasses
import difflib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jppo import runs
from jppo.anakin import Anakin, AnakinState, make_anakin
from jppo.config import PPOConfig, RayConfig, check_hyperparams, check_total_steps, num_cores, spread_envs
from jppo.devices import most_devices
from jppo.envs import available, make_env
from jppo.envs.gymnasium import is_host_env, make_host_env, nearest_host_envs
from jppo.learner import Loss, Optimizer, adam
from jppo.loops import ActorLoop, AnakinLoop, Ended, Logbook
from jppo.networks import Network, hint
from jppo.policy import TrainedPolicy
from jppo.presets import PRESETS, preset_for
from jppo.progress import Reporter, make_reporter
from jppo.sebulba import Sebulba, make_sebulba
from jppo.types import Hyperparams, TrainState

BACKENDS = ("auto", "anakin", "ray")


class Result(NamedTuple):
    """What a run gives back."""

    metrics: dict[str, np.ndarray]  # [updates] each, with "update" and "step"; NaN where no episode ended
    policy: TrainedPolicy
    summary: dict[str, Any]  # as in summary.json
    state: AnakinState | TrainState  # the latter in the Ray mode
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
    seed: int = 0,
    config: PPOConfig | None = None,
    hyperparams: Hyperparams | None = None,
    preset: str = "auto",
    network: Network | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | None = None,
    run_dir: str | Path | None = None,
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
) -> Result:
    """Trains PPO: on the device, or with Ray actors that step Gymnasium environments on CPUs.

    Args:
      env: for the device, a name, an object with gymnax's API, or an Environment; for Ray, what `jppo.make_host_env`
        takes: a Gymnasium id, "module:name", or a function that makes an environment.
      total_steps: environment steps, rounded up to whole updates; the preset's when None.
      seed: of everything random.
      config, hyperparams: the preset's when None.
      preset: a name in `jppo.PRESETS`; "auto" is the environment's own.
      network: see `jppo.networks.Network`; what config names when None.
      optimizer, loss: see `jppo.learner.make_learner`.
      run_dir: where to write config.json, metrics.jsonl, TensorBoard events, the policy and summary.json; nothing is
        written when None.
      progress: "auto" shows a bar (lines where there is no terminal), "none" nothing; or a reporter of your own.
      wandb: log to Weights & Biases too; needs run_dir.
      backend: "anakin" (on the device), "ray", or "auto": the device where gymnax has the environment.
      num_actors, envs_per_actor, policy_lag, actor_cpus, actor_gpus, address, actor_timeout, max_restarts: of the Ray
        backend, see `jppo.RayConfig`.
      num_devices: over which the environments' samples are spread, in both modes; as many as there are and fit when
        None. Their number changes the time a run takes, and rounding.

    Ctrl-C (or SIGTERM) ends the run early and returns what was reached (summary["status"] is "interrupted"); a second
    one raises KeyboardInterrupt, as does one before the first update.

    Raises:
      ValueError: anything given that cannot be; before anything is written.
      TrainingDiverged: a loss or parameter became NaN or infinite; everything up to then is saved.
      ActorsFailed: an actor failed too often in a row; everything up to then is saved.
    """
    own = {
        "environment": not isinstance(env, str),
        "network": network is not None,
        "optimizer": optimizer is not adam,
        "loss": loss is not None,
    }
    actors = RayConfig(
        num_actors, envs_per_actor, _check_lag(policy_lag), actor_cpus, actor_gpus, address, actor_timeout, max_restarts
    )
    backend = choose_backend(env, backend)
    env = make_host_env(env) if backend == "ray" else make_env(env)
    chosen = PRESETS[check_preset(preset_for(env.name) if preset == "auto" else preset)]
    hyperparams = chosen.hyperparams if hyperparams is None else hyperparams
    check_hyperparams(hyperparams)
    total_steps = check_total_steps(chosen.total_steps if total_steps is None else total_steps)
    seed = runs.check_seed(seed)
    given, config = config is not None, chosen.config if config is None else config
    if wandb and run_dir is None:
        raise ValueError("wandb needs a run_dir")
    if backend == "ray":
        config, actors = spread_envs(config, actors, num_cores(), given)
    elif actors != RayConfig():
        raise ValueError(f"{env.name} runs on the device, without actors; give backend = 'ray' for them")
    parts: dict[str, Any] = {"total_steps": total_steps, "network": network, "optimizer": optimizer, "loss": loss}
    parts["num_devices"] = num_devices = most_devices(config) if num_devices is None else num_devices
    agent: Anakin | Sebulba = (make_sebulba if backend == "ray" else make_anakin)(env, config, **parts)
    _check_sizes(config, total_steps)
    more: dict[str, Any] = {name: "custom" for name, is_own in own.items() if is_own}
    more |= {"actors": dataclasses.asdict(actors)} if backend == "ray" else {}
    more["num_devices"] = num_devices
    settings = runs.run_config(env.name, backend, seed, total_steps, config, hyperparams, **more)
    reporter = make_reporter(progress, total_steps) if isinstance(progress, str) else progress
    return _run(agent, actors, seed, hyperparams, settings, run_dir, wandb, reporter)


def _run(
    agent: Anakin | Sebulba,
    actors: RayConfig,
    seed: int,
    hyperparams: Hyperparams,
    settings: dict[str, Any],
    run_dir: str | Path | None,
    wandb: bool,
    reporter: Reporter,
) -> Result:
    """Everything that leaves a trace, and its tidying up."""
    writer, loop, config = None, None, agent.config
    try:
        with stop_on_interrupt(reporter) as stop_requested:
            writer = None if run_dir is None else runs.RunWriter(Path(run_dir), settings, wandb)
            reporter.start()
            if "network" not in settings and (said := hint(config, agent.env.obs_spec)):
                reporter.message(said)
            log = Logbook(config.batch_size, writer, reporter)
            loop = _make_loop(agent, seed, hyperparams, log, actors)
            if stop_requested():
                raise KeyboardInterrupt
            ended = loop.run(stop_requested)
            if not log.updates and ended.status in ("interrupted", "failed"):
                raise ended.error or KeyboardInterrupt
            result = _result(loop, agent, log, ended)
    except BaseException as error:
        if writer is not None:
            writer.abort()
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            sizes = f"num_envs = {config.num_envs} and num_steps = {config.num_steps}"
            raise ValueError(f"{sizes} need more memory than the device has; lower one of them") from error
        raise
    finally:
        if loop is not None:
            loop.close()
        reporter.close()
    if ended.error is not None:
        ended.error.result = result
        raise ended.error
    if ended.status == "diverged":
        raise TrainingDiverged(log.updates + 1, result)
    return result


def choose_backend(env: Any, backend: str = "auto") -> str:
    """ "anakin" or "ray". Raises ValueError where neither knows the environment."""
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r} is not one of {', '.join(BACKENDS)}")
    if backend != "auto":
        _check_backend(env, backend)
        return backend
    if not isinstance(env, str):
        return "ray" if is_host_env(env) and not hasattr(env, "default_params") else "anakin"
    if ":" not in env and env in available():
        return "anakin"
    if is_host_env(env):
        return "ray"
    near = list(dict.fromkeys(difflib.get_close_matches(env, available(), 3, 0.5) + nearest_host_envs(env)))[:3]
    hint = f"did you mean {' or '.join(near)}?" if near else "`jppo envs` lists what there is"
    raise ValueError(f"unknown environment {env!r}; {hint}")


def _check_backend(env: Any, backend: str) -> None:
    """Raises ValueError where only the other one knows the name."""
    if not isinstance(env, str) or ":" in env:
        return
    if backend == "anakin" and env not in available() and is_host_env(env):
        raise ValueError(f"{env} is an environment of Gymnasium's; it runs with backend = 'ray'")
    if backend == "ray" and not is_host_env(env) and env in available():
        raise ValueError(f"{env} is an environment of gymnax's; it runs on the device, with backend = 'anakin'")


def _make_loop(
    agent: Anakin | Sebulba, seed: int, hyperparams: Hyperparams, log: Logbook, actors: RayConfig
) -> AnakinLoop | ActorLoop:
    if isinstance(agent, Anakin):
        return AnakinLoop(agent, seed, hyperparams, log)
    return ActorLoop(agent, seed, hyperparams, log, actors)


def _result(loop: AnakinLoop | ActorLoop, agent: Anakin | Sebulba, log: Logbook, ended: Ended) -> Result:
    """Sums up and saves."""
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
        "versions": runs.versions(),
        "run_dir": None if writer is None else str(writer.path),
    }
    policy_state = jax.device_put(loop.policy_state, jax.local_devices()[0])
    policy = TrainedPolicy(agent.policy, policy_state, env.obs_spec, env.action_spec, agent.config.action_bounds)
    if writer is not None:
        writer.close(policy_state, summary)
    path = None if writer is None else writer.path
    return Result(log.history.arrays(), policy, summary, loop.state, agent, path)


def check_preset(name: str) -> str:
    """The name. Raises ValueError where there is no such preset."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    return name


def _check_lag(policy_lag: int) -> Literal[0, 1]:
    if policy_lag not in (0, 1):
        raise ValueError(f"policy_lag = {policy_lag!r} is not one of 0, 1")
    return policy_lag  # type: ignore[return-value]


def _check_sizes(config: PPOConfig, total_steps: int) -> None:
    """The device counts updates in 32 bits."""
    if (updates := config.num_updates(total_steps)) >= 2**31:
        raise ValueError(f"total_steps = {total_steps:,} makes {updates:,} updates; there must be less than 2**31")


@contextlib.contextmanager
def stop_on_interrupt(reporter: Reporter) -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a flag, so that no state is lost in the middle of a chunk; the second one raises."""
    requested = threading.Event()

    def on_interrupt(signum: int, frame: Any) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        reporter.message("stopping: saving what was reached (Ctrl-C again to stop at once)")

    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return
    signals = (signal.SIGINT, signal.SIGTERM)  # a cluster's scheduler sends the latter
    before = [signal.signal(number, on_interrupt) for number in signals]
    try:
        yield requested.is_set
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
