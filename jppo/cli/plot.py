"""`jppo plot`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclasses.dataclass(frozen=True)
class Plot:
    """Draw the learning curves of runs as a PNG.

    Runs that differ only in the seed share one line, their mean, with a band.
    """

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories written by `jppo train`."""
    output: Path = Path("learning.png")
    """Output file."""
    metric: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]")] = ("episode/return_mean",)
    """Metrics to draw, each in its own panel; docs/metrics.md lists them."""
    x: Literal["steps", "minutes"] = "steps"
    """The horizontal axis: environment steps, or minutes without compiling."""

    def run(self) -> int:
        from jppo.runs.plots import plot

        if not self.run_dirs:
            raise ValueError("no run directory; name at least one, for example: jppo plot runs/CartPole-v1/*")
        plot(self.run_dirs, self.output, metrics=self.metric, x=self.x)
        print(f"wrote {self.output}")
        return 0
