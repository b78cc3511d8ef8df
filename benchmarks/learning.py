"""Measures returns over seeds: ten seeds in one vmapped program on the device, or five runs with Ray actors.

    python benchmarks/learning.py                       # the whole table of docs/learning.md
    python benchmarks/learning.py --envs CartPole-v1/ray Pendulum-v1/ray HalfCheetah-v5/ray
    python benchmarks/learning.py --envs CartPole-v1 Pendulum-v1
    python benchmarks/learning.py --envs Breakout-MinAtar --share 0.1    # a tenth of the task's steps
    python benchmarks/learning.py --envs memory         # the table of recurrent policies
    python benchmarks/learning.py --envs                # only draws the committed results again

Rows of the results that are not measured again are kept. Tasks and published scores are in learning_tasks.py, table and
picture in learning_report.py.
"""

import datetime
import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from learning_report import bin_returns, memory_table, table, write_report
from learning_tasks import MEMORY, NETWORKS, TASKS, Task
from rich.console import Console
from throughput import RESULTS, hardware

import jppo
from jppo.config.presets import preset_for
from jppo.devices.jit import jit
from jppo.runs.files import write_json
from jppo.runs.statistics import bootstrap_interval, interquartile_mean

DOCS = Path(__file__).parents[1] / "docs" / "learning.md"
LAST_SHARE = 0.05
EVAL_EPISODES = 100


def final_returns(metrics: dict[str, Any]) -> np.ndarray:
    """Returns the mean return of the episodes that ended in the last 5 % of the updates, [seeds].

    If none did, those of the last update in which an episode ended count. NaN if no episode ended in the run.
    """
    counts, means = (np.asarray(metrics[f"episode/{name}"], np.float64) for name in ("count", "return_mean"))
    start = counts.shape[1] - math.ceil(LAST_SHARE * counts.shape[1])
    returns = []
    for count, mean in zip(counts, means, strict=True):
        ended = np.flatnonzero(count)
        used = ended[ended >= min([start, *ended[-1:]])]
        returns.append(np.average(mean[used], weights=count[used]) if len(used) else math.nan)
    return np.array(returns)


def spread(scores: np.ndarray) -> dict[str, Any]:
    """Returns mean, sample standard deviation, interquartile mean and its 95 % bootstrap interval over seeds."""
    return {
        "mean": float(scores.mean()),
        "std": float(scores.std(ddof=1)) if len(scores) > 1 else None,
        "iqm": float(interquartile_mean(scores)),
        "interval": [float(edge) for edge in bootstrap_interval(scores)],
        "per_seed": scores.tolist(),
    }


def run(label: str, task: Task, num_seeds: int, total_steps: int) -> dict[str, Any]:
    """Trains and evaluates all seeds and returns the row of results."""
    words = label.split("/")
    backend = next((word for word in words if word in ("ray", "host")), "device")
    name = "/".join(word for word in words if word not in ("ray", "host", *NETWORKS))
    env = name if task.env is None else task.env
    task = task._replace(preset=task.preset or preset_for(name))
    measured = (run_on_device if backend == "device" else run_on_host)(env, task, num_seeds, total_steps)
    return {
        "env": name,
        "backend": backend,
        "preset": task.preset,
        "network": words[-1] if task.settings else "",
        "share": total_steps / task.total_steps,
        "seeds": num_seeds,
        **measured,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        **hardware(),
    }


def run_on_device(env: Any, task: Task, num_seeds: int, total_steps: int) -> dict[str, Any]:
    """Trains all seeds in one vmapped program."""
    config, hyperparams = task.settings or jppo.PRESETS[task.preset][:2]
    agent = jppo.make_anakin(env, config, total_steps=total_steps)
    keys = jax.vmap(jax.random.key)(np.arange(num_seeds))
    start = time.perf_counter()
    train = jit(jax.vmap(agent.train, in_axes=(0, None))).lower(keys, hyperparams).compile()
    compiled = time.perf_counter()
    state, metrics = jax.block_until_ready(train(keys, hyperparams))
    trained = time.perf_counter()
    states = [jax.tree.map(lambda x, i=i: x[i], state.train.policy_state) for i in range(num_seeds)]
    policies = [jppo.TrainedPolicy(agent.policy, policy_state) for policy_state in states]
    greedy = [evaluate_greedy(agent.env, policy, seed) for seed, policy in enumerate(policies)]
    steps = agent.num_updates * agent.config.batch_size
    return {
        "steps": steps,
        "score": spread(final_returns(metrics)),
        "greedy": spread(np.array(greedy)),
        "returns": bin_returns(metrics),
        "updates_undone": int((~np.asarray(metrics["finite"])).sum()),
        "compile_seconds": compiled - start,
        "seconds": trained - compiled,
        "steps_per_second": steps * num_seeds / (trained - compiled),
    }


def run_on_host(env: Any, task: Task, num_seeds: int, total_steps: int) -> dict[str, Any]:
    """Trains one seed after the other."""
    options: dict[str, Any] = {"preset": task.preset}
    if task.settings:
        options = {"config": task.settings[0], "hyperparams": task.settings[1]}
    results = [
        jppo.train(env, backend="ray", total_steps=total_steps, seed=seed, num_actors=task.num_actors, **options)
        for seed in range(num_seeds)
    ]
    metrics = {name: np.stack([result.metrics[name] for result in results]) for name in results[0].metrics}
    greedy = [evaluate_greedy(result.agent.env, result.policy, seed) for seed, result in enumerate(results)]
    seconds = sum(result.summary["seconds"] for result in results)
    return {
        "steps": results[0].summary["steps"],
        "score": spread(final_returns(metrics)),
        "greedy": spread(np.array(greedy)),
        "returns": bin_returns(metrics),
        "num_actors": results[0].summary["num_actors"],
        "compile_seconds": sum(result.summary["compile_seconds"] for result in results),
        "seconds": seconds,
        "steps_per_second": results[0].summary["steps"] * num_seeds / seconds,
    }


def evaluate_greedy(env: Any, policy: jppo.TrainedPolicy, seed: int) -> float:
    """Returns the mean return of episodes with the most likely actions, and with other starts for each seed."""
    return float(jppo.evaluate(env, policy, num_episodes=EVAL_EPISODES, seed=1_000_000 + 1000 * seed).returns.mean())


def commit() -> str:
    """Returns the commit of this repository, with the suffix "-dirty" if files were changed."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()


def main(
    envs: tuple[str, ...] = tuple(TASKS),
    seeds: int | None = None,
    share: float = 1.0,
    output: Path = RESULTS / "learning.json",
    document: Path | None = DOCS,
) -> None:
    """Measures returns over seeds and writes the tables and the picture of docs/learning.md.

    Args:
      envs: tasks to run; memory stands for all environments that need a memory.
      seeds: number of seeds per task; by default the task's.
      share: share of the task's steps; schedules end with the run. The table marks rows with fewer steps.
      output: JSON file; rows of other tasks in it are kept.
      document: Markdown file with the tables to replace, or `--document None`.
    """
    tasks = TASKS | MEMORY
    labels = [label for env in envs for label in (MEMORY if env == "memory" else (env,))]
    if unknown := [label for label in labels if label not in tasks]:
        raise SystemExit(f"unknown envs {', '.join(unknown)}; use memory, {', '.join(tasks)}")
    rows = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    output.parent.mkdir(parents=True, exist_ok=True)
    for label in labels:
        task = tasks[label]
        rows[label] = run(label, task, seeds or task.seeds, int(share * task.total_steps))
        print(json.dumps({k: v for k, v in rows[label].items() if k != "returns"}), flush=True)
        write_json(output, rows)
        if document is not None:
            write_report(document, rows)
    if document is not None:
        write_report(document, rows)
    for content in (table(rows), memory_table(rows)):
        Console(width=200).print(content, markup=False)


if __name__ == "__main__":
    tyro.cli(main)
