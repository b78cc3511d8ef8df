"""The command line. Imports nothing slow before it knows what is asked for."""

import dataclasses
import difflib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jppo import __version__
from jppo.config import Hyperparams, PPOConfig, RayConfig, check_total_steps, num_cores, spread_envs
from jppo.presets import PRESETS, preset_for

_EXIT_DIVERGED, _EXIT_USAGE, _EXIT_FAILED, _EXIT_INTERRUPTED = 1, 2, 3, 130
_EXITS = {"diverged": _EXIT_DIVERGED, "failed": _EXIT_FAILED, "interrupted": _EXIT_INTERRUPTED}
_Inline = tyro.conf.arg(name="")


_WholeNumber = tyro.constructors.PrimitiveConstructorSpec(  # an int that may be written 5e5 or 500_000
    nargs=1,
    metavar="INT",
    instance_from_str=lambda words: check_total_steps(float(words[0])),
    is_instance=lambda value: isinstance(value, int),
    str_from_instance=lambda value: [str(value)],
)


@dataclasses.dataclass(frozen=True)
class Train:
    """Train PPO on an environment: on the device, or with Ray actors that step Gymnasium environments."""

    env: tyro.conf.Positional[str]
    """Environment to train on; `jppo envs` lists them. Or your own Gymnasium environment, as module:name."""
    backend: Literal["auto", "anakin", "ray"] = "auto"
    """anakin: on the device; ray: actor processes; auto: the device where gymnax has the environment."""
    total_steps: Annotated[int, _WholeNumber] = 1_000_000
    """Environment steps, rounded up to whole updates."""
    seed: int = 0
    """Seed of everything random."""
    preset: str = "auto"
    """Published configuration to start from (auto: the environment's own): default, cleanrl-classic, mountaincar, pendulum, mujoco, gymnax-minatar. Options given override it."""  # noqa: E501
    run_dir: Path | None = None
    """Where to write the run (default: runs/<env>/<time>-<seed>)."""
    quiet: bool = False
    """Show nothing while training."""
    json: bool = False
    """End standard output with one line of JSON; everything else goes to standard error."""
    wandb: bool = False
    """Log to Weights & Biases too (pip install 'jppo[wandb]')."""
    config: Annotated[PPOConfig, _Inline] = dataclasses.field(default_factory=PPOConfig)
    hyperparams: Annotated[Hyperparams, _Inline] = dataclasses.field(default_factory=Hyperparams)
    num_devices: int = 1
    """Devices over which the learner of --backend ray spreads a batch."""
    actors: Annotated[RayConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=RayConfig)

    def run(self) -> int:
        from jppo import runs
        from jppo.driver import TrainingDiverged, train
        from jppo.env_runner import ActorsFailed
        from jppo.progress import make_reporter, summary_lines

        stream = sys.stderr if self.json else sys.stdout
        reporter = make_reporter("none" if self.quiet else "auto", self.total_steps, stream)
        try:
            result = train(
                self.env,
                total_steps=self.total_steps,
                seed=self.seed,
                config=self.config,
                hyperparams=self.hyperparams,
                backend=self.backend,
                num_devices=self.num_devices,
                **vars(self.actors),
                run_dir=self.run_dir or runs.default_run_dir(self.env, self.seed),
                progress=reporter,
                wandb=self.wandb,
            )
        except (TrainingDiverged, ActorsFailed) as error:
            print(f"jppo: {error}", file=sys.stderr)
            if error.result is None:  # not one update was made
                return _EXIT_FAILED
            result = error.result
        if not self.quiet:
            print(*summary_lines(result.summary), sep="\n", file=stream)
        if self.json:
            print(json.dumps(runs.jsonable(result.summary)))
        return _EXITS.get(result.summary["status"], 0)

    def spread(self, argv: list[str]) -> "Train":
        """With --envs-per-actor, and sizes that nobody gave, in other sizes: see `spread_envs`."""
        given = {word.split("=")[0].replace("_", "-") for word in argv}
        if self.actors.envs_per_actor is None or given & {"--num-envs", "--num-steps"}:
            return self
        config, actors = spread_envs(self.config, self.actors, num_cores(), fixed=False)
        return dataclasses.replace(self, config=config, actors=actors)


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
        from jppo.evaluation import evaluate
        from jppo.load import load_run
        from jppo.runs import check_seed

        check_seed(self.seed)
        agent, state, settings = load_run(self.run_dir)
        summary = evaluate(
            agent.env,
            agent.policy,
            state,
            num_episodes=self.episodes,
            seed=self.seed,
            sampled=self.sampled,
            action_bounds=agent.config.action_bounds,
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
        from jppo.plots import plot

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
        from jppo.load import load_run
        from jppo.render import play_gif
        from jppo.runs import check_seed

        check_seed(self.seed)
        agent, state, _ = load_run(self.run_dir)
        length, total = play_gif(
            agent.env,
            agent.policy,
            state,
            self.output,
            seed=self.seed,
            sampled=self.sampled,
            action_bounds=agent.config.action_bounds,
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
        from jppo.render import DRAWABLE

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


_COMMANDS = ("train", "eval", "plot", "play", "envs")


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 1 (diverged), 2 (bad input), 3 (actors failed) or 130 (interrupted)."""
    if argv is None:
        argv = sys.argv[1:]
        sys.path.insert(0, os.getcwd())  # as `python -m` does, for environments of one's own
        signal.signal(signal.SIGINT, _quit)
    try:
        command = _parse(argv)
        return (command.spread(argv) if isinstance(command, Train) else command).run()
    except ValueError as error:
        if not _is_ours(error):
            raise
        print(f"jppo: {error}", file=sys.stderr)
        return _EXIT_USAGE
    except BrokenPipeError:
        from jppo.progress import silence

        silence(sys.stdout)
        return 0
    except KeyboardInterrupt:
        print("jppo: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED


def _is_ours(error: ValueError) -> bool:
    """Whether jppo says it, rather than an environment or a library, whose traceback is wanted."""
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename).is_relative_to(Path(__file__).parent)


def _quit(signum: int, frame: Any) -> None:
    """Ctrl-C while nothing trains. An exception would get lost inside JAX's garbage-collection callback."""
    os.write(sys.stderr.fileno(), b"jppo: interrupted\n")
    os._exit(_EXIT_INTERRUPTED)


def _parse(argv: list[str]) -> Any:
    if argv == ["--version"]:
        print(f"jppo {__version__}")
        raise SystemExit
    if argv and not argv[0].startswith("-") and argv[0] not in _COMMANDS:
        near = difflib.get_close_matches(argv[0], _COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_COMMANDS)}"
        raise ValueError(f"unknown command {argv[0]!r}; {hint}")
    preset = PRESETS[_preset_named_in(argv)]
    defaults = Train("", total_steps=preset.total_steps, config=preset.config, hyperparams=preset.hyperparams)
    train = tyro.conf.subcommand("train", default=dataclasses.replace(defaults, env=tyro.MISSING))
    commands: Any = (
        Annotated[Train, train]
        | Annotated[Eval, tyro.conf.subcommand("eval")]
        | Annotated[Plot, tyro.conf.subcommand("plot")]
        | Annotated[Play, tyro.conf.subcommand("play")]
        | Annotated[Envs, tyro.conf.subcommand("envs")]
    )
    return tyro.cli(commands, prog="jppo", args=argv, config=(tyro.conf.OmitArgPrefixes,))


def _preset_named_in(argv: list[str]) -> str:
    """The preset whose values the options start from: --preset, else that of an environment named anywhere."""
    for i, word in enumerate(argv):
        name = word.removeprefix("--preset=") if word.startswith("--preset=") else None
        if word == "--preset" and i + 1 < len(argv):
            name = argv[i + 1]
        if name is not None and name != "auto":
            if name not in PRESETS:
                near = difflib.get_close_matches(name, PRESETS, 1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PRESETS)}"
                raise ValueError(f"unknown preset {name!r}; {hint}")
            return name
    paths = {i + 1 for i, word in enumerate(argv) if word in ("--run-dir", "--run_dir")}
    words = [word for i, word in enumerate(argv) if i not in paths]
    return next((preset_for(word) for word in words if preset_for(word) != "default"), "default")
