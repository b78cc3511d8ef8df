"""`jppo plan`."""

import dataclasses
import json
from typing import Annotated

import tyro

from jppo.cli.arguments import Inline
from jppo.config.ppo import PPOConfig


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
    """Devices over which environments are spread. Default: as many as there are (of a CPU, as it has cores) and fit."""
    json: bool = False
    """Print one line of JSON instead."""
    config: Annotated[PPOConfig, Inline] = dataclasses.field(default_factory=PPOConfig)

    def run(self) -> int:
        from jppo.benchmark.plan import plan, print_plan
        from jppo.runs.files import jsonable

        planned = plan(
            self.env, config=self.config, preset=self.preset, num_devices=self.num_devices, seconds=self.seconds
        )
        if self.json:
            print(json.dumps(jsonable(planned._asdict())))
        else:
            print_plan(planned)
        return 0
