"""`jppo plan`."""

import dataclasses
from typing import Annotated, Any

import tyro

from jppo.cli.arguments import Environment, Inline, PreParse
from jppo.cli.output import print_json
from jppo.config.overrides import SCALE_ENVS, check_scale_envs
from jppo.config.ppo import PPOConfig


@dataclasses.dataclass(frozen=True)
class Plan:
    """Show the memory of a run and the largest num_envs that fits.

    Compiles the run without training. The exit code is 2 if the run does not fit.
    """

    env: Environment
    """JAX environment, as for `jppo train`."""
    preset: str = "auto"
    """Preset with the default values of the options below (auto: the environment's own)."""
    num_devices: int | None = None
    """Number of devices that share the environments. Default: all usable devices; on CPU, one per core."""
    scale_envs: int | None = None
    """Multiply the preset's num_envs and num_minibatches by this number. The minibatch size does not change."""
    json: bool = False
    """Print one line of JSON instead of a table."""
    config: Annotated[PPOConfig, Inline] = dataclasses.field(default_factory=PPOConfig)

    @classmethod
    def with_defaults(cls, pre_parsed: PreParse) -> "Plan":
        """Returns the command with the default values of the preset."""
        return cls(env=tyro.MISSING, config=pre_parsed.chosen_preset.config)

    def adjusted(self, pre_parsed: PreParse) -> "Plan":
        """Returns the command. Raises ValueError for --scale-envs together with --num-envs or --num-minibatches."""
        check_scale_envs(self.scale_envs, *pre_parsed.explicit_sizes if self.scale_envs is not None else ())
        return self

    def run(self) -> int:
        from jppo.benchmark.plan import plan
        from jppo.benchmark.report import print_plan

        scale: dict[str, Any] = {} if self.scale_envs is None else {SCALE_ENVS: self.scale_envs}
        result = plan(self.env, config=self.config, preset=self.preset, num_devices=self.num_devices, **scale)
        if self.json:
            print_json(result.summary())
        else:
            print_plan(result)
        return 0
