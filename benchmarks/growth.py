"""Measures how the duration of an update grows with num_envs, num_steps, width, num_epochs and num_minibatches.

    python benchmarks/growth.py

The base is CartPole-v1 with 1,024 environments x 32 steps, 4 epochs x 4 minibatches and two layers of 64. One setting
varies at a time. A slope is d log(time) / d log(setting) between two points: 1 means proportional, 0 means no effect.
Results are medians over rounds; each round times all values of a setting once.
"""

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, Updates, hardware, interleaved

import jppo
from jppo.runs.files import write_json

BASE = jppo.PPOConfig(num_envs=1024, num_steps=32)
KNOBS: dict[str, tuple[int, ...]] = {
    "num_envs": (64, 256, 1024, 4096, 8192),
    "num_steps": (8, 32, 128, 256),
    "width": (16, 64, 256, 512),
    "num_epochs": (1, 2, 4, 8),
    "num_minibatches": (1, 4, 16, 64),
}


def config_of(knob: str, value: int) -> jppo.PPOConfig:
    return dataclasses.replace(BASE, **({"hidden_sizes": (value, value)} if knob == "width" else {knob: value}))


def measure(knob: str, repeats: int) -> dict[str, Any]:
    """Times all values of one setting and returns the row of results."""
    values = KNOBS[knob]
    programs = {}
    for value in values:
        programs[value] = Updates(jppo.make_anakin("CartPole-v1", config_of(knob, value), total_steps=10**9))
    times = interleaved(programs, repeats).seconds
    milliseconds = [1e3 * float(np.median(times[value])) for value in values]
    steps = [config_of(knob, value).batch_size for value in values]
    return {
        "knob": knob,
        "values": list(values),
        "ms_per_update": milliseconds,
        "steps_per_second": [1e3 * count / taken for count, taken in zip(steps, milliseconds, strict=True)],
        "slopes": (np.diff(np.log(milliseconds)) / np.diff(np.log(values))).tolist(),
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(rows), figsize=(3.2 * len(rows), 3.2), sharey=True, layout="constrained")
    for axis, row in zip(axes, rows, strict=True):
        axis.loglog(row["values"], row["ms_per_update"], "o-")
        axis.set_xticks(row["values"], [f"{value:,}" for value in row["values"]], fontsize=7)
        axis.minorticks_off()
        axis.set_xlabel(row["knob"])
        axis.set_title(f"slope {row['slopes'][0]:.2f} to {row['slopes'][-1]:.2f}", fontsize=9)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms per update")
    figure.savefig(path, dpi=130)


def main(repeats: int = 15, output: Path = RESULTS / "growth.json") -> None:
    """Measures how the duration of an update grows with each setting; writes JSON and a plot.

    Args:
      repeats: timed updates for each value.
      output: JSON file; the plot has the same name with the suffix .png.
    """
    rows: list[dict[str, Any]] = []
    for knob in KNOBS:
        rows.append(measure(knob, repeats))
        print(json.dumps(rows[-1]), flush=True)
        jax.clear_caches()
    write_json(output, {"rows": rows, "date": datetime.date.today().isoformat()} | hardware())
    draw(rows, output.with_suffix(".png"))
    table = Table("setting", "values", "ms per update", "k steps/s", "slopes")
    for row in rows:
        table.add_row(
            row["knob"],
            " ".join(f"{value:,}" for value in row["values"]),
            " ".join(f"{value:.1f}" for value in row["ms_per_update"]),
            " ".join(f"{value / 1e3:.0f}" for value in row["steps_per_second"]),
            " ".join(f"{slope:.2f}" for slope in row["slopes"]),
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    tyro.cli(main)
