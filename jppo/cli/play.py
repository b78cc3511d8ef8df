"""`jppo play`."""

import dataclasses
from pathlib import Path

from jppo.cli.arguments import TrainedRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class Play(TrainedRun):
    """Play one episode with a trained policy and write it as a GIF."""

    output: Path = Path("play.gif")
    """Output file."""
    seed: int = 0
    """Seed of the episode."""
    sampled: bool = False
    """Sample actions from the policy instead of taking the most likely action."""
    max_steps: int = 500
    """Maximum number of steps."""

    def run(self) -> int:
        from jppo.config.checks import check_seed
        from jppo.runs.render import play_gif

        check_seed(self.seed)
        run = self.load()
        length, episode_return = play_gif(
            run.agent.env,
            run.policy,
            self.output,
            seed=self.seed,
            sampled=self.sampled,
            max_steps=self.max_steps,
        )
        print(f"wrote {self.output}: {length} steps, return {episode_return:.2f}")
        return 0
