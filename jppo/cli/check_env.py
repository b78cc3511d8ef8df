"""`jppo check-env`."""

import dataclasses

from jppo.cli.arguments import Backend, Environment
from jppo.cli.output import print_json


@dataclasses.dataclass(frozen=True)
class CheckEnv:
    """Check that an environment follows its interface.

    Tests spaces, seeds, time limit, final observations and more.

    The exit code is 1 if a check fails.
    """

    env: Environment
    """Environment to check; `jppo envs` lists the known names. For your own environment: module:name."""
    backend: Backend = "auto"
    """device: the gymnax environment; ray: the Gymnasium environment; auto: device if the environment is in JAX."""
    steps: int = 1024
    """Number of steps of each environment."""
    num_envs: int = 8
    """Number of environments. Each has its own seed."""
    seed: int = 0
    """Seed of the first environment."""
    json: bool = False
    """Print one line of JSON instead of a table."""

    def run(self) -> int:
        from jppo.envs.checks import check_env, print_report

        report = check_env(self.env, backend=self.backend, steps=self.steps, seed=self.seed, num_envs=self.num_envs)
        if self.json:
            print_json(report.summary())
        else:
            print_report(report)
        return 0 if report.passed else 1
