"""Compares training with and without value clipping, with the same seeds.

    python benchmarks/value_clipping.py                  # the table of docs/details.md
    python benchmarks/value_clipping.py --envs CartPole-v1 --seeds 32

The area under the learning curve is the mean over the updates of the mean return of the episodes that ended in the
update. The final return is that of the last 5 % of the updates. p is that of the paired t-test over the seeds.
"""

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from learning import final_returns
from scipy.stats import ttest_rel
from throughput import RESULTS, hardware

import jppo
from jppo.config.presets import preset_for
from jppo.runs.files import write_json

SMALL = {"num_envs": 64, "num_steps": 32, "hidden_sizes": (64, 64)}  # the preset would take hours on two cores
TASKS: dict[str, tuple[int, dict[str, Any]]] = {  # steps, and the changes of the preset
    "CartPole-v1": (500_000, {}),
    "MountainCar-v0": (400_000, {}),
    "Breakout-MinAtar": (200_000, SMALL),
    "Asterix-MinAtar": (200_000, SMALL),
}


def measure(env: str, seeds: int, total_steps: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Trains both variants with each seed. Returns the areas and the final returns, [seeds] each, by variant."""
    settings = {name: [value] for name, value in changes.items()} | {"clip_value": [True, False]}
    result = jppo.sweep(env, seeds=seeds, total_steps=total_steps, progress="none", **settings)
    variants = {}
    for clip_value in (True, False):
        runs = [run for run in result.runs if run.settings["clip_value"] == clip_value]
        metrics = {name: np.stack([run.metrics[name] for run in runs]) for name in runs[0].metrics}
        variants["on" if clip_value else "off"] = {
            "area": np.nanmean(metrics["episode/return_mean"], axis=1).tolist(),
            "final": final_returns(metrics).tolist(),
            "updates_without_episode": int((metrics["episode/count"] == 0).sum()),
        }
    about = {"preset": preset_for(env), "changes": changes, "steps": result.runs[0].env_steps, "seeds": seeds}
    return about | {"variants": variants, "date": datetime.date.today().isoformat(), **hardware()}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Returns the table: means over the seeds, with standard errors."""
    lines = [
        "| environment | preset | steps | seeds | area, on | area, off | p | final, on | final, off | p |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for env, row in rows.items():
        cells = [env, f"{row['preset']}{', smaller' if row['changes'] else ''}", f"{row['steps']:,}", str(row["seeds"])]
        for name in ("area", "final"):
            on, off = (np.array(row["variants"][variant][name]) for variant in ("on", "off"))
            cells += [f"{x.mean():.1f} ± {x.std(ddof=1) / np.sqrt(len(x)):.1f}" for x in (on, off)]
            cells.append(f"{ttest_rel(on, off).pvalue:.2g}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(envs: tuple[str, ...] = tuple(TASKS), seeds: int = 10, output: Path = RESULTS / "value_clipping.json") -> None:
    """Trains both variants, writes JSON and prints the table. Rows of other environments in the file are kept."""
    rows = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    for env in envs:
        rows[env] = measure(env, seeds, *TASKS[env])
        write_json(output, rows)
        print(table(rows), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
