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
        self._capacity, self._stride, self._seen, self._kept = capacity, 1, 0, 0
        self._parts: list[dict[str, np.ndarray]] = []

    def add(self, rows: dict[str, np.ndarray]) -> None:
        """Adds consecutive updates: columns [updates, ...] of equal length, with the same names at every call."""
        length = len(rows["update"])
        keep = (self._seen + np.arange(length)) % self._stride == 0
        self._seen += length
        self._kept += int(keep.sum())
        self._parts.append({name: column[keep] for name, column in rows.items()})
        while self._kept > self._capacity:
            self._parts = [{name: column[::2] for name, column in self.arrays().items()}]
            self._stride, self._kept = 2 * self._stride, len(self._parts[0]["update"])

    def arrays(self) -> dict[str, np.ndarray]:
        """One array [updates, ...] per metric."""
        if len(self._parts) > 1:
            names = self._parts[0]
            self._parts = [{name: np.concatenate([part[name] for part in self._parts]) for name in names}]
        return dict(self._parts[0]) if self._parts else {}
