"""Whether a long run leaks: memory, threads, open files and processes of a training, while it trains (Linux).

    python benchmarks/soak.py --minutes 15

Each mode trains in a process of its own, with a run directory and checkpoints, for that long; this one watches it and
all that it starts through /proc, and ends it with Ctrl-C. What is compared is the first quarter after a minute of
warming up with the last quarter.
"""

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, hardware

from jppo.runs import write_json

COMMANDS = {
    "on device": ("train", "CartPole-v1", "--num-envs", "64", "--num-steps", "32", "--total-steps", "1e12"),
    "Ray": (
        *("train", "CartPole-v1", "--backend", "ray", "--num-actors", "2", "--envs-per-actor", "4"),
        *("--total-steps", "1e12"),
    ),
}
QUANTITIES = ("rss_mb", "threads", "files", "processes")
_JPPO = "import sys; from jppo.cli import main; sys.exit(main())"
_WARM_UP_SECONDS = 60.0
_END_SECONDS = 60.0


def watch(mode: str, seconds: float, every: float) -> dict[str, Any]:
    """One mode's series, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-c", _JPPO, *COMMANDS[mode], "--run-dir", str(run_dir), "--quiet"]
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
    """Medians of the first and the last quarter after warming up, and the slope of memory."""
    warm_up = min(_WARM_UP_SECONDS, 0.25 * seconds)
    warm = [row for row in series if row["seconds"] > warm_up]
    quarter = max(1, len(warm) // 4)
    first, last = warm[:quarter], warm[-quarter:]
    medians = {name: [float(np.median([row[name] for row in rows])) for rows in (first, last)] for name in QUANTITIES}
    minutes = [row["seconds"] / 60.0 for row in warm]
    slope = float(np.polyfit(minutes, [row["rss_mb"] for row in warm], 1)[0]) if len(warm) > 2 else float("nan")
    return {"medians": medians, "rss_mb_per_minute": slope}


def measure(pid: int) -> dict[str, float]:
    """Sums over the process and all below it."""
    total = dict.fromkeys(QUANTITIES, 0.0)
    for each in [pid, *descendants(pid)]:
        try:
            status = Path(f"/proc/{each}/status").read_text(encoding="utf-8")
            files = len(os.listdir(f"/proc/{each}/fd"))
        except OSError:  # gone meanwhile
            continue
        fields = dict(line.split(":", 1) for line in status.splitlines())
        total["rss_mb"] += float(fields.get("VmRSS", "0 kB").split()[0]) / 1024.0
        total["threads"] += float(fields.get("Threads", "0"))
        total["files"] += files
        total["processes"] += 1
    return total


def descendants(pid: int) -> list[int]:
    """Processes below this one."""
    below: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in map(int, children.read_text(encoding="utf-8").split()):
                below += [child, *descendants(child)]
        except OSError:
            continue
    return below


def main(
    minutes: float = 15.0,
    modes: tuple[Literal["on device", "Ray"], ...] = ("on device", "Ray"),
    every: float = 5.0,
    output: Path = RESULTS / "soak.json",
) -> None:
    """Trains, watches and writes JSON.

    Args:
      minutes: that each mode trains.
      modes: which.
      every: seconds between two looks.
      output: JSON.
    """
    rows = []
    for mode in modes:
        rows.append(watch(mode, 60.0 * minutes, every))
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "series"}), flush=True)
        write_json(output, {"minutes": minutes, "rows": rows, "date": datetime.date.today().isoformat()} | hardware())
    table = Table("mode", "updates", *QUANTITIES, "MB per minute", "exit code", "processes left")
    for row in rows:
        pairs = ("{:.0f} -> {:.0f}".format(*row["medians"][name]) for name in QUANTITIES)
        slope = f"{row['rss_mb_per_minute']:.2f}"
        table.add_row(
            row["mode"], f"{row['updates']:,}", *pairs, slope, str(row["exit_code"]), str(row["processes_left"])
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    tyro.cli(main)
