"""The command line. Imports nothing slow before it knows what is asked for."""

import dataclasses
import difflib
import gc
import itertools
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jppo import __version__
from jppo.cli.arguments import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, EXITS, Inline, WholeNumber
from jppo.cli.bench import Bench
from jppo.cli.check_env import CheckEnv
from jppo.cli.export import Export
from jppo.cli.plan import Plan
from jppo.cli.runs import Envs, Eval, Play, Plot
from jppo.cli.sweep import Sweep
from jppo.config.ppo import DEFAULT_STRATA, Hyperparams, PPOConfig, RayConfig, num_cores, spread_envs
from jppo.config.presets import PRESETS, preset_for
from jppo.config.run import RunConfig

_HOST_DEVICES = "xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True)
class Train:
    """Train PPO on an environment: on the device, or with Ray actors that step Gymnasium environments."""

    env: tyro.conf.Positional[str]
    """Environment to train on; `jppo envs` lists them. Or your own Gymnasium environment, as module:name."""
    backend: Literal["auto", "anakin", "ray"] = "auto"
    """anakin: on the device; ray: actor processes; auto: the device where gymnax has the environment."""
    total_steps: Annotated[int, WholeNumber] = 1_000_000
    """Environment steps, rounded up to whole updates."""
    seed: int = 0
    """Seed of everything random."""
    preset: str = "auto"
    """Published configuration to start from (auto: the environment's own): default, cleanrl-classic, mountaincar, pendulum, mujoco, gymnax-minatar. Options given override it."""  # noqa: E501
    run_dir: Path | None = None
    """Where to write the run (default: runs/<env>/<time>-<seed>). A run that is there goes on."""
    checkpoint_seconds: float = 60.0
    """Seconds between two checkpoints; the end of a run always writes one."""
    max_checkpoints: int = 2
    """Number of most recent checkpoints to keep."""
    resume: Path | None = None
    """Run directory of a run that is to go on, with its settings, from its newest checkpoint."""
    quiet: bool = False
    """Show nothing while training."""
    json: bool = False
    """End standard output with one line of JSON; everything else goes to standard error."""
    wandb: bool = False
    """Log to Weights & Biases too (pip install 'jppo[wandb]')."""
    config: Annotated[PPOConfig, Inline] = dataclasses.field(default_factory=PPOConfig)
    hyperparams: Annotated[Hyperparams, Inline] = dataclasses.field(default_factory=Hyperparams)
    num_devices: int | None = None
    """Devices over which environments and their samples are spread. Default: as many as there are (of a CPU, as it has cores) and fit."""  # noqa: E501
    deterministic: bool = False
    """The same seed gives the same policy, bit for bit: slower on a GPU, no different on a CPU. A failed actor ends the run."""  # noqa: E501
    actors: Annotated[RayConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=RayConfig)

    def run(self) -> int:
        from jppo.errors import ActorsFailed, HostFailed, TrainingDiverged
        from jppo.runs import run_dir as runs
        from jppo.runs.files import jsonable
        from jppo.training.progress import make_reporter, summary_lines
        from jppo.training.train import train

        stream = sys.stderr if self.json else sys.stdout
        reporter = make_reporter("none" if self.quiet else "auto", self.total_steps, stream)
        if None not in (self.run_dir, self.resume) and self.run_dir != self.resume:
            raise ValueError(f"resume = {self.resume} and run_dir = {self.run_dir} are two runs; pass only one")
        run_dir = self.resume or self.run_dir or runs.default_run_dir(self.env, self.seed)
        try:
            result = train(
                self.env,
                total_steps=self.total_steps,
                seed=self.seed,
                config=self.config,
                hyperparams=self.hyperparams,
                backend=self.backend,
                num_devices=self.num_devices,
                ray=None if self.actors == RayConfig() else self.actors,
                run_dir=run_dir,
                run=RunConfig(
                    resume=self.resume is not None,
                    checkpoint_seconds=self.checkpoint_seconds,
                    max_checkpoints=self.max_checkpoints,
                    wandb=self.wandb,
                    deterministic=self.deterministic,
                ),
                progress=reporter,
            )
        except (TrainingDiverged, ActorsFailed, HostFailed) as error:
            print(f"jppo: {error}", file=sys.stderr)
            if error.result is None:  # not one update was made
                return EXIT_FAILED
            result = error.result
        if not self.quiet:
            same = [f"policy: SHA-256 {result.summary['policy_sha256']}"] if self.deterministic else []
            print(*summary_lines(result.summary), *same, sep="\n", file=stream)
        if self.json:
            print(json.dumps(jsonable(result.summary)))
        return EXITS.get(result.summary["status"], EXIT_FAILED if "failed_writes" in result.summary else 0)


_COMMANDS = ("train", "sweep", "plan", "bench", "check-env", "eval", "plot", "play", "export", "envs")


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 1 (diverged, or a check failed), 2 (bad input), 3 (actors, or a host,
    failed, or results could not be written) or 130 (interrupted)."""
    whole_process = argv is None
    if argv is None:
        argv = sys.argv[1:]
        sys.path.insert(0, os.getcwd())  # as `python -m` does, for environments of one's own
        signal.signal(signal.SIGINT, _quit)
    try:
        command = _parse(argv)
        if whole_process:
            _ask_of_jax(command)
            if isinstance(command, Train):
                _import_for_good()
        if isinstance(command, Sweep):
            command.check(argv)
        return (_spread(command, argv) if isinstance(command, Train | Bench) else command).run()
    except ValueError as error:
        if not _is_ours(error):
            raise
        print(f"jppo: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:
        from jppo.training.progress import silence

        silence(sys.stdout)
        return 0
    except KeyboardInterrupt:
        print("jppo: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _spread(command: Any, argv: list[str]) -> Any:
    """With --envs-per-actor, and a --num-envs that nobody gave, the command in other sizes: see `spread_envs`."""
    given = {word.split("=")[0].replace("_", "-") for word in argv}
    config, actors = command.config, command.actors
    if actors.envs_per_actor is None or "--num-envs" in given:
        return command
    if "--num-steps" in given:  # then the batch follows too
        num_actors = num_cores() if actors.num_actors is None else actors.num_actors
        config = dataclasses.replace(config, num_envs=max(num_actors, 1) * actors.envs_per_actor)
    config, actors = spread_envs(config, actors, num_cores(), fixed=False)
    return dataclasses.replace(command, config=config, actors=actors)


def _is_ours(error: ValueError) -> bool:
    """Whether jppo says it, rather than an environment or a library, whose traceback is wanted."""
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1])


def _ask_of_jax(command: Any) -> None:
    """What must be said before JAX starts. Has a CPU without accelerators show as many devices as --num-devices says,
    or as it has cores (hosts and Ray's tasks are processes of their own), and a GPU compute in the same order each
    time."""
    count, flags = getattr(command, "num_devices", 1) or num_cores(), os.environ.get("XLA_FLAGS", "")
    alone = not (isinstance(command, Sweep) and command.address)
    is_file = flags and not flags.lstrip().startswith("-")  # from which XLA reads them
    if count > 1 and alone and not is_file and _HOST_DEVICES not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_HOST_DEVICES}={min(count, DEFAULT_STRATA)}".strip()
    if getattr(command, "deterministic", False):
        from jppo.devices.determinism import ask_for_determinism

        ask_for_determinism()


def _import_for_good() -> None:
    """What training takes. Garbage is not looked for in it any more, which is a tenth of the start."""
    import jppo.training.train  # noqa: F401

    gc.freeze()


def _quit(signum: int, frame: Any) -> None:
    """Ctrl-C while nothing trains. An exception would get lost inside JAX's garbage-collection callback."""
    os.write(sys.stderr.fileno(), b"jppo: interrupted\n")
    os._exit(EXIT_INTERRUPTED)


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
        | Annotated[Export, tyro.conf.subcommand("export")]
        | Annotated[Envs, tyro.conf.subcommand("envs")]
    )
    return tyro.cli(commands, prog="jppo", args=argv, config=(tyro.conf.OmitArgPrefixes,))


def _as_before(defaults: Train, argv: list[str]) -> Train:
    """With the settings of the run that goes on, where argv names one, unless it also names a preset."""
    named = [path for option in ("--run-dir", "--resume") if (path := _value(argv, option)) is not None]
    if argv[:1] != ["train"] or not named or not Path(named[-1], "config.json").exists():
        return defaults
    from jppo.runs import run_dir as runs

    settings = runs.read_config(Path(named[-1]))
    config, hyperparams = runs.config_of(settings, Path(named[-1]))
    actors = settings.get("actors", {})
    actors = {name: actors[name] for name in ("num_actors", "policy_lag") if name in actors}
    defaults = dataclasses.replace(
        defaults,
        backend=settings["backend"],
        total_steps=settings["total_steps"],
        seed=settings["seed"],
        deterministic=settings.get("deterministic", False),
        num_devices=settings.get("num_devices"),
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
