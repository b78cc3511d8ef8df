"""Compares compute_dtype = float32 and bfloat16: milliseconds per update, and learning on CartPole.

    python benchmarks/bfloat16.py

Rounds time every program once. Results are medians over the rounds.
"""

import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, WORKLOADS, Updates, hardware, interleaved

import jppo
from jppo.runs.files import write_json

WIDE = {"hidden_sizes": (512, 512)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "CartPole, mlp 64, 64": ("W1", {}),
    "CartPole, mlp 512, 512": ("W1", WIDE),
    "Breakout-MinAtar, cnn 128": ("W3", {"network": "cnn", "hidden_sizes": (128,)}),
    "CartPole, gru 128": ("W1", {"recurrent": "gru", "hidden_sizes": (128, 128)}),
}
DTYPES = ("float32", "bfloat16")


def learn(dtype: str, seeds: int) -> list[float]:
    """Returns the final return of CartPole-v1, for each seed."""
    options = {"total_steps": 300_000, "num_envs": 8, "learning_rate": jppo.schedules.linear(1e-3, 0.0)}
    runs = [
        jppo.train("CartPole-v1", compute_dtype=dtype, seed=seed, num_devices=1, **options) for seed in range(seeds)
    ]
    return [float(run.summary["return_mean"]) for run in runs]


def main(
    repeats: int = 5,
    seeds: int = 3,
    num_envs: int = 512,
    cases: tuple[str, ...] = tuple(CASES),
    output: Path = RESULTS / "bfloat16.json",
) -> None:
    """Measures both types and writes JSON.

    Args:
      repeats: timed updates of each program, at least.
      seeds: training runs with each type.
      num_envs: environments of each update, with 32 steps.
      cases: names in CASES.
      output: JSON file.
    """
    rows = []
    table = Table("workload", "float32, ms", "bfloat16, ms", "speed of bfloat16")
    for name in cases:
        workload, changes = CASES[name]
        config = WORKLOADS[workload].config.replace(num_envs=num_envs, **changes)
        programs = {
            dtype: Updates(jppo.make_anakin(WORKLOADS[workload].env, config.replace(compute_dtype=dtype)))
            for dtype in DTYPES
        }
        times = {
            dtype: 1e3 * float(np.median(taken)) for dtype, taken in interleaved(programs, repeats).seconds.items()
        }
        rows.append({"workload": name, "num_envs": num_envs, "num_steps": config.num_steps, "milliseconds": times})
        table.add_row(name, *(f"{times[dtype]:.1f}" for dtype in DTYPES), f"{times['float32'] / times['bfloat16']:.2f}")
        print(rows[-1], flush=True)
        jax.clear_caches()
    returns = {dtype: learn(dtype, seeds) for dtype in DTYPES}
    write_json(output, {"rows": rows, "returns": returns, "date": datetime.date.today().isoformat()} | hardware())
    Console(width=120).print(table)
    for dtype, values in returns.items():
        print(f"CartPole-v1, {dtype}: {' '.join(f'{value:.0f}' for value in values)}")


if __name__ == "__main__":
    tyro.cli(main)
