"""`jppo plot`."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jppo.cli.arguments import RunDirs
from jppo.errors import Refused


@dataclasses.dataclass(frozen=True)
class Plot:
    """Draw the learning curves of runs, or of a sweep, as a PNG.

    Runs that differ only in the seed share one line, their mean, with a band.

    For population-based training: the return and the hyperparameters of each run.
    """

    run_dirs: RunDirs
    """Run directories written by `jppo train`, or one directory of `jppo sweep`."""
    output: Path = Path("learning.png")
    """Output file."""
    metrics: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]")] = ("episode/return_mean",)
    """Metrics to draw, each in its own panel; docs/metrics.md lists them."""
    x: Literal["steps", "minutes"] = "steps"
    """The horizontal axis: environment steps, or minutes without compiling."""

    def run(self) -> int:
        from jppo.runs.plots import plot

        if not self.run_dirs:
            raise Refused("no run directory; name at least one, for example: jppo plot runs/CartPole-v1/*")
        if any(os.path.exists(path / "sweep.json") for path in self.run_dirs):
            if len(self.run_dirs) > 1:
                raise Refused("pass either one sweep directory or run directories")
            if (self.metrics, self.x) != (Plot.metrics, Plot.x):
                raise Refused("--metrics and --x apply to run directories; `jppo sweep --run-dirs` writes some")
            from jppo.sweeps.store import load_sweep

            load_sweep(self.run_dirs[0]).plot(self.output)
        else:
            plot(self.run_dirs, self.output, metrics=self.metrics, x=self.x)
        print(f"wrote {self.output}")
        return 0
