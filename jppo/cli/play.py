"""`jppo play`."""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Self

from jppo.cli.arguments import TrainedRun
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


class StatusLine:
    """Shows the newest text on one line of the terminal; on other outputs, a line every five seconds."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last, self._width = time.monotonic(), 0

    def show(self, text: str) -> None:
        """Shows a text unless the last one is too recent."""
        if time.monotonic() - self._last < (0.1 if self._is_terminal else 5.0):
            return
        self._last = time.monotonic()
        end = "\r" if self._is_terminal else "\n"
        print(text.ljust(self._width), end=end, file=sys.stderr, flush=True)
        self._width = len(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Erases the line on a terminal."""
        if self._is_terminal:
            print(" " * self._width, end="\r", file=sys.stderr, flush=True)
