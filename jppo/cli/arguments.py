"""Exit codes, argument types and the pre-parse that the commands share. Imports no JAX."""

import argparse
import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tyro
from tyro.constructors import PrimitiveConstructorSpec, PrimitiveTypeInfo

from jppo.cli.interrupt import EXIT_INTERRUPTED
from jppo.config import schedules
from jppo.config.overrides import SCALE_ENVS, SCALED, check_scale_envs
from jppo.config.ppo import Hyperparam, Hyperparams, PPOConfig
from jppo.config.presets import PRESETS, Preset, choose_preset, preset_for
from jppo.config.ray import RayConfig, num_cores, spread_envs

EXIT_USAGE, EXIT_FAILED = 2, 3
EXIT_CODES = {"diverged": 1, "failed": EXIT_FAILED, "interrupted": EXIT_INTERRUPTED}

Backend = Literal["auto", "device", "ray"]
Environment = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]
RunDirs = Annotated[
    tuple[Path, ...],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="RUN_DIR [RUN_DIR ...]", help_behavior_hint="(at least one)"),
]
Inline = tyro.conf.arg(name="")  # the fields of a nested record become options without a prefix
_PRESET_HELP = (
    "Preset with the default values of the options below (auto: the environment's own): " + ", ".join(PRESETS) + "."
)
REGISTRY = tyro.constructors.ConstructorRegistry()


def _parse_int(text: str) -> int:
    """Returns an int, which may be written as 500000, 500_000 or 5e5."""
    return int(float(text)) if "e" in text and float(text).is_integer() else int(text)


@REGISTRY.primitive_rule
def _int_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Returns how to parse an int."""
    if info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: _parse_int(words[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    )


@REGISTRY.primitive_rule
def _hyperparam_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Returns how to parse a field of Hyperparams, a number or a schedule."""
    if info.type != Hyperparam:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="FLOAT|SCHEDULE",
        instance_from_str=lambda words: schedules.parse(words[0]),
        is_instance=lambda value: isinstance(value, float | int | schedules.Schedule),
        str_from_instance=lambda value: [schedules.show_parsable(value)],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """The arguments of the commands that load a run."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Run directory written by `jppo train`."""
    env: Annotated[str | None, tyro.conf.arg(metavar="MODULE:NAME")] = None
    """Environment of the run as module:name, if it is your own. Imports that module."""
    trust_env: bool = False
    """Import the module that the run's config.json names, if its environment is a module:name. It may run any code. Use --env for a module in the current directory."""  # noqa: E501

    best: bool = False
    """Use the best policy of the run instead of the newest one: by evaluation if the run had any (--eval-every), otherwise by the recent return at its checkpoints."""  # noqa: E501

    def load(self) -> Any:
        """Returns the run. Raises ValueError, see `load_run`."""
        from jppo.runs.load import load_run

        return load_run(self.run_dir, env=self.env, trust_env=self.trust_env, best=self.best)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreParse:
    """The arguments that decide the default values of the other options."""

    env: str  # the first word that names an environment with its own preset, or ""
    preset: str
    run_dir: Path | None  # of --run-dir or --resume
    resumes: bool  # whether --resume is set
    explicit_sizes: tuple[str, ...]  # which of num_envs and num_minibatches are set
    words: tuple[str, ...]  # all of them

    @property
    def chosen_preset(self) -> Preset:
        """The preset with the default values. Raises ValueError for an unknown name."""
        return PRESETS[choose_preset(self.preset, self.env)]


def pre_parse(argv: list[str]) -> PreParse:
    """Returns the arguments of a command line that decide the defaults of its options. Reports no errors."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("preset", "run_dir", "resume", *SCALED):
        parser.add_argument(f"--{name.replace('_', '-')}", *({f"--{name}"} if "_" in name else ()), nargs="?")
    known, words = parser.parse_known_args(argv)
    run_dir = known.resume or known.run_dir
    return PreParse(
        env=next((word for word in words if preset_for(word) != "default"), ""),
        preset=known.preset or "auto",
        run_dir=Path(run_dir) if run_dir else None,
        resumes=bool(known.resume),
        explicit_sizes=tuple(name for name in SCALED if getattr(known, name) is not None),
        words=tuple(argv),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunArguments:
    """The arguments of the commands that train, and their defaults."""

    env: Environment
    """Environment to train on; `jppo envs` lists the known names. For your own environment: module:name."""
    backend: Backend = "auto"
    """device: JAX environments (gymnax); ray: Gymnasium environments in Ray actors; auto: device if the environment is in JAX."""  # noqa: E501
    seed: int = 0
    """Seed of all random numbers."""
    preset: Annotated[str, tyro.conf.arg(help=_PRESET_HELP)] = "auto"
    num_devices: int | None = None
    """Number of devices that share the environments. Default: all usable devices; on CPU, one per core."""
    scale_envs: int | None = None
    """Multiply the preset's num_envs and num_minibatches by this number. The minibatch size does not change."""
    config: Annotated[PPOConfig, Inline] = dataclasses.field(default_factory=PPOConfig)
    hyperparams: Annotated[Hyperparams, Inline] = dataclasses.field(default_factory=Hyperparams)
    ray: Annotated[RayConfig, Inline] = dataclasses.field(default_factory=RayConfig)

    @classmethod
    def with_defaults(cls, pre_parsed: PreParse) -> Self:
        """Returns the command with the default values of the preset."""
        preset = pre_parsed.chosen_preset
        return cls(env=tyro.MISSING, config=preset.config, hyperparams=preset.hyperparams)

    def adjusted(self, pre_parsed: PreParse) -> Self:
        """Returns the command with num_envs = num_actors*envs_per_actor if only --envs-per-actor is set."""
        if self.scale_envs is not None:
            check_scale_envs(self.scale_envs, *pre_parsed.explicit_sizes)
            return self
        if self.ray.envs_per_actor is None or "num_envs" in pre_parsed.explicit_sizes:
            return self
        config, ray = spread_envs(self.config, self.ray, num_cores(), fixed=False)
        return dataclasses.replace(self, config=config, ray=ray)

    def arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments of `jppo.train` and `jppo.bench`."""
        names = ("env", "backend", "seed", "preset", "num_devices", "config", "hyperparams", "ray")
        arguments = {name: getattr(self, name) for name in names}
        return arguments if self.scale_envs is None else arguments | {SCALE_ENVS: self.scale_envs}
