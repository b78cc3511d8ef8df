"""`jppo plot`."""

import dataclasses
from pathlib import Path

import tyro


@dataclasses.dataclass(frozen=True)
class Plot:
    """Draw the learning curves of runs as a PNG.

    Runs that differ only in the seed share one line, their mean.
    """

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories written by `jppo train`."""
    output: Path = Path("learning.png")
    """Output file."""

    def run(self) -> int:
        from jppo.runs.plots import plot

        if not self.run_dirs:
            raise ValueError("no run directory; name at least one, for example: jppo plot runs/CartPole-v1/*")
        plot(self.run_dirs, self.output)
        print(f"wrote {self.output}")
        return 0
