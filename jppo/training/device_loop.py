"""The training loop of the on-device mode: runs chunks of updates and logs each one while the next one runs."""

import functools
import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.config.ppo import Hyperparams
from jppo.devices.jit import jit, lower
from jppo.devices.memory import check_memory
from jppo.devices.mesh import allgather_ints
from jppo.devices.signals import end_process_at
from jppo.envs.base import Environment
from jppo.envs.spaces import Array
from jppo.ppo.anakin import Anakin, AnakinState
from jppo.ppo.types import Metrics, PolicyState
from jppo.runs.checkpoints import Checkpoints
from jppo.training.history import RecentEpisodes
from jppo.training.hooks import restore_state
from jppo.training.logger import Logger, LoopResult
from jppo.training.monitor import SOLVED, Monitor
from jppo.training.return_target import RECENT_EPISODES, ReturnTarget
from jppo.training.settings import PreparedRun

_CHECKED_STEPS = 128  # steps whose observations are compared with their space before training
_CHUNK_SECONDS = 0.4  # intended duration of a chunk
_SLOW_UPDATE = 2.0  # seconds; with slower updates no chunk is launched ahead, so that Ctrl-C waits for one update only
POLL_SECONDS = 0.005
CHUNK_CAPACITY = 1024  # maximum number of updates in a chunk; a chunk returns only their metrics


class ChunkLoop:
    """Runs chunks of a compiled program. While a chunk is logged, the next one already runs."""

    def __init__(
        self,
        chunk: Any,
        state: Any,
        flags: Any,
        num_updates: int,
        log: Any,
        shared: bool = False,
        checkpoints: Checkpoints | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        """
        Args:
          chunk: the compiled `run_chunk` of one agent, or of a population of R runs.
          state: the initial state; chunks donate its buffers.
          flags: whether all updates so far were finite, [] or [R] bool, or a `ReturnTarget`, on the program's devices.
          num_updates: number of updates to run.
          log: `log.add` receives metrics [updates] or [R, updates] and returns whether to continue, see `Logger.add`.
          shared: whether several processes run the program together. They then agree on each chunk before its launch.
          checkpoints: receives the state between two chunks. The chunk after a checkpoint is not launched ahead.
          monitor: handles events after certain updates, at which chunks end.
        """
        self.state, self._flags, self.chunk = state, flags, chunk
        self._num_updates, self._log, self._shared = num_updates, log, shared
        self._checkpoints, self.monitor = checkpoints, monitor or Monitor(log)

    @property
    def policy_state(self) -> PolicyState:
        """The current policy."""
        policy: PolicyState = self.state.train.policy_state
        return policy

    def run(self, stop_requested: Callable[[], bool]) -> LoopResult:
        """Trains until the last update, a stop request, an event that ends the run, or a NaN."""
        start = time.perf_counter() - self._log.seconds
        first, launched, length, pace = self._log.updates, 0, 1, 0.0
        pending: tuple[int, Metrics] | None = None
        while True:
            remaining, update = self._num_updates - launched, first + launched
            following = None
            due = remaining > 0 and self._is_checkpoint_due(update)
            if due and pending is None:
                self.save()
            ahead = pace < _SLOW_UPDATE and not (self._shared or due or self.monitor.holds(update))
            if remaining and (pending is None or ahead):
                length = min(length, remaining, CHUNK_CAPACITY, self._updates_until_event(update))
                length, stop = self._agree(length, stop_requested())
                if not stop:
                    following = (length, self.launch(length))
                    launched += length
                    self.monitor.start(first + launched, self.policy_state)
            if pending is not None:
                chunk_start = self._log.seconds
                if not self._fetch(*pending, start):
                    return LoopResult("diverged")
                if (ended := self.monitor.ended) is not None:
                    # After a failed evaluation, the next chunk already runs, and its updates are part of the state.
                    if ended.error is None or following is None or self._fetch(*following, start):
                        return ended
                    return LoopResult("diverged")
                pace = (self._log.seconds - chunk_start) / pending[0]
                length = max(1, min(2 * length, int(_CHUNK_SECONDS / max(pace, 1e-9))))
            if following is None and pending is None:
                return LoopResult("finished" if launched == self._num_updates else "interrupted")
            pending = following

    def save(self) -> None:
        """Saves a checkpoint after the last logged update. No chunk may be running."""
        if self._checkpoints is not None:
            self.monitor.save_best(self.policy_state)
            self._log.save(self._checkpoints, self.state, {}, self.monitor.end_to_json())

    def _is_checkpoint_due(self, update: int) -> bool:
        """Returns whether to save a checkpoint before more updates than `update` are launched.

        The first process decides for all.
        """
        if self._checkpoints is None:
            return False
        due = self._checkpoints.due(update if self._checkpoints.every_updates else self._log.updates)
        return bool(allgather_ints([due])[0, 0]) if self._shared else due

    def _updates_until_event(self, update: int) -> int:
        """Returns the number of updates until the next update at which a chunk must end."""
        every = 0 if self._checkpoints is None else self._checkpoints.every_updates
        length = every - update % every if every else CHUNK_CAPACITY
        return min(length, self.monitor.updates_until_event(update))

    def launch(self, length: int) -> Metrics:
        """Starts `length` updates, at most CHUNK_CAPACITY, and returns their metrics without waiting for them."""
        self.state, self._flags, buffers = self.chunk(self.state, self._flags, np.int32(length))
        return buffers

    def _agree(self, length: int, stop: bool) -> tuple[int, bool]:
        """Returns the first process's length, and whether any process wants to stop."""
        if not self._shared:
            return length, stop
        rows = allgather_ints([length, stop])
        return int(rows[0, 0]), bool(rows[:, 1].any())

    def _fetch(self, length: int, buffers: Metrics, start: float) -> bool:
        """Waits for a chunk and logs its metrics. Returns False if an update diverged."""
        finished: Any = buffers["finite"]
        update = self._log.updates + length
        while not (finished.is_ready() and self.monitor.is_ready(update)):  # a blocking wait would delay Ctrl-C
            time.sleep(POLL_SECONDS)
            self._log.reporter.tick()
        columns = {name: np.asarray(column)[..., :length] for name, column in buffers.items()}
        now = time.perf_counter() - start
        columns = self._until_target(columns)
        if self.monitor.is_due(self._log.updates + columns["finite"].shape[-1]):
            return bool(self._log.add(columns, now, functools.partial(self.monitor.finish, self)))
        return bool(self._log.add(columns, now))

    def _until_target(self, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the metrics up to the update that reached the target; the program has run no later updates."""
        reached = columns.pop("reached", np.zeros(1, bool))
        if not reached.any():
            return columns
        self.monitor.ended = SOLVED
        return {name: column[: np.argmax(reached) + 1] for name, column in columns.items()}


def init_state(agent: Anakin, seed: int, hyperparams: Hyperparams) -> AnakinState:
    """Returns the initial state on the devices."""
    state: AnakinState = jit(agent.init, out_shardings=agent.sharding.out_shardings)(jax.random.key(seed), hyperparams)
    return state


def check_first_steps(env: Environment) -> None:
    """Raises BrokenContractError if an environment's first steps have values that `ObsSpec.is_checked` forbids.

    The compiled program has no such check, which would take time at each step.
    """
    if any(spec.is_checked for spec in jax.tree.leaves(env.obs_spec)):
        from jppo.actors.numpy_params import check_categories  # other runs on the device do not need these modules
        from jppo.envs.checks.check_gymnax import play_randomly

        check_categories(env.obs_spec, play_randomly(env, _CHECKED_STEPS), env.name)


def compile_chunk(agent: Anakin, hyperparams: Hyperparams, flags: Any = None) -> Any:
    """Returns the compiled `run_chunk` of an agent, without allocating its state.

    Args:
      flags: the flags of the run; None for those of a run without a target.
    """
    flags = jax.ShapeDtypeStruct((), bool, sharding=agent.sharding.train) if flags is None else flags
    chunk = jit(functools.partial(run_chunk, agent), donate_argnums=0)
    return lower(chunk, state_shapes(agent, hyperparams), flags, np.int32(0)).compile()


def make_flags(agent: Anakin, target: float | None, recent: RecentEpisodes) -> Any:
    """Returns the flags of a run's first chunk on the devices.

    Args:
      target: recent return at which training stops, or None.
      recent: the episodes before a resume.
    """
    flags: Any = np.ones((), bool)
    if target is not None:
        flags = make_target(target, recent)
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, agent.sharding.train, lambda index: np.asarray(x[index])), flags
    )


def make_target(value: float, recent: RecentEpisodes) -> ReturnTarget:
    """Returns the record of a target and the episodes so far, as NumPy arrays."""
    rows = [(count, mean) for count, mean, _ in reversed(recent.updates)][:RECENT_EPISODES]
    counts, means = np.zeros((2, RECENT_EPISODES), np.float32)
    counts[: len(rows)], means[: len(rows)] = np.array(rows, np.float32).reshape(-1, 2).T
    fields: dict[str, Any] = {
        "finite": np.ones((), bool),
        "reached": np.zeros((), bool),
        "value": np.float32(value),
        "counts": counts,
        "means": means,
        "total": np.float32(recent.total),
    }
    return ReturnTarget(**fields)


def state_shapes(agent: Anakin, hyperparams: Hyperparams) -> AnakinState:
    """Returns the shapes, dtypes and shardings of an agent's state."""

    def with_sharding(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    shapes, sharding = jax.eval_shape(agent.init, jax.random.key(0), hyperparams), agent.sharding
    return AnakinState(
        train=with_sharding(shapes.train, sharding.train), collect=with_sharding(shapes.collect, sharding.collect)
    )


class DeviceLoop(ChunkLoop):
    """Trains one agent on the device."""

    def __init__(
        self,
        prepared: PreparedRun,
        log: Logger,
        checkpoints: Checkpoints | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        """Compiles the program, then allocates the state.

        Raises:
          ValueError: the compiler's estimate of the memory exceeds the free memory, and `run.force` is not set.
        """
        start, agent, hyperparams = time.perf_counter(), prepared.agent, prepared.hyperparams
        assert isinstance(agent, Anakin), "use RayLoop"
        with end_process_at(signal.SIGTERM):
            flags = make_flags(agent, None if monitor is None else monitor.target, log.recent)
            compiled = compile_chunk(agent, hyperparams, flags)
            if not prepared.run.force:
                config = agent.config
                sizes = f"num_envs = {config.num_envs:,} or num_steps = {config.num_steps:,}"
                evaluation = 0 if monitor is None else monitor.evaluation_bytes
                check_memory(compiled, agent.sharding.mesh.local_mesh.size, sizes, evaluation)
            state = init_state(agent, prepared.seed, hyperparams)
            if checkpoints is not None:
                state = restore_state(checkpoints, state)
            jax.block_until_ready(state)
            check_first_steps(agent.env)
        remaining, shared = agent.num_updates - log.updates, jax.process_count() > 1
        super().__init__(compiled, state, flags, remaining, log, shared, checkpoints, monitor)
        self.compile_seconds = time.perf_counter() - start
        log.info(f"compiled in {self.compile_seconds:.1f} s")

    def summary(self) -> dict[str, Any]:
        """Returns the entries of summary.json that only this mode has."""
        return {"num_devices": len(self.state.train.update.sharding.device_set)}

    def close(self) -> None:
        """Does nothing: a device needs no cleanup."""


def run_chunk(agent: Anakin, state: AnakinState, flags: Any, length: Array) -> tuple[AnakinState, Any, Metrics]:
    """Runs `length` updates, or fewer: stops after an update that diverges or reaches a target.

    The length is an argument, not a shape, so that one compiled program serves every chunk.

    Args:
      flags: [] bool, whether all updates so far were finite; or a record of them with the properties `running` and
        `reached` and the method `after(metrics, config)` (see `ReturnTarget`). The result of the chunk before.
      length: [] i32, at most CHUNK_CAPACITY.

    Returns:
      the state, the flags, and metrics in the first rows of buffers [CHUNK_CAPACITY]. With a target, the metric
      "reached" marks the update that reached it.
    """
    step, has_target = jax.jit(agent.step), hasattr(flags, "after")  # the step is traced once for both uses
    shapes = jax.eval_shape(step, state)[1]
    shapes |= {"reached": shapes["finite"]} if has_target else {}
    buffers = jax.tree.map(lambda x: jnp.zeros((CHUNK_CAPACITY,), x.dtype), shapes)

    def should_continue(loop: tuple[Array, Any, AnakinState, Metrics]) -> Array:
        done, flags, _, _ = loop
        return jnp.logical_and(done < length, flags.running if has_target else flags)

    def body(loop: tuple[Array, Any, AnakinState, Metrics]) -> tuple[Array, Any, AnakinState, Metrics]:
        done, flags, state, buffers = loop
        state, metrics = step(state)
        flags = flags.after(metrics, agent.config) if has_target else metrics["finite"]
        metrics |= {"reached": flags.reached} if has_target else {}
        buffers = jax.tree.map(lambda buffer, value: buffer.at[done].set(value), buffers, metrics)
        return done + 1, flags, state, buffers

    start = (jnp.zeros((), jnp.int32), flags, state, buffers)
    _, flags, state, buffers = jax.lax.while_loop(should_continue, body, start)
    return state, flags, buffers
