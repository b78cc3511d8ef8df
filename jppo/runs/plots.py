"""Plots learning curves and bar charts."""

import io
import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jppo.config.checks import check_choice
from jppo.errors import Refused
from jppo.runs.curves import POINTS, RETURN, X_AXES, Curve, GroupMetrics, make_curve, read_groups, smooth, with_episodes
from jppo.runs.run_dir import check_output, write_output
from jppo.runs.statistics import bootstrap_interval, interquartile_mean

_MOST_CURVES = 10
_FEW = 3  # points do not make a line
_LETTER = 0.075  # mean width of a letter of the legend in inches
_X_LABELS = {"steps": "environment steps", "minutes": "minutes without compiling"}
_LOG_RATIO = 5  # of the largest to the smallest value, from which an axis is logarithmic
_NAMES = {RETURN: "episode return", "time/steps_per_second": "environment steps per second"}


def plot(run_dirs: Sequence[Path], output: Path, *, metrics: Sequence[str] = (RETURN,), x: str = "steps") -> None:
    """Draws metrics of runs as a PNG, one line per setting with a band over its runs.

    Args:
      metrics: names in metrics.jsonl; each gets a panel.
      x: "steps" or "minutes" (without compiling).

    Raises:
      ValueError: a run is missing or damaged, or does not have a metric, or the output cannot be written.
    """
    check_output(output, ".png")
    write_output(output, draw_metrics(read_groups(run_dirs), metrics, x), ".png")


def draw_metrics(groups: Sequence[GroupMetrics], metrics: Sequence[str] = (RETURN,), x: str = "steps") -> bytes:
    """Returns a PNG with one panel per metric. Arguments and errors: see `plot`."""
    check_choice("x", x, X_AXES)
    if isinstance(metrics, str):
        raise Refused(f"metrics = {metrics!r} must be a list of names, such as [{metrics!r}]")
    if not metrics:
        raise Refused(f"metrics is empty; name at least one, for example {RETURN}")
    envs = {group.env for group in groups}
    num_columns = min(len(metrics), 2)
    num_rows = -(-len(metrics) // num_columns)
    names = [group.settings or group.env if len(envs) == 1 else group.label for group in groups]
    labels = [
        textwrap.fill(f"{name}: {len(group.runs)} run{'s' * (len(group.runs) != 1)}", 80)
        for name, group in zip(names, groups, strict=True)
    ]
    longest = max(len(line) for label in labels for line in label.splitlines())
    width = 6.6 * num_columns
    legend_columns = int(np.clip(width // (0.6 + _LETTER * longest), 1, len(labels)))
    figure = _new_figure(width, 3.6 * num_rows + 0.7 + 0.2 * -(-len(labels) // legend_columns))
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for panel, metric in zip(axes, metrics, strict=False):
        for number, group in enumerate(groups):
            _draw_curve(panel, make_curve(group, metric, x), number)
        _format_x_axis(panel, x)
        panel.set_ylabel(_NAMES.get(metric, metric), parse_math=False)
    for panel in axes[len(metrics) :]:
        panel.remove()
    figure.suptitle(", ".join(envs) if len(envs) == 1 else None, parse_math=False)
    legend = figure.legend(
        axes[0].lines,
        labels,
        loc="outside lower center",
        ncols=legend_columns,
        title="mean, band: 1 standard deviation over runs (of one run: over episodes)",
        title_fontsize="small",
        fontsize="small",
        frameon=False,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may contain dollar signs
    return _to_png(figure)


def _draw_curve(panel: Any, curve: Curve, number: int) -> None:
    """Draws a line and its band. Ten colours are easy to tell apart, so the next ten lines are dashed."""
    color, style = f"C{number % 10}", ("-", "--", ":", "-.")[number // 10 % 4]
    marker = "o" if curve.x[0] == curve.x[-1] else None  # a point does not make a line
    panel.plot(curve.x, curve.mean, style, color=color, marker=marker)
    low, high = curve.mean - curve.spread, curve.mean + curve.spread
    panel.fill_between(curve.x, low, high, alpha=0.2, color=color, linewidth=0)


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
            runs = [with_episodes(metrics) for metrics in curves.metrics]
            grid = np.linspace(min(r["env_steps"][0] for r in runs), max(r["env_steps"][-1] for r in runs), POINTS)
            returns = np.array([smooth(r, "env_steps", "episode/return_mean", grid) for r in runs])
            marker = "o" if min(len(r["env_steps"]) for r in runs) < _FEW else None
            (line,) = axes.plot(
                grid, interquartile_mean(returns), marker=marker, markevery=POINTS - 1, label=curves.label
            )
            axes.fill_between(grid, *bootstrap_interval(returns), alpha=0.2, color=line.get_color(), linewidth=0)
        most = max(len(curves.metrics) for curves in settings)
        left_out = f", best {_MOST_CURVES} of {len(settings)} settings" if len(settings) > _MOST_CURVES else ""
        axes.set_title(f"{env} ({most} seed{'s' if most > 1 else ''}{left_out})")
        _format_x_axis(axes)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize="small", frameon=False)
    figure.axes[0].set_ylabel("episode return (interquartile mean, 95 % interval)")
    _save(figure, output)


def draw_populations(
    panels: dict[str, list[tuple[dict[str, np.ndarray], float]]], hyperparams: Sequence[str], output: Path
) -> None:
    """Draws the return and hyperparameters of every run over environment steps, and writes a PNG.

    Args:
      panels: metrics [updates] and final return of each run, by environment; each environment is a row of panels.
      hyperparams: names of hyperparameters with the metrics hyperparams/NAME; each is a column of panels.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    columns = 1 + len(hyperparams)
    figure = _new_figure(1.0 + 4.5 * columns, 4.0 * len(panels))
    for row, (env, runs) in zip(figure.subplots(len(panels), columns, squeeze=False), panels.items(), strict=True):
        finals = [final for _, final in runs if np.isfinite(final)]
        colors = ScalarMappable(Normalize(min(finals, default=0.0), max(finals, default=1.0)), colormaps["viridis_r"])
        for metrics, final in sorted(runs, key=lambda run: np.nan_to_num(run[1], nan=-np.inf)):  # best runs on top
            color, ended = colors.to_rgba(np.array(final)), with_episodes(metrics)
            if len(ended["env_steps"]):
                steps = ended["env_steps"]
                row[0].plot(steps, smooth(ended, "env_steps", "episode/return_mean", steps), color=color, lw=1.2)
            for axes, name in zip(row[1:], hyperparams, strict=True):
                _draw_steps(axes, metrics["env_steps"], metrics[f"hyperparams/{name}"], color)
        for axes, name in zip(row, ("episode return", *hyperparams), strict=True):
            axes.set_title(name)
            _format_x_axis(axes)
        for axes, name in zip(row[1:], hyperparams, strict=True):
            values = np.concatenate([metrics[f"hyperparams/{name}"] for metrics, _ in runs])
            if values.min() > 0.0 and values.max() > _LOG_RATIO * values.min():
                axes.set_yscale("log")
        row[0].set_ylabel(env)
        figure.colorbar(colors, ax=row[-1], label="final return of the run")
    _save(figure, output)


def _draw_steps(axes: Any, x: np.ndarray, y: np.ndarray, color: Any) -> None:
    """Draws a piecewise constant function with faint jumps."""
    changes = np.flatnonzero(np.diff(y)) + 1
    axes.step(x, y, color=color, lw=0.5, alpha=0.4, where="pre")
    for start, end in itertools.pairwise((0, *changes, len(y))):
        axes.plot([x[max(0, start - 1)], x[end - 1]], [y[start]] * 2, color=color, lw=1.8)


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


def _format_x_axis(axes: Any, x: str = "steps") -> None:
    axes.set_xlabel(_X_LABELS[x])
    if x == "steps":
        axes.xaxis.set_major_formatter(lambda value, _: format_steps(value))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)


def _new_figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, output: Path) -> None:
    write_output(output, _to_png(figure), ".png")


def _to_png(figure: Any) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()


def format_steps(number: float) -> str:
    """Returns a number of steps with three significant digits, for example 583k, 1.53M or 1G."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * limit:  # which rounds to the limit
            return f"{number / limit:.3g}{unit}"
    return f"{number:.0f}"
