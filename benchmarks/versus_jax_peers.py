"""Compares whole training with PureJaxRL, rejax and Brax: steps per second, compile time and memory.

    python benchmarks/versus_jax_peers.py --purejaxrl path/to/purejaxrl --purejaxrl-python path/to/its/python \\
        --rejax-python path/to/its/python
    python benchmarks/versus_jax_peers.py --workloads B1 --brax-python path/to/python  # with jppo and brax

Each implementation has its own process, which compiles a whole training run, waits, and trains once per round, so that
other processes affect all implementations equally. On a CPU with several cores, jppo is measured on one device, like
the others, and on two (`--num-devices 2`). PureJaxRL and rejax need gymnax 0.0.9, and therefore a separate Python
environment with the same version of JAX. Libraries without options are left out. jppo runs through its public API,
`jppo.jit(agent.train)`, which sets compiler options; the others are compiled with `jax.jit`.
"""

import datetime
import json
import math
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, WORKLOADS, Workload, cores_busy, hardware
from worker import Worker

from jppo.config.ray import num_cores
from jppo.runs.files import write_json

LARGER = {f"W1-{envs // 1024}k": Workload("CartPole-v1", envs, 32) for envs in (16_384, 65_536, 262_144)}
LARGER["W3-16k"] = Workload("Breakout-MinAtar", 16_384, 32)
BRAX = {"B1": Workload("brax:inverted_pendulum", 1024, 32)}
RECURRENT = {
    "R1": Workload("CartPole-v1", 256, 128, recurrent=True),
    "R2": Workload("CartPole-v1", 1024, 128, recurrent=True),
}
ALL = WORKLOADS | LARGER | RECURRENT | BRAX
_OURS = "jppo"
_STEPS = 1_000_000  # environment steps per repetition; at least two updates


class Contestant(NamedTuple):
    """An implementation that is measured."""

    name: str
    python: str
    script: str
    words: tuple[Any, ...]  # arguments before the sizes
    num_devices: int = 1
    last: tuple[Any, ...] = ()  # arguments after the sizes

    def start(self, *sizes: int, **env: str) -> Worker:
        if self.num_devices > 1:
            flags = os.environ.get("XLA_FLAGS", "")
            env["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={self.num_devices}"
        return Worker(self.python, self.script, *self.words, *sizes, *self.last, env=env)


def contestants_of(workload: Workload, peers: "Peers") -> list[Contestant]:
    """Returns the implementations to measure, jppo first."""
    env, recurrent, is_brax = workload.env, int(workload.recurrent), workload.env.startswith("brax:")
    python = peers.brax_python if is_brax and peers.brax_python else sys.executable
    found = [Contestant(_OURS, python, "serve_jppo.py", (env, recurrent))]
    if jax.default_backend() == "cpu" and num_cores() > 1:
        found.append(found[0]._replace(name=f"{_OURS}, 2 devices", num_devices=2))
    if is_brax:
        return [*found, Contestant("Brax", python, "peer_brax.py", (env,))]
    if peers.purejaxrl is not None:
        words = (peers.purejaxrl, env)
        found.append(Contestant("PureJaxRL", peers.purejaxrl_python, "peer_purejaxrl.py", words, last=(recurrent,)))
    if peers.rejax_python is not None and not recurrent:
        found.append(Contestant("rejax", peers.rejax_python, "peer_rejax.py", (env,)))
    return found


class Peers(NamedTuple):
    """Locations of the other implementations."""

    purejaxrl: Path | None
    purejaxrl_python: str
    rejax_python: str | None
    brax_python: str | None


class Started(NamedTuple):
    """The processes of one workload, and the compile times of second starts of jppo."""

    workers: dict[str, Worker]
    second_compile_seconds: list[float]


def start(name: str, peers: Peers, second_starts: int) -> Started:
    """Starts the implementations of a workload one after the other, then jppo again with its compilation cache."""
    workload = ALL[name]
    sizes = (workload.num_envs, workload.num_steps, updates_of(workload))
    contestants = contestants_of(workload, peers)
    with tempfile.TemporaryDirectory() as cache:
        workers = {c.name: c.start(*sizes, JPPO_COMPILATION_CACHE=cache) for c in contestants}
        seconds = []
        for _ in range(second_starts):
            again = contestants[0].start(*sizes, JPPO_COMPILATION_CACHE=cache)
            seconds.append(again.compile_seconds)
            again.close()
    return Started(workers, seconds)


def measure(name: str, started: Started, rounds: int, max_others: float) -> dict[str, Any]:
    """Measures one workload. Returns medians and all rounds of each implementation, and the median compile time of a
    second start of jppo, with the compilation cache of the first."""
    workload, workers = ALL[name], started.workers
    updates = updates_of(workload)
    medians, times, busy = in_rounds(workers, rounds, max_others)
    ends = {name: worker.close() for name, worker in workers.items()}
    speed = {name: updates * workload.config.batch_size / median for name, median in medians.items()}
    best_peer = max((value for name, value in speed.items() if not name.startswith(_OURS)), default=None)
    ratios = {name: value / best_peer for name, value in speed.items() if best_peer and name.startswith(_OURS)}
    return {
        "workload": name,
        **workload._asdict(),
        "updates": updates,
        "steps_per_second": speed,
        "ratio_to_best_peer": ratios,
        "compile_seconds": {name: worker.compile_seconds for name, worker in workers.items()},
        "second_compile_seconds": float(np.median(started.second_compile_seconds or np.nan)),
        "peak_rss_mb": {name: end["peak_rss_mb"] for name, end in ends.items()},
        "program_mb": {name: end["program_mb"] for name, end in ends.items()},
        "seconds": times,
        "cpu_seconds": {name: worker.cpu_seconds[1:] for name, worker in workers.items()},
        "cores_busy_before_rounds": busy,
        "versions_of": {name: end["versions"] for name, end in ends.items()},
    }


def updates_of(workload: Workload) -> int:
    """Returns the number of updates per repetition."""
    is_slow = workload.recurrent or workload.env.startswith("brax:")
    steps = _STEPS // 5 if is_slow else _STEPS
    return max(2, round(steps / workload.config.batch_size))


class Rounds(NamedTuple):
    """Seconds of each round, and the number of cores that other processes kept busy before it."""

    medians: dict[str, float]
    times: dict[str, list[float]]
    busy: list[float]


def in_rounds(workers: dict[str, Worker], rounds: int, max_others: float = math.inf) -> Rounds:
    """Trains once per round with each worker, after a round of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in workers}
    busy: list[float] = []
    for number in range(rounds + 1):
        while (others := cores_busy()) > max_others:
            pass
        names = list(workers)
        order = names[number % len(names) :] + names[: number % len(names)]  # each is first and last equally often
        round_seconds = {name: workers[name].train() for name in order}
        if number:
            busy.append(others)
            for name, seconds in round_seconds.items():
                times[name].append(seconds)
    return Rounds({name: float(np.median(seconds)) for name, seconds in times.items()}, times, busy)


def show(rows: list[dict[str, Any]]) -> None:
    names = list(rows[0]["steps_per_second"])
    table = Table("workload", *(f"{name} steps/s" for name in names), "to the best", "compile s", "2nd compile s")
    for column in ("peak RSS MB", "program MB"):
        table.add_column(column)
    for row in rows:
        speeds = [f"{row['steps_per_second'][name]:,.0f}" for name in names]
        ratios = [f"{ratio:.2f}" for ratio in row["ratio_to_best_peer"].values()]
        table.add_row(
            f"{row['workload']}: {row['env']}, {row['num_envs']} x {row['num_steps']}",
            *speeds,
            " / ".join(ratios) or "-",
            " / ".join(f"{row['compile_seconds'][name]:.1f}" for name in names),
            f"{row['second_compile_seconds']:.2f}",
            " / ".join(f"{row['peak_rss_mb'][name]:.0f}" for name in names),
            " / ".join("-" if row["program_mb"][name] is None else f"{row['program_mb'][name]:.0f}" for name in names),
        )
    Console(width=160).print(table)


def main(
    workloads: tuple[str, ...] = tuple(WORKLOADS),
    rounds: int = 7,
    purejaxrl: Path | None = None,
    purejaxrl_python: str = sys.executable,
    rejax_python: str | None = None,
    brax_python: str | None = None,
    second_starts: int = 3,
    start_together: bool = False,
    max_others: float = math.inf,
    output: Path = RESULTS / "versus_jax_peers.json",
) -> None:
    """Compares whole training with the other libraries and writes JSON.

    Args:
      workloads: W1 to W4, R1 and R2 with a recurrent network, B1 with an environment of Brax, and for accelerators
        W1-16k, W1-64k, W1-256k and W3-16k.
      rounds: number of rounds; in each, every implementation trains once.
      purejaxrl: a clone of PureJaxRL.
      purejaxrl_python: Python interpreter with PureJaxRL's dependencies.
      rejax_python: Python interpreter with rejax.
      brax_python: Python interpreter with Brax and jppo, for B1.
      second_starts: further starts of jppo with a compilation cache, which record its compile time.
      start_together: start the processes of all workloads at the same time and then measure one after the other. Saves
        time on a machine with many cores, but compile times are then not comparable.
      max_others: before each round, wait until other processes keep at most this many cores busy (Linux).
      output: JSON file.
    """
    if unknown := [name for name in workloads if name not in ALL]:
        raise SystemExit(f"unknown workloads: {', '.join(unknown)}; use {', '.join(ALL)}")
    peers, rows = Peers(purejaxrl, purejaxrl_python, rejax_python, brax_python), []
    with ThreadPoolExecutor(len(workloads) if start_together else 1) as pool:
        started = {name: pool.submit(start, name, peers, second_starts) for name in workloads if start_together}
        wait(started.values())
    for name in workloads:
        ready = started[name].result() if start_together else start(name, peers, second_starts)
        rows.append(measure(name, ready, rounds, max_others))
        write_json(output, {"rows": rows, "date": datetime.date.today().isoformat()} | hardware())
        print(json.dumps(rows[-1]["steps_per_second"]), flush=True)
    show(rows)
    print(f"wrote {output}")


if __name__ == "__main__":
    tyro.cli(main)
