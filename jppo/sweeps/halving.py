"""Trains the runs of one program group: in slices if memory is short, and rung by rung with successive halving."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jppo.envs.spaces import PyTree
from jppo.sweeps.grid import ProgramGroup, RunSpec
from jppo.sweeps.group_monitor import GroupLoop
from jppo.sweeps.log import PopulationLogger, RunLog, SweepProgress
from jppo.sweeps.population import Population, compile_group, from_host, init_population, shares, to_host
from jppo.sweeps.sweep_run import FINISHED, HALVED, INTERRUPTED, SOLVED, STOPPED, RunOutcome


class GroupTrainer:
    """Trains the runs of one program group."""

    def __init__(
        self,
        group: ProgramGroup,
        progress: SweepProgress,
        stop_requested: Callable[[], bool],
        on_run_end: Callable[[RunSpec, RunOutcome], Any],
    ) -> None:
        """
        Args:
          on_run_end: is called with each run that was trained and its result.
        """
        self._group, self._progress = group, progress
        self._stop_requested, self._on_run_end = stop_requested, on_run_end
        self._population: Population | None = None

    def train(self) -> None:
        """Trains all runs to their end, or until a stop is requested."""
        group = self._group
        runs, state, previous = [RunLog(spec, group) for spec in group.runs], None, 0
        for rung in group.rungs:
            if self._stop_requested() and state is None:
                break
            active, state = self._train_until(rung, previous, runs, state)
            if not active:
                break
            if self._stop_requested():
                self._end_runs(active, state, INTERRUPTED)
                break
            solved = sum(run.status == SOLVED for run in runs)
            kept = _better_half(active, math.ceil(len(runs) / 2) - solved)
            best = max((run.score for run in kept if not math.isnan(run.score)), default=math.nan)
            self._progress.reporter.message(
                f"after update {rung}: continuing {len(kept)} of {len(runs)} runs (best return {best:.1f})"
            )
            for run in set(active) - set(kept):
                run.end(STOPPED, HALVED)
            state = self._end_runs(active, state)
            if not kept:
                break
            runs, previous = kept, rung

    def _train_until(self, rung: int, previous: int, runs: list[RunLog], state: PyTree) -> tuple[list[RunLog], PyTree]:
        """Trains the runs from update `previous` to update `rung`.

        Args:
          state: the states of the runs on the host, leaves [runs, ...]; None at the start.

        Returns:
          the runs that have not ended, and their states.
        """
        population = self._fit_population(len(runs))
        active: list[RunLog] = []
        states = []
        for first in range(0, len(runs), population.size):
            if self._stop_requested() and state is None:
                break
            part = runs[first : first + population.size]
            if state is None:
                specs = [run.spec for run in part]
                placed = init_population(population, [x.seed for x in specs], [x.hyperparams for x in specs])
            else:
                placed = from_host(population, state, first)
            part_state = self._train_part(population, placed, part, previous, rung)
            states.append(self._end_runs(part, part_state))
            active += [run for run in part if not run.status]
        return active, jax.tree.map(lambda *x: np.concatenate(x), *states) if active else None

    def _train_part(
        self, population: Population, state: PyTree, part: list[RunLog], previous: int, rung: int
    ) -> PyTree:
        """Trains the runs that one program holds, records their metrics and returns their states on the host."""
        log = PopulationLogger(
            part,
            batch_size=self._group.agent.config.batch_size,
            update=previous,
            seconds=max(run.seconds for run in part),
            progress=self._progress,
        )
        loop = GroupLoop(self._group, population, state, rung - previous, log)
        loop.run(self._stop_requested)
        log.finish()
        for run in part:
            if not run.status and run.updates == self._group.agent.num_updates:
                run.end(FINISHED)
        return to_host(loop.state, len(part))

    def _end_runs(self, runs: list[RunLog], state: PyTree, status: str = "") -> PyTree:
        """Reports the runs that have ended and returns the states of the others.

        Args:
          status: the new status of runs without one.
        """
        remaining = []
        for index, run in enumerate(runs):
            run.status = run.status or status
            if not run.status:
                remaining.append(index)
            elif run.metrics:  # an interrupted run without updates has no result
                policy = jax.tree.map(lambda x, index=index: x[index], state.train.policy_state)
                self._on_run_end(run.spec, run.outcome(policy))
        return jax.tree.map(lambda x: x[np.array(remaining, int)], state)

    def _fit_population(self, runs: int) -> Population:
        """Returns the compiled program; compiles a smaller one when half of the runs have ended."""
        group = self._group
        if self._population is None or self._population.size > math.prod(shares(runs, group.num_devices)):
            self._population = compile_group(group, runs, self._progress.reporter)
        return self._population


def _better_half(runs: list[RunLog], count: int) -> list[RunLog]:
    """Returns the `count` runs with the highest score, in order; all runs if no run has a score."""
    if all(math.isnan(run.score) for run in runs):
        return runs
    best = set(sorted(runs, key=lambda run: math.inf if math.isnan(run.score) else -run.score)[: max(0, count)])
    return [run for run in runs if run in best]
