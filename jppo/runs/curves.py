"""Means and bands of metrics over the runs of each setting."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jppo.config.checks import did_you_mean
from jppo.errors import Refused
from jppo.runs.groups import group_runs
from jppo.runs.run_dir import read_metrics

RETURN = "episode/return_mean"
X_AXES = {"steps": ("env_steps", 1.0), "minutes": ("time/elapsed", 1.0 / 60.0)}  # column of the metrics, unit
POINTS = 200
_REQUIRED = ("update", "env_steps", "time/elapsed", "episode/count")

Metrics = dict[str, np.ndarray]  # [updates] each


class GroupMetrics(NamedTuple):
    """The metrics of the runs of one setting."""

    env: str
    settings: str  # those that differ from other groups, as text
    names: list[str]  # of the runs, for error messages
    runs: list[Metrics]

    @property
    def label(self) -> str:
        """The environment and the settings."""
        return self.env + (f" ({self.settings})" if self.settings else "")


class Curve(NamedTuple):
    """Mean and spread of a metric over the runs of one setting."""

    num_runs: int
    x: np.ndarray  # [points], environment steps or minutes
    mean: np.ndarray  # [points]
    spread: np.ndarray  # [points], std over runs; of the return of a single run, over its episodes


def read_groups(run_dirs: Sequence[Path]) -> list[GroupMetrics]:
    """Returns the metrics of runs, grouped by setting. Raises ValueError if a run is missing or damaged."""
    groups = []
    for group in group_runs(run_dirs):
        runs = [read_metrics(path) for path in group.paths]
        for path, metrics in zip(group.paths, runs, strict=True):
            if missing := [name for name in _REQUIRED if name not in metrics]:
                raise Refused(f"{path}/metrics.jsonl is damaged: it has no {', '.join(missing)}")
        names = list(map(str, group.paths))
        groups.append(GroupMetrics(env=group.env, settings=group.label, names=names, runs=runs))
    return groups


def make_curve(group: GroupMetrics, metric: str = RETURN, x: str = "steps") -> Curve:
    """Returns the curve of a metric, where all runs of the group have values.

    Args:
      x: a key of X_AXES.

    Raises:
      ValueError: a run does not have the metric, or has no value of it.
    """
    column, unit = X_AXES[x]
    runs = [_with_values(name, run, metric) for name, run in zip(group.names, group.runs, strict=True)]
    grid = np.linspace(max(run[column][0] for run in runs), min(run[column][-1] for run in runs), POINTS)
    values = np.array([smooth(run, column, metric, grid) for run in runs])
    spread = values.std(axis=0)
    if len(runs) == 1 and metric == RETURN and "episode/return_std" in runs[0]:
        spread = smooth(runs[0], column, "episode/return_std", grid)
    return Curve(num_runs=len(runs), x=unit * grid, mean=values.mean(axis=0), spread=spread)


def _with_values(name: str, metrics: Metrics, metric: str) -> Metrics:
    """Returns the metrics of the updates in which a metric has a value."""
    if metric not in metrics:
        raise Refused(f"{name} has no metric {metric!r}; {did_you_mean(metric, metrics)}")
    kept = with_episodes(metrics) if metric.startswith("episode/") else metrics
    found = np.isfinite(kept[metric].astype(float))
    if not found.any():
        what = "no episode ended in this run" if metric.startswith("episode/") else "this metric has no value"
        raise Refused(f"{name}: {what}, so there is no {metric} to plot")
    return {key: column[found] for key, column in kept.items()}


def with_episodes(metrics: Metrics) -> Metrics:
    """Returns the metrics of the updates in which episodes ended."""
    ended = metrics["episode/count"] > 0
    return {name: column[ended] for name, column in metrics.items()}


def smooth(run: Metrics, column: str, metric: str, grid: np.ndarray) -> np.ndarray:
    """Returns means over windows of a fiftieth of the run, at the grid's points, [points]. Metrics of episodes are
    weighted by the number of episodes."""
    weight = run["episode/count"] if metric.startswith("episode/") else np.ones(len(run[metric]))
    kernel = np.ones(max(1, len(weight) // 50))
    total = np.convolve(weight, kernel, "same")
    return np.interp(grid, run[column], np.convolve(weight * run[metric], kernel, "same") / total)
