"""Measures the environments of the families: steps per second alone and in a training run, with `jppo.bench`.

    python benchmarks/family_speeds.py

All runs have 256 environments, 32 steps per rollout, 4 epochs and 4 minibatches, with the network of the environment's
preset and without recurrence. With several agents, steps are those of agents. Each environment is measured in a new
process. The file of results keeps the environments of earlier calls.
"""

from pathlib import Path
from typing import Any

import tyro
from check_families import measure_each
from rich.console import Console
from rich.table import Table
from throughput import RESULTS

import jppo
from jppo.envs import make_env

ENVS = (
    *("CartPole-v1", "Breakout-MinAtar", "navix:Navix-Empty-8x8-v0", "xminigrid:MiniGrid-Empty-8x8"),
    *("jumanji:Game2048-v1", "jumanji:Snake-v1", "playground:CartpoleBalance", "playground:CheetahRun"),
    *("craftax:Craftax-Classic-Symbolic-v1", "jaxmarl:MPE_simple_spread_v3", "jaxmarl:HeuristicEnemySMAX"),
)
NUM_ENVS = 256
SIZES = {"num_steps": 32, "num_epochs": 4, "num_minibatches": 4, "recurrent": "none"}


def main(
    names: tyro.conf.Positional[tuple[str, ...]] = ENVS,
    output: Path = RESULTS / "family_speeds.json",
    seconds: float = 5.0,
    timeout: float = 1800.0,
) -> None:
    """Measures the environments and writes the results after each one.

    Args:
      names: ids of environments.
      output: the file of results.
      seconds: measuring time of a run.
      timeout: seconds for one environment.
    """
    results = measure_each(_measure, names, (seconds,), timeout, output, sizes=SIZES | {"num_envs": NUM_ENVS})
    table = Table("environment", "alone, steps/s", "training, steps/s", "share of the environment")
    for name, result in results.items():
        if "error" in result:
            table.add_row(name, result["error"])
        else:
            speeds = (f"{result[key] / 1e3:,.1f} k" for key in ("environment", "training"))
            table.add_row(name, *speeds, f"{result['share']:.0%}")
    Console(width=120).print(table)


def _measure(name: str, seconds: float) -> dict[str, Any]:
    """Returns the speeds of an environment in steps per second."""
    num_agents = make_env(name).num_agents
    result = jppo.bench(name, seconds=seconds, num_envs=NUM_ENVS * num_agents, **SIZES)
    return {
        "environment": result.alone["environment"].steps_per_second,
        "training": result.run.steps_per_second,
        "share": result.shares["environment"],
    }


if __name__ == "__main__":
    tyro.cli(main)
