"""Trains the runs of a program with population-based training, and resumes it from checkpoints."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jppo.config.pbt import PBTConfig
from jppo.config.run import RunConfig
from jppo.devices.jit import jit
from jppo.devices.memory import bytes_free, show_bytes
from jppo.errors import Refused
from jppo.ppo.anakin import AnakinState
from jppo.ppo.types import derive_key
from jppo.runs.checkpoints import Checkpoint, Checkpoints, delete_checkpoints
from jppo.runs.files import check_own_files
from jppo.runs.leaves import restore_leaves
from jppo.sweeps.grid import ProgramGroup
from jppo.sweeps.group_monitor import GroupLoop
from jppo.sweeps.halving import GroupTrainer
from jppo.sweeps.log import PopulationLogger, RunLog, SweepProgress, rows_of
from jppo.sweeps.pbt import exchange, search_ranges
from jppo.sweeps.population import Population, compile_group, from_host, init_population, to_host
from jppo.sweeps.sweep_run import FINISHED, INTERRUPTED

CHECKPOINT_SECONDS = RunConfig.checkpoint_seconds


class PBTTrainer(GroupTrainer):
    """Trains the runs of one program group. Between exchanges it is the program of any sweep."""

    def train(self, checkpoint_dir: Path | None = None) -> None:
        """Trains all runs to their end, or until a stop is requested.

        Args:
          checkpoint_dir: directory of the checkpoints, which the end of the training deletes; None saves none.
        """
        group, message = self._group, self._progress.reporter.message
        runs, checkpoints = len(group.runs), None
        if self._stop_requested():
            return
        if checkpoint_dir is not None:
            check_own_files(checkpoint_dir.parent, (), (checkpoint_dir.name,))
            checkpoint_dir.mkdir(parents=True, exist_ok=True)
            checkpoints = Checkpoints(checkpoint_dir, CHECKPOINT_SECONDS, RunConfig.max_checkpoints, message)
        population = compile_group(group._replace(max_parallel_runs=runs), runs, self._progress.reporter)
        if population.bytes > (free := bytes_free(group.num_devices)):
            raise Refused(
                f"pbt trains all {runs} runs at once and needs {show_bytes(population.bytes)} of device memory, "
                f"but {show_bytes(free)} are free; use fewer runs or lower num_envs = {group.agent.config.num_envs}"
            )
        specs = group.runs
        state = init_population(population, [x.seed for x in specs], [x.hyperparams for x in specs])
        log = PBTLogger(group, self._progress)
        try:
            if checkpoints is not None and checkpoints.start is not None:
                host_state = log.restore(checkpoints.start, to_host(state, runs))
                state = from_host(population, host_state, 0)
                message(f"{group.env_name}: resuming at update {log.updates}")
            state = self._train(population, state, log, checkpoints)
            interrupted = log.updates < group.agent.num_updates and bool(log.active.any())
            if checkpoints is not None:
                log.save(checkpoints, state)
        finally:
            if checkpoints is not None:
                checkpoints.close()
        log.finish()
        results = to_host(state.replace(collect=()), runs)  # the states of environments may be large
        self._end_runs(log.runs, results, INTERRUPTED if interrupted else FINISHED)
        if checkpoint_dir is not None and not interrupted:
            delete_checkpoints(checkpoint_dir)

    def _train(
        self, population: Population, state: AnakinState, log: "PBTLogger", checkpoints: Checkpoints | None
    ) -> AnakinState:
        """Trains until the last update, a stop request or the end of all runs, and returns the state."""
        group = self._group
        assert isinstance(group.selection, PBTConfig)
        num_updates = group.agent.num_updates
        every = group.selection.updates_between_exchanges(num_updates)
        whole = NamedSharding(population.sharding.mesh, PartitionSpec())
        compiled_exchange = jit(
            functools.partial(exchange, ranges=search_ranges(group), config=group.selection),
            donate_argnums=0,
            out_shardings=(population.sharding, whole),
        )
        key = derive_key(jax.random.key(group.runs[0].seed), "population-based training")
        log.read_state(state)
        while log.updates < num_updates and log.active.any() and not self._stop_requested():
            following = min(num_updates, (log.updates // every + 1) * every)
            loop = GroupLoop(group, population, state, following - log.updates, log, checkpoints)
            loop.run(self._stop_requested)
            state = loop.state
            if log.updates == following < num_updates and log.active.any():
                exchange_key = derive_key(key, f"update {log.updates}")
                state, source = compiled_exchange(state, log.scores, log.finite, exchange_key)
                log.record_exchange(np.asarray(source))
                log.read_state(state)
        return state


class PBTLogger(PopulationLogger):
    """Also logs the hyperparameters and the copies.

    Attributes:
      hyperparams: the current values of the hyperparameters that exchanges change, [R] each.
    """

    def __init__(self, group: ProgramGroup, progress: SweepProgress) -> None:
        self.hyperparams: dict[str, np.ndarray] = {}
        self._swept = tuple(search_ranges(group))
        super().__init__(
            [RunLog(spec, group) for spec in group.runs],
            batch_size=group.agent.config.batch_size,
            update=0,
            seconds=0.0,
            progress=progress,
        )

    @property
    def scores(self) -> np.ndarray:
        """The score of each run, [R] f32, see `RunLog.score`."""
        return np.array([run.score for run in self.runs], np.float32)

    def read_state(self, state: AnakinState) -> None:
        """Reads the current hyperparameters."""
        values = {name: getattr(state.train.hyperparams, name) for name in self._swept}
        self.hyperparams = {name: np.asarray(value)[: len(self.runs)] for name, value in values.items()}

    def _columns(self, columns: dict[str, np.ndarray], done: np.ndarray) -> dict[str, np.ndarray]:
        """Adds the hyperparameters; after a run has diverged, its metrics are NaN until it is replaced."""
        rows = super()._columns(columns, done)
        rows = {name: np.where(done.T, x, np.nan) if x.dtype.kind == "f" else x for name, x in rows.items()}
        return rows | {f"hyperparams/{name}": np.tile(x, (done.shape[1], 1)) for name, x in self.hyperparams.items()}

    def record_exchange(self, source: np.ndarray) -> None:
        """Records the copies of an exchange.

        Args:
          source: [R] i32, see `exchange`.
        """
        before = [(run.recent, run.last_eval) for run in self.runs]
        for index in np.flatnonzero(source != np.arange(len(source))):
            run, copied = self.runs[index], self.runs[source[index]]
            recent, run.last_eval = before[source[index]]
            run.recent = recent.copy(run.recent.total)
            run.updates = self.updates
            run.end("")  # a diverged run trains again
            run.copies.append((self.updates, copied.spec.number))

    def save(self, checkpoints: Checkpoints, state: AnakinState, *_: Any) -> None:
        """Saves a checkpoint after the last logged update, see `Logger.save`. Each run has its own end."""
        copies = [(update, run.spec.number, source) for run in self.runs for update, source in run.copies]
        log = {"copies": copies, "runs": [run.to_json() for run in self.runs]}  # a thread writes them
        everything = {"state": to_host(state, len(self.runs)), "history": self._history.arrays()}
        best = {str(index): run.best_policy for index, run in enumerate(self.runs) if run.best_policy is not None}
        checkpoints.save(self.updates, self.seconds, {}, everything | {"best": best}, log)

    def restore(self, start: Checkpoint, like: AnakinState) -> AnakinState:
        """Restores the log and returns the state on the host. Raises ValueError if the checkpoint does not fit.

        Args:
          like: NumPy arrays of the same shapes.
        """
        self.updates, self.seconds = start.update, start.seconds
        for index, (run, content) in enumerate(zip(self.runs, start.log["runs"], strict=True)):
            run.restore(content)
            run.copies = [
                (update, source) for update, number, source in start.log["copies"] if number == run.spec.number
            ]
            if run.best is not None:
                policy = rows_of(like.train.policy_state, index)
                run.best_policy = restore_leaves(start.leaves, policy, f"['best']['{index}']", start.path)
        prefix = "['history']['"
        columns = {name.removeprefix(prefix)[:-2]: x for name, x in start.leaves.items() if name.startswith(prefix)}
        self._history.restore(columns, self.updates)
        self._progress.env_steps += sum(run.updates for run in self.runs) * self.batch_size
        host_state: AnakinState = restore_leaves(start.leaves, like, "['state']", start.path)
        return host_state
