"""Trains the runs of one program group: in slices if memory is short, and rung by rung with successive halving."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jppo.devices.memory import bytes_free, show_bytes
from jppo.errors import describe_empty_mask
from jppo.ppo.types import PolicyState, PyTree
from jppo.sweeps.grid import ProgramGroup, RunSpec
from jppo.sweeps.population import (
    Population,
    PopulationLogger,
    SweepProgress,
    fitting_population,
    from_host,
    init_population,
    shares,
    to_host,
)
from jppo.sweeps.sweep_run import DIVERGED, FINISHED, INTERRUPTED, STOPPED, RunOutcome
from jppo.training.device_loop import ChunkLoop
from jppo.training.history import RecentEpisodes
from jppo.training.progress import Reporter


class _ActiveRun:
    """A run in training."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec, self.recent, self.status, self.updates = spec, RecentEpisodes(), "", 0
        self.error = ""
        self.metrics: list[dict[str, np.ndarray]] = []  # one element per rung with at least one update

    @property
    def seconds(self) -> float:
        """Training seconds so far."""
        return float(self.metrics[-1]["time/elapsed"][-1]) if self.metrics else 0.0

    def outcome(self, policy_state: PolicyState) -> RunOutcome:
        """Returns the result of the run."""
        return RunOutcome(
            status=self.status,
            error=self.error,
            updates=self.updates,
            episodes=self.recent.total,
            return_mean=self.recent.mean,
            return_std=self.recent.std,
            metrics={name: np.concatenate([part[name] for part in self.metrics]) for name in self.metrics[0]},
            policy_state=policy_state,
        )


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
        runs, state, previous = [_ActiveRun(spec) for spec in self._group.runs], None, 0
        for rung in self._group.rungs:
            if self._stop_requested() and state is None:
                return
            active, state = self._train_until(rung, previous, runs, state)
            if not active:
                return
            if self._stop_requested():
                self._end_runs(active, state, INTERRUPTED)
                return
            kept = _better_half(active, math.ceil(len(runs) / 2))
            best = max((run.recent.mean for run in kept if run.recent.total), default=math.nan)
            self._progress.reporter.message(
                f"after update {rung}: continuing {len(kept)} of {len(runs)} runs (best return {best:.1f})"
            )
            continuing = set(kept)
            for run in active:
                run.status = "" if run in continuing else STOPPED
            state = self._end_runs(active, state)
            runs, previous = kept, rung

    def _train_until(
        self, rung: int, previous: int, runs: list[_ActiveRun], state: PyTree
    ) -> tuple[list[_ActiveRun], PyTree]:
        """Trains the runs from update `previous` to update `rung`.

        Args:
          state: the states of the runs on the host, leaves [runs, ...]; None at the start.

        Returns:
          the runs that have not ended, and their states.
        """
        population = self._fit_population(len(runs))
        active: list[_ActiveRun] = []
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
            states.append(self._end_runs(part, part_state, INTERRUPTED if self._stop_requested() else ""))
            active += [run for run in part if not run.status]
        return active, jax.tree.map(lambda *x: np.concatenate(x), *states) if active else None

    def _train_part(
        self, population: Population, state: PyTree, part: list[_ActiveRun], previous: int, rung: int
    ) -> PyTree:
        """Trains the runs that one program holds, records their metrics and returns their states on the host."""
        log = PopulationLogger(
            recent={run.spec.number: run.recent for run in part},
            batch_size=self._group.agent.config.batch_size,
            update=previous,
            seconds=max(run.seconds for run in part),
            progress=self._progress,
        )
        finite = jax.device_put(np.ones(population.size, bool), population.sharding)
        loop = ChunkLoop(population.chunk, state, finite, rung - previous, log)
        loop.run(self._stop_requested)
        for index, run in enumerate(part):
            if metrics := log.metrics_of(index):
                run.metrics.append(metrics)
            run.updates = int(log.completed[index])
            finished = FINISHED if run.updates == self._group.agent.num_updates else ""
            run.status = finished if log.finite[index] else DIVERGED
            if index in log.empty_masks:
                run.error = empty_mask_error(self._group, log, index)
                self._progress.reporter.message(f"run {run.spec.number}: {run.error}")
        return to_host(loop.state, len(part))

    def _end_runs(self, runs: list[_ActiveRun], state: PyTree, status: str = "") -> PyTree:
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
                self._on_run_end(
                    run.spec, run.outcome(jax.tree.map(lambda x, index=index: x[index], state.train.policy))
                )
        return jax.tree.map(lambda x: x[np.array(remaining, int)], state)

    def _fit_population(self, runs: int) -> Population:
        """Returns the compiled program; compiles a smaller one when half of the runs have ended."""
        group = self._group
        if self._population is None or self._population.size > math.prod(shares(runs, group.num_devices)):
            self._population = compile_group(group, runs, self._progress.reporter)
        return self._population


def empty_mask_error(group: ProgramGroup, log: PopulationLogger, index: int) -> str:
    """Returns why a run ended, if an action_mask without legal actions ended it; otherwise ''."""
    if index not in log.empty_masks:
        return ""
    update = int(log.completed[index]) + 1
    return describe_empty_mask(group.env_name, log.empty_masks[index], group.agent.config.num_envs, update)


def compile_group(group: ProgramGroup, runs: int, reporter: Reporter) -> Population:
    """Returns the compiled program for this number of a group's runs, or for an equal part of them."""
    population = fitting_population(
        group.agent, runs, group.num_devices, group.max_parallel_runs, group.runs[0].hyperparams
    )
    count = f"{runs} runs" if population.size >= runs else f"{population.size} of {runs} runs at a time"
    reporter.message(
        f"{group.env_name}, {count}: compiled in {population.compile_seconds:.1f} s; needs "
        f"{show_bytes(population.bytes)} of {show_bytes(bytes_free(group.num_devices))}"
    )
    return population


def _better_half(runs: list[_ActiveRun], count: int) -> list[_ActiveRun]:
    """Returns the `count` runs with the highest recent return, in order; all runs if no episode has ended."""
    if not any(run.recent.total for run in runs):
        return runs
    best = set(sorted(runs, key=lambda run: -run.recent.mean if run.recent.total else math.inf)[:count])
    return [run for run in runs if run in best]
