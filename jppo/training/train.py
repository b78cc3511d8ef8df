"""`train`: a run in this process, or on several hosts."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jppo.actors.sebulba import Sebulba, make_sebulba
from jppo.config.ppo import PPOConfig, RayConfig, check_total_steps, num_cores
from jppo.config.presets import PRESETS, preset_for
from jppo.envs import make_env
from jppo.envs.gymnasium import make_host_env
from jppo.errors import ActorsFailed, TrainingDiverged
from jppo.ppo.anakin import Anakin, make_anakin
from jppo.ppo.learner import Loss
from jppo.ppo.networks import Network
from jppo.ppo.optimizer import Optimizer, adam
from jppo.ppo.types import Hyperparams, PolicyState, TrainState
from jppo.runs.policy import TrainedPolicy
from jppo.runs.run_dir import read_config
from jppo.training.interrupts import stop_on_interrupt
from jppo.training.progress import Reporter, make_reporter
from jppo.training.run import Given, Result, run_here
from jppo.training.settings import check_preset, check_run_dir


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
    policy_lag: int | None = None,
    actor_cpus: float = 1.0,
    actor_gpus: float = 0.0,
    address: str | None = None,
    actor_timeout: float | None = None,
    max_restarts: int = 3,
    num_devices: int | None = None,
    num_hosts: int = 1,
    host_cpus: float = 1.0,
    host_gpus: float = 0.0,
    deterministic: bool | None = None,
) -> Result:
    """Trains PPO: on the device, or with Ray actors that step Gymnasium environments on CPUs.

    Args:
      env: for the device, a name, an object with gymnax's API, or an Environment; for Ray, what `jppo.make_host_env`
        takes: a Gymnasium id, "module:name", or a function that makes an environment.
      total_steps: environment steps, rounded up to whole updates; the preset's when None.
      seed: of everything random; 0 when None.
      config, hyperparams: the preset's when None.
      preset: a name in `jppo.PRESETS`; "auto" is the environment's own.
      network: see `jppo.ppo.networks.Network`; what config names when None.
      optimizer, loss: see `jppo.ppo.learner.make_learner`.
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
      deterministic: on the same machine, or one like it, the same arguments give the same policy, bit for bit
        (summary["policy_sha256"]). A CPU's runs do so anyway; a GPU must have been asked before JAX started, and is
        slower. With actors, what their environments draw from their seeds must repeat itself too, and an actor that
        fails ends the run, as with max_restarts = 0.

    Where `jax.distributed.initialize` was called, all processes must call this, with the same arguments; the first one
    writes the run directory and shows the progress (docs/scaling.md).

    Ctrl-C (or SIGTERM) ends the run early and returns what was reached (summary["status"] is "interrupted"); a second
    one raises KeyboardInterrupt, as does one before the first update.

    Raises:
      ValueError: anything given that cannot be; before anything is written.
      TrainingDiverged: a loss, gradient or parameter became NaN or infinite; everything up to then is saved.
      ActorsFailed: an actor failed too often in a row; everything up to then is saved.
      HostFailed: one of several hosts failed; what was logged up to then is saved, but no policy.
    """
    run_dir = check_run_dir(run_dir, resume, wandb, checkpoint_every, keep, num_hosts)
    lag = _check_lag(_lag_before(run_dir) if policy_lag is None else policy_lag)
    actors = RayConfig(num_actors, envs_per_actor, lag, actor_cpus, actor_gpus, address, actor_timeout, max_restarts)
    of_ppo = (total_steps, seed, config, hyperparams, preset, network, optimizer, loss)
    given = Given(env, *of_ppo, run_dir, wandb, backend, actors, num_devices, checkpoint_every, keep, deterministic)
    if num_hosts == 1 and (host_cpus, host_gpus) == (1.0, 0.0):
        return run_here(given, progress)
    return _train_on_hosts(given, progress, num_hosts, host_cpus, host_gpus)


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
    from jppo.training.ray_hosts import run_on_hosts  # ray takes a second to import

    name = given.env if isinstance(given.env, str) else ""
    chosen = PRESETS[check_preset(preset_for(name) if given.preset == "auto" else given.preset)]
    total_steps = check_total_steps(chosen.total_steps if given.total_steps is None else given.total_steps)
    reporter = make_reporter(progress, total_steps)
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
        result = run_here(given[0], reporter, stop, cores)
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
    policy = TrainedPolicy(agent.policy, policy_state)
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


def _lag_before(run_dir: Path | None) -> int:
    """That of the run that is there."""
    if run_dir is None or not (run_dir / "config.json").exists():
        return 0
    return read_config(run_dir).get("actors", {}).get("policy_lag", 0)


def _check_lag(policy_lag: int) -> Literal[0, 1]:
    if policy_lag not in (0, 1):
        raise ValueError(f"policy_lag = {policy_lag!r} is not one of 0, 1")
    return policy_lag  # type: ignore[return-value]
