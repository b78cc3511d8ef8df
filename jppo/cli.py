"""The command line. Imports nothing slow before it knows what is asked for."""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import os
import signal
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jppo import __version__
from jppo.bench_command import Bench
from jppo.config import MAX_STRATA, Hyperparams, PPOConfig, RayConfig, check_total_steps, num_cores, spread_envs
from jppo.presets import PRESETS, preset_for

_EXIT_DIVERGED, _EXIT_USAGE, _EXIT_FAILED, _EXIT_INTERRUPTED = 1, 2, 3, 130
_EXIT_CHECK_FAILED = 1
_EXITS = {"diverged": _EXIT_DIVERGED, "failed": _EXIT_FAILED, "interrupted": _EXIT_INTERRUPTED}
_HOST_DEVICES = "xla_force_host_platform_device_count"
_Inline = tyro.conf.arg(name="")


_WholeNumber = tyro.constructors.PrimitiveConstructorSpec(  # an int that may be written 5e5 or 500_000
    nargs=1,
    metavar="INT",
    instance_from_str=lambda words: check_total_steps(float(words[0])),
    is_instance=lambda value: isinstance(value, int) or value is None,
    str_from_instance=lambda value: ["preset" if value is None else str(value)],
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
    """Where to write the run (default: runs/<env>/<time>-<seed>). A run that is there goes on."""
    checkpoint_every: float | None = None
    """Seconds between two checkpoints (default: a minute); the end of a run always makes one."""
    keep: int = 2
    """Checkpoints that stay, the newest."""
    resume: Path | None = None
    """Run directory of a run that is to go on, with its settings, from its newest checkpoint."""
    quiet: bool = False
    """Show nothing while training."""
    json: bool = False
    """End standard output with one line of JSON; everything else goes to standard error."""
    wandb: bool = False
    """Log to Weights & Biases too (pip install 'jppo[wandb]')."""
    config: Annotated[PPOConfig, _Inline] = dataclasses.field(default_factory=PPOConfig)
    hyperparams: Annotated[Hyperparams, _Inline] = dataclasses.field(default_factory=Hyperparams)
    num_devices: int | None = None
    """Devices over which environments and their samples are spread. Default: as many as there are and fit."""
    num_hosts: int = 1
    """Ray processes that learn together, one per machine where the cluster at --address has as many."""
    host_cpus: float = 1.0
    """CPUs that Ray reserves for each host, and threads that it computes with."""
    host_gpus: float = 0.0
    """GPUs that Ray reserves for each host, which learns on the CPU without."""
    actors: Annotated[RayConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=RayConfig)

    def run(self) -> int:
        from jppo import runs
        from jppo.devices import HostFailed
        from jppo.driver import TrainingDiverged, train
        from jppo.env_runner import ActorsFailed
        from jppo.progress import make_reporter, summary_lines

        stream = sys.stderr if self.json else sys.stdout
        reporter = make_reporter("none" if self.quiet else "auto", self.total_steps, stream)
        run_dir = self.run_dir or (runs.default_run_dir(self.env, self.seed) if self.resume is None else None)
        try:
            result = train(
                self.env,
                total_steps=self.total_steps,
                seed=self.seed,
                config=self.config,
                hyperparams=self.hyperparams,
                backend=self.backend,
                num_devices=self.num_devices,
                num_hosts=self.num_hosts,
                host_cpus=self.host_cpus,
                host_gpus=self.host_gpus,
                **vars(self.actors),
                run_dir=run_dir,
                checkpoint_every=self.checkpoint_every,
                keep=self.keep,
                resume=self.resume,
                progress=reporter,
                wandb=self.wandb,
            )
        except (TrainingDiverged, ActorsFailed, HostFailed) as error:
            print(f"jppo: {error}", file=sys.stderr)
            if error.result is None:  # not one update was made
                return _EXIT_FAILED
            result = error.result
        if not self.quiet:
            print(*summary_lines(result.summary), sep="\n", file=stream)
        if self.json:
            print(json.dumps(runs.jsonable(result.summary)))
        return _EXITS.get(result.summary["status"], 0)


def _documented(source: type) -> dict[str, str]:
    """The documentation of a dataclass's fields."""
    parsed: Any = ast.parse(textwrap.dedent(inspect.getsource(source))).body[0]
    pairs: Any = itertools.pairwise(parsed.body)
    return {field.target.id: doc.value.value for field, doc in pairs if hasattr(field, "annotation")}


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


_SIZES = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="N,N",
    instance_from_str=lambda words: _sizes(words[0]),
    is_instance=lambda value: isinstance(value, tuple),
    str_from_instance=lambda value: [",".join(map(str, value))],
)


def _several(source: type) -> list[tuple[str, Any, Any]]:
    """The fields of a configuration, each with any number of values."""
    docs, fields = _documented(source), []
    for field in dataclasses.fields(source):
        one: Any = Annotated[tuple, _SIZES] if field.name == "hidden_sizes" else field.type
        one = Annotated[int, _WholeNumber] if one is int else one
        several = Annotated[tuple[one, ...], tyro.conf.arg(help=docs[field.name], help_behavior_hint="")]
        fields.append((field.name, several, dataclasses.field(default=())))
    return fields


Settings = dataclasses.make_dataclass("Settings", _several(Hyperparams) + _several(PPOConfig), frozen=True)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Train every combination of settings with every seed, as lanes of one compiled program per shape.

    Options that take values are settings; one value holds for all runs, several are swept. Truth values are written out
    (--normalize-obs True), and the sizes of a network with commas: --hidden-sizes 64,64 128,128 are two networks.
    """

    envs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ENV [ENV ...]")]
    """Environments to train on, on the device."""
    seeds: int = 4
    """Runs of each combination, with the seeds 0, 1, ..."""
    total_steps: Annotated[int | None, _WholeNumber] = None
    """Environment steps of each run, rounded up to whole updates."""
    preset: str = "auto"
    """Published configuration to start from (auto: each environment's own)."""
    halving: bool = False
    """After 1/16, 1/8, 1/4 and 1/2 of the updates end the worse half of the lanes."""
    lanes_at_once: int | None = None
    """Lanes in one program. Default: as many as memory holds."""
    num_devices: int | None = None
    """Devices over which lanes are spread. Default: all."""
    sweep_dir: Path | None = None
    """Where to keep lanes, table and pictures (default: runs/sweeps/<time>). Lanes found there are not run again."""
    run_dirs: bool = False
    """Also write a run directory for each lane, for `jppo eval`, `plot` and `play`."""
    address: str | None = None
    """Run the programs side by side as Ray tasks: auto, host:port, ray://host:port, or local for a new Ray."""
    task_cpus: float = 1.0
    """CPUs that Ray reserves for each."""
    task_gpus: float = 0.0
    """GPUs that Ray reserves for each; may be a fraction."""
    quiet: bool = False
    """Show nothing while training."""
    json: bool = False
    """End standard output with one line of JSON, the best setting of each environment; all else goes to standard error."""  # noqa: E501
    settings: Annotated[Settings, _Inline] = dataclasses.field(default_factory=Settings)  # type: ignore[valid-type]

    def check(self, argv: list[str]) -> None:
        """Raises ValueError for a setting without a value."""
        given = [word.split("=")[0] for word in argv]
        for word, following in zip(given, [*given[1:], "--"], strict=True):
            if following.startswith("--") and "=" not in argv[given.index(word)]:
                name = word.removeprefix("--").replace("-", "_")
                if word.startswith("--") and hasattr(self.settings, name):
                    raise ValueError(f"{word} wants a value, or several to sweep")

    def run(self) -> int:
        from jppo.progress import make_reporter
        from jppo.sweeps import default_sweep_dir, sweep

        if not self.envs:
            raise ValueError("name at least one environment")
        stream = sys.stderr if self.json else sys.stdout
        settings: dict[str, Any] = {name: list(values) for name, values in vars(self.settings).items() if values}
        result = sweep(
            list(self.envs),
            seeds=self.seeds,
            total_steps=self.total_steps,
            preset=self.preset,
            halving=self.halving,
            lanes_at_once=self.lanes_at_once,
            num_devices=self.num_devices,
            sweep_dir=self.sweep_dir or default_sweep_dir(),
            address=self.address,
            task_cpus=self.task_cpus,
            task_gpus=self.task_gpus,
            progress="none" if self.quiet else functools.partial(make_reporter, "auto", stream=stream),
            **settings,
        )
        if self.run_dirs:
            result.write_run_dirs()
        if not self.quiet:
            from jppo.results import print_settings

            print_settings(result, stream)
        if self.json:
            from jppo.runs import jsonable

            print(json.dumps(jsonable(result.summary())))
        return _EXITS.get(result.status, 0)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Say what a run would need, before it is run: parameters, memory, compile time, steps per second, and how far it
    can grow. Takes as long as some compilations. Exit code 2 where it does not fit."""

    env: tyro.conf.Positional[str]
    """Environment to train on, on the device."""
    preset: str = "auto"
    """Published configuration to start from (auto: the environment's own)."""
    seconds: float = 2.0
    """How long to try it for."""
    num_devices: int | None = None
    """Devices over which environments are spread. Default: as many as there are and fit."""
    json: bool = False
    """Print one line of JSON instead."""
    config: Annotated[PPOConfig, _Inline] = dataclasses.field(default_factory=PPOConfig)

    def run(self) -> int:
        from jppo.planning import plan, print_plan
        from jppo.runs import jsonable

        planned = plan(
            self.env, config=self.config, preset=self.preset, num_devices=self.num_devices, seconds=self.seconds
        )
        if self.json:
            print(json.dumps(jsonable(planned._asdict())))
        else:
            print_plan(planned)
        return 0


@dataclasses.dataclass(frozen=True)
class CheckEnv:
    """Play with an environment and say what is wrong with it: its contract, seeds, time limit, final observations, and
    so on. Exit code 1 where a check failed."""

    env: tyro.conf.Positional[str]
    """Environment to check; `jppo envs` lists them. Or your own Gymnasium environment, as module:name."""
    backend: Literal["auto", "anakin", "ray"] = "auto"
    """anakin: gymnax's, on the device; ray: Gymnasium's; auto: the device where gymnax has the environment."""
    steps: int = 1024
    """Steps of each environment."""
    num_envs: int = 8
    """Environments, with a seed each."""
    seed: int = 0
    """The first seed."""
    json: bool = False
    """Print one line of JSON instead."""

    def run(self) -> int:
        from jppo.checking import check_env, print_report
        from jppo.runs import jsonable

        report = check_env(self.env, backend=self.backend, steps=self.steps, seed=self.seed, num_envs=self.num_envs)
        if self.json:
            print(json.dumps(jsonable(report.summary())))
        else:
            print_report(report)
        return 0 if report.passed else _EXIT_CHECK_FAILED


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


_COMMANDS = ("train", "sweep", "plan", "bench", "check-env", "eval", "plot", "play", "envs")


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 1 (diverged, or a check failed), 2 (bad input), 3 (actors, or a host,
    failed) or 130 (interrupted)."""
    whole_process = argv is None
    if argv is None:
        argv = sys.argv[1:]
        sys.path.insert(0, os.getcwd())  # as `python -m` does, for environments of one's own
        signal.signal(signal.SIGINT, _quit)
    try:
        command = _parse(argv)
        if whole_process:
            _ask_for_devices(command)
        if isinstance(command, Sweep):
            command.check(argv)
        return (_spread(command, argv) if isinstance(command, Train | Bench) else command).run()
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


def _spread(command: Any, argv: list[str]) -> Any:
    """With --envs-per-actor, and sizes that nobody gave, the command in other sizes: see `spread_envs`."""
    given = {word.split("=")[0].replace("_", "-") for word in argv}
    if command.actors.envs_per_actor is None or given & {"--num-envs", "--num-steps"}:
        return command
    config, actors = spread_envs(command.config, command.actors, num_cores(), fixed=False)
    return dataclasses.replace(command, config=config, actors=actors)


def _is_ours(error: ValueError) -> bool:
    """Whether jppo says it, rather than an environment or a library, whose traceback is wanted."""
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename).is_relative_to(Path(__file__).parent)


def _ask_for_devices(command: Any) -> None:
    """Has a CPU without accelerators show as many devices as --num-devices says; JAX has not started yet. Hosts have
    processes of their own."""
    count, flags = getattr(command, "num_devices", None) or 1, os.environ.get("XLA_FLAGS", "")
    if 1 < count <= MAX_STRATA and getattr(command, "num_hosts", 1) == 1 and _HOST_DEVICES not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_HOST_DEVICES}={count}".strip()


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
    defaults = _as_before(defaults, argv)
    train = tyro.conf.subcommand("train", default=dataclasses.replace(defaults, env=tyro.MISSING))
    plan = tyro.conf.subcommand("plan", default=Plan(tyro.MISSING, config=preset.config))
    bench = Bench(tyro.MISSING, config=preset.config, hyperparams=preset.hyperparams)
    commands: Any = (
        Annotated[Train, train]
        | Annotated[Sweep, tyro.conf.subcommand("sweep")]
        | Annotated[Plan, plan]
        | Annotated[Bench, tyro.conf.subcommand("bench", default=bench)]
        | Annotated[CheckEnv, tyro.conf.subcommand("check-env")]
        | Annotated[Eval, tyro.conf.subcommand("eval")]
        | Annotated[Plot, tyro.conf.subcommand("plot")]
        | Annotated[Play, tyro.conf.subcommand("play")]
        | Annotated[Envs, tyro.conf.subcommand("envs")]
    )
    return tyro.cli(commands, prog="jppo", args=argv, config=(tyro.conf.OmitArgPrefixes,))


def _as_before(defaults: Train, argv: list[str]) -> Train:
    """With the settings of the run that goes on, where argv names one, unless it also names a preset."""
    named = [path for option in ("--run-dir", "--resume") if (path := _value(argv, option)) is not None]
    if argv[:1] != ["train"] or not named or not Path(named[-1], "config.json").exists():
        return defaults
    from jppo import runs

    settings = runs.read_config(Path(named[-1]))
    config, hyperparams = runs.config_of(settings, Path(named[-1]))
    actors = settings.get("actors", {})
    actors = {name: actors[name] for name in ("num_actors", "policy_lag") if name in actors}
    defaults = dataclasses.replace(
        defaults,
        backend=settings["backend"],
        total_steps=settings["total_steps"],
        seed=settings["seed"],
        actors=RayConfig(**actors),
    )
    if _value(argv, "--preset") is None:
        defaults = dataclasses.replace(defaults, config=config, hyperparams=hyperparams)
    return defaults


def _value(argv: list[str], option: str) -> str | None:
    """What an option is given, spelt either way."""
    for word, following in itertools.zip_longest(argv, argv[1:]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:
            return value if equals else following
    return None


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
    paths = {
        i + 1
        for i, word in enumerate(argv)
        if word in ("--run-dir", "--run_dir", "--resume", "--sweep-dir", "--sweep_dir")
    }
    words = [word for i, word in enumerate(argv) if i not in paths]
    return next((preset_for(word) for word in words if preset_for(word) != "default"), "default")
