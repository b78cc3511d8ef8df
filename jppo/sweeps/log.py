"""The logs of the runs of a sweep while they train: metrics, episodes, best policies and the reasons of their ends."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jppo.config.pbt import PBTConfig
from jppo.envs.spaces import PyTree
from jppo.ppo.types import PolicyState
from jppo.runs.run_dir import BestPolicy
from jppo.sweeps.grid import ProgramGroup, RunSpec
from jppo.sweeps.sweep_run import DIVERGED, SOLVED, RunOutcome
from jppo.training.history import History, RecentEpisodes, join_blocks
from jppo.training.progress import Reporter
from jppo.training.return_target import count_needed_episodes

_HISTORY_ROWS = 1 << 20  # updates kept in memory, summed over all runs
_EPISODES = ("count", "return_mean", "return_std")
_STATUS = ("updates", "status", "stop_reason", "error", "last_eval", "best")  # attributes of a run in a checkpoint


class RunLog:
    """The log of one run.

    Attributes:
      updates: number of finite updates so far.
      status: why the run has ended, see `RunOutcome.status`; "" while it trains.
      last_eval: mean return of the newest evaluation, or None.
      best, best_policy: the policy with the highest return so far, or None.
      metrics: columns [updates] of consecutive updates, from `PopulationLogger.finish`.
      copies: (update, number of the copied run) of each replacement in population-based training.
    """

    def __init__(self, spec: RunSpec, group: ProgramGroup) -> None:
        self.spec, self.recent, self.updates = spec, RecentEpisodes(), 0
        self.status, self.stop_reason, self.error = "", "", ""
        self._group, self._evaluates = group, bool(group.settings.run.eval_every)
        self.last_eval: float | None = None
        self.best: BestPolicy | None = None
        self.best_policy: PolicyState | None = None
        self.metrics: list[dict[str, np.ndarray]] = []
        self.copies: list[tuple[int, int]] = []

    @property
    def seconds(self) -> float:
        """Training seconds up to the last update in `metrics`."""
        return float(self.metrics[-1]["time/elapsed"][-1]) if self.metrics else 0.0

    @property
    def recent_return(self) -> float:
        """Recent mean return, minus infinity if the run has diverged; NaN before the first episode has ended."""
        return -math.inf if self.status == DIVERGED else self.recent.mean

    @property
    def score(self) -> float:
        """Return of the newest evaluation, or without one the recent return; NaN before the first episode has ended."""
        return self.recent.mean if self.last_eval is None else self.last_eval

    def add(self, rows: dict[str, np.ndarray]) -> None:
        """Adds the metrics of consecutive updates, as columns [updates]."""
        self.updates += len(rows["update"])
        for update in np.flatnonzero(rows["episode/count"] > 0):
            self.recent.add(*(float(rows[f"episode/{name}"][update]) for name in _EPISODES))

    def offer(self, policy_state: PolicyState) -> None:
        """Makes a policy, NumPy leaves, the best one if its score is the highest. A recent return of few episodes does
        not count."""
        counts = self._evaluates or self.recent.total >= count_needed_episodes(self._group.agent.config)
        if counts and self.score > (-math.inf if self.best is None else self.best.score):
            self.best = BestPolicy(self.updates, self.score, "evaluation" if self._evaluates else "recent return")
            self.best_policy = policy_state

    def end(self, status: str, stop_reason: str = "", error: str = "") -> None:
        """Ends the run."""
        self.status, self.stop_reason, self.error = status, stop_reason, error

    def outcome(self, policy_state: PolicyState) -> RunOutcome:
        """Returns the result of the run.

        Args:
          policy_state: NumPy leaves.
        """
        if self._group.best_every and not self._evaluates and self.status != DIVERGED:
            self.offer(policy_state)
        return RunOutcome(
            status=self.status,
            stop_reason=self.stop_reason,
            error=self.error,
            updates=self.updates,
            episodes=self.recent.total,
            return_mean=self.recent.mean,
            return_std=self.recent.std,
            metrics=join_blocks(self.metrics),
            policy_state=policy_state,
            eval_return_mean=self.last_eval,
            best=self.best,
            best_policy_state=self.best_policy,
            copies=tuple(self.copies) if isinstance(self._group.selection, PBTConfig) else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the run's part of a checkpoint, without the best policy."""
        return {name: getattr(self, name) for name in _STATUS} | {"recent": self.recent.to_json()}

    def restore(self, content: dict[str, Any]) -> None:
        """Restores the result of `to_json`. The best policy is not part of it."""
        vars(self).update({name: content[name] for name in _STATUS})
        self.recent.restore(content["recent"])
        self.best = None if self.best is None else BestPolicy(*self.best)


class PopulationLogger:
    """Collects the metrics of the runs in a population."""

    def __init__(
        self, runs: list[RunLog], *, batch_size: int, update: int, seconds: float, progress: "SweepProgress"
    ) -> None:
        """
        Args:
          runs: in the program's order. Further runs of the program are padding.
          update: number of updates before.
          seconds: training seconds before.
          progress: receives the sums over all runs.
        """
        self.runs, self.seconds, self.reporter, self.batch_size = runs, seconds, progress.reporter, batch_size
        self.updates = update  # of the runs that have not ended
        self._progress = progress
        self._history = History(max(2, _HISTORY_ROWS // len(runs)))

    @property
    def active(self) -> np.ndarray:
        """Whether each run still trains, [R] bool."""
        return np.array([not run.status for run in self.runs])

    @property
    def finite(self) -> np.ndarray:
        """Whether each run has not diverged, [R] bool."""
        return np.array([run.status != DIVERGED for run in self.runs])

    def add(
        self, metrics: dict[str, np.ndarray], now: float, finish: Callable[[], dict[str, np.ndarray]] | None = None
    ) -> bool:
        """Logs metrics [R, updates]. Returns False if all runs have ended.

        Args:
          finish: handles the events after the last update and returns more metrics of it, [R] each.
        """
        before, columns = self.active, {name: column[: len(self.runs)] for name, column in metrics.items()}
        reached = columns.pop("reached", None)
        done = np.logical_and(before[:, None], np.logical_and.accumulate(columns.pop("finite"), axis=1))
        length, passed = done.shape[1], now - self.seconds
        number = self.updates + 1 + np.arange(length)
        rows: dict[str, np.ndarray] = {"update": number, "env_steps": number * self.batch_size}
        rows["time/elapsed"] = self.seconds + passed * np.arange(1, length + 1) / length
        self.updates, self.seconds = self.updates + length, now
        for index in np.flatnonzero(before).tolist():
            count, run = int(done[index].sum()), self.runs[index]
            own = {name: column[index, :count] for name, column in columns.items()}
            run.add({name: column[:count] for name, column in rows.items()} | own)
            if reached is not None and reached[index, :count].any():
                run.end(SOLVED)
            elif count < length:
                run.end(DIVERGED)
        rows |= self._columns(columns, done)
        for name, values in ({} if finish is None else finish()).items():
            rows[name] = np.full((length, len(values)), np.nan)
            rows[name][-1] = values
        self._history.add(rows)
        self._progress.add(int(done.sum()) * self.batch_size, passed, self.runs)
        return bool(self.active.any())

    def _columns(self, columns: dict[str, np.ndarray], done: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the logged metrics, [updates, R] each.

        Args:
          columns: metrics of the program, [R, updates] each.
          done: [R, updates] bool, False from the update on in which a run diverged or after which it stopped.
        """
        return {name: column.T for name, column in columns.items()}

    def finish(self) -> None:
        """Adds the metrics to `RunLog.metrics` of the runs, without those after the last update of a run."""
        columns = self._history.arrays()
        for index, run in enumerate(self.runs if columns else ()):
            good = columns["update"] <= run.updates
            own = {name: column if column.ndim == 1 else column[:, index] for name, column in columns.items()}
            run.metrics.append({name: column[good] for name, column in own.items()})


class SweepProgress:
    """Adds up the progress of all runs for display."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter, self.env_steps, self._best = reporter, 0, math.nan

    def add(self, env_steps: int, seconds: float, runs: list[RunLog]) -> None:
        """Adds environment steps that took `seconds`, and the recent mean returns of the runs."""
        self.env_steps += env_steps
        returns = [self._best, *(run.recent_return for run in runs)]
        self._best = max((x for x in returns if not math.isnan(x)), default=math.nan)
        self.reporter.update(self.env_steps, env_steps / max(seconds, 1e-9), self._best)


def rows_of(state: PyTree, index: int) -> PyTree:
    """Returns copies of the rows of one run in NumPy leaves [R, ...]."""
    return jax.tree.map(lambda x: np.array(x[index]), state)
