"""Draws README's picture: learning curves, and speed next to other libraries.

    python benchmarks/readme_plot.py             # from the committed results
    python benchmarks/readme_plot.py --measure-curves   # trains the curves first, which takes some minutes on two cores

The speeds come from `versus_jax_peers.py`, `versus_sb3.py` and `versus_rllib.py`.
"""

import datetime
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from throughput import RESULTS, hardware

import jppo
from jppo.runs.files import write_json

CURVES = RESULTS / "learning_curves.json"
DEVICE = "versus_jax_peers_0.3.0"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "overview.png"
REFERENCES = {  # environment: steps, score, source
    "CartPole-v1": (500_000, 490.0, "CleanRL"),
    "Acrobot-v1": (500_000, -86.4, "CleanRL"),
    "Pendulum-v1": (100_000, -172.0, "rl-zoo"),
}
SEEDS, BINS = 10, 50
COLORS = {"jppo": "#3f51b5", "jppo, 2 devices": "#7986cb", "PureJaxRL": "#f9a825", "rejax": "#ef6c00"}
COLORS |= {"SB3, subprocesses": "#c0ca33", "SB3, in process": "#7cb342", "RLlib": "#00897b"}


def measure() -> dict[str, Any]:
    """Trains ten seeds per environment with its preset. Returns the curve of each seed."""
    rows = {}
    for env, (total_steps, _, _) in REFERENCES.items():
        runs = jppo.sweep(env, seeds=SEEDS, total_steps=total_steps).runs
        curves = [bin_returns(run.metrics) for run in runs]
        steps = int(runs[0].metrics["env_steps"][-1])
        rows[env] = {"steps": steps, "returns": curves, "date": datetime.date.today().isoformat(), **hardware()}
    return rows


def bin_returns(metrics: dict[str, np.ndarray]) -> list[float | None]:
    """Returns the mean return of all episodes that ended in each of at most 50 parts of the run; None if none ended."""
    count, mean = metrics["episode/count"], np.nan_to_num(metrics["episode/return_mean"])
    bins = min(BINS, len(count))
    parts = [
        (sum(counts), counts @ means)
        for counts, means in zip(np.array_split(count, bins), np.array_split(mean, bins), strict=True)
    ]
    return [float(total / number) if number else None for number, total in parts]


def draw_curves(axes: Axes, env: str, row: dict[str, Any]) -> None:
    """Draws the mean over seeds, and the range of all seeds."""
    _, score, source = REFERENCES[env]
    returns = np.array(row["returns"], float)
    steps = np.linspace(0, row["steps"], returns.shape[1] + 1)[1:]
    axes.fill_between(steps, returns.min(axis=0), returns.max(axis=0), color=COLORS["jppo"], alpha=0.2, lw=0)
    axes.plot(steps, returns.mean(axis=0), color=COLORS["jppo"])
    axes.axhline(score, color="gray", ls="--", lw=1)
    below = score < returns.mean(axis=0)[-1]
    axes.annotate(source, (row["steps"] * 0.02, score), va="top" if below else "bottom", fontsize=8, color="gray")
    axes.set_title(f"{env}: return of {len(returns)} seeds, jppo {row['versions']['jppo']}", fontsize=9)
    axes.set_xlabel("environment steps", fontsize=9)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:.0f}k"))


def draw_bars(axes: Axes, groups: dict[str, dict[str, float]], title: str) -> None:
    """Draws a group of bars per workload, one per library."""
    labels = []
    for number, speeds in enumerate(groups.values()):
        width = 0.8 / len(speeds)
        for place, (library, speed) in enumerate(speeds.items()):
            label = None if library in labels else library
            labels.append(library)
            x = number - 0.4 + width * (place + 0.5)
            bar = axes.bar(x, speed / 1000, width * 0.92, color=COLORS[library], label=label)
            axes.bar_label(bar, fmt=lambda value: f"{value:.3g}", fontsize=7)
    axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.set_ylabel("thousand steps/s", fontsize=9)
    axes.margins(y=0.3)
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper right")


def read_result(name: str) -> dict[str, Any]:
    """Returns a committed result."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def jax_speeds() -> dict[str, dict[str, float]]:
    """Returns the speeds of libraries on the device, per workload."""
    rows = read_result(DEVICE)["rows"]
    names = {row["workload"]: f"{row['env']}\n{row['num_envs']} envs" for row in rows}
    return {names[row["workload"]]: {lib: row["steps_per_second"][lib] for lib in list(COLORS)[:4]} for row in rows}


def actor_speeds() -> dict[str, dict[str, float]]:
    """Returns the speeds of libraries with processes, per machine and version of jppo."""
    groups = {}
    for cpu, name, libraries in (
        ("AMD", "versus_sb3", ("jppo", "SB3, subprocesses", "SB3, in process")),
        ("Intel", "versus_rllib", ("jppo", "RLlib")),
    ):
        result = read_result(name)
        speeds = {row["contestant"]: row["steps_per_second"] for row in result["rows"] if row["env"] == "cartpole"}
        label = f"2 cores, {cpu}\njppo {result['versions']['jppo']}"
        groups[label] = {library: speeds[library] for library in libraries}
    return groups


def shown() -> str:
    """Returns the speeds and versions that the picture shows, as JSON, which is also saved in the picture."""
    return json.dumps([jax_speeds(), actor_speeds(), read_result(DEVICE)["versions"]["jppo"]])


def main(measure_curves: bool = False, output: Path = PICTURE) -> None:
    """Writes the picture, and with --measure-curves the curves."""
    if measure_curves:
        write_json(CURVES, measure())
    rows = json.loads(CURVES.read_text(encoding="utf-8"))
    figure = plt.figure(figsize=(11, 6.2), layout="constrained")
    top, bottom = figure.subfigures(2, 1)
    for axes, (env, row) in zip(top.subplots(1, len(rows)), rows.items(), strict=True):
        draw_curves(axes, env, row)
    left, right = bottom.subplots(1, 2, width_ratios=[1.7, 1])
    draw_bars(left, jax_speeds(), f"training on the device, jppo {read_result(DEVICE)['versions']['jppo']}")
    draw_bars(right, actor_speeds(), "CartPole-v1 from Gymnasium, 64 environments")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110, facecolor="white", metadata={"Comment": shown()})
    print(f"wrote {output}")


if __name__ == "__main__":
    tyro.cli(main)
