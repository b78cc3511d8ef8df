"""Measures how much faster Taxi-v4 learns with the action mask of its info than without it.

    python benchmarks/masks.py                     # the table of docs/learning.md
    python benchmarks/masks.py --seeds 1 --steps-with 50000 --steps-without 50000

The runs of both variants alternate.
"""

import datetime
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import tyro
from throughput import RESULTS, hardware

import jppo
from jppo.runs.files import write_json

DOCS = Path(__file__).parents[1] / "docs" / "learning.md"
BEGIN, END = "<!-- masks table: begin -->", "<!-- masks table: end -->"
THRESHOLDS = (-100.0, 0.0, 6.0)
WINDOW = 100  # episodes


class WithoutMask(gymnasium.Wrapper):
    """Removes the action mask from the info."""

    def reset(self, **options: Any) -> Any:
        obs, info = self.env.reset(**options)
        return obs, {name: value for name, value in info.items() if name != "action_mask"}

    def step(self, action: Any) -> Any:
        *result, info = self.env.step(action)
        return (*result, {name: value for name, value in info.items() if name != "action_mask"})


def without_mask() -> gymnasium.Env:
    """Makes Taxi-v4 without the mask."""
    return WithoutMask(gymnasium.make("Taxi-v4"))


def recent_returns(metrics: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the mean return of the last 100 or more episodes after each update; NaN before there are 100."""
    count, mean = metrics["episode/count"], np.nan_to_num(metrics["episode/return_mean"])
    episodes, total = np.cumsum(count), np.cumsum(count * mean)
    recent = np.full(len(count), np.nan)
    for update in range(len(count)):
        start = np.searchsorted(episodes, episodes[update] - WINDOW, side="right") - 1  # last update before the window
        if episodes[update] >= WINDOW:
            before = (episodes[start], total[start]) if start >= 0 else (0.0, 0.0)
            recent[update] = (total[update] - before[1]) / (episodes[update] - before[0])
    return recent


def steps_to(threshold: float, metrics: dict[str, np.ndarray]) -> float:
    """Returns the environment steps after which the recent mean return was first at least the threshold, or NaN."""
    reached = recent_returns(metrics) >= threshold
    return float(metrics["env_steps"][np.argmax(reached)]) if reached.any() else np.nan


def measure(env: Any, seed: int, total_steps: int) -> dict[str, Any]:
    """Trains once with the preset of Taxi and returns the steps to each threshold."""
    result = jppo.train(env, preset="taxi", seed=seed, total_steps=total_steps, num_actors=0, progress="none")
    steps = {f"{threshold:g}": steps_to(threshold, result.metrics) for threshold in THRESHOLDS}
    return {
        "seed": seed,
        "steps": result.summary["steps"],
        "steps_to": steps,
        "final": float(recent_returns(result.metrics)[-1]),
    }


def make_table(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Returns the rows of the table: medians over the seeds."""
    header = [f"steps to {threshold:g}" for threshold in THRESHOLDS]
    lines = [f"| variant | steps | {' | '.join(header)} | return at the end |", "|---" * (len(header) + 3) + "|"]
    for variant, measured in runs.items():
        cells = []
        for threshold in THRESHOLDS:
            steps = np.array([run["steps_to"][f"{threshold:g}"] for run in measured], float)  # null in JSON is NaN
            reached = int(np.isfinite(steps).sum())
            ordered = np.sort(np.where(np.isfinite(steps), steps, np.inf))
            median = ordered[len(ordered) // 2]
            spread = (
                f"{ordered[0]:,.0f} to {ordered[-1]:,.0f}"
                if np.isfinite(ordered[-1])
                else f"{reached} of {len(measured)} seeds"
            )
            cells.append(
                f"{median:,.0f} ({spread})"
                if np.isfinite(median)
                else f"not reached ({reached} of {len(measured)} seeds)"
            )
        final = np.array([run["final"] for run in measured])
        std = f" ± {final.std(ddof=1):.1f}" if len(final) > 1 else ""
        lines.append(f"| {variant} | {measured[0]['steps']:,} | {' | '.join(cells)} | {final.mean():.1f}{std} |")
    return lines


def main(seeds: int = 5, steps_with: int = 200_000, steps_without: int = 500_000) -> None:
    """Trains both variants with each seed, one after the other, and rewrites the table."""
    variants: dict[str, tuple[Any, int]] = {
        "with mask": ("Taxi-v4", steps_with),
        "without mask": (without_mask, steps_without),
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for seed in range(seeds):
        for name, (env, total_steps) in variants.items():
            runs[name].append(measure(env, seed, total_steps))
            print(name, runs[name][-1], flush=True)
    table = make_table(runs)
    print(*table, sep="\n")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    write_json(RESULTS / "masks.json", {"date": date, "hardware": hardware(), "runs": runs})
    text = DOCS.read_text()
    if BEGIN in text:
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        DOCS.write_text(f"{before}{BEGIN}\n" + "\n".join(table) + f"\n{END}{after}")


if __name__ == "__main__":
    tyro.cli(main)
