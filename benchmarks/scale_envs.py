"""Measures learning with 256 to 65,536 environments: with naive scaling, with scale_envs, and with a staggered start.

    python benchmarks/scale_envs.py
    python benchmarks/scale_envs.py --num-envs 256 4096 --seeds 1 --millions 1

Naive scaling multiplies num_envs and keeps num_minibatches, so the minibatches grow. scale_envs multiplies both, so the
minibatch size and the gradient steps per sample stay. The learning rate is constant and the same for all. A return is
the mean over 128 whole episodes with the most likely actions; its time is not counted. Each seed runs with every
setting before the next seed starts.
"""

import datetime
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, hardware

import jppo
from jppo.devices.jit import jit
from jppo.runs.episodes import make_player
from jppo.runs.files import write_json

IMAGES = Path(__file__).parents[1] / "docs" / "images"
NUM_ENVS = (256, 1024, 4096, 16384, 65536)
METHODS = {
    "naive": "naive: same number of minibatches",
    "scale_envs": "scale_envs: same minibatch size",
    "staggered": "scale_envs, staggered",
}
_EPISODES, _POINTS = 128, 14


class Task(NamedTuple):
    """The base setting of an environment, for 256 environments."""

    config: jppo.PPOConfig
    hyperparams: jppo.Hyperparams
    staggered_start: int = 0  # of the method "staggered"; 0: not measured


TASKS = {
    "CartPole-v1": Task(
        jppo.PPOConfig(num_envs=256, num_steps=8, num_minibatches=2, clip_value=False),
        jppo.Hyperparams(learning_rate=1e-3),
    ),
    "Pendulum-v1": Task(
        jppo.PPOConfig(num_envs=256, num_steps=8, num_minibatches=2, clip_value=False),
        jppo.Hyperparams(learning_rate=1e-3, gamma=0.9, ent_coef=0.0),
        staggered_start=200,
    ),
}


def config_of(task: Task, method: str, num_envs: int) -> jppo.PPOConfig:
    """Returns the setting of a run."""
    if method == "naive":
        return task.config.replace(num_envs=num_envs)
    config = task.config.scale_envs(num_envs // task.config.num_envs)
    return config.replace(staggered_start=task.staggered_start) if method == "staggered" else config


class Runs:
    """The compiled programs of one setting."""

    def __init__(self, env: str, method: str, num_envs: int, total_steps: int) -> None:
        task = TASKS[env]
        self.setting = {"env": env, "method": method, "num_envs": num_envs}
        self._agent = jppo.make_anakin(env, config_of(task, method, num_envs), total_steps=total_steps)
        self._hyperparams = task.hyperparams
        self._init = jit(self._agent.init)
        state = self._init(jax.random.key(0), task.hyperparams)
        self._step = jit(self._agent.step, donate_argnums=0).lower(state).compile()
        player = make_player(self._agent.env, self._agent.policy, sampled=False)
        self._play = jit(lambda policy, keys: player(policy, keys)[0].mean())
        self._play(state.train.policy_state, jax.random.split(jax.random.key(0), _EPISODES))

    def __call__(self, seed: int) -> dict[str, Any]:
        """Trains once. Returns the returns over samples and seconds."""
        updates, batch = self._agent.num_updates, self._agent.config.batch_size
        points = sorted({round(point) for point in np.geomspace(1, updates, _POINTS)})
        keys = jax.random.split(jax.random.key(10_000 + seed), _EPISODES)
        began = time.perf_counter()
        state = jax.block_until_ready(self._init(jax.random.key(seed), self._hyperparams))
        start_seconds = seconds = time.perf_counter() - began
        returns, times, done = [float(self._play(state.train.policy_state, keys))], [0.0], 0
        for point in points:
            began = time.perf_counter()
            for _ in range(point - done):
                state, _ = self._step(state)
            jax.block_until_ready(state)
            seconds, done = seconds + time.perf_counter() - began, point
            returns.append(float(self._play(state.train.policy_state, keys)))
            times.append(seconds)
        return self.setting | {
            "seed": seed,
            "samples": [0, *(point * batch for point in points)],
            "seconds": times,
            "returns": returns,
            "start_seconds": start_seconds,
            "steps_per_second": updates * batch / (seconds - start_seconds),
        }


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row per setting: medians over the seeds."""
    rows = []
    names = ("env", "method", "num_envs")
    for setting in dict.fromkeys(tuple(run[name] for name in names) for run in runs):
        own = [run for run in runs if tuple(run[name] for name in names) == setting]
        final = [run["returns"][-1] for run in own]
        config = config_of(TASKS[setting[0]], *setting[1:])
        rows.append(
            dict(zip(names, setting, strict=True))
            | {
                "minibatch_size": config.minibatch_size,
                "updates": round(own[0]["samples"][-1] / config.batch_size),
                "final_return": float(np.median(final)),
                "final_returns": final,
                "best_return": float(np.median([max(run["returns"]) for run in own])),
                "seconds": float(np.median([run["seconds"][-1] for run in own])),
                "steps_per_second": float(np.median([run["steps_per_second"] for run in own])),
            }
        )
    return rows


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draws the return over samples and over seconds: medians over the seeds, one colour per number of environments."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    envs = list(dict.fromkeys(run["env"] for run in runs))
    sizes = sorted({run["num_envs"] for run in runs})
    colours = plt.get_cmap("viridis")(np.linspace(0.0, 0.9, len(sizes)))
    styles = {"naive": ":", "scale_envs": "-", "staggered": "--"}
    figure, axes = plt.subplots(len(envs), 2, figsize=(9.0, 3.2 * len(envs)), sharey="row", squeeze=False)
    for row, env in zip(axes, envs, strict=True):
        for axis, x in zip(row, ("samples", "seconds"), strict=True):
            for method, style in styles.items():
                for size, colour in zip(sizes, colours, strict=True):
                    own = [run for run in runs if (run["env"], run["method"], run["num_envs"]) == (env, method, size)]
                    if own:
                        across = np.median([run[x][1:] for run in own], axis=0)
                        up = np.median([run["returns"][1:] for run in own], axis=0)
                        axis.plot(across, up, style, color=colour, marker=".", markersize=4)
            axis.set_xscale("log")
            axis.set_xlabel("samples" if x == "samples" else "seconds of training, two CPU cores")
            axis.grid(alpha=0.3)
        row[0].set_ylabel(f"{env}\nreturn")
    handles = [plt.Line2D([], [], color=colour, label=f"{size:,} environments") for size, colour in
               zip(sizes, colours, strict=True)]  # fmt: skip
    handles += [
        plt.Line2D([], [], color="gray", linestyle=styles[name], label=label) for name, label in METHODS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=120)


def main(
    envs: tuple[str, ...] = tuple(TASKS),
    num_envs: tuple[int, ...] = NUM_ENVS,
    seeds: int = 3,
    millions: float = 4.2,
    output: Path = RESULTS / "scale_envs.json",
    image: Path = IMAGES / "scale_envs.png",
) -> None:
    """Trains every setting with every seed; writes JSON and a plot.

    Args:
      envs: names in TASKS.
      num_envs: numbers of environments, multiples of 256.
      seeds: runs of each setting.
      millions: samples of each run, in millions.
      output: JSON file.
      image: PNG file.
    """
    programs = [
        Runs(env, method, count, int(1e6 * millions))
        for env in envs
        for count in num_envs
        for method in METHODS
        if not (method == "naive" and count == TASKS[env].config.num_envs)  # the same as scale_envs
        if method != "staggered" or TASKS[env].staggered_start
    ]
    runs = []
    for seed in range(seeds):
        for program in programs:
            runs.append(program(seed))
            last = runs[-1]
            print(*program.setting.values(), seed, f"{last['returns'][-1]:.1f} {last['seconds'][-1]:.1f} s", flush=True)
            write_json(output, {"runs": runs} | hardware())
    rows = summarize(runs)
    content = {"rows": rows, "runs": runs, "date": datetime.date.today().isoformat(), "episodes": _EPISODES}
    write_json(output, content | hardware())
    draw(runs, image)
    table = Table("task", "environments", "method", "minibatch", "updates", "return", "range", "k steps/s", "seconds")
    for row in rows:
        low, high = min(row["final_returns"]), max(row["final_returns"])
        table.add_row(
            *(row["env"], f"{row['num_envs']:,}", row["method"], f"{row['minibatch_size']:,}", f"{row['updates']:,}"),
            *(f"{row['final_return']:.0f}", f"{low:.0f} to {high:.0f}", f"{row['steps_per_second'] / 1e3:.0f}"),
            f"{row['seconds']:.1f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    tyro.cli(main)
