"""What might make a GPU faster, each thing alone: ours as it is beside ours with one thing changed.

    python benchmarks/trials.py
    python benchmarks/trials.py --workloads W1 --trials unroll4 rbg-keys

Command buffers (CUDA graphs) off, or around loops too; the rollout unrolled, or epochs and minibatches; rbg keys; Adam
of arrays where ours is of one vector; other ways of fusing what follows a product; products in the forms that are plain
JAX; and the network's passes as one Pallas kernel each. Each trial is a process of its own, interleaved, medians over
the rounds. What needs a GPU is left out elsewhere unless it is named.
"""

import datetime
import os
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import tyro
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, hardware
from versus_jax_peers import ALL, in_rounds, updates_of
from worker import Worker

from jppo.runs import write_json


class Trial(NamedTuple):
    """One change."""

    change: str = "none"  # serve_trial.py's
    flags: str = ""  # XLA's
    keys: str = "threefry2x32"
    needs_gpu: bool = False
    only: tuple[str, ...] = ()  # the environments that it can be done with; all when empty

    def start(self, env: str, *sizes: int) -> Worker:
        flags = f"{os.environ.get('XLA_FLAGS', '')} {self.flags}".strip()
        variables = {"XLA_FLAGS": flags, "JAX_DEFAULT_PRNG_IMPL": self.keys, "JPPO_COMPILATION_CACHE": "off"}
        return Worker(sys.executable, "serve_trial.py", self.change, env, *sizes, env=variables)


AS_IS = "as it is"
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
    "triton-products": Trial(flags="--xla_gpu_triton_gemm_any=true", needs_gpu=True),
    "triton-fusions": Trial(flags="--xla_gpu_experimental_enable_fusion_block_level_rewriter=true", needs_gpu=True),
    "pallas": Trial("pallas", needs_gpu=True, only=("CartPole-v1", "Pendulum-v1")),
}


def measure(name: str, trials: dict[str, Trial], rounds: int) -> dict[str, object]:
    """Steps per second of each trial on a workload."""
    workload = ALL[name]
    updates = updates_of(workload)
    sizes = (workload.num_envs, workload.num_steps, updates)
    fitting = {key: trial for key, trial in trials.items() if workload.env in (trial.only or (workload.env,))}
    workers, failed = {}, []
    for key, trial in ({AS_IS: Trial()} | fitting).items():
        try:
            worker = trial.start(workload.env, *sizes)
            worker.train()
            workers[key] = worker
        except SystemExit as error:  # a flag that this XLA does not know, or a kernel that it cannot compile
            failed.append(key)
            print(f"{key}: {error}", file=sys.stderr, flush=True)
    compile_seconds = {key: worker.compile_seconds for key, worker in workers.items()}
    medians, times, _ = in_rounds(workers, rounds)
    for worker in workers.values():
        worker.close()
    return {
        "workload": name,
        **workload._asdict(),
        "steps_per_second": {key: updates * workload.config.batch_size / median for key, median in medians.items()},
        "ratio": {key: medians[AS_IS] / median for key, median in medians.items()},
        "compile_seconds": compile_seconds,
        "failed": failed,
        "seconds": times,
    }


def main(
    workloads: tuple[str, ...] = ("W1", "W2", "W3", "W4", "W1-64k"),
    trials: tuple[str, ...] = (),
    rounds: int = 5,
    output: Path = RESULTS / "trials.json",
) -> None:
    """Measures and writes JSON.

    Args:
      workloads: as in versus_jax_peers.py.
      trials: all that this machine's device can do where none is named.
      rounds: each lets every trial train once.
      output: JSON.
    """
    unknown = [name for name in (*workloads, *trials) if name not in (*ALL, *TRIALS)]
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; there are {', '.join(ALL)} and {', '.join(TRIALS)}")
    on_gpu = jax.default_backend() == "gpu"
    chosen = trials or tuple(name for name, trial in TRIALS.items() if on_gpu or not trial.needs_gpu)
    rows = []
    for name in workloads:
        rows.append(measure(name, {key: TRIALS[key] for key in chosen}, rounds))
        write_json(output, {"rows": rows, "date": datetime.date.today().isoformat()} | hardware())
    table = Table("speed, as it is = 1", *(row["workload"] for row in rows))
    for key in (AS_IS, *chosen):
        ratios = [row["ratio"].get(key) for row in rows]
        table.add_row(key, *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios))
    Console(width=120).print(table)
    print(f"wrote {output}")


if __name__ == "__main__":
    tyro.cli(main)
