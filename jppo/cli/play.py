"""`jppo play`."""

import dataclasses
from pathlib import Path

from jppo.cli.arguments import TrainedRun
from jppo.cli.output import StatusLine
from jppo.config.run import MAX_FRAMES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Play(TrainedRun):
    """Play one episode with a trained policy and write it as a GIF."""

    output: Path = Path("play.gif")
    """Output file."""
    seed: int = 0
    """Seed of the episode."""
    sampled: bool = False
    """Sample actions from the policy instead of taking the most likely action."""
    max_steps: int = MAX_FRAMES
    """Maximum number of steps. A longer episode is cut. The frames of all steps are in memory."""

    def run(self) -> int:
        from jppo.config.checks import check_seed
        from jppo.runs.render import play_gif
        from jppo.runs.run_dir import check_output, write_output

        check_seed(self.seed)
        check_output(self.output, ".gif")
        run = self.load()
        with StatusLine() as status:
            played = play_gif(
                run.agent.env,
                run.policy,
                seed=self.seed,
                sampled=self.sampled,
                max_steps=self.max_steps,
                progress=status.show,
            )
        write_output(self.output, played.gif, ".gif")
        cut = "" if played.finished else f" (the episode did not end within --max-steps {self.max_steps})"
        print(f"wrote {self.output}: {played.length} steps, return {played.episode_return:.2f}{cut}")
        return 0
