"""The metrics of a run in memory that does not grow with its length."""

import math
from collections import deque
from typing import Any

import numpy as np

_CAPACITY = 1 << 16
_RECENT_EPISODES = 100


class RecentEpisodes:
    """Returns of about the last hundred episodes, from per-update counts, means and standard deviations."""

    def __init__(self) -> None:
        self._updates: deque[tuple[float, float, float]] = deque()
        self._count = 0.0
        self.total = 0

    def add(self, count: float, mean: float, std: float) -> None:
        """Adds an update in which `count` episodes ended; NaN counts as none."""
        if not count > 0:
            return
        self.total += int(count)
        self._count += count
        self._updates.append((count, mean, std))
        while self._count - self._updates[0][0] >= _RECENT_EPISODES:
            self._count -= self._updates.popleft()[0]

    @property
    def mean(self) -> float:
        """NaN while no episode has ended."""
        return sum(n * mean for n, mean, _ in self._updates) / self._count if self._count else math.nan

    @property
    def std(self) -> float:
        """Population standard deviation; NaN while no episode has ended."""
        if not self._count:
            return math.nan
        centre = self.mean
        return math.sqrt(sum(n * (std**2 + (mean - centre) ** 2) for n, mean, std in self._updates) / self._count)


class History:
    """Keeps at most 65,536 updates: when full, every other one is dropped, and from then on only every other one of
    those to come is kept (metrics.jsonl has them all)."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity, self._stride, self._seen, self._kept = capacity, 1, 0, 0
        self._columns: dict[str, np.ndarray] = {}  # with room for more than `_kept`

    def add(self, rows: dict[str, np.ndarray]) -> None:
        """Adds consecutive updates: columns [updates, ...] of equal length. Where names come or go, NaN is what is not
        there."""
        length = len(rows["update"])
        keep = (self._seen + np.arange(length)) % self._stride == 0
        self._seen += length
        start, self._kept = self._kept, self._kept + int(keep.sum())
        room = len(self._columns.get("update", ()))
        if self._kept > room or rows.keys() - self._columns.keys():
            room, names = max(room, 2 * self._kept), dict.fromkeys([*self._columns, *rows])
            self._columns = {name: _with_room(room, start, self._columns.get(name), rows.get(name)) for name in names}
        for name, column in self._columns.items():
            if name in rows:
                column[start : self._kept] = rows[name][keep]
            else:
                self._columns[name] = column.astype(np.result_type(column, np.float32), copy=False)
                self._columns[name][start : self._kept] = np.nan
        while self._kept > self._capacity:
            self._columns = {name: column[::2].copy() for name, column in self.arrays().items()}
            self._stride, self._kept = 2 * self._stride, len(self._columns["update"])

    def arrays(self) -> dict[str, np.ndarray]:
        """One array [updates, ...] per metric."""
        return {name: column[: self._kept] for name, column in self._columns.items()}


def _with_room(room: int, kept: int, old: np.ndarray | None, added: np.ndarray | None) -> np.ndarray:
    """A column with room for more, of which the first `kept` are `old`, or NaN where there is none."""
    like: Any = added if old is None else old
    late = old is None and kept
    column = np.empty((room, *like.shape[1:]), np.result_type(like, np.float32) if late else like.dtype)
    if kept:
        column[:kept] = np.nan if old is None else old[:kept]
    return column
