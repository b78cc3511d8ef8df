"""Finds the runs in a folder and reads their state."""

import math
import os
import time
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from jppo.errors import Refused
from jppo.runs.files import open_file
from jppo.runs.groups import changed_settings
from jppo.runs.load import read_summary
from jppo.runs.run_dir import parse_row, read_config
from jppo.runs.writer import is_written

_RUN_FILES = ("config.json", "metrics.jsonl")
_TAIL_BYTES = 1 << 16  # of metrics.jsonl; contains about the last hundred updates
_RECENT_EPISODES = 100


class RunState(NamedTuple):
    """The settings and the result of a run so far."""

    path: Path
    env: str
    seed: int
    changes: dict[str, Any]  # settings that differ from the preset of the environment
    status: str  # that of `LoopResult`, running or killed
    steps: int
    total_steps: int
    return_mean: float  # over about the last 100 episodes; NaN if no episode ended
    modified: float  # seconds since the epoch


def find_runs(folder: Path) -> list[RunState | ValueError]:
    """Returns the runs below a folder, in the order of their paths; for a damaged run, the error.

    Raises:
      ValueError: the folder does not exist.
    """
    if not os.path.isdir(folder):
        raise Refused(f"there is no folder {folder}; name the folder of your runs: jppo runs FOLDER")
    found: list[RunState | ValueError] = []
    for path, names, files in os.walk(folder):
        names.sort()
        if any(name in files for name in _RUN_FILES):
            names.clear()  # a run contains no other runs
            try:
                found.append(read_run(Path(path)))
            except ValueError as error:
                found.append(error)
    return found


def read_run(path: Path) -> RunState:
    """Returns the state of a run. Raises ValueError if the directory contains no run or damaged files."""
    config = read_config(path)
    rows, summary = _last_rows(path / "metrics.jsonl"), read_summary(path)
    returns = summary.get("return_mean", _recent_return(rows))
    steps = summary.get("steps", rows[-1].get("env_steps") if rows else 0)
    return RunState(
        path=path,
        env=config["env"],
        seed=config["seed"],
        changes=changed_settings(config, path),
        status="running" if is_written(path) else str(summary.get("status", "killed")),
        steps=steps if isinstance(steps, int) else 0,
        total_steps=config["total_steps"],
        return_mean=float(returns) if isinstance(returns, int | float) else math.nan,
        modified=max(file.stat().st_mtime for file in map(path.joinpath, _RUN_FILES) if file.exists()),
    )


def _last_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the last lines of metrics.jsonl. Raises ValueError if they are damaged or the file is missing."""
    try:
        start = max(0, path.stat().st_size - _TAIL_BYTES)
        with open_file(path) as file:
            file.seek(start)
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        raise Refused(f"{path.parent} is not a run directory: it has no metrics.jsonl") from None
    rows = [parse_row(line) for line in (lines[1:] if start else lines)]  # the first one may be incomplete
    if None in rows:
        raise Refused(f"{path} is damaged")
    return cast(list[dict[str, Any]], rows)


def _recent_return(rows: list[dict[str, Any]]) -> float:
    """Returns the mean return of about the last 100 episodes; NaN if no episode ended."""
    counts, means = [], []
    for row in reversed(rows):
        count, mean = row.get("episode/count"), row.get("episode/return_mean")
        if isinstance(count, int | float) and isinstance(mean, int | float) and count > 0:
            counts.append(count)
            means.append(mean)
        if sum(counts) >= _RECENT_EPISODES:
            break
    return float(np.average(means, weights=counts)) if counts else math.nan


def format_age(modified: float) -> str:
    """Returns the time since a file was modified in the largest whole unit, for example 3 min."""
    seconds = max(0, int(time.time() - modified))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
