"""Results of a sweep: scores of the settings, tables and pictures."""

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from jppo.config.checks import check_path
from jppo.errors import Refused
from jppo.runs.display import html_table, show_count
from jppo.runs.files import check_own_files
from jppo.runs.groups import format_value
from jppo.runs.plots import SettingCurves, draw_curves, draw_populations
from jppo.runs.statistics import bootstrap_interval, interquartile_mean
from jppo.runs.writer import delete_run
from jppo.sweeps.sweep_run import DIVERGED, FINISHED, INTERRUPTED, STATUSES, SweepRun, as_cell, to_columns
from jppo.training.history import join_blocks
from jppo.training.progress import short_path
from jppo.training.tables import print_table

_MAX_SETTINGS_SHOWN = 10
RUN_DIRS = "run_dirs"  # folder in the directory of a sweep


class SettingResult(NamedTuple):
    """The runs of one environment and one combination of settings; they differ in their seeds only."""

    env: str
    settings: dict[str, Any]
    runs: tuple[SweepRun, ...]

    @property
    def score(self) -> float:
        """Interquartile mean of the runs' scores over seeds. Runs stopped by successive halving count only if all
        runs were stopped."""
        return float(interquartile_mean(self._scores))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the score; NaN for a single run."""
        if len(self._scores) < 2:
            return np.nan, np.nan
        low, high = bootstrap_interval(self._scores[:, None])
        return float(low[0]), float(high[0])

    @property
    def best_run(self) -> SweepRun:
        """The run with the highest score."""
        return max(self.runs, key=lambda run: (run.is_complete, run.score))

    def label(self, names: Sequence[str]) -> str:
        """Returns name=value for each of the settings."""
        return ", ".join(f"{name}={format_value(self.settings[name])}" for name in names)

    @property
    def _scores(self) -> np.ndarray:
        complete = [run.score for run in self.runs if run.is_complete]
        return np.array(complete or [run.score for run in self.runs])

    @property
    def _rank(self) -> tuple[bool, float]:
        """Orders settings with complete runs above settings that successive halving stopped."""
        return any(run.is_complete for run in self.runs), self.score


class SweepResult:
    """The result of a sweep.

    Attributes:
      runs: all trained runs, ordered by environment, settings and seed.
      swept: names of the settings with several values.
      sweep_dir: directory of the sweep, or None.
      not_started: number of runs that did not start because the sweep was interrupted.
    """

    def __init__(
        self, runs: Sequence[SweepRun], swept: Sequence[str], sweep_dir: Path | None = None, not_started: int = 0
    ) -> None:
        self.runs, self.swept, self.sweep_dir, self.not_started = tuple(runs), tuple(swept), sweep_dir, not_started

    def __repr__(self) -> str:
        return f"SweepResult(status={self.status!r}, runs={len(self.runs)}, settings={len(self.settings)})"

    def _repr_html_(self) -> str:
        rows = [
            {"env": one.env, "setting": one.label(self.swept), "runs": len(one.runs), "score": one.score}
            for one in sorted(self.settings, key=lambda one: -one.score)[:_MAX_SETTINGS_SHOWN]
        ]
        return html_table(repr(self), *rows)

    def run(self, number: int) -> SweepRun:
        """Returns the run with this number. Raises ValueError if it does not exist."""
        for run in self.runs:
            if run.number == number:
                return run
        raise Refused(f"run {number} does not exist; the runs are {', '.join(str(run.number) for run in self.runs)}")

    @property
    def envs(self) -> list[str]:
        """Names of the environments."""
        return list(dict.fromkeys(run.env for run in self.runs))

    @property
    def settings(self) -> list[SettingResult]:
        """Runs grouped by environment and settings, in order.

        With population-based training, each run is a group, and its settings are the last values.
        """
        if self.is_population:
            return [
                SettingResult(env=run.env, settings=run.settings | run.last_values, runs=(run,)) for run in self.runs
            ]
        found: dict[Any, list[SweepRun]] = {}
        for run in self.runs:
            found.setdefault((run.env, repr(run.settings)), []).append(run)
        return [SettingResult(env=same[0].env, settings=same[0].settings, runs=tuple(same)) for same in found.values()]

    def ranked(self, env: str) -> list[SettingResult]:
        """Returns the settings of an environment, best first."""
        return sorted((x for x in self.settings if x.env == env), key=lambda x: x._rank, reverse=True)

    def best(self, env: str | None = None) -> SettingResult:
        """Returns the setting with the highest score.

        Args:
          env: name of the environment; required if the sweep has several.

        Raises:
          ValueError: the environment is missing or unknown, or no run was trained.
        """
        if not self.runs:
            raise Refused("the sweep has no runs")
        if env is None and len(self.envs) > 1:
            raise Refused(f"the sweep has several environments; name one of {', '.join(self.envs)}")
        if env not in (None, *self.envs):
            raise Refused(f"the sweep has no run in {env!r}; its environments are {', '.join(self.envs)}")
        return self.ranked(env or self.envs[0])[0]

    @property
    def is_population(self) -> bool:
        """Whether population-based training trained the runs."""
        return any(run.copies is not None for run in self.runs)

    @property
    def copies(self) -> list[dict[str, Any]]:
        """The copies of population-based training in the order of updates: environment, update, number of the replaced
        run, number of the copied run ("source"), and the new hyperparameters."""
        rows = []
        for run in self.runs:
            for update, source in run.copies or ():
                after = np.searchsorted(run.metrics["update"], update, "right")
                is_known = after < len(run.metrics["update"])  # not if the run diverged or ended before its next update
                values = {
                    x: float(run.metrics[f"hyperparams/{x}"][after]) if is_known else np.nan for x in run.last_values
                }
                rows.append({"env": run.env, "update": update, "run": run.number, "source": source} | values)
        return sorted(rows, key=lambda row: row["update"])

    @property
    def status(self) -> str:
        """interrupted if a run was interrupted or not started, diverged if all runs diverged, otherwise finished."""
        statuses = {run.status for run in self.runs}
        if INTERRUPTED in statuses or self.not_started or not statuses:
            return INTERRUPTED
        return DIVERGED if statuses == {DIVERGED} else FINISHED

    def summary(self) -> dict[str, Any]:
        """Returns the status, the number of runs by status, and the best setting of each environment."""
        counts = {name: sum(run.status == name for run in self.runs) for name in STATUSES}
        best = {}
        for env in self.envs:
            setting = self.best(env)
            best[env] = {
                "settings": setting.settings,
                "score": setting.score,
                "interval": setting.interval,
                "runs": [run.number for run in setting.runs],
                "best_run": setting.best_run.number,
            }
        directory = None if self.sweep_dir is None else str(self.sweep_dir)
        counts["not_started"] = self.not_started
        return {"status": self.status, "runs": counts, "best": best, "sweep_dir": directory}

    @property
    def table(self) -> dict[str, np.ndarray]:
        """One row per run, as columns [runs]; `pandas.DataFrame(result.table)` accepts it."""
        columns = to_columns([run.row for run in self.runs])
        return {name: np.array([as_cell(value) for value in column]) for name, column in columns.items()}

    def tidy(self) -> dict[str, np.ndarray]:
        """Returns one row per run and update, as columns: run, env, seed, the settings and all metrics.

        A metric with the name of a setting is called "metric/...", for example the current learning rate.
        """
        blocks = []
        for run in self.runs:
            length = len(run.metrics["update"])
            fixed = {"run": run.number, "env": run.env, "seed": run.seed} | run.settings
            named = {f"metric/{name}" if name in fixed else name: column for name, column in run.metrics.items()}
            blocks.append({name: np.full(length, as_cell(value)) for name, value in fixed.items()} | named)
        return join_blocks(blocks) if blocks else {}

    def plot(self, path: str | Path) -> None:
        """Draws learning curves as a PNG: one panel per environment, with the ten best settings.

        Each curve is the interquartile mean over seeds with its 95 % bootstrap interval. A run that reached
        stop_at_return continues with its last value. Other runs that ended earlier than those of the same setting are
        left out. With population-based training, the picture shows the return and
        the changed hyperparameters of every run.

        Raises:
          ValueError: no episode has ended.
        """
        path = check_path("path", path)
        if self.is_population and any(run.episodes for run in self.runs):
            populations = {env: [run for run in self.runs if run.env == env and run.updates] for env in self.envs}
            curves = {env: [(run.metrics, run.return_mean) for run in runs] for env, runs in populations.items()}
            return draw_populations(curves, list(self.runs[0].last_values), path)
        panels: dict[str, list[SettingCurves]] = {}
        for env in self.envs:
            for setting in self.ranked(env):
                longest = max(run.updates for run in setting.runs)
                whole = [run for run in setting.runs if run.updates == longest or run.ended_early]
                metrics = [run.metrics for run in whole if run.episodes]
                diverged = sum(run.status == DIVERGED for run in setting.runs)
                label = (setting.label(self.swept) or "return") + (f" ({diverged} diverged)" if diverged else "")
                if metrics:
                    panels.setdefault(env, []).append(SettingCurves(label, metrics))
        if not panels:
            raise Refused("no episode ended in this sweep, so there is no return to plot")
        draw_curves(panels, path)

    def write_run_dirs(self) -> None:
        """Writes a run directory below sweep_dir/run_dirs for each run that was not interrupted and has none yet.

        Its name starts with the number of the run. If the sweep has more runs than before, directories are renamed.

        Raises:
          ValueError: the sweep has no sweep_dir, or a file cannot be written.
        """
        if self.sweep_dir is None:
            raise Refused("run directories need a sweep_dir")
        folder, digits = self.sweep_dir / RUN_DIRS, len(str(max((run.number for run in self.runs), default=0)))
        for run in self.runs:
            path = folder / f"{run.number:0{digits}}-{run.name}"
            if (existing := next(folder.glob(f"*{glob.escape(run.name)}"), path)) != path:
                existing.rename(path)
            if run.status != INTERRUPTED and not (path / "summary.json").exists():
                check_own_files(folder, (), (path.name,))
                delete_run(path)  # left by a crash
                run.save(path)


def print_settings(result: SweepResult, stream: TextIO) -> None:
    """Prints the best settings of each environment as a table, and the location of the files."""
    if not result.runs:
        print("interrupted before the first update", file=stream)
    for env in result.envs:
        settings = result.ranked(env)
        hidden, kind = len(settings) > _MAX_SETTINGS_SHOWN, "runs" if result.is_population else "settings"
        title = f"{env}, best {_MAX_SETTINGS_SHOWN} of {len(settings)} {kind}" if hidden else env
        make_row = _run_row if result.is_population else _setting_row
        evaluated = any(run.eval_return_mean is not None for setting in settings for run in setting.runs)
        rows = [make_row(setting, result.swept, evaluated) for setting in settings[:_MAX_SETTINGS_SHOWN]]
        print_table(title, rows, stream)
    if result.not_started:
        print(f"{show_count(result.not_started, 'run')} did not start", file=stream)
    if result.sweep_dir is not None and result.runs:
        files = ", ".join(path.name for path in sorted(result.sweep_dir.iterdir()) if path.suffix in (".csv", ".png"))
        print(f"saved in {short_path(result.sweep_dir)}: {files}", file=stream)


def _setting_row(setting: SettingResult, swept: Sequence[str], evaluated: bool) -> dict[str, str]:
    """Returns the cells of a setting by column title."""
    low, high = setting.interval
    counts = {name: sum(run.status == name for run in setting.runs) for name in STATUSES}
    return {
        **{name: format_value(setting.settings[name]) for name in swept},
        "return": f"{setting.score:.1f}",
        "95 % interval": "-" if np.isnan(low) else f"{low:.1f} to {high:.1f}",
        **_evaluation_cell(setting, evaluated),
        "runs": ", ".join(f"{count} {name}" for name, count in counts.items() if count),
        "best run": str(setting.best_run.number),
    }


def _run_row(setting: SettingResult, swept: Sequence[str], evaluated: bool) -> dict[str, str]:
    """Returns the cells of a run of population-based training by column title."""
    (run,) = setting.runs
    return {
        "run": str(run.number),
        **{f"last {name}": format_value(setting.settings[name]) for name in swept},
        "return": f"{setting.score:.1f}",
        **_evaluation_cell(setting, evaluated),
        "status": run.status,
        "replaced": show_count(len(run.copies or ()), "time"),
    }


def _evaluation_cell(setting: SettingResult, evaluated: bool) -> dict[str, str]:
    """Returns the mean of the runs' last evaluations; no cell if the sweep has no evaluations."""
    means = [run.eval_return_mean for run in setting.runs if run.eval_return_mean is not None]
    return {"evaluation": f"{np.mean(means):.1f}" if means else "-"} if evaluated else {}
