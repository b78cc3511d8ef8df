"""Compares compute_dtype = float32 and bfloat16: milliseconds per update, and learning with the environments' presets.

    python benchmarks/bfloat16.py
    python benchmarks/bfloat16.py --learn-envs Breakout-MinAtar --seeds 5    # on a GPU

Rounds time every program once. Results are medians over the rounds.
"""

import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from learning import final_returns
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, WORKLOADS, Updates, hardware, interleaved

import jppo
from jppo.config.presets import preset_for
from jppo.devices.jit import jit
from jppo.runs.files import write_json

WIDE = {"hidden_sizes": (512, 512)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "CartPole, mlp 64, 64": ("W1", {}),
    "CartPole, mlp 512, 512": ("W1", WIDE),
    "Breakout-MinAtar, cnn 128": ("W3", {"network": "cnn", "hidden_sizes": (128,)}),
    "CartPole, gru 128": ("W1", {"recurrent": "gru", "hidden_sizes": (128, 128)}),
}
DTYPES = ("float32", "bfloat16")


def learn(env: str, dtype: str, seeds: int) -> list[float]:
    """Trains with the preset of the environment; returns the final return of each seed."""
    if not seeds:
        return []
    preset = jppo.PRESETS[preset_for(env)]
    agent = jppo.make_anakin(env, preset.config.replace(compute_dtype=dtype), total_steps=preset.total_steps)
    keys = jax.vmap(jax.random.key)(np.arange(seeds))
    _, metrics = jit(jax.vmap(agent.train, in_axes=(0, None)))(keys, preset.hyperparams)
    return final_returns(metrics).tolist()


def main(
    repeats: int = 5,
    seeds: int = 3,
    learn_envs: tuple[str, ...] = ("CartPole-v1",),
    num_envs: int = 512,
    cases: tuple[str, ...] = tuple(CASES),
    output: Path = RESULTS / "bfloat16.json",
) -> None:
    """Measures both types and writes JSON.

    Args:
      repeats: timed updates of each program, at least.
      seeds: training runs with each type; with 0, only updates are measured.
      learn_envs: environments of the training runs.
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
    returns = {env: {dtype: learn(env, dtype, seeds) for dtype in DTYPES} for env in learn_envs}
    write_json(output, {"rows": rows, "returns": returns, "date": datetime.date.today().isoformat()} | hardware())
    Console(width=120).print(table)
    for env, by_type in returns.items():
        for dtype, values in by_type.items():
            print(f"{env}, {dtype}: {' '.join(f'{value:.1f}' for value in values)}")


if __name__ == "__main__":
    tyro.cli(main)
