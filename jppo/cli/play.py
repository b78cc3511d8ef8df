"""`jppo play`."""

import dataclasses
from pathlib import Path

import tyro


@dataclasses.dataclass(frozen=True)
class Play:
    """Play one episode with a trained policy and write it as a GIF."""

    run_dir: tyro.conf.Positional[Path]
    """Run directory written by `jppo train`."""
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
        from jppo.runs.load import load_run
        from jppo.runs.render import play_gif

        check_seed(self.seed)
        run = load_run(self.run_dir)
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
