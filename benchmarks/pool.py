"""Measures the speed and the generalization with a pool of initial states.

    python benchmarks/pool.py

Speed: steps per second of the environment alone, 256 environments with random actions. Generalization: the return in
training, in which episodes start from the pool, and in an evaluation, in which they start from new states; both with
sampled actions.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from family_speeds import NUM_ENVS, SIZES
from learning import final_returns
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, hardware

import jppo
from jppo.envs import make_env
from jppo.runs.files import write_json

TASK = "xminigrid:MiniGrid-DoorKey-5x5"
SETTINGS = {"num_envs": 1024, "num_steps": 32, "num_epochs": 4, "num_minibatches": 16, "recurrent": "none"}
SPEED_ENVS = (TASK, "navix:Navix-DoorKey-5x5-v0", "jumanji:Maze-v0")


def main(
    pools: tuple[int, ...] = (1, 16, 256),
    steps: int = 1_000_000,
    seeds: int = 3,
    envs: tuple[str, ...] = SPEED_ENVS,
    output: Path = RESULTS / "pool.json",
) -> None:
    """Trains with each size of the pool, measures the speeds, and writes the results.

    Args:
      pools: sizes of the pool; training without a pool is always measured.
      steps: environment steps of each run.
      seeds: runs of each size.
      envs: environments for the speed, with and without a pool of 256; medians of three interleaved measurements.
      output: the file of results.
    """
    for name, size in [*((TASK, size) for size in pools), *((name, 256) for name in envs)]:
        make_env(name, pool=size)  # reports mistakes before the first run
    rows: list[dict[str, Any]] = []
    speeds: dict[str, dict[str, float]] = {}
    for size in (*pools, None):
        runs = [train(size, steps, seed) for seed in range(seeds)]
        rows.append({"pool": size, "training": [run[0] for run in runs], "new_states": [run[1] for run in runs]})
        print(json.dumps(rows[-1]), flush=True)
        write_json(output, {"task": TASK, "steps": steps, "rows": rows, "speeds": speeds, "hardware": hardware()})
    for name in envs:
        samples = [[measure_speed(name, size) for size in (None, 256)] for _ in range(3)]
        speeds[name] = dict(zip(("None", "256"), np.median(samples, axis=0).tolist(), strict=True))
        print(name, speeds[name], flush=True)
        write_json(output, {"task": TASK, "steps": steps, "rows": rows, "speeds": speeds, "hardware": hardware()})
    table = Table("pool", "return in training", "return from new states")
    for row in rows:
        cells = (f"{np.mean(row[key]):.2f} ({min(row[key]):.2f} to {max(row[key]):.2f})" for key in list(row)[1:])
        table.add_row(str(row["pool"]), *cells)
    Console(width=100).print(table)


def train(pool: int | None, steps: int, seed: int) -> tuple[float, float]:
    """Returns the mean return at the end of a run, and that of episodes from new states."""
    result = jppo.train(
        make_env(TASK, pool=pool), preset="xminigrid", total_steps=steps, seed=seed, progress="none", **SETTINGS
    )
    metrics = {name: np.asarray(values)[None] for name, values in result.metrics.items()}
    new_states = jppo.evaluate(make_env(TASK), result.policy, num_episodes=500, seed=1000 + seed, sampled=True)
    return float(final_returns(metrics)[0]), float(new_states.returns.mean())


def measure_speed(name: str, pool: int | None) -> float:
    """Returns the steps per second of an environment without a network."""
    result = jppo.bench(make_env(name, pool=pool), num_envs=NUM_ENVS, seconds=3.0, **SIZES)
    return float(result.alone["environment"].steps_per_second)


if __name__ == "__main__":
    tyro.cli(main)
