"""Tests reliability (Linux): leaks of long runs, and runs whose processes are killed.

    python benchmarks/soak.py memory --minutes 30
    python benchmarks/soak.py kills

`memory` checks a long run for leaks of memory, threads, open files and processes. Both modes train at the same time,
each in its own process with a run directory and checkpoints. This process measures them and their child processes
through /proc and stops them with Ctrl-C at the end. The first quarter is for warm-up: the metrics in memory reach their
limit of 65,536 rows. The second quarter is compared with the last. Memory is the proportional set size (PSS), in which
shared pages count once, without pages of files.

`kills` kills runs, actors and Ray's daemons (see soak_kills.py) and adds its counts to the same file.
"""

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import soak_kills
import tyro
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, hardware

from jppo.runs.files import write_json

COMMANDS = {
    "on device": ("train", "CartPole-v1", "--num-envs", "64", "--num-steps", "32", "--total-steps", "1e12"),
    "Ray": (
        *("train", "CartPole-v1", "--backend", "ray", "--num-actors", "2", "--envs-per-actor", "4"),
        *("--total-steps", "1e12"),
    ),
}
QUANTITIES = ("memory_mb", "threads", "files", "processes")
_MEMORY = ("Pss_Anon", "Pss_Shmem", "SwapPss")
_END_SECONDS = 60.0


def watch(mode: str, seconds: float, every: float) -> dict[str, Any]:
    """Trains in one mode and returns the measured series, the exit code and the remaining processes."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "jppo", *COMMANDS[mode], "--run-dir", str(run_dir), "--quiet"]
        process = subprocess.Popen(command, cwd=folder)
        started, series = time.monotonic(), []
        while process.poll() is None and time.monotonic() - started < seconds:
            time.sleep(every)
            series.append({"seconds": time.monotonic() - started} | measure(process.pid))
        ended_early = process.poll() is not None
        began = [process.pid, *descendants(process.pid)]
        process.send_signal(signal.SIGINT)
        code = process.wait(_END_SECONDS)
        time.sleep(2.0)
        left = [pid for pid in began if Path(f"/proc/{pid}").exists()]
        rows = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        updates = [json.loads(row)["update"] for row in rows]
    return {
        "mode": mode,
        "command": " ".join(["jppo", *COMMANDS[mode]]),
        "ended_early": ended_early,
        "exit_code": code,
        "processes_left": len(left),
        "updates": len(updates),
        "updates_missing_or_double": int(updates != list(range(1, len(updates) + 1))),
        **compare(series, seconds),
        "series": series,
    }


def compare(series: list[dict[str, float]], seconds: float) -> dict[str, Any]:
    """Returns medians of the second and the last quarter, and the slope of memory after the first quarter."""
    warm = [row for row in series if row["seconds"] > 0.25 * seconds]
    quarter = max(1, len(warm) // 3)
    first, last = warm[:quarter], warm[-quarter:]
    medians = {name: [float(np.median([row[name] for row in rows])) for rows in (first, last)] for name in QUANTITIES}
    minutes = [row["seconds"] / 60.0 for row in warm]
    slope = float(np.polyfit(minutes, [row["memory_mb"] for row in warm], 1)[0]) if len(warm) > 2 else float("nan")
    return {"medians": medians, "memory_mb_per_minute": slope}


def measure(pid: int) -> dict[str, float]:
    """Returns the sums over the process and its descendants."""
    total = dict.fromkeys(QUANTITIES, 0.0)
    for each in [pid, *descendants(pid)]:
        try:
            status = Path(f"/proc/{each}/status").read_text(encoding="utf-8")
            memory = Path(f"/proc/{each}/smaps_rollup").read_text(encoding="utf-8")
            files = len(os.listdir(f"/proc/{each}/fd"))
        except OSError:  # the process has ended
            continue
        fields = dict(line.split(":", 1) for line in (status + memory).splitlines() if ":" in line)
        total["memory_mb"] += sum(float(fields.get(name, "0 kB").split()[0]) for name in _MEMORY) / 1024.0
        total["threads"] += float(fields.get("Threads", "0"))
        total["files"] += files
        total["processes"] += 1
    return total


def descendants(pid: int) -> list[int]:
    """Returns the ids of the descendants of a process."""
    below: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in map(int, children.read_text(encoding="utf-8").split()):
                below += [child, *descendants(child)]
        except OSError:
            continue
    return below


def memory(
    minutes: float = 30.0,
    modes: tuple[Literal["on device", "Ray"], ...] = ("on device", "Ray"),
    every: float = 5.0,
    output: Path = RESULTS / "soak.json",
) -> None:
    """Checks a long run for leaks and writes JSON.

    Args:
      minutes: duration of training.
      modes: modes to check.
      every: seconds between two measurements.
      output: JSON file.
    """
    with ThreadPoolExecutor() as pool:
        rows = list(pool.map(lambda mode: watch(mode, 60.0 * minutes, every), modes))
    save(output, {"minutes": minutes, "rows": rows, "date": datetime.date.today().isoformat()} | hardware())
    table = Table("mode", "updates", *QUANTITIES, "MB per minute", "exit code", "processes left")
    for row in rows:
        pairs = ("{:.0f} -> {:.0f}".format(*row["medians"][name]) for name in QUANTITIES)
        slope = f"{row['memory_mb_per_minute']:.2f}"
        table.add_row(
            row["mode"], f"{row['updates']:,}", *pairs, slope, str(row["exit_code"]), str(row["processes_left"])
        )
    Console(width=140).print(table)


def kills(
    device: int = 12, ray: int = 6, actors: int = 20, daemons: bool = True, output: Path = RESULTS / "soak.json"
) -> None:
    """Kills runs, actors and Ray's daemons, and adds the counts to the JSON file.

    Args:
      device: number of SIGKILLs of an on-device run, which is resumed each time.
      ray: number of SIGKILLs of a run with Ray actors, which is resumed each time.
      actors: number of SIGKILLs of actors during one run.
      daemons: kill the raylet and the gcs_server of a run.
      output: JSON file.
    """
    tests: dict[str, Callable[[], dict[str, Any]]] = {
        "run on device": lambda: soak_kills.kill_runs(device, 6_000_000, is_exact=True),
        "run with Ray": lambda: soak_kills.kill_runs(ray, 400_000, *soak_kills.ACTORS),
        "actors": lambda: soak_kills.kill_actors(actors),
        "raylet": lambda: soak_kills.kill_daemon("raylet"),
        "gcs_server": lambda: soak_kills.kill_daemon("gcs_server"),
    }
    numbers = {"run on device": device, "run with Ray": ray, "actors": actors}
    results = {}
    for name, test in tests.items():
        if numbers.get(name, int(daemons)):
            results[name] = test()
            print(name, json.dumps(results[name], indent=2), flush=True)
            save(output, {"kills": results, "kills_date": datetime.date.today().isoformat()})


def save(output: Path, results: dict[str, Any]) -> None:
    """Adds results to the JSON file."""
    before = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    write_json(output, before | results)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"memory": memory, "kills": kills})
