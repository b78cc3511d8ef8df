"""The events of a program's runs between two chunks: evaluations as one program, and candidates for best policies."""

from typing import Any

import jax
import numpy as np

from jppo.config.pbt import PBTConfig
from jppo.errors import first_line
from jppo.ppo.types import PolicyState
from jppo.runs.checkpoints import Checkpoints
from jppo.runs.episodes import check_legal_actions
from jppo.sweeps.grid import ProgramGroup
from jppo.sweeps.log import PopulationLogger, rows_of
from jppo.sweeps.population import Population, evaluation_keys, place_flags
from jppo.sweeps.sweep_run import DIVERGED, SOLVED, STOPPED
from jppo.training.device_loop import ChunkLoop
from jppo.training.evaluator import EvaluationResult
from jppo.training.monitor import Monitor


class GroupMonitor(Monitor):
    """Evaluates all runs of a group with one program, ends solved runs and keeps the best policy of each run."""

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

    def finish(self, loop: Any) -> dict[str, Any]:
        """Handles the events of all runs after the last update of the log, and returns more metrics of it, [R] each."""
        log, active, rows = self._log, self._log.active, dict[str, np.ndarray]()
        result = self._running.pop(log.updates, None)
        metrics, policies = {}, loop.policy_state
        if result is not None:
            metrics, policies = result.metrics, result.policy_state
        metrics, policies = jax.device_get((metrics, policies))
        for index, run in enumerate(log.runs):
            if run.updates != log.updates or run.status not in ("", SOLVED):
                continue
            own = {name: column[index] for name, column in metrics.items()}
            if "stuck" in own:
                try:
                    check_legal_actions(self._group.env_name, own.pop("stuck"))
                except ValueError as error:
                    run.end(DIVERGED, error=first_line(error))
                    continue
                run.last_eval = float(own["return_mean"])
                if not run.status and run.last_eval >= self._eval_target:
                    run.end(SOLVED)
            run.offer(rows_of(policies, index))
            for name, value in own.items():
                rows.setdefault(f"eval/{name}", np.full(len(log.runs), np.nan))[index] = value
        if isinstance(self._group.selection, PBTConfig):
            self._end_together()
        if (means := rows.get("eval/return_mean")) is not None:
            log.reporter.evaluated(log.updates * log.batch_size, float(np.fmax.reduce(means)))
        if (log.active != active).any():
            loop.stop_ended_runs()
        return rows

    def _start_evaluation(self, policy_state: PolicyState, update: int) -> EvaluationResult:
        metrics, policies, stuck = self._population.evaluate(policy_state, self._keys, np.int32(update))
        return EvaluationResult(metrics | {"stuck": stuck}, policies)

    def _end_together(self) -> None:
        """Ends all runs if one is solved: the runs of a population train together."""
        solved = any(run.status == SOLVED for run in self._log.runs)
        for run in self._log.runs if solved else ():
            if not run.status:
                run.end(STOPPED, "another run reached stop_at_return")


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

    def _until_target(self, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return columns  # each run has its own end; see PopulationLogger.add
