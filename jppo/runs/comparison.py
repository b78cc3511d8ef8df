"""Compares the returns of runs with different settings."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jppo.runs.groups import RunGroup, format_value, group_runs
from jppo.runs.listing import RunState, read_run
from jppo.runs.statistics import bootstrap_interval, interquartile_mean


class SettingScore(NamedTuple):
    """The final returns of the runs of one setting. The score is their interquartile mean."""

    name: str  # A, B, ...
    group: RunGroup
    returns: np.ndarray  # [seeds], of the runs in which episodes ended
    statuses: dict[str, int]  # number of runs by status
    score: float
    interval: tuple[float, float] | None  # 95 % bootstrap interval of the score; None for fewer than two seeds


class Comparison(NamedTuple):
    """The settings of runs and their scores."""

    scores: list[SettingScore]
    notes: list[str]  # runs that are left out or not finished

    def rows(self, env: str) -> list[dict[str, str]]:
        """Returns the table of an environment: one row per setting, with the settings that differ between the rows."""
        scores = [score for score in self.scores if score.group.env == env]
        settings = [score.group.settings for score in scores]
        all_names = dict.fromkeys(name for one in settings for name in one)
        names = [name for name in all_names if len({repr(one.get(name)) for one in settings}) > 1]
        return [
            {"": score.name}
            | {name: format_value(score.group.settings.get(name, "-")) for name in names}
            | {
                "runs": ", ".join(f"{count} {status}" for status, count in score.statuses.items()),
                "return": f"{score.score:.1f}" if len(score.returns) else "-",
                "95 % interval": _show(score.interval) if score.interval else "-",
            }
            for score in scores
        ]

    def summary(self) -> dict[str, Any]:
        """Returns the content as JSON types."""
        scores = [
            {
                "name": one.name,
                "env": one.group.env,
                "settings": one.group.settings,
                "seeds": one.group.seeds,
                "runs": list(map(str, one.group.paths)),
                "statuses": one.statuses,
                "score": one.score,
                "interval": one.interval,
            }
            for one in self.scores
        ]
        return {"settings": scores, "notes": self.notes}


def compare(run_dirs: Sequence[Path]) -> Comparison:
    """Compares the final returns of runs. Raises ValueError if a directory contains no run or damaged files."""
    notes: list[str] = []
    groups = group_runs(list(dict.fromkeys(run_dirs)))
    return Comparison([_score(_letters(i), group, notes) for i, group in enumerate(groups)], notes)


def _score(name: str, group: RunGroup, notes: list[str]) -> SettingScore:
    by_seed: dict[int, RunState] = {}
    for state in sorted(map(read_run, group.paths), key=lambda state: state.modified, reverse=True):
        if state.seed in by_seed:
            notes.append(f"{state.path} is left out: {by_seed[state.seed].path} has the same settings and seed")
            continue
        by_seed[state.seed] = state
        if state.status != "finished":
            notes.append(f"{state.path} is {state.status} after {state.steps:,} of {state.total_steps:,} steps")
    states = [by_seed[seed] for seed in sorted(by_seed)]
    returns = np.array([state.return_mean for state in states if not np.isnan(state.return_mean)])
    interval = bootstrap_interval(returns[:, None]) if len(returns) > 1 else None
    return SettingScore(
        name=name,
        group=group._replace(paths=[state.path for state in states], seeds=[state.seed for state in states]),
        returns=returns,
        statuses=dict(Counter(state.status for state in states)),
        score=float(interquartile_mean(returns)) if len(returns) else np.nan,
        interval=interval and (float(interval[0][0]), float(interval[1][0])),
    )


def _show(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.1f} to {interval[1]:.1f}"


def _letters(number: int) -> str:
    """Returns A, ..., Z, AA, AB, ..."""
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)
