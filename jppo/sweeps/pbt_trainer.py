"""Trains the runs of a program with population-based training, and resumes it from checkpoints."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jppo.devices.jit import jit
from jppo.devices.memory import bytes_free, show_bytes
from jppo.ppo.anakin import AnakinState
from jppo.ppo.keys import derive_key
from jppo.runs.checkpoints import Checkpoint, Checkpoints
from jppo.runs.leaves import restore_leaves
from jppo.sweeps.grid import ProgramGroup, RunSpec
from jppo.sweeps.halving import compile_group, empty_mask_error
from jppo.sweeps.pbt import exchange, search_ranges
from jppo.sweeps.population import PopulationLogger, SweepProgress, from_host, init_population, to_host
from jppo.sweeps.sweep_run import DIVERGED, FINISHED, INTERRUPTED, RunOutcome
from jppo.training.device_loop import ChunkLoop
from jppo.training.history import RecentEpisodes

CHECKPOINT_SECONDS = 60.0


class PBTTrainer:
    """Trains the runs of one program group. Between exchanges it is the program of any sweep."""

    def __init__(
        self,
        group: ProgramGroup,
        progress: SweepProgress,
        stop_requested: Callable[[], bool],
        on_run_end: Callable[[RunSpec, RunOutcome], Any],
        checkpoint_dir: Path | None = None,
    ) -> None:
        """
        Args:
          on_run_end: is called with each run and its result.
          checkpoint_dir: directory of the checkpoints, which the end of the training deletes; None saves none.
        """
        self._group, self._progress, self._stop_requested = group, progress, stop_requested
        self._on_run_end, self._directory = on_run_end, checkpoint_dir

    def train(self) -> None:
        """Trains all runs to their end, or until a stop is requested."""
        group, message = self._group, self._progress.reporter.message
        runs, checkpoints = len(group.runs), None
        if self._stop_requested():
            return
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            checkpoints = Checkpoints(self._directory, CHECKPOINT_SECONDS, 2, message)
        self._population = compile_group(group._replace(max_parallel_runs=runs), runs, self._progress.reporter)
        if self._population.bytes > (free := bytes_free(group.num_devices)):
            raise ValueError(
                f"pbt trains all {runs} runs at once and needs {show_bytes(self._population.bytes)} of device memory, "
                f"but {show_bytes(free)} are free; use fewer runs or lower num_envs = {group.agent.config.num_envs}"
            )
        specs = group.runs
        state = init_population(self._population, [x.seed for x in specs], [x.hyperparams for x in specs])
        log = PBTLogger(group, self._progress)
        try:
            if checkpoints is not None and checkpoints.start is not None:
                host_state = log.restore(checkpoints.start, to_host(state, runs))
                state = from_host(self._population, host_state, 0)
                message(f"{group.env_name}: resuming at update {log.updates}")
            state = self._train(state, log, checkpoints)
            if checkpoints is not None and self._is_interrupted(log):
                log.save(checkpoints, state)
        finally:
            if checkpoints is not None:
                checkpoints.close()
        self._report(state, log)
        if self._directory is not None and not self._is_interrupted(log):
            shutil.rmtree(self._directory)

    def _train(self, state: AnakinState, log: "PBTLogger", checkpoints: Checkpoints | None) -> AnakinState:
        """Trains until the last update, a stop request or the divergence of all runs, and returns the state."""
        group, population = self._group, self._population
        assert group.pbt is not None
        num_updates = group.agent.num_updates
        every = group.pbt.updates_between_exchanges(num_updates)
        whole = NamedSharding(population.sharding.mesh, PartitionSpec())
        compiled_exchange = jit(
            functools.partial(exchange, ranges=search_ranges(group), config=group.pbt),
            donate_argnums=0,
            out_shardings=(population.sharding, whole),
        )
        key = derive_key(jax.random.key(group.runs[0].seed), "population-based training")
        log.hyperparams = self._read_hyperparams(state)
        while log.updates < num_updates and log.finite.any() and not self._stop_requested():
            following = min(num_updates, (log.updates // every + 1) * every)
            finite = np.zeros(population.size, bool)  # padding is not trained
            finite[: len(log.finite)] = log.finite
            finite = jax.device_put(finite, population.sharding)
            loop = ChunkLoop(population.chunk, state, finite, following - log.updates, log, checkpoints=checkpoints)
            loop.run(self._stop_requested)
            state = loop.state
            for index in log.empty_masks:
                self._progress.reporter.message(f"run {index}: {empty_mask_error(group, log, index)}")
            if log.updates == following < num_updates and log.finite.any():
                exchange_key = derive_key(key, f"update {log.updates}")
                state, source = compiled_exchange(state, log.recent_returns, log.finite, exchange_key)
                log.record_exchange(np.asarray(source), self._read_hyperparams(state))
        return state

    def _read_hyperparams(self, state: AnakinState) -> dict[str, np.ndarray]:
        """Returns the hyperparameters that exchanges change, [R] each."""
        hyperparams, runs = state.train.hyperparams, len(self._group.runs)
        return {name: np.asarray(getattr(hyperparams, name))[:runs] for name in search_ranges(self._group)}

    def _is_interrupted(self, log: "PBTLogger") -> bool:
        return log.updates < self._group.agent.num_updates and bool(log.finite.any())

    def _report(self, state: AnakinState, log: "PBTLogger") -> None:
        """Reports all runs."""
        policies = to_host(state.train.policy, len(self._group.runs))
        for index, (spec, recent) in enumerate(zip(self._group.runs, log.recent, strict=True)):
            status = INTERRUPTED if self._is_interrupted(log) else FINISHED
            if not (metrics := log.metrics_of(index)):
                continue  # an interrupted run without updates has no result
            outcome = RunOutcome(
                status=status if log.finite[index] else DIVERGED,
                updates=int(log.completed[index]),
                episodes=recent.total,
                return_mean=recent.mean,
                return_std=recent.std,
                metrics=metrics,
                policy_state=jax.tree.map(lambda x, index=index: x[index], policies),
                error=empty_mask_error(self._group, log, index),
                copies=tuple(
                    (update, source)
                    for update, run, source in log.copies
                    if run == spec.number and update < log.updates
                ),
            )
            self._on_run_end(spec, outcome)


class PBTLogger(PopulationLogger):
    """Also logs the hyperparameters and the copies.

    Attributes:
      hyperparams: the current values of the hyperparameters that exchanges change, [R] each.
      copies: (update, number of the replaced run, number of the copied run) of each copy.
    """

    def __init__(self, group: ProgramGroup, progress: SweepProgress) -> None:
        self.hyperparams: dict[str, np.ndarray] = {}
        self.copies: list[tuple[int, int, int]] = []
        self._numbers = [spec.number for spec in group.runs]
        super().__init__(
            recent={number: RecentEpisodes() for number in self._numbers},
            batch_size=group.agent.config.batch_size,
            update=0,
            seconds=0.0,
            progress=progress,
        )

    @property
    def recent(self) -> list[RecentEpisodes]:
        """Recent episodes of each run."""
        return list(self._recent.values())

    @property
    def recent_returns(self) -> np.ndarray:
        """Recent mean return of each run, [R] f32; NaN before its first episode has ended."""
        return np.array([recent.mean for recent in self.recent], np.float32)

    def _columns(self, columns: dict[str, np.ndarray], finite: np.ndarray) -> dict[str, np.ndarray]:
        """Adds the hyperparameters; after a run has diverged, its metrics are NaN until it is replaced."""
        rows = super()._columns(columns, finite)
        rows = {name: np.where(finite.T, x, np.nan) if x.dtype.kind == "f" else x for name, x in rows.items()}
        return rows | {f"hyperparams/{name}": np.tile(x, (finite.shape[1], 1)) for name, x in self.hyperparams.items()}

    def record_exchange(self, source: np.ndarray, hyperparams: dict[str, np.ndarray]) -> None:
        """Records the copies of an exchange and the new hyperparameters.

        Args:
          source: [R] i32, see `exchange`.
        """
        before, self.hyperparams = self.recent, hyperparams
        for index in np.flatnonzero(source != np.arange(len(source))):
            number, copied = self._numbers[index], source[index]
            self._recent[number] = before[copied].copy(before[index].total)
            self.copies.append((self.updates, number, self._numbers[copied]))
            self.finite[index], self.completed[index] = True, self.updates
            self.empty_masks.pop(int(index), None)

    def save(self, checkpoints: Checkpoints, state: AnakinState, counts: dict[str, int] | None = None) -> None:
        """Saves a checkpoint after the last logged update."""
        log = {
            "copies": list(self.copies),  # a thread writes them
            "recent": [recent.to_json() for recent in self.recent],
            "completed": self.completed.tolist(),
            "finite": self.finite.tolist(),
            "empty_masks": list(self.empty_masks.items()),
        }
        everything = {"state": to_host(state, len(self._numbers)), "history": self._history.arrays()}
        checkpoints.save(self.updates, self.seconds, counts or {}, everything, log)

    def restore(self, start: Checkpoint, like: AnakinState) -> AnakinState:
        """Restores the log and returns the state on the host. Raises ValueError if the checkpoint does not fit.

        Args:
          like: NumPy arrays of the same shapes.
        """
        self.updates, self.seconds = start.update, start.seconds
        self.copies = [tuple(copy) for copy in start.log["copies"]]
        for recent, content in zip(self.recent, start.log["recent"], strict=True):
            recent.restore(content)
        self.completed, self.finite = (np.array(start.log[name]) for name in ("completed", "finite"))
        self.empty_masks = dict(start.log["empty_masks"])
        prefix = "['history']['"
        columns = {name.removeprefix(prefix)[:-2]: x for name, x in start.leaves.items() if name.startswith(prefix)}
        self._history.restore(columns, self.updates)
        self._progress.env_steps += int(self.completed.sum()) * self._batch_size
        host_state: AnakinState = restore_leaves(start.leaves, like, "['state']", start.path)
        return host_state
