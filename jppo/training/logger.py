"""Logs the metrics of updates: keeps them in memory, writes them to the run directory and shows the progress."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jppo.envs.spaces import PyTree
from jppo.runs.checkpoints import Checkpoint, Checkpoints
from jppo.runs.run_dir import metrics_until
from jppo.runs.writer import RunWriter
from jppo.training.history import History, RecentEpisodes
from jppo.training.hooks import RunHooks
from jppo.training.line_means import LineMeans
from jppo.training.progress import Reporter

_EPISODES = ("count", "return_mean", "return_std")


class Logger:
    """Keeps, writes and shows the metrics of a run. Both modes use it."""

    def __init__(
        self,
        batch_size: int,
        writer: RunWriter | None,
        reporter: Reporter,
        hooks: RunHooks | None = None,
        log_every: int = 1,
        event_every: int = 1,
    ) -> None:
        """
        Args:
          log_every: number of updates in each line of metrics.jsonl and each entry of the history.
          event_every: number of updates in `event_means`.
        """
        self.batch_size, self.writer, self.reporter, self._hooks = batch_size, writer, reporter, hooks
        self.history, self.recent = History(), RecentEpisodes()
        self._means, self._event_means = LineMeans(log_every), LineMeans(event_every)
        self.event_means: dict[str, float] = {}  # metrics of the last `event_every` updates, see `LineMeans`
        self.updates, self.seconds = 0, 0.0

    def restore(self, run_dir: Path, start: Checkpoint) -> None:
        """Restores the log of a resumed run up to its checkpoint."""
        self.updates, self.seconds, lines = start.update, start.seconds, 0
        self.recent.restore(start.log["recent"])
        self._event_means.partial = start.log["event"]  # a callback gets the same metrics as without a resume
        for rows in metrics_until(run_dir, self.updates):
            self.history.add(rows)
            lines += len(rows["update"])
        if lines < (expected := start.update // self._means.every):
            self.info(f"metrics.jsonl has only {lines} of the {expected} lines before the checkpoint")

    def save(
        self, checkpoints: Checkpoints, state: PyTree, counts: dict[str, int], ended: dict[str, Any] | None = None
    ) -> None:
        """Saves a checkpoint after the last logged update.

        Args:
          counts: counters of the training loop.
          ended: `Monitor.end_to_json`.
        """
        log = {"event": dict(self._event_means.partial), "recent": self.recent.to_json(), "ended": ended}
        checkpoints.save(self.updates, self.seconds, counts, state, log)

    def finish(self) -> None:
        """Logs the updates after the last complete line."""
        self._write(self._means.finish())

    def _write(self, lines: dict[str, np.ndarray]) -> None:
        if not len(lines["update"]):
            return
        self.history.add(lines)
        if self.writer is not None:
            self.writer.write_updates(_to_rows(lines))

    def info(self, text: str) -> None:
        """Shows a message once: only the first process passes it to its reporter."""
        if not jax.process_index():
            self.reporter.message(text)

    @property
    def steps(self) -> int:
        """Number of environment steps logged so far."""
        return self.updates * self.batch_size

    def add(
        self, metrics: dict[str, np.ndarray], now: float, finish: Callable[[], dict[str, float]] | None = None
    ) -> bool:
        """Logs consecutive updates.

        Args:
          metrics: columns [updates]. The first update whose "finite" is False and all later ones are not logged.
          now: training time at the end of the last update, in seconds.
          finish: is called if all updates were finite, and returns more metrics of the last update.

        Returns:
          whether all updates were finite.
        """
        metrics = dict(metrics)
        finite = metrics.pop("finite")
        length = len(finite)
        good = length if finite.all() else int(np.argmin(finite))
        speed = length * self.batch_size / max(now - self.seconds, 1e-9)
        number = self.updates + 1 + np.arange(good)
        rows: dict[str, np.ndarray] = {"update": number, "env_steps": number * self.batch_size}
        rows |= {name: column[:good] for name, column in metrics.items()}
        rows["time/steps_per_second"] = np.full(good, speed)
        rows["time/elapsed"] = self.seconds + (now - self.seconds) * np.arange(1, good + 1) / length
        self.updates, self.seconds = self.updates + good, now
        if good:
            returns = self._add_episodes(rows)
            lines = self._event_means.add(rows)
            if finish is not None:
                self.event_means = {name: column[-1].item() for name, column in lines.items() if len(column)}
            more = finish() if finish is not None and good == length else {}
            if more:
                self._write(self._means.add({name: column[:-1] for name, column in rows.items()}))
                last = {name: column[-1:] for name, column in rows.items()}
                self._write(self._means.add(last | {name: np.array([value]) for name, value in more.items()}))
            else:
                self._write(self._means.add(rows))
            if self._hooks is not None:
                updates = _to_rows(rows | {"return_mean": returns})
                self._hooks.on_updates([*updates[:-1], updates[-1] | more])
            self.reporter.update(self.steps, speed, self.recent.mean)
        return bool(finite.all())

    def _add_episodes(self, rows: dict[str, np.ndarray]) -> np.ndarray:
        """Adds the episodes of consecutive updates. Returns the mean return of the recent episodes after each."""
        nothing = np.full(len(rows["update"]), np.nan)
        means = []
        for episodes in zip(*(rows.get(f"episode/{name}", nothing).tolist() for name in _EPISODES), strict=True):
            self.recent.add(*episodes)
            means.append(self.recent.mean)
        return np.array(means)


def _to_rows(columns: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    values_by_row = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values_by_row]


class LoopResult(NamedTuple):
    """The reason why a training loop ended."""

    status: str  # finished, solved, stopped, interrupted, diverged or failed
    error: Exception | None = None  # if the status is failed
    reason: str = ""  # if the status is stopped
