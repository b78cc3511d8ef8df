"""Keeps the metrics of a run in bounded memory."""

import math
from collections import deque
from typing import Any

import numpy as np

_CAPACITY = 1 << 16  # updates
_RECENT_EPISODES = 100


class RecentEpisodes:
    """Mean and standard deviation of the returns of about the last 100 episodes."""

    def __init__(self) -> None:
        self._updates: deque[tuple[float, float, float]] = deque()
        self._count = 0.0
        self.total = 0

    def add(self, count: float, mean: float, std: float) -> None:
        """Adds an update in which `count` episodes ended, with the mean and standard deviation of their returns."""
        if not count > 0:  # also if it is NaN
            return
        self.total += int(count)
        self._count += count
        self._updates.append((count, mean, std))
        while self._count - self._updates[0][0] >= _RECENT_EPISODES:
            self._count -= self._updates.popleft()[0]

    @property
    def mean(self) -> float:
        """Mean return; NaN before the first episode ends."""
        return sum(n * mean for n, mean, _ in self._updates) / self._count if self._count else math.nan

    @property
    def std(self) -> float:
        """Standard deviation of the returns (of the population); NaN before the first episode ends."""
        if not self._count:
            return math.nan
        overall = self.mean
        return math.sqrt(sum(n * (std**2 + (mean - overall) ** 2) for n, mean, std in self._updates) / self._count)


class History:
    """Stores the metrics of at most 65,536 updates.

    When it is full, it drops every second update and from then on stores only every second new one; metrics.jsonl has
    all of them.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity, self._stride, self._seen, self._length = capacity, 1, 0, 0
        self._columns: dict[str, np.ndarray] = {}  # longer than _length, so that appending is cheap

    def add(self, rows: dict[str, np.ndarray]) -> None:
        """Adds consecutive updates, as columns [updates, ...] of equal length. Missing metrics become NaN."""
        length = len(rows["update"])
        keep = (self._seen + np.arange(length)) % self._stride == 0
        self._seen += length
        start, self._length = self._length, self._length + int(keep.sum())
        capacity = len(self._columns.get("update", ()))
        if self._length > capacity or rows.keys() - self._columns.keys():
            capacity, names = max(capacity, 2 * self._length), dict.fromkeys([*self._columns, *rows])
            self._columns = {name: _grow(capacity, start, self._columns.get(name), rows.get(name)) for name in names}
        for name, column in self._columns.items():
            if name in rows:
                column[start : self._length] = rows[name][keep]
            else:
                self._columns[name] = column.astype(np.result_type(column, np.float32), copy=False)
                self._columns[name][start : self._length] = np.nan
        while self._length > self._capacity:
            self._columns = {name: column[::2].copy() for name, column in self.arrays().items()}
            self._stride, self._length = 2 * self._stride, len(self._columns["update"])

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns one array [updates, ...] per metric."""
        return {name: column[: self._length] for name, column in self._columns.items()}


def _grow(capacity: int, length: int, old: np.ndarray | None, added: np.ndarray | None) -> np.ndarray:
    """Returns a column of the given capacity whose first `length` values are `old`, or NaN if `old` is None."""
    like: Any = added if old is None else old
    starts_with_nan = old is None and length > 0
    column = np.empty((capacity, *like.shape[1:]), np.result_type(like, np.float32) if starts_with_nan else like.dtype)
    if length:
        column[:length] = np.nan if old is None else old[:length]
    return column
