"""`jppo report`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from jppo.cli.play import StatusLine


@dataclasses.dataclass(frozen=True)
class Report:
    """Write an HTML page with the curves, settings and speed of runs.

    The page is one file, which needs no network.
    """

    run_dirs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR [RUN_DIR ...]")]
    """Run directories written by `jppo train`."""
    output: Path = Path("report.html")
    """Output file."""
    video: bool = False
    """Also show an episode of the run with the highest return of each environment."""

    def run(self) -> int:
        from jppo.runs.report import write_report

        if not self.run_dirs:
            raise ValueError("no run directory; name at least one, for example: jppo report runs/CartPole-v1/*")
        status = StatusLine()
        write_report(self.run_dirs, self.output, video=self.video, progress=status.show)
        status.clear()
        print(f"wrote {self.output}")
        return 0
