"""Logs the metrics of updates: keeps them in memory, writes them to the run directory and shows the progress."""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np

from jppo.errors import ActorsFailed
from jppo.runs.writer import RunWriter
from jppo.training.history import History, RecentEpisodes
from jppo.training.hooks import RunHooks
from jppo.training.progress import Reporter

_EPISODES = ("count", "return_mean", "return_std")


class Logger:
    """Keeps, writes and shows the metrics of a run. Both modes use it."""

    def __init__(
        self, batch_size: int, writer: RunWriter | None, reporter: Reporter, hooks: RunHooks | None = None
    ) -> None:
        self.batch_size, self.writer, self.reporter, self._hooks = batch_size, writer, reporter, hooks
        self.history, self.recent = History(), RecentEpisodes()
        self.updates, self.seconds = 0, 0.0

    def restore(self, blocks: Iterable[dict[str, np.ndarray]], updates: int, seconds: float) -> None:
        """Restores the log of a resumed run.

        Args:
          blocks: the metrics of consecutive updates, columns [updates].
          updates, seconds: updates and training time before the checkpoint.
        """
        self.updates, self.seconds, read = updates, seconds, 0
        for rows in blocks:
            self._remember(rows)
            read += len(rows["update"])
        if read < updates:
            self.info(f"metrics.jsonl has only {read} of the {updates} updates before the checkpoint")

    def truncate_after(self) -> None:
        """Removes the metrics that a resumed run wrote after its checkpoint."""
        if self.writer is not None:
            self.writer.truncate_after(self.updates, self.steps)

    def _remember(self, rows: dict[str, np.ndarray]) -> None:
        self.history.add(rows)
        nothing = np.full(len(rows["update"]), np.nan)
        for episodes in zip(*(rows.get(f"episode/{name}", nothing).tolist() for name in _EPISODES), strict=True):
            self.recent.add(*episodes)

    def info(self, text: str) -> None:
        """Shows a message once: only the first process passes it to its reporter."""
        if not jax.process_index():
            self.reporter.message(text)

    @property
    def steps(self) -> int:
        """Number of environment steps logged so far."""
        return self.updates * self.batch_size

    def add(self, metrics: dict[str, np.ndarray], now: float) -> bool:
        """Logs consecutive updates.

        Args:
          metrics: columns [updates]. The first update whose "finite" is False and all later ones are not logged.
          now: training time at the end of the last update, in seconds.

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
            self._remember(rows)
            if self.writer is not None or self._hooks is not None:
                values_by_row = zip(*(column.tolist() for column in rows.values()), strict=True)
                listed = [dict(zip(rows, row, strict=True)) for row in values_by_row]
                if self.writer is not None:
                    self.writer.write_updates(listed)
                if self._hooks is not None:
                    self._hooks.on_updates(listed)
            self.reporter.update(int(rows["env_steps"][-1]), speed, self.recent.mean)
        return bool(finite.all())


class LoopResult(NamedTuple):
    """The reason why a training loop ended."""

    status: str  # finished, interrupted, diverged or failed
    error: ActorsFailed | None = None  # if the status is failed
