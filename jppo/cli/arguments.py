"""Exit codes, argument types and the pre-parse that the commands share. Imports no JAX."""

import argparse
import contextlib
import dataclasses
import itertools
import math
import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tyro
from tyro.constructors import PrimitiveConstructorSpec, PrimitiveTypeInfo

from jppo.cli.interrupt import EXIT_INTERRUPTED
from jppo.config import schedules
from jppo.config.checks import find_similar
from jppo.config.overrides import ENV_OPTIONS, SCALE_ENVS, SCALED, check_scale_envs
from jppo.config.ppo import Hyperparam, Hyperparams, PPOConfig
from jppo.config.presets import PRESETS, Preset, choose_preset, preset_for
from jppo.config.ray import RayConfig, num_cores, spread_envs
from jppo.config.run import EVALUATION_FIELDS, SAVED_FIELDS
from jppo.errors import Refused, strip_colours

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
_ENV_NAMES = ("env", "env_id", "env_name")
_HINTS = {  # options of other programs
    **dict.fromkeys(
        ("gpu", "gpus", "cuda", "device", "platform"),
        "JAX uses a GPU if its GPU build is installed; JAX_PLATFORMS=cpu selects the CPU",
    ),
    **dict.fromkeys(
        ("anneal_learning_rate", "no_anneal_learning_rate"),
        "write --learning-rate 2.5e-4:0 for a linear decrease to 0, and a number for a constant learning rate",
    ),
    **dict.fromkeys(SAVED_FIELDS, "only `jppo train` supports it"),
    **dict.fromkeys(EVALUATION_FIELDS, "only `jppo train` and `jppo sweep` support it"),
}

_REWORDED = (  # messages of tyro
    (r"Missing value for argument '(-.+)'\. Expected 1 values", r"\1 needs a value"),
    (r"Unrecognized options: ", "unexpected argument "),
    (r"could not convert string to float: ('.*')", r"\1 is not a number"),
)


def check_options(name: str, command: Any, words: list[str]) -> None:
    """Raises ValueError with a hint for the first option that the command does not have."""
    known = _option_names(command)
    for word in words:
        if re.fullmatch("-[a-zA-Z]", word) and word != "-h":
            raise Refused(f"unknown option {word}; `jppo {name} --help` lists all options, which start with --")
        option = word.partition("=")[0][2:].replace("-", "_")
        if word.startswith("--") and option and option.removeprefix("no_") not in known:
            hint = _suggest_option(option, name, command, known)
            raise Refused(f"unknown option {show_option(option)}; {hint}`jppo {name} --help` lists all options")


def _suggest_option(option: str, name: str, command: Any, known: list[str]) -> str:
    """Returns what to write in place of an unknown option of a command, or ''."""
    arguments = {field.name for field in dataclasses.fields(command)} - set(known)
    if option in ENV_OPTIONS and "env" in arguments and "backend" in known:
        made = "jppo.make_env(ENV, ...) for --backend device"
        if option.startswith("max_"):
            made += " or gymnasium.make(ENV, ...) for --backend ray"
        return f"write a function that returns {made}, and pass its module:name and the backend; "
    if option in _HINTS:
        is_device = "num_devices" in known and _HINTS[option] == _HINTS["gpu"]
        return f"{_HINTS[option]}{', and --num-devices the number of devices' if is_device else ''}; "
    if option in _ENV_NAMES and "env" not in known:
        if arguments & {"env", "envs"}:
            return f"the environment is an argument without an option: jppo {name} CartPole-v1; "
        is_named = "run_dirs" in arguments
        return "the run directories name the environment; " if is_named else "this command has no environment; "
    if option == "run_dir" and "sweep_dir" not in known:
        is_argument = arguments & {"run_dir", "run_dirs"}
        return f"the run directory is an argument without an option: jppo {name} RUN_DIR; " if is_argument else ""
    similar = "sweep_dir" if option == "run_dir" else find_similar(option, known)
    return f"did you mean {show_option(similar)}? " if similar else ""


def first_error(printed: str, name: str) -> str:
    """Returns the error that tyro printed for a command, in one line and without the help of the argument.

    tyro prints a box. Its title is in the first row, and a rule separates the error from more help. If standard output
    cannot show a box, there is also a rule below the title. Names of missing arguments are indented by four columns,
    and their help by eight.
    """
    rows = [row.strip("│|")[1:] for row in strip_colours(printed).splitlines()[1:]]
    start = itertools.dropwhile(lambda row: not row.strip(" ─-"), rows)
    error = itertools.takewhile(lambda row: row.strip(" ─-"), start)
    words = " ".join(row.strip() for row in error if not row.startswith(" " * 8)).rstrip(".")
    for pattern, replacement in _REWORDED:
        words = re.sub(pattern, replacement, words)
    return f"{words}; `jppo {name} --help` describes the arguments"


def show_option(field_name: str) -> str:
    """Returns the option of a field, for example --num-envs."""
    return f"--{field_name.replace('_', '-')}"


def name_options(text: str, command: Any) -> str:
    """Returns an error message with the options of a command in place of its fields: --seed 1 for seed = 1.

    A name with one word is replaced only before a value, or where the message begins with "name needs", because it may
    be a word of the sentence. In Python, as in trust_env=True, the name stays.
    """
    text = re.sub(r"(?<![\w./'-])([a-z]+_[a-z]+)\*(?=[a-z]+_[a-z]+)", r"\1 * ", text)  # --num-envs * --num-steps
    for name in _option_names(command):
        field = rf"(?<![\w./'-]){name.replace('_', '[_.]')}(?![\w./'(=])"  # pbt.every is --pbt-every
        text = re.sub(rf"(?<!\* ){field} = |^{field} (?=needs )", f"{show_option(name)} ", text)
        text = re.sub(field, show_option(name), text) if "_" in name else text
    return text


def _option_names(record: Any) -> list[str]:
    """Returns the names of the fields that are options, also those of nested records."""
    names = ["help"]
    for name, hint in typing.get_type_hints(record, include_extras=True).items():
        kind, *marks = typing.get_args(hint) or (hint,)
        if Inline in marks:
            names += _option_names(kind)
        elif typing.get_origin(hint) is not typing.ClassVar and tyro.conf.Positional not in marks:
            names.append(name)
    return names


def _parse_whole_number(text: str) -> int:
    """Returns an int, which may be written as 500000, 500_000 or 5e5."""
    with contextlib.suppress(ValueError):
        return int(text)
    number = math.nan
    with contextlib.suppress(ValueError):
        number = float(text)
    if not number.is_integer():
        raise Refused(f"{text!r} is not a whole number")
    return int(number)


REGISTRY = tyro.constructors.ConstructorRegistry()


@REGISTRY.primitive_rule
def _whole_number_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Returns how to parse an int."""
    if info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: _parse_whole_number(words[0]),
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


@REGISTRY.primitive_rule
def _optional_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Returns how to parse `T | None`: the word None, or a T. With tyro's own rule, errors and help would show both."""
    kind, *others = typing.get_args(info.type) or (None,)
    spec = _find_spec(kind, info) if others == [types.NoneType] else None
    if spec is None:
        return None
    return dataclasses.replace(
        spec,
        instance_from_str=lambda words: None if words == ["None"] else spec.instance_from_str(words),
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: ["None"] if value is None else spec.str_from_instance(value),
    )


@REGISTRY.primitive_rule
def _several_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Returns how to parse `tuple[T, ...]`. With tyro's own rule, the error of a value would get lost."""
    kind, *others = typing.get_args(info.type) or (None,)
    spec = _find_spec(kind, info) if others == [...] else None
    if spec is None:
        return None

    def parse(word: str) -> Any:
        try:
            return spec.instance_from_str([word])
        except ValueError as error:
            raise Refused(f"{error}; separate several values with spaces" if "," in word else str(error)) from None

    return dataclasses.replace(
        spec,
        nargs="*",
        metavar=f"[{spec.metavar} [{spec.metavar} ...]]",
        instance_from_str=lambda words: tuple(map(parse, words)),
        is_instance=lambda value: isinstance(value, tuple) and all(map(spec.is_instance, value)),
        str_from_instance=lambda value: [word for item in value for word in spec.str_from_instance(item)],
    )


def _find_spec(kind: Any, info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Returns how to parse a type inside another one; None unless its values have one word."""
    spec = tyro.constructors.ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, info.markers))
    return spec if isinstance(spec, PrimitiveConstructorSpec) and spec.nargs == 1 else None


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
