"""Runs all measurements on a GPU; writes JSON files to results/gpu.

    python benchmarks/gpu.py --purejaxrl path/to/purejaxrl --purejaxrl-python path/to/its/python

- versus: whole training with jppo and PureJaxRL, for W1 to W4 and for 16 k, 64 k and 256 k environments. Each is
  measured with float32, TensorFloat-32 and bfloat16 products (`JAX_DEFAULT_MATMUL_PRECISION`).
- throughput: the duration of each part of an update, with JAX's default precision.

With --start-together, the processes of all workloads start at the same time. On an H200 with 16 CPU cores, five
workloads of versus then take two minutes with one precision.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import tyro

HERE = Path(__file__).parent
Precision = Literal["fp32", "tf32", "bf16"]
PRECISIONS: dict[Precision, str] = {"fp32": "highest", "tf32": "TF32_TF32_F32", "bf16": "BF16_BF16_F32"}
WORKLOADS = ("W1", "W2", "W3", "W4", "W1-16k", "W1-64k", "W1-256k", "W3-16k")


def main(
    purejaxrl: Path | None = None,
    purejaxrl_python: str = sys.executable,
    rounds: int = 5,
    precisions: tuple[Precision, ...] = tuple(PRECISIONS),
    workloads: tuple[str, ...] = WORKLOADS,
    start_together: bool = False,
    output: Path = HERE / "results" / "gpu",
) -> None:
    """Runs all measurements on a GPU and writes JSON files.

    Args:
      purejaxrl: a clone of PureJaxRL; without it, only jppo is measured.
      purejaxrl_python: Python interpreter with PureJaxRL's dependencies and JAX for this GPU.
      rounds: number of rounds; in each, every implementation trains once.
      precisions: precisions of matrix products.
      workloads: names of workloads, see versus_jax_peers.py.
      start_together: see above. Compile times are then not comparable, and second starts are not measured.
      output: folder for the JSON files.
    """
    output.mkdir(parents=True, exist_ok=True)
    peers = [] if purejaxrl is None else ["--purejaxrl", purejaxrl, "--purejaxrl-python", purejaxrl_python]
    named = ("--workloads", *workloads)
    together = ("--start-together", "--second-starts", 0) if start_together else ()
    for name in precisions:
        path = output / f"versus_{name}.json"
        run("versus_jax_peers", *named, "--rounds", rounds, *together, *peers, output=path, precision=PRECISIONS[name])
    run("throughput", output=output / "throughput.json")


def run(script: str, *words: object, output: Path, precision: str = "") -> None:
    """Runs one benchmark script. Reports a failure and continues."""
    command = [sys.executable, str(HERE / f"{script}.py"), *map(str, words), "--output", str(output)]
    print(" ".join(command), flush=True)
    env = os.environ | ({"JAX_DEFAULT_MATMUL_PRECISION": precision} if precision else {})
    if code := subprocess.run(command, env=env, check=False).returncode:
        print(f"{script}.py failed with exit code {code}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    tyro.cli(main)
