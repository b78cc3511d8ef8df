"""The events of a program's runs between two chunks: evaluations as one program, and each run's callback."""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jppo.config.pbt import PBTConfig
from jppo.devices.jit import jit
from jppo.envs.spaces import PyTree
from jppo.errors import first_line
from jppo.ppo.types import PolicyState
from jppo.runs.checkpoints import Checkpoints
from jppo.runs.episodes import check_legal_actions
from jppo.sweeps.grid import ProgramGroup
from jppo.sweeps.log import PopulationLogger, RunLog, rows_of
from jppo.sweeps.population import Population, evaluation_keys, place_flags
from jppo.sweeps.sweep_run import DIVERGED, SOLVED, STOPPED
from jppo.training.device_loop import ChunkLoop
from jppo.training.evaluator import METRICS, EvaluationResult
from jppo.training.monitor import Monitor


class GroupMonitor(Monitor):
    """Evaluates all runs of a group with one program and passes each event to the monitor of each run."""

    def __init__(self, log: PopulationLogger, group: ProgramGroup, population: Population) -> None:
        """
        Args:
          log: the log of the runs in the program.
        """
        settings = group.settings
        super().__init__(
            log,
            settings.run,
            evaluate=None if population.evaluate is None else self._start_evaluation,
            best_every=group.best_every,
        )
        self.target = None  # each run has its own target in the program
        self._population, self._group = population, group
        self._keys = evaluation_keys(population, [run.spec.seed for run in log.runs])
        self.read_row, self.write_row = _row_programs(population.sharding)

    def finish(self, loop: Any) -> dict[str, Any]:
        """Handles the events of all runs after the last update of the log, and returns more metrics of it, [R] each.

        After an exception in the callback of a run, the other runs are handled, too: a population is resumed from here.
        """
        log, active, rows = self._log, self._log.active, dict[str, np.ndarray]()
        result = self._running.pop(log.updates, None)
        host = None if result is None else jax.device_get((result.metrics, result.policy_state))
        for index, run in enumerate(log.runs):
            if run.updates != log.updates or run.status not in ("", SOLVED):
                continue
            for name, value in self._finish_run(loop, index, run, host).items():
                rows.setdefault(name, np.full(len(log.runs), np.nan))[index] = value
        if isinstance(self._group.selection, PBTConfig):
            self._end_together()
        if (means := rows.get("eval/return_mean")) is not None:
            log.reporter.evaluated(log.updates * log.batch_size, float(np.fmax.reduce(means)))
        if (log.active != active).any():
            loop.stop_ended_runs()
        return rows

    def _finish_run(self, loop: Any, index: int, run: RunLog, host: Any) -> dict[str, float]:
        """Handles the events of one run and returns more metrics of its last update.

        Args:
          host: the metrics and policies of the evaluations, NumPy leaves [R, ...], or None.
        """
        monitor = run.monitor
        assert monitor is not None
        if host is not None:
            metrics, policies = host
            try:
                check_legal_actions(self._group.env_name, metrics["stuck"][index])
            except ValueError as error:
                run.end(DIVERGED, error=first_line(error))
                return {}
            own = {name: metrics[name][index] for name in METRICS}
            monitor.add_evaluation(self._log.updates, EvaluationResult(own, rows_of(policies, index)))
        more = monitor.finish(_RunOfLoop(self, loop, index))
        if (ended := monitor.ended) is not None:
            if ended.error is not None:
                where = f"run {run.spec.number} of the sweep ({self._group.env_name}, seed {run.spec.seed}"
                settings = "".join(f", {name} = {value}" for name, value in run.spec.settings.items())
                ended.error.add_note(f"in the callback of {where}{settings}), update {run.updates}")
                self.ended = self.ended or ended
                if run.status == SOLVED:
                    run.end("")  # its callback has not handled the update that solved it
            elif not run.status:
                run.end(ended.status, ended.reason)
        return more

    def _start_evaluation(self, policy_state: PolicyState, update: int) -> EvaluationResult:
        metrics, policies, stuck = self._population.evaluate(policy_state, self._keys, np.int32(update))
        return EvaluationResult(metrics | {"stuck": stuck}, policies)

    def _end_together(self) -> None:
        """Ends all runs if one has ended: the runs of a population train together."""
        ended = [run for run in self._log.runs if run.status in (SOLVED, STOPPED)]
        for run in self._log.runs if ended else ():
            if not run.status:
                run.end(STOPPED, ended[0].stop_reason or "another run reached stop_at_return")


@functools.cache
def _row_programs(sharding: NamedSharding) -> tuple[Any, Any]:
    """Returns programs that read and replace the row of one run in leaves [R, ...] with this sharding."""
    read = jit(
        lambda state, row: jax.tree.map(lambda x: x[row], state),
        out_shardings=NamedSharding(sharding.mesh, PartitionSpec()),
    )
    write = jit(
        lambda state, row, new: jax.tree.map(lambda x, value: x.at[row].set(value), state, new),
        donate_argnums=0,
        out_shardings=sharding,
    )
    return read, write


class _RunOfLoop:
    """One run of a loop, for its monitor."""

    def __init__(self, group: GroupMonitor, loop: Any, index: int) -> None:
        self._group, self._loop, self._index = group, loop, np.int32(index)

    @property
    def state(self) -> PyTree:
        """The state of the run, which callbacks may read and replace."""
        return self._group.read_row(self._loop.state, self._index)

    @state.setter
    def state(self, state: PyTree) -> None:
        self._loop.state = self._group.write_row(self._loop.state, self._index, state)
        self._loop.state_changed()

    @property
    def policy_state(self) -> PolicyState:
        """The policy of the run, NumPy leaves."""
        policy: PolicyState = jax.device_get(self._group.read_row(self._loop.state.train.policy_state, self._index))
        return policy


class GroupLoop(ChunkLoop):
    """Trains the runs of a program. Runs that have ended, and padding, do not change."""

    def __init__(
        self,
        group: ProgramGroup,
        population: Population,
        state: Any,
        num_updates: int,
        log: PopulationLogger,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        monitor = GroupMonitor(log, group, population) if group.has_events else None
        flags = place_flags(population, log)
        super().__init__(population.chunk, state, flags, num_updates, log, checkpoints=checkpoints, monitor=monitor)
        self._population = population

    def stop_ended_runs(self) -> None:
        """Excludes runs that ended in an event from further updates."""
        self._flags = place_flags(self._population, self._log)

    def state_changed(self) -> None:
        """Is called after a callback has changed the state of a run."""
        self._log.read_state(self.state)

    def _until_target(self, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return columns  # each run has its own end; see PopulationLogger.add
