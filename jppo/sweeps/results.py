"""What a sweep gives back: its lanes, a table of them, the best setting, and files of each."""

import csv
import json
import os
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jppo.config.ppo import Hyperparams
from jppo.ppo.anakin import Anakin
from jppo.ppo.types import PolicyState
from jppo.runs import run_dir as runs
from jppo.runs.plots import SettingCurves, bootstrap_interval, draw_curves, draw_heat_map, interquartile_mean
from jppo.runs.policy import TrainedPolicy
from jppo.runs.writer import RunWriter

_ROWS_AT_ONCE = 200  # points that TensorBoard shows of a lane
STATES = FINISHED, DIVERGED, STOPPED, INTERRUPTED = "finished", "diverged", "stopped", "interrupted"
_MOST_SHOWN = 10


class Lane(NamedTuple):
    """One run of a sweep."""

    number: int
    env: str
    seed: int
    settings: dict[str, Any]  # those that the sweep set
    status: str  # finished, diverged, stopped (by halving) or interrupted
    updates: int
    episodes: int
    return_mean: float  # of about the last hundred episodes; NaN where none ended
    return_std: float
    metrics: dict[str, np.ndarray]  # [updates] each
    policy_state: PolicyState  # leaves of NumPy
    hyperparams: Hyperparams
    agent: Anakin
    own: tuple[str, ...]  # which of environment, network, optimizer and loss are the user's own
    name: str  # of its files: what it is, hashed

    @property
    def steps(self) -> int:
        """Environment steps made."""
        return self.updates * self.agent.config.batch_size

    @property
    def policy(self) -> TrainedPolicy:
        """Acts on NumPy observations."""
        return TrainedPolicy(self.agent.policy, self.policy_state)

    @property
    def score(self) -> float:
        """return_mean, and minus infinity for a run that diverged or saw no episode end."""
        return -np.inf if self.status == DIVERGED or np.isnan(self.return_mean) else self.return_mean

    def save(self, run_dir: str | Path) -> None:
        """Writes a run directory like `jppo.train`'s, for `jppo eval`, `plot` and `play`."""
        summary = {"env": self.env, "backend": "anakin", "steps": self.steps} | {
            name: getattr(self, name) for name in ("status", "updates", "episodes", "return_mean", "return_std")
        }
        total_steps = self.agent.num_updates * self.agent.config.batch_size
        settings = (total_steps, self.agent.config, self.hyperparams)
        config = runs.run_config(self.env, "anakin", self.seed, *settings) | dict.fromkeys(self.own, "custom")
        writer = RunWriter(Path(run_dir), config)
        values = zip(*(column.tolist() for column in self.metrics.values()), strict=True)
        rows = [dict(zip(self.metrics, row, strict=True)) for row in values]
        stride = max(1, len(rows) // _ROWS_AT_ONCE)
        for first in range(0, len(rows), stride):
            writer.write_updates(rows[first : first + stride])
        if unsaved := writer.close(self.policy_state, summary):
            (Path(run_dir) / "summary.json").unlink(missing_ok=True)  # so that it is written again
            raise ValueError(f"{run_dir} could not be written: it has no {', '.join(unsaved)}")


class Setting(NamedTuple):
    """The lanes that differ only in their seed."""

    env: str
    settings: dict[str, Any]
    lanes: tuple[Lane, ...]

    @property
    def score(self) -> float:
        """Interquartile mean over seeds of what the lanes scored; where halving ended some, of those that ran to the
        end."""
        return float(interquartile_mean(self._scores))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of that mean; NaN for a single lane."""
        if len(self._scores) < 2:
            return np.nan, np.nan
        low, high = bootstrap_interval(self._scores[:, None])
        return float(low[0]), float(high[0])

    @property
    def _scores(self) -> np.ndarray:
        whole = [lane.score for lane in self.lanes if lane.status != STOPPED]
        return np.array(whole or [lane.score for lane in self.lanes])

    @property
    def best_lane(self) -> Lane:
        """That of the highest score."""
        return max(self.lanes, key=lambda lane: (lane.status != STOPPED, lane.score))

    def label(self, names: Sequence[str]) -> str:
        """name=value of these settings."""
        return ", ".join(f"{name}={show(self.settings[name])}" for name in names)


class SweepResult:
    """The lanes of a sweep.

    Attributes:
      lanes: in the order of environments, settings and seeds.
      swept: the names of the settings that have several values.
      missing: how many lanes an interrupt kept from beginning.
    """

    def __init__(
        self, lanes: Sequence[Lane], swept: Sequence[str], sweep_dir: Path | None = None, missing: int = 0
    ) -> None:
        self.lanes, self.swept, self.sweep_dir, self.missing = tuple(lanes), tuple(swept), sweep_dir, missing

    def lane(self, index: int) -> Lane:
        """The lane of this number, as the table has it. Raises ValueError where there is none."""
        for lane in self.lanes:
            if lane.number == index:
                return lane
        raise ValueError(f"there is no lane {index}; there are {', '.join(str(lane.number) for lane in self.lanes)}")

    @property
    def settings(self) -> list[Setting]:
        """Lanes by setting, in order."""
        found: dict[Any, list[Lane]] = {}
        for lane in self.lanes:
            found.setdefault((lane.env, repr(lane.settings)), []).append(lane)
        return [Setting(lanes[0].env, lanes[0].settings, tuple(lanes)) for lanes in found.values()]

    def best(self, env: str | None = None) -> Setting:
        """The setting of the highest score. Raises ValueError where it is not said in which of several environments."""
        envs = list(dict.fromkeys(lane.env for lane in self.lanes))
        if env is None and len(envs) > 1:
            raise ValueError(f"name the environment: {', '.join(envs)}")
        among = [setting for setting in self.settings if env in (None, setting.env)]
        if not among:
            raise ValueError(f"no lane was run in {env!r}; there are {', '.join(envs)}" if env else "no lane was run")
        return max(among, key=_rank)

    @property
    def status(self) -> str:
        """interrupted where a lane was or is missing, diverged where all did, else finished."""
        states = {lane.status for lane in self.lanes}
        return (
            INTERRUPTED
            if INTERRUPTED in states or self.missing or not states
            else DIVERGED
            if states == {DIVERGED}
            else FINISHED
        )

    def summary(self) -> dict[str, Any]:
        """The best setting of each environment, and where everything is."""
        counts = {name: sum(lane.status == name for lane in self.lanes) for name in STATES} | {"missing": self.missing}
        best = {env: self.best(env) for env in dict.fromkeys(lane.env for lane in self.lanes)}
        shown = {
            env: {"settings": setting.settings, "score": setting.score, "interval": setting.interval}
            | {"lanes": [lane.number for lane in setting.lanes], "best_lane": setting.best_lane.number}
            for env, setting in best.items()
        }
        directory = None if self.sweep_dir is None else str(self.sweep_dir)
        return {"status": self.status, "lanes": counts, "best": shown, "sweep_dir": directory}

    def write_run_dirs(self) -> None:
        """A run directory for each lane that has ended, under sweep_dir/runs, where it is not there yet, named like the
        lane's file. Raises ValueError for a sweep without a directory."""
        if self.sweep_dir is None:
            raise ValueError("run directories need a sweep_dir")
        for lane in self.lanes:
            path = self.sweep_dir / "runs" / lane.name
            if not (path / "summary.json").exists() and lane.status != INTERRUPTED:
                shutil.rmtree(path, ignore_errors=True)  # what a crash left
                lane.save(path)

    @property
    def table(self) -> dict[str, np.ndarray]:
        """A row per lane, as columns [lanes]; `pandas.DataFrame(result.table)` takes it as it is."""
        return _columns([_row(lane) for lane in self.lanes])

    def tidy(self) -> dict[str, np.ndarray]:
        """A row per lane and update, as columns: lane, env, seed, the settings, and every metric (one that has a
        setting's name as "metric/...": the annealed learning rate)."""
        rows: dict[str, list[np.ndarray]] = {}
        for lane in self.lanes:
            length = len(lane.metrics.get("update", ()))
            fixed = {"lane": lane.number, "env": lane.env, "seed": lane.seed} | lane.settings
            for name, value in fixed.items():
                shown = value if isinstance(value, int | float | str) else show(value)
                rows.setdefault(name, []).append(np.full(length, shown))
            for name, column in lane.metrics.items():
                rows.setdefault(f"metric/{name}" if name in fixed else name, []).append(column)
        return {name: np.concatenate(parts) for name, parts in rows.items()}

    def write_table(self, path: Path) -> None:
        """The table as CSV; the file appears when it is complete."""
        rows = [_row(lane) for lane in self.lanes]
        temporary = path.with_name(path.name + ".tmp")
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows({name: show(value) for name, value in row.items()} for row in rows)
        os.replace(temporary, path)

    def plot(self, path: str | Path) -> None:
        """Learning curves as a PNG: a panel per environment, and per setting (the ten best ones) the interquartile mean
        over seeds (those that got furthest) and its 95 % bootstrap interval. Raises ValueError where no episode has
        ended."""
        panels: dict[str, list[SettingCurves]] = {}
        for setting in sorted(self.settings, key=_rank, reverse=True):
            longest = max(lane.updates for lane in setting.lanes)
            whole = [lane.metrics for lane in setting.lanes if lane.updates == longest and lane.episodes]
            diverged = sum(lane.status == DIVERGED for lane in setting.lanes)
            label = setting.label(self.swept) or "return"
            label += f" ({diverged} diverged)" if diverged else ""
            if whole:
                panels.setdefault(setting.env, []).append(SettingCurves(label, whole))
        if not panels:
            raise ValueError("no episode ended in this sweep, so there is no return to plot")
        draw_curves(panels, Path(path))

    def plot_heat_map(self, path: str | Path) -> None:
        """Score by the two settings that were swept, as a PNG. Raises ValueError where they are not two."""
        if len(self.swept) != 2:
            raise ValueError(f"a heat map is of two settings; swept were {len(self.swept)}: {', '.join(self.swept)}")
        first, second = self.swept
        panels = {}
        for env in dict.fromkeys(lane.env for lane in self.lanes):
            scores = {
                (show(setting.settings[second]), show(setting.settings[first])): setting.score
                for setting in self.settings
                if setting.env == env
            }
            rows, columns = (list(dict.fromkeys(key[i] for key in scores)) for i in (0, 1))
            panels[env] = (rows, columns, np.array([[scores.get((r, c), np.nan) for c in columns] for r in rows]))
        draw_heat_map(panels, second, first, Path(path))


def write_lane(path: Path, lane: Lane, described: dict[str, Any]) -> None:
    """One file of arrays without pickle; it appears when it is complete."""
    known = {name: getattr(lane, name) for name in ("status", "updates", "episodes", "return_mean", "return_std")}
    leaves = jax.tree.leaves(lane.policy_state)
    arrays = {f"policy/{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
    arrays |= {f"metrics/{name}": column for name, column in lane.metrics.items()}
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        np.savez(file, allow_pickle=False, about=json.dumps(runs.jsonable(described | known)), **arrays)
    os.replace(temporary, path)


def read_lane(path: Path, agent: Anakin) -> dict[str, Any]:
    """The fields of a Lane that `write_lane` wrote. Raises ValueError where the file is damaged."""
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            metrics = {name.removeprefix("metrics/"): file[name] for name in file.files if name.startswith("metrics/")}
            leaves = [file[f"policy/{i}"] for i in range(sum(name.startswith("policy/") for name in file.files))]
        like = jax.eval_shape(agent.init, jax.random.key(0), Hyperparams()).train.policy
        if [(x.shape, x.dtype) for x in leaves] != [(x.shape, x.dtype) for x in jax.tree.leaves(like)]:
            raise ValueError("its policy has other shapes")
        policy_state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        known = {name: about[name] for name in ("status", "updates", "episodes", "return_mean", "return_std")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it to run this lane again") from None
    nan = {name: np.nan for name in ("return_mean", "return_std") if known[name] is None}
    return known | nan | {"metrics": metrics, "policy_state": policy_state}


def show(value: Any) -> str:
    """A setting's value in a table or a label."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def print_settings(result: SweepResult, stream: TextIO) -> None:
    """The best settings of each environment as a table, and where the rest is."""
    if not result.lanes:
        print("interrupted before a lane had made an update", file=stream)
    for env in dict.fromkeys(lane.env for lane in result.lanes):
        settings = sorted((s for s in result.settings if s.env == env), key=_rank, reverse=True)
        shown = f", best {_MOST_SHOWN} of {len(settings)} settings" if len(settings) > _MOST_SHOWN else ""
        table = Table(*result.swept, "return", "95 % interval", "lanes", "best lane", title=f"{env}{shown}")
        for setting in settings[:_MOST_SHOWN]:
            low, high = setting.interval
            states = {name: sum(lane.status == name for lane in setting.lanes) for name in STATES}
            table.add_row(
                *(show(setting.settings[name]) for name in result.swept),
                *(f"{setting.score:.1f}", "-" if np.isnan(low) else f"{low:.1f} to {high:.1f}"),
                ", ".join(f"{count} {name}" for name, count in states.items() if count),
                str(setting.best_lane.number),
            )
        Console(file=stream).print(table)
    if result.missing:
        print(f"{result.missing} lanes were not begun", file=stream)
    if result.sweep_dir is not None:
        files = ", ".join(path.name for path in sorted(result.sweep_dir.iterdir()) if path.suffix in (".csv", ".png"))
        print(f"saved in {result.sweep_dir}: {files}", file=stream)


def _row(lane: Lane) -> dict[str, Any]:
    row = {"lane": lane.number, "env": lane.env, "seed": lane.seed} | lane.settings
    return row | {
        name: getattr(lane, name) for name in ("status", "updates", "steps", "episodes", "return_mean", "return_std")
    }


def _columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    names = rows[0] if rows else {}
    return {
        name: np.array([row[name] if isinstance(row[name], int | float | str) else show(row[name]) for row in rows])
        for name in names
    }


def _rank(setting: Setting) -> tuple[bool, float]:
    """Settings with a lane that ran to the end come before those that halving ended."""
    return any(lane.status != STOPPED for lane in setting.lanes), setting.score
