"""`jppo check-env`."""

import dataclasses
import json
from typing import Annotated, Literal

import tyro

from jppo.cli.arguments import WholeNumber


@dataclasses.dataclass(frozen=True)
class CheckEnv:
    """Play with an environment and say what is wrong with it: its contract, seeds, time limit, final observations, and
    so on. Exit code 1 where a check failed."""

    env: tyro.conf.Positional[str]
    """Environment to check; `jppo envs` lists them. Or your own Gymnasium environment, as module:name."""
    backend: Literal["auto", "anakin", "ray"] = "auto"
    """anakin: gymnax's, on the device; ray: Gymnasium's; auto: the device where gymnax has the environment."""
    steps: Annotated[int, WholeNumber] = 1024
    """Steps of each environment."""
    num_envs: int = 8
    """Environments, with a seed each."""
    seed: int = 0
    """The first seed."""
    json: bool = False
    """Print one line of JSON instead."""

    def run(self) -> int:
        from jppo.envs.checks import check_env, print_report
        from jppo.runs.files import jsonable

        report = check_env(self.env, backend=self.backend, steps=self.steps, seed=self.seed, num_envs=self.num_envs)
        if self.json:
            print(json.dumps(jsonable(report.summary())))
        else:
            print_report(report)
        return 0 if report.passed else 1
