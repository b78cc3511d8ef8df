"""The driver: runs the compiled loop in chunks, and logs, shows and saves what comes out."""

import contextlib
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jppo import runs
from jppo.anakin import Anakin, AnakinState, make_anakin
from jppo.compiling import jit
from jppo.config import PPOConfig, check_hyperparams, check_total_steps
from jppo.envs import make_env
from jppo.history import History, RecentEpisodes
from jppo.learner import Loss, Optimizer, adam
from jppo.networks import Network
from jppo.policy import TrainedPolicy
from jppo.presets import PRESETS, preset_for
from jppo.progress import Reporter, make_reporter
from jppo.types import Array, Hyperparams, Metrics

CHUNK_CAPACITY = 1024  # updates a chunk can hold; its metrics are all that it sends back
_CHUNK_SECONDS = 0.4
_SLOW_UPDATE = 2.0  # seconds; from here on no chunk is launched ahead, so that a stop waits for one update only
_POLL_SECONDS = 0.005
_EPISODES = ("count", "return_mean", "return_std")


class Result(NamedTuple):
    """What a run gives back."""

    metrics: dict[str, np.ndarray]  # [updates] each, with "update" and "step"; NaN where no episode ended
    policy: TrainedPolicy
    summary: dict[str, Any]  # as in summary.json
    state: AnakinState
    agent: Anakin
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
) -> Result:
    """Trains PPO on the device.

    Args:
      env: a name, an object with gymnax's API, or an Environment.
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

    Ctrl-C (or SIGTERM) ends the run early and returns what was reached (summary["status"] is "interrupted"); a second
    one raises KeyboardInterrupt, as does one before the first update.

    Raises:
      ValueError: anything given that cannot be; before anything is written.
      TrainingDiverged: a loss or parameter became NaN or infinite; everything up to then is saved.
    """
    own = {
        "environment": not isinstance(env, str),
        "network": network is not None,
        "optimizer": optimizer is not adam,
        "loss": loss is not None,
    }
    env = make_env(env)
    chosen = PRESETS[_check_preset(preset_for(env.name) if preset == "auto" else preset)]
    config = chosen.config if config is None else config
    hyperparams = chosen.hyperparams if hyperparams is None else hyperparams
    check_hyperparams(hyperparams)
    total_steps = check_total_steps(chosen.total_steps if total_steps is None else total_steps)
    seed = runs.check_seed(seed)
    _check_sizes(config, total_steps)
    if wandb and run_dir is None:
        raise ValueError("wandb needs a run_dir")
    agent = make_anakin(env, config, total_steps=total_steps, network=network, optimizer=optimizer, loss=loss)
    custom = {name: "custom" for name, given in own.items() if given}
    settings = runs.run_config(env.name, "anakin", seed, total_steps, config, hyperparams, **custom)
    reporter = make_reporter(progress, total_steps) if isinstance(progress, str) else progress
    writer = None
    try:
        with _stop_on_interrupt(reporter) as stop_requested:
            writer = None if run_dir is None else runs.RunWriter(Path(run_dir), settings, wandb)
            reporter.start()
            loop = _Loop(agent, seed, hyperparams, writer, reporter)
            if stop_requested():
                raise KeyboardInterrupt
            status = loop.run(stop_requested)
            result = loop.result(status, writer)
    except BaseException as error:
        if writer is not None:
            writer.abort()
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            sizes = f"num_envs = {config.num_envs} and num_steps = {config.num_steps}"
            raise ValueError(f"{sizes} need more memory than the device has; lower one of them") from error
        raise
    finally:
        reporter.close()
    if status == "diverged":
        raise TrainingDiverged(loop.updates + 1, result)
    return result


class _Loop:
    """A run under way: the state on the device, one chunk ahead of what has been logged."""

    def __init__(
        self, agent: Anakin, seed: int, hyperparams: Hyperparams, writer: runs.RunWriter | None, reporter: Reporter
    ) -> None:
        self._agent, self._writer, self._reporter = agent, writer, reporter
        self._history, self._recent = History(), RecentEpisodes()
        self.updates, self.seconds = 0, 0.0
        start = time.perf_counter()
        self.state = jit(agent.init)(jax.random.key(seed), hyperparams)
        self._finite = jnp.ones((), bool)
        chunk = jit(functools.partial(run_chunk, agent), donate_argnums=0)
        self._chunk = chunk.lower(self.state, self._finite, jnp.int32(0)).compile()
        self.compile_seconds = time.perf_counter() - start
        reporter.message(f"compiled in {self.compile_seconds:.1f} s")

    def run(self, stop_requested: Callable[[], bool]) -> str:
        """Trains to the end, or to an interrupt or a NaN; returns which."""
        start = time.perf_counter()
        launched, length, pace = 0, 1, 0.0
        pending: tuple[int, Metrics] | None = None
        while True:
            remaining = self._agent.num_updates - launched
            following = None
            if remaining and not stop_requested() and (pending is None or pace < _SLOW_UPDATE):
                length = min(length, remaining, CHUNK_CAPACITY)
                self.state, self._finite, buffers = self._chunk(self.state, self._finite, jnp.int32(length))
                following = (length, buffers)
                launched += length
            if pending is not None:
                chunk_start = self.seconds
                if not self._log(*pending, start):
                    return "diverged"
                pace = (self.seconds - chunk_start) / pending[0]
                length = max(1, min(2 * length, int(_CHUNK_SECONDS / max(pace, 1e-9))))
            if following is None and pending is None and (stop_requested() or not remaining):
                return "finished" if launched == self._agent.num_updates else "interrupted"
            pending = following

    def _log(self, length: int, buffers: Metrics, start: float) -> bool:
        """Fetches a chunk's metrics (the next chunk runs meanwhile); False when an update diverged."""
        finished: Any = buffers["finite"]
        while not finished.is_ready():  # a blocking fetch would keep Ctrl-C waiting
            time.sleep(_POLL_SECONDS)
            self._reporter.tick()
        values = {name: np.asarray(column)[:length] for name, column in buffers.items()}
        now = time.perf_counter() - start
        finite = values.pop("finite")
        good = length if finite.all() else int(np.argmin(finite))
        batch = self._agent.config.batch_size
        speed = length * batch / max(now - self.seconds, 1e-9)
        number = self.updates + 1 + np.arange(good)
        rows = {"update": number, "step": number * batch} | {name: column[:good] for name, column in values.items()}
        rows["time/steps_per_second"] = np.full(good, speed)
        rows["time/elapsed"] = self.seconds + (now - self.seconds) * np.arange(1, good + 1) / length
        self.updates, self.seconds = self.updates + good, now
        if good:
            self._history.add(rows)
            for episodes in zip(*(rows[f"episode/{name}"].tolist() for name in _EPISODES), strict=True):
                self._recent.add(*episodes)
            if self._writer is not None:
                values_by_row = zip(*(column.tolist() for column in rows.values()), strict=True)
                self._writer.write_updates([dict(zip(rows, row, strict=True)) for row in values_by_row])
            self._reporter.update(int(rows["step"][-1]), speed, self._recent.mean)
        return bool(finite.all())

    def result(self, status: str, writer: runs.RunWriter | None) -> Result:
        """Sums up and saves."""
        agent, env = self._agent, self._agent.env
        device = jax.devices()[0]
        steps = self.updates * agent.config.batch_size
        summary = {
            "env": env.name,
            "backend": "anakin",
            "status": status,
            "steps": steps,
            "updates": self.updates,
            "seconds": self.seconds,
            "compile_seconds": self.compile_seconds,
            "steps_per_second": steps / self.seconds if self.seconds else 0.0,
            "episodes": self._recent.total,
            "return_mean": self._recent.mean,
            "return_std": self._recent.std,
            "device": device.device_kind,
            "num_devices": 1,
            "versions": runs.versions(),
            "run_dir": None if writer is None else str(writer.path),
        }
        policy_state = self.state.train.policy
        policy = TrainedPolicy(agent.policy, policy_state, env.obs_spec, env.action_spec, agent.config.action_bounds)
        if writer is not None:
            writer.close(policy_state, summary)
        path = None if writer is None else writer.path
        return Result(self._history.arrays(), policy, summary, self.state, agent, path)


def run_chunk(agent: Anakin, state: AnakinState, finite: Array, length: Array) -> tuple[AnakinState, Array, Metrics]:
    """`length` updates, or fewer: up to the first that diverges, and none where finite, which the chunk before
    returned, is False already.

    The length is an argument, not a shape, so that one compiled program serves every chunk.

    Returns:
      the state, whether all went well, and metrics in the first rows of buffers [CHUNK_CAPACITY].
    """
    shapes = jax.eval_shape(agent.step, state)[1]
    buffers = jax.tree.map(lambda x: jnp.zeros((CHUNK_CAPACITY,), x.dtype), shapes)

    def go_on(loop: tuple[Array, Array, AnakinState, Metrics]) -> Array:
        done, finite, _, _ = loop
        return jnp.logical_and(done < length, finite)

    def body(loop: tuple[Array, Array, AnakinState, Metrics]) -> tuple[Array, Array, AnakinState, Metrics]:
        done, _, state, buffers = loop
        state, metrics = agent.step(state)
        buffers = jax.tree.map(lambda buffer, value: buffer.at[done].set(value), buffers, metrics)
        return done + 1, metrics["finite"], state, buffers

    start = (jnp.zeros((), jnp.int32), finite, state, buffers)
    _, finite, state, buffers = jax.lax.while_loop(go_on, body, start)
    return state, finite, buffers


def _check_preset(name: str) -> str:
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    return name


def _check_sizes(config: PPOConfig, total_steps: int) -> None:
    """The device counts updates in 32 bits."""
    if (updates := config.num_updates(total_steps)) >= 2**31:
        raise ValueError(f"total_steps = {total_steps:,} makes {updates:,} updates; there must be less than 2**31")


@contextlib.contextmanager
def _stop_on_interrupt(reporter: Reporter) -> Iterator[Callable[[], bool]]:
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
