"""The metrics of a run in memory that does not grow with its length."""

import math
from collections import deque

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
        """Adds an update in which `count` episodes ended."""
        if not count:
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
        self._capacity, self._stride, self._seen = capacity, 1, 0
        self._columns: dict[str, list[float]] = {}

    def add(self, rows: dict[str, np.ndarray]) -> None:
        """Adds consecutive updates: columns of equal length, with the same names at every call."""
        length = len(rows["update"])
        keep = (self._seen + np.arange(length)) % self._stride == 0
        self._seen += length
        for name, column in rows.items():
            self._columns.setdefault(name, []).extend(column[keep].tolist())
        while len(self._columns["update"]) > self._capacity:
            self._columns = {name: column[::2] for name, column in self._columns.items()}
            self._stride *= 2

    def arrays(self) -> dict[str, np.ndarray]:
        """One array over updates per metric."""
        return {name: np.array(column) for name, column in self._columns.items()}
