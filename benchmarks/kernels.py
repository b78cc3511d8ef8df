"""Counts and times the kernels of an update with JAX's profiler (on CPU: XLA's operations).

    python benchmarks/kernels.py --workloads W1

The profiler slows short kernels down, so use the shares, not the milliseconds. With --traces, the traces are saved for
TensorBoard or Perfetto.
"""

import collections
import datetime
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, Updates, hardware
from versus_jax_peers import ALL

import jppo
from jppo.runs.files import write_json

_NO_KERNELS = (
    "ThunkExecutor",
    "Threadpool",
    "SlinkyThreadPool",
    "ExecuteHelper",
    "CommonPjRt",
    "PjitFunction",
    "$",
    "end: ",
)
_SHOWN = 15


def profile(name: str, updates: int, traces: Path) -> dict[str, Any]:
    """Profiles one workload and returns its kernels with the largest shares of the time."""
    workload = ALL[name]
    program = Updates(jppo.make_anakin(workload.env, workload.config, total_steps=10**9))
    for _ in range(3):
        jax.block_until_ready(program())
    folder = traces / name
    with jax.profiler.trace(str(folder)):
        for _ in range(updates):
            jax.block_until_ready(program())
    (path,) = folder.glob("**/*.xplane.pb")
    seconds, counts = read(path)
    total = sum(seconds.values())
    return {
        "workload": name,
        "kernels_per_update": sum(counts.values()) / updates,
        "ms_per_update": 1e3 * total / updates,
        "top": [
            {"kernel": kernel, "share": taken / total, "per_update": counts[kernel] / updates}
            for kernel, taken in seconds.most_common(_SHOWN)
        ],
    }


def read(path: Path) -> tuple[collections.Counter, collections.Counter]:
    """Returns seconds and counts of each kernel. On CPU, events that only contain other events are left out."""
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    on_device = [plane for plane in planes if plane.name.startswith("/device:")]
    seconds: collections.Counter = collections.Counter()
    counts: collections.Counter = collections.Counter()
    for plane in on_device or [plane for plane in planes if plane.name == "/host:CPU"]:
        for line in plane.lines:
            if on_device and "Stream" not in line.name:
                continue
            for event in line.events:
                kernel = event.name.split("::")[0] if not on_device else event.name
                if not kernel.startswith(_NO_KERNELS) and (on_device or not kernel.startswith(("while", "cond"))):
                    seconds[kernel] += 1e-9 * event.duration_ns
                    counts[kernel] += 1
    return seconds, counts


def main(
    workloads: tuple[str, ...] = ("W1", "W2", "W3", "W4"),
    updates: int = 3,
    traces: Path | None = None,
    output: Path = RESULTS / "kernels.json",
) -> None:
    """Profiles the kernels of an update and writes JSON.

    Args:
      workloads: names of workloads, see versus_jax_peers.py.
      updates: number of profiled updates.
      traces: folder for the traces; by default they are deleted.
      output: JSON file.
    """
    if unknown := [name for name in workloads if name not in ALL]:
        raise SystemExit(f"unknown workloads: {', '.join(unknown)}; use {', '.join(ALL)}")
    with tempfile.TemporaryDirectory() as passing:
        rows = [profile(name, updates, traces or Path(passing)) for name in workloads]
    write_json(output, {"rows": rows, "date": datetime.date.today().isoformat()} | hardware())
    for row in rows:
        print(json.dumps({key: value for key, value in row.items() if key != "top"}))
        table = Table("kernel", "share", "per update", title=row["workload"])
        for kernel in row["top"]:
            table.add_row(kernel["kernel"], f"{kernel['share']:.1%}", f"{kernel['per_update']:.0f}")
        Console(width=120).print(table)


if __name__ == "__main__":
    tyro.cli(main)
