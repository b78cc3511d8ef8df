"""`jppo sweep`."""

import dataclasses
import functools
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jppo.cli.arguments import EXIT_CODES, Inline, PreParse
from jppo.cli.output import print_json
from jppo.config.pbt import PBTConfig
from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.config.run import EVALUATION_FIELDS, RunConfig
from jppo.errors import Refused


class _Absent(tuple):
    """The default of a setting, which tells an absent option from an option without a value."""


def _parse_layer_sizes(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise Refused(f"{text!r} is not a list of layer sizes; write whole numbers with commas between them")
    return tuple(int(size) for size in text.split(","))


_ABSENT = _Absent()
_LAYER_SIZES = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="N,N",
    instance_from_str=lambda words: _parse_layer_sizes(words[0]),
    is_instance=lambda value: isinstance(value, tuple),
    str_from_instance=lambda value: [",".join(map(str, value))],
)


def _make_settings_type() -> Any:
    """Returns a dataclass with the fields of Hyperparams and PPOConfig, each a tuple of values to sweep.

    It inherits from both so that tyro finds the documentation of the fields.
    """
    fields = []
    for field in (*dataclasses.fields(Hyperparams), *dataclasses.fields(PPOConfig)):
        value_type: Any = Annotated[tuple, _LAYER_SIZES] if field.name == "hidden_sizes" else field.type
        values: Any = Annotated[tuple[value_type, ...], tyro.conf.arg(help_behavior_hint="")]
        fields.append((field.name, values, dataclasses.field(default=_ABSENT)))
    namespace = {"__post_init__": lambda self: None}  # a tuple is not a valid value of PPOConfig
    bases = (Hyperparams, PPOConfig)
    return dataclasses.make_dataclass("Settings", fields, bases=bases, namespace=namespace, frozen=True)


Settings = _make_settings_type()


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Train every combination of settings with every seed, on the device.

    A setting with one value applies to all runs; several values are swept.

    Hyperparameters may change during the run: --ent-coef 0.01:0, docs/schedules.md.

    Write out booleans: --normalize-obs True.

    Write layer sizes with commas: --hidden-sizes 64,64 128,128 (two networks).
    """

    envs: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ENV [ENV ...]", help_behavior_hint="")
    ]
    """JAX environments to train on; `jppo envs` lists them."""
    seeds: int = 4
    """Runs of each combination, with the seeds 0, 1, ..."""
    total_steps: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: preset)")] = None
    """Environment steps of each run, rounded up to whole updates."""
    preset: str = "auto"
    """Preset with the default values of the settings (auto: each environment's own)."""
    selection: Literal["none", "successive_halving", "pbt"] = "none"
    """What happens to the worst runs. successive_halving: the worse half stops after 1/16, 1/8, 1/4 and 1/2 of the updates. pbt (population-based training): at regular times, they become copies of the best runs, and the hyperparameters with several values change in the copies (docs/sweeps.md)."""  # noqa: E501
    pbt_every: int | None = None
    """With --selection pbt: number of updates between two exchanges. Default: a twentieth of the updates."""
    pbt_fraction: float = PBTConfig.fraction
    """With --selection pbt: fraction of the runs that are replaced by copies; at most 0.5."""
    max_parallel_runs: int | None = None
    """Maximum number of runs in one program. Default: as many as memory holds."""
    num_devices: int | None = None
    """Number of devices that share the runs. Default: all; on CPU, one per core."""
    sweep_dir: Path | None = None
    """Directory for results, table and plot (default: runs/sweeps/<time>). Saved runs are not trained again."""
    eval_every: int | None = RunConfig.eval_every
    """Number of updates between two evaluations of each run on whole episodes (metrics eval/*). Default: none."""
    eval_episodes: int | None = RunConfig.eval_episodes
    """Number of episodes of an evaluation. Default: 16."""
    eval_sampled: bool = False
    """Evaluations sample actions instead of taking the most likely ones."""
    eval_max_steps: int | None = RunConfig.eval_max_steps
    """Evaluations cut episodes that are longer than this. Default: 10,000."""
    stop_at_return: float | None = RunConfig.stop_at_return
    """End each run when its mean return reaches this value: of an evaluation if --eval-every is set, otherwise of about the last 100 episodes. With --selection pbt, all runs end (needs --eval-every)."""  # noqa: E501
    run_dirs: bool = False
    """Also write a run directory for each run, for `jppo eval`, `plot` and `play`."""
    quiet: bool = False
    """Show no progress and no summary."""
    json: bool = False
    """Print the best setting of each environment as one line of JSON on standard output, and everything else on standard error."""  # noqa: E501
    settings: Annotated[Settings, Inline] = dataclasses.field(default_factory=Settings)  # type: ignore[valid-type]
    words: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()  # the command line

    def adjusted(self, pre_parsed: PreParse) -> "Sweep":
        """Returns the command. Raises ValueError for a setting without a value or an option that has no effect."""
        if self.selection != "pbt" and (self.pbt_every, self.pbt_fraction) != (None, PBTConfig.fraction):
            raise Refused("--pbt-every and --pbt-fraction need --selection pbt")
        for name, values in vars(self.settings).items():
            if not values and values is not _ABSENT:
                raise Refused(f"--{name.replace('_', '-')} needs one value, or several values to sweep")
        return dataclasses.replace(self, words=pre_parsed.words)

    def run(self) -> int:
        from jppo.sweeps.results import print_settings
        from jppo.sweeps.store import default_sweep_dir
        from jppo.sweeps.sweep import sweep
        from jppo.training.progress import make_reporter, short_path

        if not self.envs:
            raise Refused("no environment; name at least one, for example: jppo sweep CartPole-v1")
        stream = sys.stderr if self.json else sys.stdout
        overrides: dict[str, Any] = {
            name: list(values) for name, values in vars(self.settings).items() if values is not _ABSENT
        }
        pbt = PBTConfig(every=self.pbt_every, fraction=self.pbt_fraction)
        result = sweep(
            list(self.envs),
            seeds=self.seeds,
            total_steps=self.total_steps,
            preset=self.preset,
            selection={"none": None, "pbt": pbt}.get(self.selection, self.selection),
            max_parallel_runs=self.max_parallel_runs,
            num_devices=self.num_devices,
            sweep_dir=self.sweep_dir or default_sweep_dir(),
            run=RunConfig(**{name: getattr(self, name) for name in EVALUATION_FIELDS}),
            progress="none" if self.quiet else functools.partial(make_reporter, "auto", stream=stream),
            **overrides,
        )
        if self.run_dirs:
            result.write_run_dirs()
        if not self.quiet:
            print_settings(result, stream)
            if result.status == "interrupted" and result.sweep_dir is not None:
                where = [] if self.sweep_dir else ["--sweep-dir", str(short_path(result.sweep_dir))]
                print("next:", shlex.join(["jppo", "sweep", *self.words, *where]), sep="\n  ", file=stream)
        if self.json:
            print_json(result.summary())
        return EXIT_CODES.get(result.status, 0)
