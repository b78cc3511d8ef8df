"""Learning curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jppo.runs import read_config, read_metrics

_POINTS = 200


class Curve(NamedTuple):
    """Mean and spread over the runs of one setting."""

    label: str
    runs: int
    x: dict[str, np.ndarray]  # "steps" and "seconds", [points] each
    mean: dict[str, np.ndarray]
    spread: dict[str, np.ndarray]  # std over runs; of a single run, over its episodes


def learning_curves(run_dirs: Sequence[Path]) -> list[Curve]:
    """Groups runs that differ only in their seed. Raises ValueError where one is no run or has no finished episode."""
    configs = [read_config(path) for path in run_dirs]
    settings = [_settings(config) for config in configs]
    keys = {key: None for setting in settings for key in setting}
    differing = [key for key in keys if len({repr(s.get(key)) for s in settings}) > 1]
    groups: dict[str, list[dict[str, np.ndarray]]] = {}
    for path, setting in zip(run_dirs, settings, strict=True):
        more = ", ".join(f"{key}={setting[key]}" for key in differing if key != "env" and key in setting)
        label = setting["env"] + (f" ({more})" if more else "")
        groups.setdefault(label, []).append(_with_episodes(path, read_metrics(path)))
    return [_curve(label, runs) for label, runs in groups.items()]


def plot(run_dirs: Sequence[Path], output: Path) -> None:
    """Draws episode return over steps and over wall time as a PNG, one line per setting with a band over its runs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if output.suffix.lower() != ".png":
        raise ValueError(f"output {output} must end in .png")
    curves = learning_curves(run_dirs)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
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
    try:
        figure.savefig(output, format="png", dpi=120)
    except OSError as error:
        raise ValueError(f"{output} cannot be written: {error.strerror or error}") from error


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """What tells two settings apart: everything but the seed and the versions."""
    nested = config["config"] | config["hyperparams"]
    return nested | {k: v for k, v in config.items() if k not in ("config", "hyperparams", "seed", "versions")}


def _with_episodes(path: Path, metrics: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    ended = metrics["episode/count"] > 0
    if not ended.any():
        raise ValueError(f"{path}: no episode ended in this run, so there is no return to plot")
    return {name: column[ended] for name, column in metrics.items()}


def _curve(label: str, runs: list[dict[str, np.ndarray]]) -> Curve:
    x, mean, spread = {}, {}, {}
    for axis, column in (("steps", "step"), ("seconds", "time/elapsed")):
        grid = np.linspace(max(r[column][0] for r in runs), min(r[column][-1] for r in runs), _POINTS)
        returns = np.array([_smooth(r, column, "episode/return_mean", grid) for r in runs])
        x[axis], mean[axis] = grid, returns.mean(axis=0)
        alone = len(runs) == 1
        spread[axis] = _smooth(runs[0], column, "episode/return_std", grid) if alone else returns.std(axis=0)
    return Curve(label, len(runs), x, mean, spread)


def _smooth(run: dict[str, np.ndarray], column: str, metric: str, grid: np.ndarray) -> np.ndarray:
    """Means weighted by episodes over windows of a fiftieth of the run, read at the grid's points, [points]."""
    weight = run["episode/count"]
    window = max(1, len(weight) // 50)
    kernel = np.ones(window)
    total = np.convolve(weight, kernel, "same")
    return np.interp(grid, run[column], np.convolve(weight * run[metric], kernel, "same") / total)
