"""`jppo sweep`."""

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import tyro

from jppo.cli.arguments import EXITS, Inline, WholeNumber
from jppo.config.ppo import Hyperparams, PPOConfig


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
        one = Annotated[int, WholeNumber] if one is int else one
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
    total_steps: Annotated[int | None, WholeNumber] = None
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
    settings: Annotated[Settings, Inline] = dataclasses.field(default_factory=Settings)  # type: ignore[valid-type]

    def check(self, argv: list[str]) -> None:
        """Raises ValueError for a setting without a value."""
        given = [word.split("=")[0] for word in argv]
        for word, following in zip(given, [*given[1:], "--"], strict=True):
            if following.startswith("--") and "=" not in argv[given.index(word)]:
                name = word.removeprefix("--").replace("-", "_")
                if word.startswith("--") and hasattr(self.settings, name):
                    raise ValueError(f"{word} wants a value, or several to sweep")

    def run(self) -> int:
        from jppo.sweeps.sweep import default_sweep_dir, sweep
        from jppo.training.progress import make_reporter

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
            from jppo.sweeps.results import print_settings

            print_settings(result, stream)
        if self.json:
            from jppo.runs.run_dir import jsonable

            print(json.dumps(jsonable(result.summary())))
        return EXITS.get(result.status, 0)
