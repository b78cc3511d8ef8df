"""Measures the speed of several runs in one program, compared with one run after the other and with PureJaxRL.

    python benchmarks/population.py
    python benchmarks/population.py --purejaxrl path/to/purejaxrl --peer-python path/to/its/python

Each implementation has its own process, which compiles and then waits. In each round, every implementation trains once.
Results are medians over the rounds. PureJaxRL's `ppo.py` runs under `jax.vmap` from a clone of its repository. It needs
gymnax 0.0.9, and therefore a separate Python environment.
"""

import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, hardware
from worker import Worker

from jppo.runs.files import write_json

NUM_ENVS, NUM_STEPS = 16, 128
LANE_UPDATES = 256  # runs x updates per repetition, so that repetitions take about the same time; at least 2 updates


def serve(lanes: int, num_envs: int, num_steps: int, updates: int) -> None:
    """Compiles a population of jppo's runs, then trains it once per line of standard input."""
    import jax
    import jax.numpy as jnp

    import jppo
    from jppo.sweeps.population import compile_population, init_population

    config = jppo.PPOConfig(num_envs=num_envs, num_steps=num_steps)
    agent = jppo.make_anakin("CartPole-v1", config, total_steps=updates * config.batch_size)
    population = compile_population(agent, lanes)
    print(json.dumps({"seconds": population.compile_seconds}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        state = init_population(population, list(range(lanes)), [jppo.Hyperparams()] * lanes)
        finite = jax.device_put(np.ones(lanes, bool), population.sharding)
        jax.block_until_ready(population.chunk(state, finite, jnp.int32(updates)))
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)
    print(json.dumps({}), flush=True)  # the last message, which Worker.close reads


def measure(lanes: int, rounds: int, peer: list[Any] | None) -> dict[str, Any]:
    """Returns speeds (medians) and the times of all rounds for each implementation."""
    updates = max(2, LANE_UPDATES // lanes)
    sizes = (NUM_ENVS, NUM_STEPS, updates)
    workers = {"jppo": Worker(sys.executable, "population.py", "--serve", lanes, *sizes)}
    workers["one run"] = Worker(sys.executable, "population.py", "--serve", 1, *sizes)
    if peer is not None:
        workers["PureJaxRL"] = Worker(peer[0], "peer_purejaxrl.py", peer[1], "CartPole-v1", lanes, *sizes)
    steps = {name: NUM_ENVS * NUM_STEPS * updates * (1 if name == "one run" else lanes) for name in workers}
    times: dict[str, list[float]] = {name: [] for name in workers}
    for number in range(rounds + 1):
        for name, worker in workers.items():
            seconds = worker.train()
            if number:  # the first round is for warm-up
                times[name].append(seconds)
    for worker in workers.values():
        worker.close()
    return {
        "lanes": lanes,
        "updates": updates,
        "steps_per_second": {name: steps[name] / float(np.median(times[name])) for name in workers},
        "compile_seconds": {name: worker.compile_seconds for name, worker in workers.items()},
        "seconds": times,
    }


def main(
    lanes: tuple[int, ...] = (1, 4, 16, 64, 256),
    rounds: int = 5,
    purejaxrl: Path | None = None,
    peer_python: str = sys.executable,
    output: Path = RESULTS / "population.json",
) -> None:
    """Measures the speed of several runs in one program and writes JSON.

    Args:
      lanes: numbers of runs in one program.
      rounds: number of rounds; in each, every implementation trains once.
      purejaxrl: a clone of PureJaxRL; without it, only jppo is measured.
      peer_python: Python interpreter with PureJaxRL's dependencies.
      output: JSON file.
    """
    peer = None if purejaxrl is None else [peer_python, purejaxrl]
    rows: list[dict[str, Any]] = []
    sizes = {"num_envs": NUM_ENVS, "num_steps": NUM_STEPS, "date": datetime.date.today().isoformat()}
    for count in lanes:
        rows.append(measure(count, rounds, peer))
        write_json(output, {"rows": rows} | sizes | hardware())
        print({name: f"{speed:,.0f}" for name, speed in rows[-1]["steps_per_second"].items()}, flush=True)
    table = Table(title=f"CartPole-v1, {NUM_ENVS} x {NUM_STEPS} per run; steps/s of all runs together")
    for name in ("runs", "jppo", "one run after the other", "ratio", "PureJaxRL, vmapped", "ratio", "compile s"):
        table.add_column(name, justify="right")
    for row in rows:
        speed = row["steps_per_second"]
        ours, alone, theirs = speed["jppo"], speed["one run"], speed.get("PureJaxRL")
        compiled = " / ".join(f"{seconds:.1f}" for name, seconds in row["compile_seconds"].items() if name != "one run")
        table.add_row(
            *(str(row["lanes"]), f"{ours:,.0f}", f"{alone:,.0f}", f"{ours / alone:.2f}"),
            *(f"{theirs:,.0f}" if theirs else "-", f"{ours / theirs:.2f}" if theirs else "-", compiled),
        )
    Console(width=120).print(table)
    print(f"wrote {output}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*map(int, sys.argv[2:]))
    else:
        tyro.cli(main)
