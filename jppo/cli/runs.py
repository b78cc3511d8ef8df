"""What can be done with runs (`jppo eval`, `plot` and `play`), and the list of environments."""

import dataclasses
import json
from pathlib import Path

import tyro

from jppo.config.presets import preset_for


@dataclasses.dataclass(frozen=True)
class Eval:
    """Play a trained policy and report its returns."""

    run_dir: tyro.conf.Positional[Path]
    """A run directory made by `jppo train`."""
    episodes: int = 100
    """Episodes to play, side by side."""
    sampled: bool = False
    """Draw actions from the policy instead of taking the most likely ones."""
    seed: int = 0
    """Seed of the environments and draws."""
    json: bool = False
    """Print one line of JSON instead."""

    def run(self) -> int:
        from jppo.config.ppo import check_seed
        from jppo.runs.evaluation import evaluate
        from jppo.runs.load import load_run

        check_seed(self.seed)
        agent, state, settings = load_run(self.run_dir)
        summary = evaluate(
            agent.env,
            agent.policy,
            state,
            num_episodes=self.episodes,
            seed=self.seed,
            sampled=self.sampled,
        ).summary()
        if self.json:
            print(json.dumps({"env": settings["env"], "sampled": self.sampled} | summary))
            return 0
        unfinished = f"; {summary['unfinished']} did not finish" if summary["unfinished"] else ""
        print(
            f"{settings['env']}, {'sampled' if self.sampled else 'greedy'}, {summary['episodes']} episodes: return "
            f"{summary['return_mean']:.2f} +- {summary['return_std']:.2f} "
            f"(min {summary['return_min']:.2f}, max {summary['return_max']:.2f}), "
            f"length {summary['length_mean']:.1f}{unfinished}"
        )
        return 0


@dataclasses.dataclass(frozen=True)
class Plot:
    """Draw learning curves of runs as a PNG; runs that differ only in their seed share a line."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories made by `jppo train`."""
    output: Path = Path("learning.png")
    """The picture to write."""

    def run(self) -> int:
        from jppo.runs.plots import plot

        if not self.run_dirs:
            raise ValueError("name at least one run directory")
        plot(self.run_dirs, self.output)
        print(f"wrote {self.output}")
        return 0


@dataclasses.dataclass(frozen=True)
class Play:
    """Write a GIF of a trained policy at play."""

    run_dir: tyro.conf.Positional[Path]
    """A run directory made by `jppo train`."""
    output: Path = Path("play.gif")
    """The GIF to write."""
    seed: int = 0
    """Seed of the episode."""
    sampled: bool = False
    """Draw actions from the policy instead of taking the most likely ones."""
    max_steps: int = 500
    """Stop after this many steps."""

    def run(self) -> int:
        from jppo.config.ppo import check_seed
        from jppo.runs.load import load_run
        from jppo.runs.render import play_gif

        check_seed(self.seed)
        agent, state, _ = load_run(self.run_dir)
        length, total = play_gif(
            agent.env,
            agent.policy,
            state,
            self.output,
            seed=self.seed,
            sampled=self.sampled,
            max_steps=self.max_steps,
        )
        print(f"wrote {self.output}: {length} steps, return {total:.2f}")
        return 0


@dataclasses.dataclass(frozen=True)
class Envs:
    """List the environments that can be named, by backend."""

    def run(self) -> int:
        from rich.console import Console
        from rich.table import Table

        from jppo.envs import available
        from jppo.envs.gymnasium import host_env_names
        from jppo.runs.render import DRAWABLE

        on_device, on_host = available(), host_env_names()
        table = Table("environment", "backend", "preset", "drawn by `jppo play`")
        table.columns[0].no_wrap, table.columns[0].min_width = True, max(map(len, [*on_device, *on_host]))
        for name in on_device:
            backend = "anakin (gymnax), ray (gymnasium)" if name in on_host else "anakin (gymnax)"
            table.add_row(name, backend, preset_for(name), "yes" if name in DRAWABLE else "")
        for name in (name for name in on_host if name not in on_device):
            table.add_row(name, "ray (gymnasium)", preset_for(name), "yes")
        Console().print(table)
        return 0
