"""The on-device loop: chunks of a compiled program, one ahead of what has been logged."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jppo.config.ppo import Hyperparams
from jppo.devices.jit import jit
from jppo.devices.mesh import allgather_ints
from jppo.ppo import anakin
from jppo.ppo.anakin import Anakin, AnakinState, run_chunk
from jppo.ppo.types import Array, Metrics, PolicyState
from jppo.runs.checkpoints import Checkpoints
from jppo.training.logger import Logger, LoopResult

_CHUNK_SECONDS = 0.4
_SLOW_UPDATE = 2.0  # seconds; from here on no chunk is launched ahead, so that a stop waits for one update only
POLL_SECONDS = 0.005
_STALL_POLLS = 5000  # of a CPU device, half a minute, in which it is to use as many CPU seconds as this:
_STALL_CPU_SECONDS = 1.5


class ChunkLoop:
    """Chunks of a compiled program, one ahead of what has been logged."""

    def __init__(
        self,
        chunk: Any,
        state: Any,
        finite: Array,
        num_updates: int,
        log: Any,
        shared: bool = False,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """
        Args:
          chunk: as `run_chunk` without its agent, compiled; or that over lanes.
          finite: whether all is well so far, [] or [lanes] bool, where the program wants it.
          log: its `add(columns, seconds)` gets metrics [updates] or [lanes, updates], and says whether to go on.
          shared: several processes run it together. They agree on each chunk, and none is launched ahead.
          checkpoints: get the state between two chunks, of which the second is not launched ahead then.
        """
        self.state, self._finite, self._chunk = state, finite, chunk
        self._num_updates, self._log, self._shared = num_updates, log, shared
        self._checkpoints = checkpoints

    def run(self, stop_requested: Callable[[], bool]) -> LoopResult:
        """Trains to the end, or to an interrupt or a NaN."""
        start = time.perf_counter() - self._log.seconds
        first, launched, length, pace = self._log.updates, 0, 1, 0.0
        pending: tuple[int, Metrics] | None = None
        while True:
            remaining = self._num_updates - launched
            following = None
            due = remaining > 0 and self._is_due(first + launched)
            if due and pending is None:
                self.save()
            ahead = pace < _SLOW_UPDATE and not self._shared and not due
            if remaining and (pending is None or ahead):
                length = min(length, remaining, anakin.CHUNK_CAPACITY, self._updates_until_save(first + launched))
                length, stop = self._agree(length, stop_requested())
                if not stop:
                    following = (length, self.launch(length))
                    launched += length
            if pending is not None:
                chunk_start = self._log.seconds
                if not self._fetch(*pending, start):
                    return LoopResult("diverged")
                pace = (self._log.seconds - chunk_start) / pending[0]
                length = max(1, min(2 * length, int(_CHUNK_SECONDS / max(pace, 1e-9))))
            if following is None and pending is None:
                return LoopResult("finished" if launched == self._num_updates else "interrupted")
            pending = following

    def save(self) -> None:
        """Has the state saved as it is after the last update logged, with no chunk under way."""
        if self._checkpoints is not None:
            self._checkpoints.save(self._log.updates, self._log.seconds, {}, self.state)

    def _is_due(self, update: int) -> bool:
        """Returns whether to save a checkpoint before more updates than `update` are launched."""
        if self._checkpoints is None:
            return False
        return self._checkpoints.due(update if self._checkpoints.every_updates else self._log.updates)

    def _updates_until_save(self, update: int) -> int:
        """Returns the number of updates until the next checkpoint if it follows a fixed number of updates."""
        every = 0 if self._checkpoints is None else self._checkpoints.every_updates
        return every - update % every if every else anakin.CHUNK_CAPACITY

    def launch(self, length: int) -> Metrics:
        """Has the device make so many updates, at most CHUNK_CAPACITY; returns at once, with their metrics."""
        self.state, self._finite, buffers = self._chunk(self.state, self._finite, np.int32(length))
        return buffers

    def _agree(self, length: int, stop: bool) -> tuple[int, bool]:
        """The first process's length, and whether any process stops."""
        if not self._shared:
            return length, stop
        rows = allgather_ints([length, stop])
        return int(rows[0, 0]), bool(rows[:, 1].any())

    def _fetch(self, length: int, buffers: Metrics, start: float) -> bool:
        """Logs a chunk's metrics (the next chunk runs meanwhile); False when there is nothing to go on with."""
        finished: Any = buffers["finite"]
        polls, cpu_seconds = 0, time.process_time()
        while not finished.is_ready():  # a blocking fetch would keep Ctrl-C waiting
            time.sleep(POLL_SECONDS)
            self._log.reporter.tick()
            polls += 1
            if polls % _STALL_POLLS == 0:
                cpu_seconds = _check_alive(cpu_seconds)
        columns = {name: np.asarray(column)[..., :length] for name, column in buffers.items()}
        return self._log.add(columns, time.perf_counter() - start)


def _check_alive(before: float) -> float:
    """This process's CPU seconds. Raises RuntimeError where XLA's CPU client has gone to sleep for good since they were
    `before` (docs/performance.md): looking itself takes some 2 % of a core."""
    now = time.process_time()
    if jax.default_backend() == "cpu" and jax.process_count() == 1 and now - before < _STALL_CPU_SECONDS:
        raise RuntimeError(
            "XLA's CPU client does nothing any more. Linear algebra of batches (QR, SVD, ... under vmap, in an "
            "environment or a network) may wait for itself: use max_parallel_runs = 1 and num_devices = 1"
        )
    return now


class DeviceLoop(ChunkLoop):
    """The on-device mode."""

    def __init__(
        self,
        agent: Anakin,
        seed: int,
        hyperparams: Hyperparams,
        log: Logger,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        start = time.perf_counter()
        state: AnakinState = jit(agent.init, out_shardings=agent.sharding.out_shardings)(
            jax.random.key(seed), hyperparams
        )
        if checkpoints is not None and checkpoints.start is not None:
            train = state.train
            state = checkpoints.start.put(state)
            # A resumed run may be longer, and a trial of Ray Tune may have other hyperparameters.
            train = state.train.replace(num_updates=train.num_updates, hyperparams=train.hyperparams)
            state = state.replace(train=train)
        finite = jax.make_array_from_callback((), agent.sharding.train, lambda _: np.ones((), bool))
        chunk = jit(functools.partial(run_chunk, agent), donate_argnums=0)
        compiled = chunk.lower(state, finite, np.int32(0)).compile()
        remaining, shared = agent.num_updates - log.updates, jax.process_count() > 1
        super().__init__(compiled, state, finite, remaining, log, shared, checkpoints)
        self.compile_seconds = time.perf_counter() - start
        log.info(f"compiled in {self.compile_seconds:.1f} s")

    @property
    def policy_state(self) -> PolicyState:
        """The policy as it is now."""
        return self.state.train.policy

    def summary(self) -> dict[str, Any]:
        """What this mode adds to summary.json."""
        return {"num_devices": len(self.state.train.update.sharding.device_set)}

    def close(self) -> None:
        """Nothing outlives the program."""
