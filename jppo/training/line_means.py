"""Averages the metrics of several updates for one line of metrics.jsonl."""

import math
from typing import Any

import numpy as np

_LAST = ("update", "env_steps", "time/elapsed", "actors/lost_fragments", "actors/restarts")
_COUNT, _MEAN, _STD = "episode/count", "episode/return_mean", "episode/return_std"


class LineMeans:
    """Combines the metrics of `every` consecutive updates.

    Lines end at updates that are multiples of `every`, so they do not depend on chunks. A line has the sum of
    episode/count; the mean of each other metric over its updates, without NaN; for episode/*, the statistics of all its
    episodes; and the last value of a quantity that only grows, such as env_steps.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.partial: dict[str, list[float]] = {}  # [sum, weight] of each metric since the last line

    def add(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Adds consecutive updates, as columns [updates], and returns the complete lines as columns [lines]."""
        if self.every == 1:
            return rows
        lines, start = [], 0
        for end in (np.flatnonzero(rows["update"] % self.every == 0) + 1).tolist():
            self._accumulate({name: column[start:end] for name, column in rows.items()})
            lines.append(self._take_line())
            start = end
        self._accumulate({name: column[start:] for name, column in rows.items()})
        return _to_columns(lines)

    def finish(self) -> dict[str, np.ndarray]:
        """Returns the incomplete line at the end of a run as columns [0 or 1]."""
        return _to_columns([self._take_line()] if self.partial else [])

    def _accumulate(self, rows: dict[str, np.ndarray]) -> None:
        if not len(rows["update"]):
            return
        episodes = np.nan_to_num(rows[_COUNT]) if _COUNT in rows else 0.0
        for name, column in rows.items():
            values = column.astype(np.float64)
            if name in _LAST:
                self.partial[name] = [float(values[-1]), 1.0]
                continue
            if name == _STD:
                values = values**2 + rows[_MEAN].astype(np.float64) ** 2
            by_episode = name.startswith("episode/") and name != _COUNT
            weights = np.where(np.isnan(values), 0.0, episodes if by_episode else 1.0)
            total, weight = self.partial.get(name, (0.0, 0.0))
            with np.errstate(invalid="ignore"):  # the mean of inf and -inf is NaN
                # cumsum adds one value after the other, so that the rounding does not depend on the chunks.
                total = np.cumsum([total, *np.where(weights > 0.0, weights * values, 0.0)])[-1]
            self.partial[name] = [float(total), weight + float(weights.sum())]

    def _take_line(self) -> dict[str, float]:
        line: dict[str, float] = {}
        for name, (total, weight) in self.partial.items():
            line[name] = total if name == _COUNT else total / weight if weight else math.nan
        if _STD in line:
            line[_STD] = math.sqrt(max(line[_STD] - line[_MEAN] ** 2, 0.0)) if line.get(_COUNT) else math.nan
        self.partial = {}
        return line


def _to_columns(lines: list[dict[str, float]]) -> dict[str, np.ndarray]:
    whole: Any = {"update": np.int64, "env_steps": np.int64}
    names = dict.fromkeys(name for line in lines for name in line) or ["update"]
    return {name: np.array([line.get(name, math.nan) for line in lines], whole.get(name)) for name in names}
