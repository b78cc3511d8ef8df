"""Plots learning curves, heat maps and bar charts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jppo.runs.groups import group_runs
from jppo.runs.run_dir import check_output, read_metrics
from jppo.runs.statistics import bootstrap_interval, interquartile_mean

_POINTS = 200
_MOST_CURVES = 10
_FEW = 3  # points do not make a line
_PLOTTED = ("env_steps", "time/elapsed", "episode/count", "episode/return_mean", "episode/return_std")


class Curve(NamedTuple):
    """Mean and spread over the runs of one setting."""

    label: str
    runs: int
    x: dict[str, np.ndarray]  # "steps" and "seconds", [points] each
    mean: dict[str, np.ndarray]
    spread: dict[str, np.ndarray]  # std over runs; of a single run, over its episodes


def learning_curves(run_dirs: Sequence[Path]) -> list[Curve]:
    """Returns one curve per setting. Raises ValueError if a run is missing or finished no episode."""
    return [
        _curve(group.label, [_with_episodes(path, read_metrics(path)) for path in group.paths])
        for group in group_runs(run_dirs)
    ]


def plot(run_dirs: Sequence[Path], output: Path) -> None:
    """Draws episode return over steps and over wall time as a PNG, one line per setting with a band over its runs."""
    check_output(output, ".png")
    curves = learning_curves(run_dirs)
    figure = _new_figure(11, 4.5)
    for axes, (axis, title) in zip(
        figure.subplots(1, 2, sharey=True),
        (("steps", "environment steps"), ("seconds", "wall time without compiling (s)")),
        strict=True,
    ):
        for curve in curves:
            runs = f"{curve.runs} runs" if curve.runs > 1 else "1 run"
            (line,) = axes.plot(curve.x[axis], curve.mean[axis], label=f"{curve.label}: {runs}")
            low, high = (curve.mean[axis] + sign * curve.spread[axis] for sign in (-1, 1))
            axes.fill_between(curve.x[axis], low, high, alpha=0.2, color=line.get_color(), linewidth=0)
        axes.set_xlabel(title)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("episode return (mean, band: 1 std)")
    figure.axes[0].legend(loc="best", fontsize="small")
    _save(figure, output)


class SettingCurves(NamedTuple):
    """The metrics of the runs with one setting."""

    label: str
    metrics: list[dict[str, np.ndarray]]  # of each run, [updates] each


def draw_curves(panels: dict[str, list[SettingCurves]], output: Path) -> None:
    """Draws learning curves, one panel per environment, and writes a PNG.

    A curve is the interquartile mean of the return over the runs of a setting, with its 95 % bootstrap interval, over
    environment steps. Settings come best first; the first ten are drawn.
    """
    figure = _new_figure(6.0 * len(panels), 4.5)
    for axes, (env, settings) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for curves in settings[:_MOST_CURVES]:
            runs = [_ended(metrics) for metrics in curves.metrics]
            grid = np.linspace(min(r["env_steps"][0] for r in runs), max(r["env_steps"][-1] for r in runs), _POINTS)
            returns = np.array([_smooth(r, "env_steps", "episode/return_mean", grid) for r in runs])
            marker = "o" if min(len(r["env_steps"]) for r in runs) < _FEW else None
            (line,) = axes.plot(
                grid, interquartile_mean(returns), marker=marker, markevery=_POINTS - 1, label=curves.label
            )
            axes.fill_between(grid, *bootstrap_interval(returns), alpha=0.2, color=line.get_color(), linewidth=0)
        most = max(len(curves.metrics) for curves in settings)
        left_out = f", best {_MOST_CURVES} of {len(settings)} settings" if len(settings) > _MOST_CURVES else ""
        axes.set_title(f"{env} ({most} seed{'s' if most > 1 else ''}{left_out})")
        axes.set_xlabel("environment steps")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize="small", frameon=False)
    figure.axes[0].set_ylabel("episode return (interquartile mean, 95 % interval)")
    _save(figure, output)


def draw_heat_map(
    panels: dict[str, tuple[list[str], list[str], np.ndarray]], row_name: str, column_name: str, output: Path
) -> None:
    """Draws the score [rows, columns] of each pair of values of two settings, one panel per environment."""
    widest = max(len(columns) for _, columns, _ in panels.values())
    tallest = max(len(rows) for rows, _, _ in panels.values())
    figure = _new_figure(len(panels) * (2.2 + 0.9 * widest), 1.6 + 0.6 * tallest)
    for axes, (env, (rows, columns, scores)) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        finite = np.where(np.isfinite(scores), scores, np.nan)
        image = axes.imshow(finite, aspect="auto", cmap="viridis")
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.set(title=env, xlabel=column_name, ylabel=row_name)
        middle = np.nanmean([np.nanmin(finite), np.nanmax(finite)]) if np.isfinite(finite).any() else 0.0
        for (row, column), score in np.ndenumerate(scores):
            shown = f"{score:.4g}" if np.isfinite(score) else "-"
            axes.text(
                column,
                row,
                shown,
                ha="center",
                va="center",
                color="white" if score <= middle and np.isfinite(score) else "black",
            )
        figure.colorbar(image, ax=axes, label="return (interquartile mean)")
    _save(figure, output)


def draw_bars(
    title: str, values: Mapping[str, float], labels: Mapping[str, str], axis_label: str, output: Path
) -> None:
    """Draws one horizontal bar per value, from zero, and writes a PNG.

    Args:
      values: length of each bar by name, from top to bottom.
      labels: text at the end of each bar.
      axis_label: name and unit of the length.
    """
    figure = _new_figure(8, 1.4 + 0.4 * len(values))
    figure.suptitle(title)
    axes = figure.subplots()
    bars = axes.barh(list(values), list(values.values()), color="C0")
    axes.bar_label(bars, [labels[name] for name in values], padding=4)
    axes.set(xlim=(0.0, 1.3 * max(values.values())), xlabel=axis_label)
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
    _save(figure, output)


def _with_episodes(path: Path, metrics: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if missing := [name for name in _PLOTTED if name not in metrics]:
        raise ValueError(f"{path}/metrics.jsonl is damaged: it has no {', '.join(missing)}")
    ended = _ended(metrics)
    if not len(ended["env_steps"]):
        raise ValueError(f"{path}: no episode ended in this run, so there is no return to plot")
    return ended


def _ended(metrics: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the metrics of the updates in which episodes ended."""
    ended = metrics["episode/count"] > 0
    return {name: column[ended] for name, column in metrics.items()}


def _curve(label: str, runs: list[dict[str, np.ndarray]]) -> Curve:
    x, mean, spread = {}, {}, {}
    for axis, column in (("steps", "env_steps"), ("seconds", "time/elapsed")):
        grid = np.linspace(max(r[column][0] for r in runs), min(r[column][-1] for r in runs), _POINTS)
        returns = np.array([_smooth(r, column, "episode/return_mean", grid) for r in runs])
        x[axis], mean[axis] = grid, returns.mean(axis=0)
        alone = len(runs) == 1
        spread[axis] = _smooth(runs[0], column, "episode/return_std", grid) if alone else returns.std(axis=0)
    return Curve(label, len(runs), x, mean, spread)


def _smooth(run: dict[str, np.ndarray], column: str, metric: str, grid: np.ndarray) -> np.ndarray:
    """Returns means weighted by episodes over windows of a fiftieth of the run, at the grid's points, [points]."""
    weight = run["episode/count"]
    window = max(1, len(weight) // 50)
    kernel = np.ones(window)
    total = np.convolve(weight, kernel, "same")
    return np.interp(grid, run[column], np.convolve(weight * run[metric], kernel, "same") / total)


def _new_figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, output: Path) -> None:
    check_output(output, ".png")
    try:
        figure.savefig(output, format="png", dpi=120)
    except OSError as error:
        raise ValueError(f"{output} cannot be written: {error.strerror or error}") from error


def format_steps(number: float) -> str:
    """Returns a number of steps with three significant digits, for example 583k or 1.53M."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.0f}"
