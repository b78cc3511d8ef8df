"""Compares Ray mode with another library, for versus_sb3.py and versus_rllib.py. Each run has a new process.

As a program, this module trains once with jppo, as peer_sb3.py and peer_rllib.py do with the other libraries: it takes
the settings as JSON and prints JSON with, for the end of each update, the seconds since the start and the steps; the
mean return of the episodes that ended in the last update's rollout; and versions.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from throughput import cores_busy, hardware

import jppo
from jppo.runs.files import write_json
from jppo.runs.run_dir import versions

HERE = Path(__file__).parent
_LEARNING_RULE = {
    "learning_rate": 1e-3,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_eps": 0.2,
    "vf_coef": 0.5,
    "ent_coef": 0.01,
    "max_grad_norm": 0.5,
}
LEARNING: dict[str, Any] = _LEARNING_RULE | {"num_epochs": 4, "num_minibatches": 4, "hidden_sizes": (64, 64)}
_TIMEOUT_SECONDS = 900.0
_PATIENCE_SECONDS = 600.0


class Work(NamedTuple):
    """Environment steps per update, and environment steps timed per run."""

    batch_size: int
    steps: int


WORK = {"cartpole": Work(8192, 8 * 8192), "waiting": Work(1024, 2 * 1024), "burning": Work(4096, 2 * 4096)}
_QUICK = Work(512, 1024)


@dataclass(frozen=True)
class Options:
    """Options of a comparison."""

    envs: tuple[Literal["cartpole", "waiting", "burning"], ...] = ("cartpole", "waiting")
    """Environments, as in host_envs.py."""
    num_actors: tuple[int, ...] = (8,)
    """Numbers of actors to measure."""
    envs_per_actor: int = 8
    """Number of environments per actor."""
    steps: int | None = None
    """Environment steps timed per run after one update of warm-up, rounded up to whole updates. By default, a run takes
    some seconds."""
    batch_size: int | None = None
    """Environment steps per update; by default 8,192, or fewer for slow environments."""
    repeats: int = 3
    """Runs of each contestant; results are their medians."""
    seed: int = 0
    """Seed of the first run, increased by 1 for each repetition."""
    torch_threads: int = 1
    """Number of threads of torch in the other library; 0 for its default. One is fastest for small networks."""
    peer_python: str = sys.executable
    """Python interpreter of an environment with the other library."""
    max_others: float = math.inf
    """Before each run, wait until other processes keep at most this many cores busy, for at most ten minutes."""
    quick: bool = False
    """Only check that everything works: one short run each with CartPole and two actors."""


class Contestant(NamedTuple):
    """One variant: a script that trains, and arguments in addition to the settings."""

    name: str
    script: str
    python: str = sys.executable
    extra: Mapping[str, Any] = MappingProxyType({})


class Run(NamedTuple):
    """Result of one training run."""

    steps_per_second: float  # of training after the first update
    outside_seconds: float  # duration of the process without training: imports, start and end of processes, compilation
    return_mean: float | None  # of the episodes that ended in the last update's rollout; None without such an episode
    cores_busy_before: float  # by other processes, just before the run
    versions: dict[str, str]


def compare(peer: str, imports: str, contestants: list[Contestant], options: Options, output: Path) -> None:
    """Runs all contestants alternately, prints a table and writes `output`.

    Args:
      peer: packages to install, for the message if the other library is missing.
      imports: a statement that fails if the other library is missing.
      contestants: jppo first; the others are compared with it.
    """
    if missing := _missing(options.peer_python, imports):
        print(f"{missing}; install {peer}, or select a Python environment that has it with --peer-python")
        return
    rows = []
    for env in ("cartpole",) if options.quick else options.envs:
        for num_actors in (2,) if options.quick else options.num_actors:
            setting = make_setting(env, num_actors, options)
            runs = run_alternately(contestants, setting, 1 if options.quick else options.repeats, options.max_others)
            rows += [report(setting, name, runs[name], runs[contestants[0].name]) for name in runs]
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, {"rows": rows, "learning": LEARNING, **hardware()})
    show(rows)


def make_setting(env: str, num_actors: int, options: Options) -> dict[str, Any]:
    """Returns the settings of all contestants. Exits with a message if the sizes do not fit."""
    work = _QUICK if options.quick else WORK[env]
    batch_size = options.batch_size or work.batch_size
    num_envs = num_actors * options.envs_per_actor
    if num_envs < 1 or batch_size % num_envs or batch_size % LEARNING["num_minibatches"]:
        raise SystemExit(
            f"batch_size = {batch_size} must be a multiple of num_actors*envs_per_actor = {num_envs} and of "
            f"num_minibatches = {LEARNING['num_minibatches']}"
        )
    return LEARNING | {
        "env": env,
        "num_actors": num_actors,
        "envs_per_actor": options.envs_per_actor,
        "batch_size": batch_size,
        "num_updates": 1 - (-(options.steps or work.steps) // batch_size),
        "seed": options.seed,
        "torch_threads": options.torch_threads,
    }


def run_alternately(
    contestants: list[Contestant], setting: dict[str, Any], repeats: int, max_others: float
) -> dict[str, list[Run]]:
    """Runs every contestant once per round, so that other processes affect all equally. Returns the runs by name."""
    runs: dict[str, list[Run]] = {contestant.name: [] for contestant in contestants}
    for number in range(repeats):
        for contestant in contestants:
            run = run_once(contestant, setting | {"seed": setting["seed"] + number}, max_others)
            runs[contestant.name].append(run)
            line = {key: setting[key] for key in ("env", "num_actors")} | {"contestant": contestant.name}
            print(
                json.dumps(line | {key: value for key, value in run._asdict().items() if key != "versions"}), flush=True
            )
    return runs


def run_once(contestant: Contestant, setting: dict[str, Any], max_others: float) -> Run:
    """Trains once in a new process. Exits with the error output if it fails."""
    deadline = time.perf_counter() + _PATIENCE_SECONDS
    while (busy := cores_busy()) > max_others and time.perf_counter() < deadline:
        pass
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}  # the other libraries also learn on the CPU
    environment.pop("RAY_ADDRESS", None)  # each run starts Ray itself
    command = [contestant.python, str(HERE / contestant.script), json.dumps(setting | dict(contestant.extra))]
    start = time.perf_counter()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
    )
    wall = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{contestant.name} failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    result = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
    seconds, steps = result["seconds"], result["steps"]
    speed = (steps[-1] - steps[0]) / (seconds[-1] - seconds[0])
    return Run(speed, wall - seconds[-1], result["return_mean"], busy, result["versions"])


def report(setting: dict[str, Any], name: str, runs: list[Run], ours: list[Run]) -> dict[str, Any]:
    """Returns the row of one contestant: medians over its runs, and all runs."""
    speeds = [run.steps_per_second for run in runs]
    ratios = [our.steps_per_second / run.steps_per_second for our, run in zip(ours, runs, strict=True)]
    returns = [math.nan if run.return_mean is None else run.return_mean for run in runs]
    return {
        "contestant": name,
        **{key: setting[key] for key in ("env", "num_actors", "envs_per_actor", "batch_size", "num_updates")},
        "steps_per_second": float(np.median(speeds)),
        "ours_to_this": float(np.median(ratios)),
        "outside_seconds": float(np.median([run.outside_seconds for run in runs])),
        "return_mean": float(np.median(returns)),
        "steps_per_second_of_runs": speeds,
        "return_mean_of_runs": returns,
        "cores_busy_before_runs": [run.cores_busy_before for run in runs],
        "torch_threads": setting["torch_threads"],
        "contestant_versions": runs[0].versions,
    }


def show(rows: list[dict[str, Any]]) -> None:
    columns = ("env", "actors x envs", "batch", "contestant", "steps/s", "jppo is", "outside s", "return")
    table = Table(*columns)
    for row in rows:
        low, high = min(row["steps_per_second_of_runs"]), max(row["steps_per_second_of_runs"])
        table.add_row(
            row["env"],
            f"{row['num_actors']} x {row['envs_per_actor']}",
            f"{row['batch_size']:,}",
            row["contestant"],
            f"{row['steps_per_second']:,.0f} ({low:,.0f}, {high:,.0f})",
            f"{row['ours_to_this']:.2f}x",
            f"{row['outside_seconds']:.1f}",
            f"{row['return_mean']:.0f}",
        )
    Console(width=140).print(
        table, "medians (lowest, highest); 'jppo is' gives the speed of the group's first row relative to this row"
    )


def train_ours(setting: dict[str, Any]) -> dict[str, Any]:
    """Trains once with jppo; the settings also contain policy_lag, and in_process to train without actors."""
    num_envs = setting["num_actors"] * setting["envs_per_actor"]
    config = jppo.PPOConfig(
        num_envs=num_envs,
        num_steps=setting["batch_size"] // num_envs,
        num_epochs=setting["num_epochs"],
        num_minibatches=setting["num_minibatches"],
        hidden_sizes=tuple(setting["hidden_sizes"]),
        clip_value=False,
    )
    actors, envs = (0, num_envs) if setting["in_process"] else (setting["num_actors"], setting["envs_per_actor"])
    result = jppo.train(
        f"host_envs:{setting['env']}",
        backend="ray",
        ray=jppo.RayConfig(num_actors=actors, envs_per_actor=envs, policy_lag=setting["policy_lag"]),
        config=config,
        hyperparams=jppo.Hyperparams(**{name: setting[name] for name in _LEARNING_RULE}),
        total_steps=setting["batch_size"] * setting["num_updates"],
        seed=setting["seed"],
        progress="none",
    )
    seconds = result.metrics["time/elapsed"]  # interpolated for updates that were logged together
    seconds[0] = sum(result.metrics[f"time/{part}"][0] for part in ("wait_rollouts", "host_to_device", "update"))
    return {
        "seconds": seconds.tolist(),
        "steps": result.metrics["env_steps"].tolist(),
        "return_mean": float(result.metrics["episode/return_mean"][-1]),
        "versions": versions() | {name: version(name) for name in ("ray", "gymnasium")},
    }


def _missing(python: str, imports: str) -> str:
    """Returns the reason why `imports` fails with an interpreter, or ''."""
    try:
        done = subprocess.run([python, "-c", imports], capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


if __name__ == "__main__":
    print(json.dumps(train_ours(json.loads(sys.argv[1]))))
