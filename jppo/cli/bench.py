"""`jppo bench`."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import tyro

from jppo.cli.arguments import EXIT_FAILED, Backend, Environment, Inline, PreParse, fit_sizes_to_actors
from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.config.ray import RayConfig


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measure the speed of a run and how much time each part of it takes.

    Trains for a few seconds, then runs each part alone. Saves nothing.
    """

    env: Environment
    """Environment, as for `jppo train`."""
    backend: Backend = "auto"
    """device: JAX environments (gymnax); ray: Gymnasium environments in Ray actors; auto: device if gymnax has the environment."""  # noqa: E501
    seed: int = 0
    """Seed of all random numbers."""
    preset: str = "auto"
    """Preset with the default values of the options below (auto: the environment's own)."""
    seconds: float = 2.0
    """Measuring time of the run, and of its slowest part, in seconds."""
    output: Path | None = None
    """Also draw the result, as this PNG file."""
    json: bool = False
    """Print one line of JSON instead of a table."""
    config: Annotated[PPOConfig, Inline] = dataclasses.field(default_factory=PPOConfig)
    hyperparams: Annotated[Hyperparams, Inline] = dataclasses.field(default_factory=Hyperparams)
    num_devices: int | None = None
    """Number of devices that share the environments. Default: all usable devices; on CPU, one per core."""
    ray: Annotated[RayConfig, Inline] = dataclasses.field(default_factory=RayConfig)

    @classmethod
    def with_defaults(cls, given: PreParse) -> "Bench":
        """Returns the command with the default values of the preset."""
        preset = given.chosen_preset
        return cls(env=tyro.MISSING, config=preset.config, hyperparams=preset.hyperparams)

    def adjusted(self, given: PreParse) -> "Bench":
        """Returns the command with num_envs and num_steps that fit --envs-per-actor."""
        config, ray = fit_sizes_to_actors(self.config, self.ray, given)
        return dataclasses.replace(self, config=config, ray=ray)

    def run(self) -> int:
        from jppo.benchmark.bench import bench
        from jppo.benchmark.report import draw_bench, print_bench
        from jppo.errors import ActorsFailed
        from jppo.runs.files import jsonable
        from jppo.runs.run_dir import check_output

        if self.output is not None:
            check_output(self.output, ".png")
        try:
            result = bench(
                self.env,
                seed=self.seed,
                preset=self.preset,
                config=self.config,
                hyperparams=self.hyperparams,
                backend=self.backend,
                num_devices=self.num_devices,
                ray=self.ray,
                seconds=self.seconds,
                message=_print_message,
            )
        except ActorsFailed as error:
            _print_message(f"jppo: {error}")
            return EXIT_FAILED
        if self.json:
            print(json.dumps(jsonable(result.summary())))
        else:
            print_bench(result)
        if self.output is not None:
            draw_bench(result, self.output)
            _print_message(f"wrote {self.output}")
        return 0


def _print_message(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
