"""Measures Ray mode with 1, 2, 4 and 8 actors: return over time, and the time of each activity.

    python benchmarks/actors.py
    python benchmarks/actors.py --envs waiting --actors 1 8 --seeds 1
    python benchmarks/actors.py --num-steps 1024  # updates of 8,192 steps

The number of environments does not depend on the number of actors. In synchronous mode all runs therefore see the same
samples, and only the time differs. Each run has its own process. Each seed runs with every number of actors before the
next seed starts.

The ceiling is the speed of the environments without a policy, one environment per process and one process per actor.
"""

import datetime
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import host_envs
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, hardware

import jppo
from jppo.runs.files import write_json

NUM_ENVS = 8
HYPERPARAMS = jppo.Hyperparams(learning_rate=1e-3)
PARTS = ("env", "policy", "rest", "transfer", "wait", "update")
_CEILING_SECONDS = 3.0
_LEAST_UPDATES = 10


class Task(NamedTuple):
    """The training length and the label of an environment."""

    total_steps: int
    meaning: str


TASKS = {
    "cartpole": Task(102_400, "CartPole-v1"),
    "waiting": Task(40_960, "CartPole-v1 that sleeps 2 ms per step"),
    "burning": Task(40_960, "CartPole-v1 that computes for 0.5 ms per step"),
}


def train(env: str, num_actors: int, seed: int, policy_lag: int, num_steps: int) -> dict[str, Any]:
    """Trains once in this process and returns speed, times and returns."""
    result = jppo.train(
        f"host_envs:{env}",
        backend="ray",
        num_actors=num_actors,
        ray=jppo.RayConfig(policy_lag=policy_lag),
        total_steps=max(TASKS[env].total_steps, _LEAST_UPDATES * NUM_ENVS * num_steps),
        seed=seed,
        config=jppo.PPOConfig(num_envs=NUM_ENVS, num_steps=num_steps),
        hyperparams=HYPERPARAMS,
    )
    columns = {name: values[1:] for name, values in result.metrics.items()}  # the first update warms up
    elapsed = result.metrics["time/elapsed"]
    rollout = {name: columns[f"actors/{name}_seconds"].mean() for name in ("env", "policy", "rollout")}
    return {
        "steps_per_second": float(
            (result.metrics["env_steps"][-1] - result.metrics["env_steps"][0]) / (elapsed[-1] - elapsed[0])
        ),
        "seconds": {
            "env": float(rollout["env"]),
            "policy": float(rollout["policy"]),
            "rest": float(rollout["rollout"] - rollout["env"] - rollout["policy"]),
            "transfer": float(columns["time/host_to_device"].mean()),
            "wait": float(columns["time/wait_rollouts"].mean()),
            "update": float(columns["time/update"].mean()),
        },
        "start_seconds": result.summary["compile_seconds"],
        "time": elapsed.tolist(),
        "return": result.metrics["episode/return_mean"].tolist(),
        "final_return": result.summary["return_mean"],
    }


def step_bare(env: str, barrier: Any, counts: Any) -> None:
    """Steps one environment for three seconds and puts its steps per second into the queue."""
    made = getattr(host_envs, env)()
    made.reset(seed=0)
    barrier.wait()
    steps, start = 0, time.perf_counter()
    while (now := time.perf_counter()) - start < _CEILING_SECONDS:
        _, _, terminated, truncated, _ = made.step(steps % 2)
        steps += 1
        if terminated or truncated:
            made.reset()
    counts.put(steps / (now - start))


def ceiling(env: str, processes: int) -> float:
    """Returns the total steps per second of environments without a policy, one per process."""
    context = multiprocessing.get_context("spawn")
    barrier, counts = context.Barrier(processes), context.Queue()
    workers = [context.Process(target=step_bare, args=(env, barrier, counts)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    total = sum(counts.get() for _ in workers)
    for worker in workers:
        worker.join()
    return total


def apart(function: Any, *args: Any) -> Any:
    """Calls the function in a new process and returns its result."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def report(env: str, runs: dict[int, list[dict[str, Any]]], ceilings: dict[int, float]) -> list[dict[str, Any]]:
    """Returns a row per number of actors, with medians over the seeds."""
    rows = []
    for num_actors, of_seeds in runs.items():
        speed = float(np.median([run["steps_per_second"] for run in of_seeds]))
        first = float(np.median([run["steps_per_second"] for run in runs[min(runs)]]))
        rows.append(
            {
                "env": env,
                "actors": num_actors,
                "steps_per_second": speed,
                "speed_up": speed / first,
                "ceiling": ceilings[num_actors],
                "of_ceiling": speed / ceilings[num_actors],
                "seconds": {p: float(np.median([run["seconds"][p] for run in of_seeds])) for p in PARTS},
                "final_return": float(np.mean([run["final_return"] for run in of_seeds])),
                "runs": of_seeds,
            }
        )
    return rows


def show(rows: list[dict[str, Any]], policy_lag: int, num_steps: int) -> None:
    """Prints the table."""
    setting = f"policy_lag = {policy_lag}, {NUM_ENVS} environments x {num_steps} steps"
    table = Table(title=f"{setting}; parts in ms per update (env, policy, rest: mean over actors)")
    for name in ("environment", "actors", "steps/s", "speed-up", "ceiling", "of it", *PARTS, "return"):
        table.add_column(name, justify="left" if name == "environment" else "right")
    for row in rows:
        parts = (f"{1e3 * row['seconds'][part]:.1f}" for part in PARTS)
        numbers = (f"{row['steps_per_second']:,.0f}", f"{row['speed_up']:.2f}", f"{row['ceiling']:,.0f}")
        share = f"{row['of_ceiling']:.2f}"
        table.add_row(row["env"], str(row["actors"]), *numbers, share, *parts, f"{row['final_return']:.0f}")
    Console(width=140).print(table)


def draw(rows: list[dict[str, Any]], output: Path) -> None:
    """Plots return over time: a panel per environment, a line per number of actors, and the range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    envs = list(dict.fromkeys(row["env"] for row in rows))
    figure, axes = pyplot.subplots(1, len(envs), figsize=(4.6 * len(envs), 3.8), squeeze=False, layout="constrained")
    for axis, env in zip(axes[0], envs, strict=True):
        for color, row in enumerate(row for row in rows if row["env"] == env):
            end = min(run["time"][-1] for run in row["runs"])
            grid = np.linspace(0.0, end, 200)
            curves = [_on_grid(grid, run) for run in row["runs"]]
            plural = "s" if row["actors"] > 1 else ""
            axis.plot(grid, np.mean(curves, axis=0), color=f"C{color}", label=f"{row['actors']} actor{plural}")
            axis.fill_between(grid, np.min(curves, 0), np.max(curves, 0), color=f"C{color}", alpha=0.15, linewidth=0)
        axis.set(title=TASKS[env].meaning, xlabel="training time (s)", xscale="log", ylabel="episode return")
        axis.legend(frameon=False, loc="upper left")
        axis.grid(alpha=0.3)
    figure.savefig(output, dpi=150)


def _on_grid(grid: np.ndarray, run: dict[str, Any]) -> np.ndarray:
    """Interpolates a run's returns at the times of the grid. Updates in which no episode ended have no return."""
    known = [(when, value) for when, value in zip(run["time"], run["return"], strict=True) if np.isfinite(value)]
    times, values = np.array(known).T
    return np.interp(grid, times, values, left=np.nan)


def main(
    envs: tuple[str, ...] = tuple(TASKS),
    actors: tuple[int, ...] = (1, 2, 4, 8),
    seeds: int = 3,
    policy_lag: int = 0,
    num_steps: int = 256,
    output: Path = RESULTS / "actors.json",
) -> None:
    """Measures Ray mode with several numbers of actors; writes JSON and a plot.

    Args:
      envs: environments of host_envs.py: cartpole, waiting, burning.
      actors: numbers of actors; each must divide 8, the number of environments.
      seeds: number of runs for each number of actors.
      policy_lag: 0 or 1.
      num_steps: steps per rollout and environment.
      output: JSON file; the plot has the same name with the suffix .png.
    """
    if unknown := [env for env in envs if env not in TASKS]:
        raise SystemExit(f"unknown envs {', '.join(unknown)}; use {', '.join(TASKS)}")
    rows: list[dict[str, Any]] = []
    for env in envs:
        ceilings = {num_actors: ceiling(env, num_actors) for num_actors in actors}
        runs: dict[int, list[dict[str, Any]]] = {num_actors: [] for num_actors in actors}
        for seed in range(seeds):
            for num_actors in actors:
                runs[num_actors].append(apart(train, env, num_actors, seed, policy_lag, num_steps))
                last = runs[num_actors][-1]
                print(f"{env}, {num_actors} actors, seed {seed}: {last['steps_per_second']:,.0f} steps/s", flush=True)
        rows += report(env, runs, ceilings)
    output.parent.mkdir(parents=True, exist_ok=True)
    setting = {"policy_lag": policy_lag, "num_envs": NUM_ENVS, "num_steps": num_steps}
    write_json(output, {"rows": rows, **setting, "date": datetime.date.today().isoformat()} | hardware())
    draw(rows, output.with_suffix(".png"))
    show(rows, policy_lag, num_steps)
    print(f"wrote {output} and {output.with_suffix('.png')}; {os.cpu_count()} cores")


if __name__ == "__main__":
    tyro.cli(main)
