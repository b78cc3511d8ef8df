"""Measures returns over seeds: ten seeds in one vmapped program on the device, or five runs with Ray actors.

    python benchmarks/learning.py                       # the whole table of docs/learning.md
    python benchmarks/learning.py --envs CartPole-v1/ray Pendulum-v1/ray HalfCheetah-v5/ray
    python benchmarks/learning.py --envs CartPole-v1 Pendulum-v1
    python benchmarks/learning.py --envs Breakout-MinAtar --breakout-steps 1e6 --breakout-seeds 2
    python benchmarks/learning.py --envs memory         # the table of recurrent policies

Rows of the results that are not measured again are kept.
"""

import datetime
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from memory_envs import HiddenVelocities, HostHiddenVelocities, TMaze
from rich.console import Console
from scipy import stats
from throughput import RESULTS, hardware

import jppo
from jppo.devices.jit import jit
from jppo.runs.files import write_json

DOCS = Path(__file__).parents[1] / "docs" / "learning.md"
LAST_SHARE = 0.05
EVAL_EPISODES = 100


class Task(NamedTuple):
    """Settings of an environment, and the published result for comparison."""

    preset: str
    total_steps: int
    reference: str
    target: float | None = None
    seeds: int = 10
    env: Any = None  # default: the name in the label
    settings: tuple[jppo.PPOConfig, jppo.Hyperparams] | None = None  # in place of the preset's


TASKS = {
    "CartPole-v1": Task("cleanrl-classic", 500_000, "490.0 ± 6.1, CleanRL, 3 seeds", 484.0),
    "Acrobot-v1": Task("cleanrl-classic", 500_000, "-86.4 ± 1.3, CleanRL, 3 seeds", -90.0),
    "Pendulum-v1": Task("pendulum", 100_000, "-172 ± 104, rl-zoo, 1 seed, greedy", -200.0),
    "MountainCar-v0": Task("mountaincar", 1_000_000, "-110 ± 19, rl-zoo, 1 seed, greedy", -125.0),
    "CartPole-v1/ray": Task("cleanrl-classic", 500_000, "490.0 ± 6.1, CleanRL, 3 seeds", 484.0, 5),
    "Pendulum-v1/ray": Task("pendulum", 100_000, "-172 ± 104, rl-zoo, 1 seed, greedy", -200.0, 5),
    "HalfCheetah-v5/ray": Task("mujoco", 1_000_000, "1443 ± 46 (v4), CleanRL, 3 seeds", 1443.0, 5),
    "Breakout-MinAtar": Task("gymnax-minatar", 10_000_000, "28, gymnax-blines, 1 seed, 1e7 steps"),
}

# Memory: the same settings for all environments. The two networks have about the same number of parameters.
_COMMON = {"num_envs": 64, "num_steps": 128, "num_minibatches": 4, "num_epochs": 4, "normalize_obs": True}
_NETWORKS = {
    "GRU": jppo.PPOConfig(recurrent="gru", recurrent_size=64, hidden_sizes=(64, 64), sequence_length=64, **_COMMON),
    "MLP": jppo.PPOConfig(hidden_sizes=(64, 64, 64), **_COMMON),
}
_MEMORY_ENVS = {  # label: environment, steps, target
    "MemoryChain-bsuite": ("MemoryChain-bsuite", 300_000, 0.95),
    "CartPole without velocities": (HiddenVelocities(), 1_500_000, 475.0),
    "CartPole without velocities/host": (HostHiddenVelocities, 3_000_000, 475.0),
    "T-maze of length 20": (TMaze(), 1_000_000, 0.95),
}
_ANNEALED = jppo.Hyperparams(learning_rate=jppo.schedules.linear(1e-3, 0.0), ent_coef=jppo.schedules.linear(0.01, 0.0))
MEMORY = {
    f"{label}/{network}": Task("", steps, "", target, 5, env, (config, _ANNEALED))
    for label, (env, steps, target) in _MEMORY_ENVS.items()
    for network, config in _NETWORKS.items()
}


def final_returns(metrics: dict[str, Any]) -> np.ndarray:
    """Returns the mean return of the episodes that ended in the last 5 % of the updates, [seeds]."""
    count, mean = (np.asarray(metrics[f"episode/{name}"], np.float64) for name in ("count", "return_mean"))
    last = math.ceil(LAST_SHARE * count.shape[1])
    count, mean = count[:, -last:], np.nan_to_num(mean[:, -last:])
    return (count * mean).sum(axis=1) / count.sum(axis=1)


def spread(scores: np.ndarray) -> dict[str, Any]:
    """Returns mean, sample standard deviation and interquartile mean over seeds."""
    return {
        "mean": float(scores.mean()),
        "std": float(scores.std(ddof=1)) if len(scores) > 1 else None,
        "iqm": float(stats.trim_mean(scores, 0.25)),
        "per_seed": scores.tolist(),
    }


def run(label: str, task: Task, num_seeds: int, total_steps: int) -> dict[str, Any]:
    """Trains and evaluates all seeds and returns the row of results."""
    name, *words = label.split("/")
    env = name if task.env is None else task.env
    backend = next((word for word in words if word in ("ray", "host")), "device")
    measured = (run_on_device if backend == "device" else run_on_host)(env, task, num_seeds, total_steps)
    return {
        "env": name,
        "backend": backend,
        "preset": task.preset,
        "network": words[-1] if task.settings else "",
        "seeds": num_seeds,
        **measured,
        "date": datetime.date.today().isoformat(),
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
    states = [jax.tree.map(lambda x, i=i: x[i], state.train.policy) for i in range(num_seeds)]
    policies = [jppo.TrainedPolicy(agent.policy, policy_state) for policy_state in states]
    greedy = [evaluate_greedy(agent.env, policy) for policy in policies]
    steps = agent.num_updates * agent.config.batch_size
    return {
        "steps": steps,
        "score": spread(final_returns(metrics)),
        "greedy": spread(np.array(greedy)),
        "updates_undone": int((~np.asarray(metrics["finite"])).sum()),
        "compile_seconds": compiled - start,
        "seconds": trained - compiled,
        "steps_per_second": steps * num_seeds / (trained - compiled),
    }


def run_on_host(env: Any, task: Task, num_seeds: int, total_steps: int) -> dict[str, Any]:
    """Trains one seed after the other, each with one actor per core; without actors if the task has settings."""
    options: dict[str, Any] = {"preset": task.preset}
    if task.settings:
        options = {"config": task.settings[0], "hyperparams": task.settings[1], "num_actors": 0}
    results = [
        jppo.train(env, backend="ray", total_steps=total_steps, seed=seed, **options) for seed in range(num_seeds)
    ]
    metrics = {name: np.stack([result.metrics[name] for result in results]) for name in results[0].metrics}
    greedy = [evaluate_greedy(result.agent.env, result.policy) for result in results]
    seconds = sum(result.summary["seconds"] for result in results)
    return {
        "steps": results[0].summary["steps"],
        "score": spread(final_returns(metrics)),
        "greedy": spread(np.array(greedy)),
        "num_actors": results[0].summary["num_actors"],
        "compile_seconds": sum(result.summary["compile_seconds"] for result in results),
        "seconds": seconds,
        "steps_per_second": results[0].summary["steps"] * num_seeds / seconds,
    }


def evaluate_greedy(env: Any, policy: jppo.TrainedPolicy) -> float:
    """Returns the mean return of episodes with the most likely actions."""
    return float(jppo.evaluate(env, policy, num_episodes=EVAL_EPISODES, seed=1).returns.mean())


def _plus_minus(part: dict[str, Any], digits: int = 1) -> str:
    std = "" if part["std"] is None else f" ± {part['std']:.{digits}f}"
    return f"{part['mean']:.{digits}f}{std}"


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [
        "| environment | preset | steps | seeds | score | IQM | greedy | target | reference | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for env, task in TASKS.items():
        if env not in rows:
            continue
        row, target = rows[env], task.target
        reached = "" if target is None else f"≥ {target:.0f}"
        if target is not None:
            reached += ": yes" if row["score"]["mean"] >= target else ": **no**"
        iqm = f"{row['score']['iqm']:.1f}"
        name = row["env"] + (", Ray" if row.get("backend") == "ray" else "")
        lines.append(
            f"| {name} | `{row['preset']}` | {row['steps']:,} | {row['seeds']} | {_plus_minus(row['score'])} | {iqm} | "
            f"{_plus_minus(row['greedy'])} | {reached} | {task.reference} | {row['seconds']:.0f} |"
        )
    return "\n".join([*lines, "", machines_of([row for label, row in rows.items() if label in TASKS])])


def memory_table(rows: dict[str, dict[str, Any]]) -> str:
    """Returns the rows of recurrent networks and of those without memory as a Markdown table."""
    lines = [
        "| environment | steps | seeds | target | GRU, greedy | worst seed | MLP, greedy | best seed | GRU, sampled | "
        "MLP, sampled | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for label, (_, _, target) in _MEMORY_ENVS.items():
        if f"{label}/GRU" not in rows or f"{label}/MLP" not in rows:
            continue
        gru, mlp = rows[f"{label}/GRU"], rows[f"{label}/MLP"]
        name = gru["env"] + (", Gymnasium" if gru["backend"] == "host" else "")
        worst, best = min(gru["greedy"]["per_seed"]), max(mlp["greedy"]["per_seed"])
        greedy = f"{_plus_minus(gru['greedy'], 2)} | {worst:.2f} | {_plus_minus(mlp['greedy'], 2)} | {best:.2f}"
        sampled = f"{_plus_minus(gru['score'], 2)} | {_plus_minus(mlp['score'], 2)}"
        lines.append(
            f"| {name} | {gru['steps']:,} | {gru['seeds']} | ≥ {target:g} | {greedy} | {sampled} | "
            f"{gru['seconds']:.0f} / {mlp['seconds']:.0f} |"
        )
    return "\n".join([*lines, "", machines_of([row for label, row in rows.items() if label in MEMORY])])


def machines_of(rows: list[dict[str, Any]]) -> str:
    """Returns a sentence with the machines and the versions of JAX."""
    machines = {(row["cpu"] if row["device"] == "cpu" else row["device"], row["cores"]) for row in rows}
    where = "; ".join(f"{name}, {cores} CPU cores" for name, cores in sorted(machines))
    return f"On {where}; JAX {', '.join(sorted({row['versions']['jax'] for row in rows}))}."


def rewrite(document: Path, name: str, content: str) -> None:
    """Replaces the text between the markers of a document's table."""
    begin, end = (f"<!-- {name} table: {edge} -->" for edge in ("begin", "end"))
    text = document.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"{document} must contain '{begin}' and '{end}' once each")
    before, after = text.split(begin)[0], text.split(end)[1]
    document.write_text(f"{before}{begin}\n{content}\n{end}{after}", encoding="utf-8")


def main(
    envs: tuple[str, ...] = tuple(TASKS),
    seeds: int | None = None,
    breakout_steps: float = 10_000_000,
    breakout_seeds: int | None = None,
    output: Path = RESULTS / "learning.json",
    document: Path | None = DOCS,
) -> None:
    """Measures returns over seeds and writes the table of docs/learning.md.

    Args:
      envs: environments to run; memory stands for all environments that need a memory.
      seeds: number of seeds per environment; by default ten, or five with Ray and for memory.
      breakout_steps: environment steps of Breakout-MinAtar; its learning rate decreases to 0 over these steps.
      breakout_seeds: number of seeds of Breakout-MinAtar; by default `seeds`.
      output: JSON file; rows of other environments in it are kept.
      document: Markdown file with the table to replace, or `--document None`.
    """
    tasks = TASKS | MEMORY
    labels = [label for env in envs for label in (MEMORY if env == "memory" else (env,))]
    if unknown := [label for label in labels if label not in tasks]:
        raise SystemExit(f"unknown envs {', '.join(unknown)}; use memory, {', '.join(tasks)}")
    rows = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    output.parent.mkdir(parents=True, exist_ok=True)
    for env in labels:
        task, breakout = tasks[env], env == "Breakout-MinAtar"
        total_steps = int(breakout_steps) if breakout else task.total_steps
        rows[env] = run(env, task, (breakout and breakout_seeds) or seeds or task.seeds, total_steps)
        print(json.dumps(rows[env]), flush=True)
        write_json(output, rows)
        if document is not None:
            rewrite(document, *(("memory", memory_table(rows)) if env in MEMORY else ("learning", table(rows))))
    for content in (table(rows), memory_table(rows)):
        Console(width=200).print(content, markup=False)


if __name__ == "__main__":
    tyro.cli(main)
