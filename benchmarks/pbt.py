"""Compares population-based training with the same runs without exchanges.

    python benchmarks/pbt.py

In each repetition, every case trains 16 runs of CartPole-v1 with other seeds. Then the run with the highest recent
return plays 100 new episodes with the most likely actions. Results are means over the repetitions, with the sample
standard deviation.
"""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from throughput import RESULTS, hardware

import jppo
from jppo.runs.files import write_json

CONFIG = jppo.PPOConfig(num_envs=16, num_steps=64)
RUNS, EPISODES = 16, 100
RATES = {
    "too low, 1e-7 to 1e-5": np.geomspace(1e-7, 1e-5, RUNS),
    "wide, 1e-6 to 1e-1": np.geomspace(1e-6, 1e-1, RUNS),
}


def measure(rates: np.ndarray, pbt: jppo.PBTConfig | None, seed: int, total_steps: int) -> dict[str, Any]:
    """Trains a population and returns its results."""
    result = jppo.sweep(
        "CartPole-v1",
        seeds=[seed],
        total_steps=total_steps,
        config=CONFIG,
        learning_rate=rates.tolist(),
        selection=pbt,
    )
    scores = np.array([run.score for run in result.runs])
    best = max(result.runs, key=lambda run: run.score)
    return {
        "best_greedy": float(jppo.evaluate(best, num_episodes=EPISODES, seed=seed + 1).returns.mean()),
        "best": float(scores.max()),
        "median": float(np.median(scores)),
        "worst": float(scores.min()),
        "copies": len(result.copies),
    }


def main(
    repetitions: int = 5, total_steps: int = 200_000, every: int = 10, output: Path = RESULTS / "pbt.json"
) -> None:
    """Compares population-based training with the same runs without exchanges, and writes JSON.

    Args:
      repetitions: number of populations per case.
      total_steps: environment steps of each run.
      every: number of updates between two exchanges.
      output: JSON file.
    """
    cases = {(label, pbt): [] for label in RATES for pbt in (None, jppo.PBTConfig(every=every))}
    for repetition in range(repetitions):
        for (label, pbt), rows in cases.items():
            rows.append(measure(RATES[label], pbt, 1000 * repetition, total_steps))
            print(label, "pbt" if pbt else "no exchanges", rows[-1], flush=True)
    lines = [
        "| initial learning rates | exchanges | best run, greedy | best | median | worst |",
        "|---|---|---|---|---|---|",
    ]
    for (label, pbt), rows in cases.items():
        columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        shown = [f"{columns[name].mean():.0f} ± {columns[name].std(ddof=1):.0f}" for name in list(columns)[:4]]
        lines.append(f"| {label} | {'yes' if pbt else 'no'} | {' | '.join(shown)} |")
    results = [{"rates": label, "pbt": pbt is not None, "repetitions": rows} for (label, pbt), rows in cases.items()]
    sizes = {"total_steps": total_steps, "every": every, "runs": RUNS, "date": datetime.date.today().isoformat()}
    write_json(output, {"cases": results} | sizes | hardware())
    Console(width=200).print("\n".join(lines), markup=False)


if __name__ == "__main__":
    tyro.cli(main)
