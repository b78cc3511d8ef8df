"""The two loops of a run: chunks of a compiled program, and actors beside a learner. Both log into one `Logbook`."""

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jppo.anakin import Anakin, AnakinState
from jppo.checkpoints import Checkpoint, Checkpoints
from jppo.compiling import jit
from jppo.config import Hyperparams, RayConfig
from jppo.devices import gather
from jppo.env_runner import ActorsFailed, RunnerSpec, blank_fragment
from jppo.history import History, RecentEpisodes
from jppo.progress import Reporter
from jppo.runs import RunWriter
from jppo.sebulba import Sebulba
from jppo.types import Array, Metrics, PolicyState, TrainState

CHUNK_CAPACITY = 1024  # updates a chunk can hold; its metrics are all that it sends back
_CHUNK_SECONDS = 0.4
_SLOW_UPDATE = 2.0  # seconds; from here on no chunk is launched ahead, so that a stop waits for one update only
_POLL_SECONDS = 0.005
_STALL_POLLS = 5000  # of a CPU device, half a minute, in which it is to use as many CPU seconds as this:
_STALL_CPU_SECONDS = 1.5
_LOG_SECONDS = 0.4  # between two writes of the actors' loop
_WAIT_SECONDS = 0.2  # for fragments, between two looks at Ctrl-C
_EPISODES = ("count", "return_mean", "return_std")
_ONWARD, _STOP, _FAILED = 0, 1, 2  # what a process says to the others before each update


class Logbook:
    """Keeps, writes and shows what updates report."""

    def __init__(self, batch_size: int, writer: RunWriter | None, reporter: Reporter) -> None:
        self.batch_size, self.writer, self.reporter = batch_size, writer, reporter
        self.history, self.recent = History(), RecentEpisodes()
        self.updates, self.seconds = 0, 0.0

    def go_on(self, before: Iterable[dict[str, np.ndarray]], updates: int, seconds: float) -> None:
        """Takes up a run after so many updates and seconds.

        Args:
          before: what was logged of them, columns [updates], as it was written.
        """
        self.updates, self.seconds, read = updates, seconds, 0
        for rows in before:
            self._remember(rows)
            read += len(rows["update"])
        if read < updates:
            self.say(f"metrics.jsonl has only {read} of the {updates} updates before the checkpoint")

    def rewind(self) -> None:
        """Takes back what a run that goes on has written after this."""
        if self.writer is not None:
            self.writer.rewind(self.updates, self.steps)

    def _remember(self, rows: dict[str, np.ndarray]) -> None:
        self.history.add(rows)
        for episodes in zip(*(rows[f"episode/{name}"].tolist() for name in _EPISODES), strict=True):
            self.recent.add(*episodes)

    def say(self, text: str) -> None:
        """To the reporter; of several processes that say the same, the first one's."""
        if not jax.process_index():
            self.reporter.message(text)

    @property
    def steps(self) -> int:
        """Environment steps logged."""
        return self.updates * self.batch_size

    def add(self, metrics: dict[str, np.ndarray], now: float) -> bool:
        """Logs the updates since the last call.

        Args:
          metrics: columns [updates]; those of a diverged update ("finite" is False) and after are left out.
          now: training seconds so far, all updates included.

        Returns:
          whether none diverged.
        """
        metrics = dict(metrics)
        finite = metrics.pop("finite")
        length = len(finite)
        good = length if finite.all() else int(np.argmin(finite))
        speed = length * self.batch_size / max(now - self.seconds, 1e-9)
        number = self.updates + 1 + np.arange(good)
        rows: dict[str, np.ndarray] = {"update": number, "step": number * self.batch_size}
        rows |= {name: column[:good] for name, column in metrics.items()}
        rows["time/steps_per_second"] = np.full(good, speed)
        rows["time/elapsed"] = self.seconds + (now - self.seconds) * np.arange(1, good + 1) / length
        self.updates, self.seconds = self.updates + good, now
        if good:
            self._remember(rows)
            if self.writer is not None:
                values_by_row = zip(*(column.tolist() for column in rows.values()), strict=True)
                self.writer.write_updates([dict(zip(rows, row, strict=True)) for row in values_by_row])
            self.reporter.update(int(rows["step"][-1]), speed, self.recent.mean)
        return bool(finite.all())


class Ended(NamedTuple):
    """How a loop came to its end."""

    status: str  # finished, interrupted, diverged, or failed
    error: ActorsFailed | None = None  # where it failed


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

    def run(self, stop_requested: Callable[[], bool]) -> Ended:
        """Trains to the end, or to an interrupt or a NaN."""
        start = time.perf_counter() - self._log.seconds
        launched, length, pace = 0, 1, 0.0
        pending: tuple[int, Metrics] | None = None
        while True:
            remaining = self._num_updates - launched
            following = None
            due = self._checkpoints is not None and self._checkpoints.due(self._log.updates)
            if due and pending is None:
                self.save()
            ahead = pace < _SLOW_UPDATE and not self._shared and not due
            if remaining and (pending is None or ahead):
                length, stop = self._agree(min(length, remaining, CHUNK_CAPACITY), stop_requested())
                if not stop:
                    following = (length, self.launch(length))
                    launched += length
            if pending is not None:
                chunk_start = self._log.seconds
                if not self._fetch(*pending, start):
                    return Ended("diverged")
                pace = (self._log.seconds - chunk_start) / pending[0]
                length = max(1, min(2 * length, int(_CHUNK_SECONDS / max(pace, 1e-9))))
            if following is None and pending is None:
                return Ended("finished" if launched == self._num_updates else "interrupted")
            pending = following

    def save(self) -> None:
        """Has the state saved as it is after the last update logged, with no chunk under way."""
        if self._checkpoints is not None:
            self._checkpoints.save(self._log.updates, self._log.seconds, {}, self.state)

    def launch(self, length: int) -> Metrics:
        """Has the device make so many updates, at most CHUNK_CAPACITY; returns at once, with their metrics."""
        self.state, self._finite, buffers = self._chunk(self.state, self._finite, np.int32(length))
        return buffers

    def _agree(self, length: int, stop: bool) -> tuple[int, bool]:
        """The first process's length, and whether any process stops."""
        if not self._shared:
            return length, stop
        rows = gather([length, stop])
        return int(rows[0, 0]), bool(rows[:, 1].any())

    def _fetch(self, length: int, buffers: Metrics, start: float) -> bool:
        """Logs a chunk's metrics (the next chunk runs meanwhile); False when there is nothing to go on with."""
        finished: Any = buffers["finite"]
        polls, cpu_seconds = 0, time.process_time()
        while not finished.is_ready():  # a blocking fetch would keep Ctrl-C waiting
            time.sleep(_POLL_SECONDS)
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
            "XLA's CPU client does nothing any more: a known stall with many lanes of tiny environments. Run fewer "
            "lanes at once (lanes_at_once), or larger environments"
        )
    return now


class AnakinLoop(ChunkLoop):
    """The on-device mode."""

    def __init__(
        self,
        agent: Anakin,
        seed: int,
        hyperparams: Hyperparams,
        log: Logbook,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        start = time.perf_counter()
        state: AnakinState = jit(agent.init, out_shardings=agent.sharding)(jax.random.key(seed), hyperparams)
        if checkpoints is not None and checkpoints.start is not None:
            train = state.train
            state = checkpoints.start.put(state)
            state = state.replace(train=state.train.replace(num_updates=train.num_updates))  # it may be extended
        whole: Any = agent.sharding.train
        finite = jax.make_array_from_callback((), whole, lambda _: np.ones((), bool))
        chunk = jit(functools.partial(run_chunk, agent), donate_argnums=0)
        compiled = chunk.lower(state, finite, np.int32(0)).compile()
        remaining, shared = agent.num_updates - log.updates, jax.process_count() > 1
        super().__init__(compiled, state, finite, remaining, log, shared, checkpoints)
        self.compile_seconds = time.perf_counter() - start
        log.say(f"compiled in {self.compile_seconds:.1f} s")

    @property
    def policy_state(self) -> PolicyState:
        """The policy as it is now."""
        return self.state.train.policy

    def summary(self) -> dict[str, Any]:
        """What this mode adds to summary.json."""
        return {"num_devices": len(self.state.train.step.sharding.device_set)}

    def close(self) -> None:
        """Nothing outlives the program."""


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


class ActorState(NamedTuple):
    """Of a run in the Ray mode, all that can be had: Gymnasium's environments keep their states to themselves."""

    train: TrainState
    streams: np.ndarray  # [N, ...] key data of what the environments draw from next
    behaviour: PolicyState | tuple[()]  # that collects the next rollout, where it is not the newest: with policy_lag 1


class ActorLoop:
    """The Ray mode: with policy_lag 0, collect and learn in turn; with 1, the actors collect the next rollout while
    the learner learns from the last, so that from the second update on the samples' policy is one update old.

    Where several processes learn together, each has its own share of the actors, whose fragments go to its devices."""

    def __init__(
        self,
        agent: Sebulba,
        seed: int,
        hyperparams: Hyperparams,
        log: Logbook,
        config: RayConfig,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """Starts the actors and compiles beside them.

        Args:
          config: with num_actors and envs_per_actor filled in.
        """
        start, key = time.perf_counter(), jax.random.key(seed)
        self._agent, self._log, self._config = agent, log, config
        self._rows: list[dict[str, Any]] = []
        self._gamma = float(hyperparams.gamma)
        self.state: TrainState = agent.init(key, hyperparams)
        self._checkpoints, self._counts_before = checkpoints, dict[str, int]()
        self._streams: np.ndarray
        self._behaviour: Any = ()  # see ActorState
        # Where a run goes on, its environments are new ones, and must not begin as the first ones did.
        spec = agent.runner_spec(jax.random.fold_in(key, log.updates) if log.updates else key)
        if checkpoints is not None and checkpoints.start is not None:
            spec = self._go_on_from(checkpoints.start, spec)
        processes = max(config.num_actors or 0, jax.process_count())
        log.say(
            f"num_envs = {agent.config.num_envs}: {processes} x {config.envs_per_actor}; num_steps = "
            f"{agent.config.num_steps}: batches of {agent.config.batch_size:,}"
        )
        self._actors = _make_actors(spec, config, log.reporter.message)
        self._counts = self._actors.counts() | self._counts_before  # of all processes, and of the whole run
        try:
            blank = blank_fragment(spec, config.envs_per_actor or 1)
            self.update = agent.update.lower(
                self.state, *agent.place([blank] * (processes // jax.process_count()))
            ).compile()
        except BaseException:
            self._actors.close()
            raise
        self.compile_seconds = time.perf_counter() - start
        log.say(f"compiled in {self.compile_seconds:.1f} s")
        self._start = start

    @property
    def policy_state(self) -> PolicyState:
        """The policy as it is now."""
        return self.state.policy

    def run(self, stop_requested: Callable[[], bool]) -> Ended:
        """Trains to the end, or to an interrupt, a NaN, or an actor that fails too often."""
        try:
            status = self._run(stop_requested)
        except ActorsFailed as error:
            self._flush()
            return Ended("failed", error)
        return Ended(status)

    def summary(self) -> dict[str, Any]:
        """What this mode adds to summary.json."""
        config = self._config
        return {
            "num_devices": len(self.state.step.sharding.device_set),
            "num_actors": config.num_actors,
            "envs_per_actor": config.envs_per_actor,
            "policy_lag": config.policy_lag,
            **self._counts,
        }

    def close(self) -> None:
        """Ends the actors."""
        self._actors.close()

    def save(self) -> None:
        """Has the state saved as it is after the last update logged."""
        if self._checkpoints is not None:
            state = ActorState(self.state, self._streams, self._behaviour)
            self._checkpoints.save(self._log.updates, self._log.seconds, self._counts, state)

    def _go_on_from(self, checkpoint: Checkpoint, spec: RunnerSpec) -> RunnerSpec:
        streams = np.zeros((self._agent.config.num_envs, *spec.key_data.shape), spec.key_data.dtype)
        behaviour = jax.device_get(self.state.policy) if self._config.policy_lag else ()
        num_updates = self.state.num_updates
        restored = checkpoint.put(ActorState(self.state, streams, behaviour))
        self.state, self._streams, self._behaviour = restored
        self.state = self.state.replace(num_updates=num_updates)  # it may be extended
        self._counts_before = checkpoint.counts
        return spec._replace(streams=self._streams)

    def _run(self, stop_requested: Callable[[], bool]) -> str:
        if (ready := self._await(self._actors.ready, stop_requested)) is None:
            return "interrupted"
        self.compile_seconds = time.perf_counter() - self._start
        self._log.say(f"{ready} ready after {self.compile_seconds:.1f} s")
        self._written = time.perf_counter()
        self._start = self._written - self._log.seconds
        lag, num_updates, first = self._config.policy_lag, self._agent.num_updates, self._log.updates + 1
        behind = bool(self._behaviour)
        self._launch(self._behaviour or jax.device_get(self.state.policy))
        for number in range(first, num_updates + 1):
            begin = time.perf_counter()
            fragments = self._await(self._actors.poll, stop_requested)
            if fragments is None:
                return "interrupted" if self._flush() else "diverged"
            arrived = time.perf_counter()
            self._streams = np.concatenate([fragment.streams for fragment in fragments])
            if lag:
                self._behaviour = jax.device_get(self.state.policy)
                if number < num_updates:
                    self._launch(self._behaviour)
            rollout, stats = jax.block_until_ready(self._agent.place(fragments))
            placed = time.perf_counter()
            self.state, metrics = self.update(self.state, rollout, stats)
            self._await_update(metrics["finite"])
            metrics = {name: value.item() for name, value in jax.device_get(metrics).items()}
            learnt = time.perf_counter()
            if not lag and number < num_updates and metrics["finite"]:
                self._launch(jax.device_get(self.state.policy))
            times = {"time/wait": arrived - begin, "time/transfer": placed - arrived, "time/update": learnt - placed}
            self._rows.append(metrics | times | self._of_actors(fragments, bool(lag) and (behind or number > first)))
            save = self._checkpoints is not None and self._checkpoints.due(number)
            due = save or number == num_updates or time.perf_counter() - self._written >= _LOG_SECONDS
            if (due or not metrics["finite"]) and not self._flush():
                return "diverged"
            if save:
                self.save()
        return "finished"

    def _launch(self, policy_state: PolicyState) -> None:
        self._actors.start(policy_state, self._gamma)

    def _await(self, poll: Callable[[float], Any], stop_requested: Callable[[], bool]) -> Any:
        """What poll returns in the end; None when a stop comes first, here or in another process."""
        result, error = None, None
        try:
            while result is None and not stop_requested():
                result = poll(_WAIT_SECONDS)
                self._log.reporter.tick()
        except ActorsFailed as failure:
            error = failure
        own = _FAILED if error is not None else _STOP if result is None else _ONWARD
        counts = self._actors.counts()
        rows = gather([own, *counts.values()])
        totals = zip(counts, rows[:, 1:].sum(axis=0).tolist(), strict=True)
        self._counts = {name: total + self._counts_before.get(name, 0) for name, total in totals}
        if error is not None:
            raise error
        if (rows[:, 0] == _FAILED).any():
            raise ActorsFailed(f"actors of process {int(np.argmax(rows[:, 0]))} failed; its own error says why")
        return None if rows[:, 0].any() else result

    def _await_update(self, finished: Any) -> None:
        """By looking, since a blocking fetch would keep Ctrl-C waiting; more and more seldom, since most are short."""
        pause = 1e-4
        while not finished.is_ready():
            time.sleep(pause)
            pause = min(1.2 * pause, _POLL_SECONDS)
            self._log.reporter.tick()

    def _of_actors(self, fragments: list[Any], behind: bool) -> dict[str, float]:
        seconds = {name: float(np.mean([f.seconds[name] for f in fragments])) for name in fragments[0].seconds}
        counts = {f"actors/{name}": float(count) for name, count in self._counts.items()}
        times = {f"actors/{name}_seconds": value for name, value in seconds.items()}
        return counts | times | {"actors/policy_lag": float(behind)}

    def _flush(self) -> bool:
        """Logs what has come up since the last time; False when an update diverged."""
        if not self._rows:
            return True
        columns = {name: np.array([row[name] for row in self._rows]) for name in self._rows[0]}
        self._rows, self._written = [], time.perf_counter()
        return self._log.add(columns, self._written - self._start)


def _make_actors(spec: Any, config: RayConfig, message: Callable[[str], None]) -> Any:
    """This process's share."""
    from jppo.actors import Actors, InProcess  # ray takes a second to import

    host, envs = jax.process_index(), config.envs_per_actor or 1
    if config.num_actors:
        return Actors(spec, config, message, host, jax.process_count())
    return InProcess(spec, host * envs + np.arange(envs))
