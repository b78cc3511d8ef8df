"""Keeps the metrics of a run in bounded memory."""

import math
from collections import deque
from typing import Any

import numpy as np

from jppo.training.return_target import RECENT_EPISODES

_CAPACITY = 1 << 16  # updates
_MAX_BLOCKS = 256  # limits the memory for blocks of a single update


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
        while self._count - self._updates[0][0] >= RECENT_EPISODES:
            self._count -= self._updates.popleft()[0]

    def copy(self, total: int) -> "RecentEpisodes":
        """Returns a copy with another total number of episodes."""
        copied = RecentEpisodes()
        copied._updates, copied._count, copied.total = self._updates.copy(), self._count, total
        return copied

    @property
    def updates(self) -> list[tuple[float, float, float]]:
        """The number of episodes, the mean and the standard deviation of each update, oldest first."""
        return list(self._updates)

    def to_json(self) -> dict[str, Any]:
        """Returns the content as JSON."""
        return {"updates": self.updates, "total": self.total}

    def restore(self, content: dict[str, Any]) -> None:
        """Restores the result of `to_json`."""
        self._updates = deque((float(n), float(mean), float(std)) for n, mean, std in content["updates"])
        self._count, self.total = sum(n for n, _, _ in self._updates), int(content["total"])

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

    When it is full, it drops every second update and from then on stores only every second new one, except for the
    first: 1, 2, 4, 6, ..., then 1, 4, 8, 12, ... Events that happen in every k-th update are in these as often as in
    the others. metrics.jsonl has all updates.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        """
        Args:
          capacity: maximum number of rows; at least 2.
        """
        self._capacity, self._stride = capacity, 1
        self._first: int | None = None  # number of the first update, which is always stored
        self._blocks: list[dict[str, np.ndarray]] = []

    def add(self, rows: dict[str, np.ndarray]) -> None:
        """Adds consecutive updates, as columns [updates, ...] of equal length. Missing metrics become NaN."""
        if self._first is None and len(rows["update"]):
            self._first = int(rows["update"][0])
        self._blocks.append(self._thin_out(rows))
        while sum(len(block["update"]) for block in self._blocks) > self._capacity:
            self._stride *= 2
            self._blocks = [self._thin_out(self.arrays())]
        if len(self._blocks) > _MAX_BLOCKS:
            self.arrays()

    def _thin_out(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the rows that the history stores."""
        is_stored = np.logical_or(rows["update"] % self._stride == 0, rows["update"] == self._first)
        return {name: column[is_stored] for name, column in rows.items()}

    def restore(self, arrays: dict[str, np.ndarray], updates: int) -> None:
        """Restores a history of the updates 1, ..., `updates` with the same capacity from its `arrays()`."""
        self._blocks, self._first = [arrays], 1
        while updates // self._stride + (self._stride > 1) > self._capacity:
            self._stride *= 2

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns one array [updates, ...] per metric. Joins the blocks into one."""
        if len(self._blocks) > 1:
            self._blocks = [join_blocks(self._blocks)]
        return self._blocks[0] if self._blocks else {}


def join_blocks(blocks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Joins metrics of consecutive updates, as columns [updates, ...]. Missing metrics become NaN."""
    examples = {name: column for block in blocks for name, column in block.items()}
    parts = {
        name: [block[name] if name in block else _nan(block, like) for block in blocks]
        for name, like in examples.items()
    }
    return {name: np.concatenate(columns) for name, columns in parts.items()}


def _nan(block: dict[str, np.ndarray], like: np.ndarray) -> np.ndarray:
    """Returns the column of a metric that a block does not have."""
    return np.full((len(block["update"]), *like.shape[1:]), np.nan, np.float32)
