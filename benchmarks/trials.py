"""Measures possible optimizations for GPUs: jppo with one change, compared with unchanged jppo.

    python benchmarks/trials.py
    python benchmarks/trials.py --workloads W1 --trials unroll4 rbg-keys

The changes: command buffers (CUDA graphs) off, or also around loops; an unrolled rollout, or unrolled epochs and
minibatches; rbg keys; Adam with separate arrays instead of one vector; other fusions after matrix products; no tuned
kernels; and the network's passes as one Pallas kernel each. Each variant has its own process. All processes start at
the same time, then they train in turn. Results are ratios of medians over the rounds. Trials that need a GPU run
elsewhere only if named.
"""

import datetime
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import tyro
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, hardware
from versus_jax_peers import ALL, in_rounds, updates_of
from worker import Worker

from jppo.runs.files import write_json


class Trial(NamedTuple):
    """A change of the program, of XLA's flags or of the keys."""

    change: str = "none"  # argument of serve_trial.py
    flags: str = ""  # for XLA
    keys: str = "threefry2x32"
    needs_gpu: bool = False
    only: tuple[str, ...] = ()  # the environments that support it; all if empty

    def start(self, env: str, *sizes: int) -> Worker:
        flags = f"{os.environ.get('XLA_FLAGS', '')} {self.flags}".strip()
        variables = {"XLA_FLAGS": flags, "JAX_DEFAULT_PRNG_IMPL": self.keys, "JPPO_COMPILATION_CACHE": "off"}
        return Worker(sys.executable, "serve_trial.py", self.change, env, *sizes, env=variables)


AS_IS = "unchanged"
TRIALS = {
    "no-command-buffers": Trial(flags="--xla_gpu_enable_command_buffer=", needs_gpu=True),
    "loops-in-command-buffers": Trial(flags="--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL", needs_gpu=True),
    "short-command-buffers": Trial(flags="--xla_gpu_graph_min_graph_size=1", needs_gpu=True),
    "unroll2": Trial("unroll2"),
    "unroll4": Trial("unroll4"),
    "unroll8": Trial("unroll8"),
    "unroll-minibatches": Trial("unroll_minibatches"),
    "rbg-keys": Trial(keys="rbg"),
    "adam-of-arrays": Trial("adam_of_arrays"),
    "plain-products": Trial("plain_products"),
    "no-triton-products": Trial(flags="--xla_gpu_enable_triton_gemm=false", needs_gpu=True),
    "no-cublas-products": Trial(flags="--xla_gpu_cublas_fallback=false", needs_gpu=True),
    "triton-fusions": Trial(flags="--xla_gpu_experimental_enable_fusion_block_level_rewriter=true", needs_gpu=True),
    "pallas": Trial("pallas", needs_gpu=True, only=("CartPole-v1", "Pendulum-v1")),
}


def measure(name: str, trials: dict[str, Trial], rounds: int) -> dict[str, Any]:
    """Compares changes with unchanged jppo on a workload; all processes must fit on the device. Returns the results of
    each variant that runs."""
    workload = ALL[name]
    updates = updates_of(workload)
    sizes = (workload.num_envs, workload.num_steps, updates)
    variants = {AS_IS: Trial()} | trials
    with ThreadPoolExecutor(len(variants)) as pool:
        starting = {key: pool.submit(trial.start, workload.env, *sizes) for key, trial in variants.items()}
        failed = {key: str(future.exception()) for key, future in starting.items() if future.exception() is not None}
    workers = {key: future.result() for key, future in starting.items() if key not in failed}
    try:
        medians, times, _ = in_rounds(workers, rounds)
    finally:
        for worker in workers.values():
            worker.kill()
    steps = updates * workload.config.batch_size
    return {key: {"failed": problem} for key, problem in failed.items()} | {
        key: {
            "ratio": medians[AS_IS] / median,
            "steps_per_second": steps / median,
            "compile_seconds": workers[key].compile_seconds,
            "seconds": times[key],
        }
        for key, median in medians.items()
    }


def main(
    workloads: tuple[str, ...] = ("W1", "W2", "W3", "W4", "W1-64k"),
    trials: tuple[str, ...] = (),
    rounds: int = 5,
    output: Path = RESULTS / "trials.json",
) -> None:
    """Measures possible optimizations for GPUs and writes JSON.

    Args:
      workloads: names of workloads, see versus_jax_peers.py.
      trials: names of changes; by default all that this machine's device supports.
      rounds: number of rounds; in each, every variant trains once.
      output: JSON file.
    """
    for names, known in ((workloads, ALL), (trials, TRIALS)):
        if unknown := [name for name in names if name not in known]:
            raise SystemExit(f"unknown: {', '.join(unknown)}; use {', '.join(known)}")
    if rounds < 1:
        raise SystemExit("rounds must be at least 1")
    output.parent.mkdir(parents=True, exist_ok=True)
    on_gpu = jax.default_backend() == "gpu"
    chosen = trials or tuple(name for name, trial in TRIALS.items() if on_gpu or not trial.needs_gpu)
    rows = []
    for name in workloads:
        fitting = {key: TRIALS[key] for key in chosen if ALL[name].env in (TRIALS[key].only or (ALL[name].env,))}
        rows.append({"workload": name, **ALL[name]._asdict(), "trials": measure(name, fitting, rounds)})
        for key, found in rows[-1]["trials"].items():
            print(f"{name}, {key}: {found.get('ratio', found.get('failed'))}", flush=True)
        write_json(output, {"rows": rows, "date": datetime.date.today().isoformat()} | hardware())
    table = Table("speed relative to unchanged", *(row["workload"] for row in rows))
    for key in chosen:
        ratios = [row["trials"].get(key, {}).get("ratio") for row in rows]
        table.add_row(key, *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios))
    Console(width=120).print(table)
    print(f"wrote {output}")


if __name__ == "__main__":
    tyro.cli(main)
