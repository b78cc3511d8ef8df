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
    """Train every combination of settings with every seed, in one compiled program per PPOConfig.

    Options that take values are settings; one value applies to all runs, several values are swept. Write out booleans
    (--normalize-obs True), and network sizes with commas: --hidden-sizes 64,64 128,128 are two networks.
    """

    envs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ENV [ENV ...]")]
    """Environments to train on, on the device."""
    seeds: int = 4
    """Runs of each combination, with the seeds 0, 1, ..."""
    total_steps: Annotated[int | None, WholeNumber] = None
    """Environment steps of each run, rounded up to whole updates."""
    preset: str = "auto"
    """Published configuration to start from (auto: each environment's own)."""
    successive_halving: bool = False
    """Stop the worse half of the runs after 1/16, 1/8, 1/4 and 1/2 of the updates."""
    max_parallel_runs: int | None = None
    """Maximum number of runs in one program. Default: as many as memory holds."""
    num_devices: int | None = None
    """Number of devices that share the runs. Default: all."""
    sweep_dir: Path | None = None
    """Directory for results, table and pictures (default: runs/sweeps/<time>). Saved runs are not trained again."""
    run_dirs: bool = False
    """Also write a run directory for each run, for `jppo eval`, `plot` and `play`."""
    address: str | None = None
    """Run the programs in parallel as Ray tasks: auto, host:port, ray://host:port, or local for a new Ray."""
    cpus: float = 1.0
    """CPUs that Ray reserves for each program."""
    gpus: float = 0.0
    """GPUs that Ray reserves for each program; may be a fraction."""
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
        from jppo.config.resources import Resources
        from jppo.sweeps.store import default_sweep_dir
        from jppo.sweeps.sweep import sweep
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
            successive_halving=self.successive_halving,
            max_parallel_runs=self.max_parallel_runs,
            num_devices=self.num_devices,
            sweep_dir=self.sweep_dir or default_sweep_dir(),
            address=self.address,
            resources=Resources(cpus=self.cpus, gpus=self.gpus),
            progress="none" if self.quiet else functools.partial(make_reporter, "auto", stream=stream),
            **settings,
        )
        if self.run_dirs:
            result.write_run_dirs()
        if not self.quiet:
            from jppo.sweeps.results import print_settings

            print_settings(result, stream)
        if self.json:
            from jppo.runs.files import jsonable

            print(json.dumps(jsonable(result.summary())))
        return EXITS.get(result.status, 0)
