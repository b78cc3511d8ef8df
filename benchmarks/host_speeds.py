"""Measures Gymnasium environments of the families: steps per second alone and in a training run.

    python benchmarks/host_speeds.py atari:Pong-v5 LunarLander-v3

Alone: one process steps eight environments with random actions, for `seconds`. Training: `jppo.bench` with the
environment's preset, without actors and with two. With several agents, steps are those of agents. Each environment is
measured in a new process. The file of results keeps the environments of earlier calls.
"""

import time
from pathlib import Path
from typing import Any

import tyro
from check_families import measure_each
from gymnasium.vector.utils import batch_space
from rich.console import Console
from rich.table import Table
from throughput import RESULTS

import jppo
from jppo.envs.gymnasium import make_host_env

NUM_ENVS = 8
ACTORS = (0, 2)


def main(
    names: tyro.conf.Positional[tuple[str, ...]],
    output: Path = RESULTS / "host_speeds.json",
    seconds: float = 10.0,
    timeout: float = 600.0,
) -> None:
    """Measures the environments and writes the results after each one.

    Args:
      names: ids of environments.
      output: the file of results.
      seconds: measuring time of each of the three measurements; a training run has at least one update.
      timeout: seconds for one environment.
    """
    results = measure_each(_measure, names, (seconds,), timeout, output, num_envs=NUM_ENVS)
    table = Table("environment", "alone, steps/s", "training without actors", "with two actors")
    for name, result in results.items():
        cells = [result["error"]] if "error" in result else [f"{speed:,.0f}" for speed in result.values()]
        table.add_row(name, *cells)
    Console(width=120).print(table)


def _measure(name: str, seconds: float) -> dict[str, Any]:
    """Returns the speeds of an environment in steps per second."""
    speeds = {"alone": _measure_alone(name, seconds)}
    for actors in ACTORS:
        speeds[f"actors_{actors}"] = jppo.bench(
            name, backend="ray", num_actors=actors, seconds=seconds
        ).run.steps_per_second
    return speeds


def _measure_alone(name: str, seconds: float) -> float:
    env = make_host_env(name)
    num_rows = NUM_ENVS * env.num_agents
    envs, space = env.make(list(range(num_rows))), batch_space(env.action_space, num_rows)
    space.seed(0)
    actions = [space.sample() for _ in range(64)]
    envs.reset()
    start, steps = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        envs.step(actions[steps % len(actions)])
        steps += 1
    return steps * num_rows / passed


if __name__ == "__main__":
    tyro.cli(main)
