"""`jppo bench`."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jppo.cli.arguments import EXIT_FAILED, Inline
from jppo.config.ppo import Hyperparams, PPOConfig, RayConfig


@dataclasses.dataclass(frozen=True)
class Bench:
    """Say how fast a run is, which part of it limits, and what would help: environments, policy, learner, or actors.
    Trains for some seconds, and then runs the parts alone."""

    env: tyro.conf.Positional[str]
    """Environment to train on, as for `jppo train`."""
    backend: Literal["auto", "anakin", "ray"] = "auto"
    """anakin: on the device; ray: actor processes; auto: the device where gymnax has the environment."""
    seed: int = 0
    """Seed of everything random."""
    preset: str = "auto"
    """Published configuration to start from (auto: the environment's own)."""
    seconds: float = 2.0
    """How long to measure the run, and the slowest part."""
    output: Path | None = None
    """Also draw it, as this PNG."""
    json: bool = False
    """Print one line of JSON instead."""
    config: Annotated[PPOConfig, Inline] = dataclasses.field(default_factory=PPOConfig)
    hyperparams: Annotated[Hyperparams, Inline] = dataclasses.field(default_factory=Hyperparams)
    num_devices: int | None = None
    """Devices over which environments and their samples are spread. Default: as many as there are (of a CPU, as it has cores) and fit."""  # noqa: E501
    actors: Annotated[RayConfig, Inline] = dataclasses.field(default_factory=RayConfig)

    def run(self) -> int:
        from jppo.benchmark.bench import bench
        from jppo.benchmark.report import draw_bench, print_bench
        from jppo.errors import ActorsFailed
        from jppo.runs.files import jsonable
        from jppo.runs.run_dir import check_output

        if self.output is not None:
            check_output(self.output, ".png")
        try:
            benched = bench(
                self.env,
                seed=self.seed,
                config=self.config,
                hyperparams=self.hyperparams,
                backend=self.backend,
                num_devices=self.num_devices,
                seconds=self.seconds,
                say=_say,
                **vars(self.actors),
            )
        except ActorsFailed as error:
            _say(f"jppo: {error}")
            return EXIT_FAILED
        if self.json:
            print(json.dumps(jsonable(benched.summary())))
        else:
            print_bench(benched)
        if self.output is not None:
            draw_bench(benched, self.output)
            _say(f"wrote {self.output}")
        return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
