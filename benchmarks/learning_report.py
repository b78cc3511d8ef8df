"""Tables and picture of docs/learning.md, from the results of learning.py."""

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from learning_tasks import MEMORY, TASKS, Task
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from jppo.runs.statistics import bootstrap_interval, interquartile_mean

_BINS = 50
_COLUMNS = 4
_PICTURE = Path(__file__).parents[1] / "docs" / "images" / "learning.png"
_ALMOST = 0.999  # of a task's steps


def bin_returns(metrics: dict[str, np.ndarray]) -> list[list[float | None]]:
    """Returns each seed's mean return of the episodes that ended in each of at most 50 parts of a run; None if none
    ended.

    Args:
      metrics: "episode/count" and "episode/return_mean", [seeds, updates].
    """
    count, mean = (np.asarray(metrics[f"episode/{name}"], np.float64) for name in ("count", "return_mean"))
    bins = min(_BINS, count.shape[1])
    parts = zip(np.array_split(count, bins, axis=1), np.array_split(np.nan_to_num(mean), bins, axis=1), strict=True)
    sums = [(counts.sum(axis=1), (counts * means).sum(axis=1)) for counts, means in parts]
    return [
        [round(float(total[seed] / number[seed]), 3) if number[seed] else None for number, total in sums]
        for seed in range(len(count))
    ]


def _plus_minus(part: dict[str, Any]) -> str:
    std = "" if part["std"] is None else f" ± {part['std']:.1f}"
    return f"{part['mean']:.1f}{std}"


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [
        "| environment | published | source | score, IQM | 95 % interval | greedy | steps | seeds | minutes | preset | "
        "options of learning.py |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for label, task in TASKS.items():
        if label not in rows:
            continue
        row = rows[label]
        scores = np.array(row["score"]["per_seed"])
        low, high = bootstrap_interval(scores)
        name = row["env"] + (", Ray" if row["backend"] == "ray" else "")
        steps = f"{row['steps']:,}"
        if is_reduced(task, row):
            steps += f" ({100 * row['steps'] / task.total_steps:.2g} %)"
        lines.append(
            f"| {name} | {task.published or 'none'} | {task.source or '-'} | {_number(interquartile_mean(scores))}"
            f"{mark_below(task, row, 'score')} | {_number(low)} to {_number(high)} | "
            f"{_plus_minus(row['greedy'])}{mark_below(task, row, 'greedy')} | "
            f"{steps} | {row['seeds']} | {(row['seconds'] + row['compile_seconds']) / 60:.1f} | `{row['preset']}` | "
            f"`{options(label, task, row)}` |"
        )
    return "\n".join([*lines, "", machines_of([row for label, row in rows.items() if label in TASKS])])


def is_reduced(task: Task, row: dict[str, Any]) -> bool:
    """Returns whether a row has fewer steps than its task."""
    return bool(row["steps"] < _ALMOST * task.total_steps)


def mark_below(task: Task, row: dict[str, Any], actions: str) -> str:
    """Returns the mark of a score below the published one, which is bold if the published one is above our interval.

    Args:
      actions: "score" (sampled) or "greedy"; only that of the source gets a mark.
    """
    is_compared = actions == ("greedy" if "greedy" in task.source else "score")
    if not (task.published and is_compared) or task.other_budget or is_reduced(task, row):
        return ""
    scores, published = np.array(row[actions]["per_seed"]), float(task.published.split()[0])
    if interquartile_mean(scores) >= published:
        return ""
    return " (**below**)" if bootstrap_interval(scores)[1] < published else " (below)"


def options(label: str, task: Task, row: dict[str, Any]) -> str:
    """Returns the options of learning.py that measure a row again."""
    text = f"--envs {label}"
    if row["seeds"] != task.seeds:
        text += f" --seeds {row['seeds']}"
    if row["share"] != 1:
        text += f" --share {row['share']:g}"
    return text


def _number(x: float) -> str:
    return f"{x:.1f}" if abs(x) >= 10 else f"{x:.2f}"


def memory_table(rows: dict[str, dict[str, Any]]) -> str:
    """Returns the rows of recurrent networks and of those without memory as a Markdown table."""
    lines = [
        "| environment | network | steps | seeds | target | greedy, IQM | 95 % interval | range | sampled, IQM | "
        "95 % interval | range | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for label in MEMORY:
        if label not in rows:
            continue
        row = rows[label]
        name = row["env"] + (", Gymnasium" if row["backend"] == "host" else "")
        lines.append(
            f"| {name} | {row['network']} | {row['steps']:,} | {row['seeds']} | ≥ {MEMORY[label].target:g} | "
            f"{_spread(row['greedy'])} | {_spread(row['score'])} | {row['seconds']:.0f} |"
        )
    return "\n".join([*lines, "", machines_of([row for label, row in rows.items() if label in MEMORY])])


def _spread(part: dict[str, Any]) -> str:
    """Returns three cells: interquartile mean, 95 % bootstrap interval, and range over seeds."""
    scores = np.array(part["per_seed"])
    low, high = bootstrap_interval(scores)
    return f"{interquartile_mean(scores):.2f} | {low:.2f} to {high:.2f} | {scores.min():.2f} to {scores.max():.2f}"


def machines_of(rows: list[dict[str, Any]]) -> str:
    """Returns a sentence with the machines and the versions of JAX."""
    machines = {(row["cpu"] if row["device"] == "cpu" else row["device"], row["cores"]) for row in rows}
    where = "; ".join(f"{name}, {cores} CPU cores" for name, cores in sorted(machines))
    return f"On {where}; JAX {', '.join(sorted({row['versions']['jax'] for row in rows}))}."


def rewrite(document: Path, name: str, content: str) -> None:
    """Replaces the text between the markers of a document's table."""
    begin, end = (f"<!-- {name} table: {edge} -->" for edge in ("begin", "end"))
    text = document.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"{document} must contain '{begin}' and '{end}' once each")
    before, after = text.split(begin)[0], text.split(end)[1]
    document.write_text(f"{before}{begin}\n{content}\n{end}{after}", encoding="utf-8")


def draw(rows: dict[str, dict[str, Any]], output: Path = _PICTURE) -> None:
    """Draws the learning curves of all tasks that have them."""
    drawn = {label: rows[label] for label in TASKS | MEMORY if "returns" in rows.get(label, {})}
    if not drawn:
        return
    num_rows = math.ceil(len(drawn) / _COLUMNS)
    figure, grid = plt.subplots(num_rows, _COLUMNS, figsize=(11, 2.3 * num_rows), squeeze=False, layout="constrained")
    for axes in grid.flat[len(drawn) :]:
        axes.axis("off")
    for axes, (label, row) in zip(grid.flat, drawn.items(), strict=False):
        _draw_curve(axes, label, row)
    figure.supxlabel("environment steps")
    figure.supylabel("return")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=100, facecolor="white")
    plt.close(figure)


def _draw_curve(axes: Axes, label: str, row: dict[str, Any]) -> None:
    """Draws the interquartile mean over seeds, its 95 % bootstrap interval, and the published score."""
    returns = np.array(row["returns"], float)
    steps = np.linspace(0, row["steps"], returns.shape[1] + 1)[1:]
    known = ~np.isnan(returns).any(axis=0)
    low, high = bootstrap_interval(returns[:, known])
    axes.fill_between(steps[known], low, high, color="#3f51b5", alpha=0.25, lw=0)
    marker = "o" if known.sum() == 1 else None  # a line needs two points
    axes.plot(steps[known], interquartile_mean(returns[:, known]), color="#3f51b5", lw=1.5, marker=marker, ms=4)
    task = (TASKS | MEMORY)[label]
    has_other_budget = is_reduced(task, row) or task.other_budget
    if task.published and not has_other_budget:
        axes.axhline(float(task.published.split(" ")[0]), color="gray", ls="--", lw=1)
    axes.set_title(label, fontsize=8)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def write_report(document: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Replaces the tables of a document and draws its picture."""
    rewrite(document, "learning", table(rows))
    rewrite(document, "memory", memory_table(rows))
    draw(rows)
