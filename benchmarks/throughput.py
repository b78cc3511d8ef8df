"""Measures steps per second of the full training loop, and of each part alone.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --workloads W1 W3 --output results.json

Each round times every program once, so that other processes on the machine affect all programs equally. Results are
medians over the rounds. Compile time and memory are measured in a new process per workload.
"""

import functools
import json
import math
import multiprocessing
import os
import platform
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import jppo
from jppo.benchmark.timing import select_actions as act
from jppo.benchmark.timing import step_environments
from jppo.devices.jit import jit
from jppo.ppo.anakin import Anakin, AnakinState
from jppo.ppo.learner import make_learner
from jppo.ppo.rollout import collect
from jppo.runs.files import write_json
from jppo.runs.run_dir import versions

RESULTS = Path(__file__).parent / "results"
Program = Callable[[], Any]


class Workload(NamedTuple):
    """A workload with four epochs of four minibatches and separate networks of two 64-wide tanh layers; if recurrent,
    a shared relu layer, a GRU, and a relu layer each for actor and critic, all 128 wide."""

    env: str
    num_envs: int
    num_steps: int
    recurrent: bool = False

    @property
    def config(self) -> jppo.PPOConfig:
        config = jppo.PPOConfig(num_envs=self.num_envs, num_steps=self.num_steps)
        memory = {"recurrent": "gru", "recurrent_size": 128, "hidden_sizes": (128, 128), "activation": "relu"}
        return config.replace(**memory) if self.recurrent else config


WORKLOADS = {
    "W1": Workload("CartPole-v1", 2048, 32),
    "W2": Workload("CartPole-v1", 64, 128),
    "W3": Workload("Breakout-MinAtar", 1024, 32),
    "W4": Workload("Pendulum-v1", 1024, 32),
}
_BLOCK_SECONDS = 0.5  # the kernel counts CPU time in hundredths of a second
CEILINGS = ("environment", "policy", "learner")


def hardware() -> dict[str, Any]:
    """Returns a description of the hardware and the versions of packages."""
    models = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = (line.split(":")[1].strip() for line in models if line.startswith("model name"))
    return {
        "device": jax.devices()[0].device_kind,
        "cpu": next(named, platform.processor()),
        "cores": os.cpu_count(),
        "matmul_precision": jax.config.jax_default_matmul_precision,  # None is JAX's default
        "versions": versions(),
    }


def interleaved(programs: dict[Any, Program], repeats: int) -> tuple[dict[Any, np.ndarray], float]:
    """Times programs in rounds, each of which runs every program once, after two rounds of warm-up.

    Returns the seconds of each program per round, and the number of cores that other processes kept busy.
    """
    for program in [*programs.values()] * 2:
        _seconds(program)
    began, others = time.perf_counter(), _cpu_seconds_of_others()
    rounds = [[_seconds(program) for program in programs.values()] for _ in range(repeats)]
    busy = (_cpu_seconds_of_others() - others) / (time.perf_counter() - began)
    return dict(zip(programs, np.transpose(rounds), strict=True)), busy


def cores_busy() -> float:
    """Returns the number of cores that other processes keep busy, measured over half a second."""
    began, others = time.perf_counter(), _cpu_seconds_of_others()
    time.sleep(_BLOCK_SECONDS)
    return (_cpu_seconds_of_others() - others) / (time.perf_counter() - began)


def _seconds(program: Program) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program())
    return time.perf_counter() - start


def _cpu_seconds_of_others() -> float:
    """Returns the CPU time of all other processes so far; NaN without /proc."""
    if not Path("/proc/stat").exists():
        return math.nan
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - time.process_time()


class Updates:
    """Runs the full loop: each call makes one rollout and one update and donates the state."""

    def __init__(self, agent: Anakin) -> None:
        start = time.perf_counter()
        self.state: AnakinState = jit(agent.init)(jax.random.key(0), jppo.Hyperparams())
        self._step = jit(agent.step, donate_argnums=0).lower(self.state).compile()
        self.compile_seconds = time.perf_counter() - start

    def __call__(self) -> AnakinState:
        self.state, _ = self._step(self.state)
        return self.state


def make_agent(name: str) -> Anakin:
    workload = WORKLOADS[name]
    return jppo.make_anakin(workload.env, workload.config, total_steps=10**9)


def fresh_process(name: str) -> dict[str, float]:
    """Returns compile time and peak memory of a new process that only trains."""
    updates = Updates(make_agent(name))
    for _ in range(3):
        jax.block_until_ready(updates())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if platform.system() == "Darwin" else 2**10)
    return {"compile_seconds": updates.compile_seconds, "peak_rss_mb": peak}


def parts_of(agent: Anakin) -> dict[str, Program]:
    """Returns programs that each run one part of the loop on a fixed state and rollout."""
    state = jit(agent.init)(jax.random.key(1), jppo.Hyperparams())
    train, key = state.train, jax.random.key(2)
    roll = jit(functools.partial(collect, agent.env, agent.policy, agent.config.num_steps))
    _, rollout, stats = roll(train.policy_state, state.collect, train.hyperparams.gamma)

    def bound(function: Callable, *args: Any) -> Program:
        return functools.partial(jit(function), *args)

    return {
        "environment": bound(functools.partial(step_environments, agent), state.collect, key),
        "policy": bound(functools.partial(act, agent), train.policy_state, rollout.obs, key),
        "learner": bound(make_learner(agent.policy, agent.config).update, train, rollout, stats),
        "rollout": functools.partial(roll, train.policy_state, state.collect, train.hyperparams.gamma),
    }


def report(name: str, seconds: dict[str, np.ndarray], fresh: dict[str, float]) -> dict[str, Any]:
    """Returns the results of one workload."""
    workload = WORKLOADS[name]
    samples = workload.config.batch_size
    update = seconds["update"]
    milliseconds = {part: 1e3 * float(np.median(times)) for part, times in seconds.items()}
    return {
        "workload": name,
        **workload._asdict(),
        "steps_per_second": samples / float(np.median(update)),
        "ms_per_update": milliseconds["update"],
        "ms_per_update_quartiles": [1e3 * float(q) for q in np.quantile(update, (0.25, 0.75))],
        **fresh,
        "ceilings": {part: samples / float(np.median(seconds[part])) for part in CEILINGS},
        "ms_of_parts": {part: value for part, value in milliseconds.items() if part != "update"},
    }


def show(lines: list[dict[str, Any]]) -> None:
    columns = ("workload", "env", "envs x steps", "steps/s", "ms/update", "compile s", "peak MB")
    table = Table(*columns, *(f"{part} only" for part in CEILINGS))
    for line in lines:
        low, high = line["ms_per_update_quartiles"]
        table.add_row(
            line["workload"],
            line["env"],
            f"{line['num_envs']} x {line['num_steps']}",
            f"{line['steps_per_second']:,.0f}",
            f"{line['ms_per_update']:.1f} [{low:.1f}, {high:.1f}]",
            f"{line['compile_seconds']:.1f}",
            f"{line['peak_rss_mb']:.0f}",
            *(f"{line['ceilings'][part]:,.0f}" for part in CEILINGS),
        )
    parts = Table("ms of", *(line["workload"] for line in lines))
    for part in lines[0]["ms_of_parts"]:
        parts.add_row(part, *(f"{line['ms_of_parts'][part]:.1f}" for line in lines))
    Console(width=160).print(table, parts, {key: lines[0][key] for key in ("rounds", "cores_busy_with_others")})


def main(
    workloads: tuple[str, ...] = tuple(WORKLOADS),
    repeats: int = 30,
    output: Path = RESULTS / "throughput.json",
) -> None:
    """Measures steps per second of the training loop and of its parts, and writes JSON.

    Args:
      workloads: W1, W2, W3 or W4.
      repeats: timed updates of each workload.
      output: JSON file.
    """
    unknown = [name for name in workloads if name not in WORKLOADS]
    if unknown or repeats < 1:
        raise SystemExit(f"unknown workloads: {', '.join(unknown)}" if unknown else "repeats must be at least 1")
    fresh = {}
    for name in workloads:  # before this process touches the device itself
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            fresh[name] = pool.submit(fresh_process, name).result()
    programs: dict[tuple[str, str], Program] = {}
    for name in workloads:
        agent = make_agent(name)
        programs |= {(name, part): program for part, program in parts_of(agent).items()}
        programs[name, "update"] = Updates(agent)
    times, busy = interleaved(programs, repeats)
    measured = {"rounds": repeats, "cores_busy_with_others": busy} | hardware()
    parts = {name: {part: times[of, part] for of, part in times if of == name} for name in workloads}
    lines = [report(name, parts[name], fresh[name]) | measured for name in workloads]
    for line in lines:
        print(json.dumps(line), flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, lines)
    show(lines)


if __name__ == "__main__":
    tyro.cli(main)
