"""`jppo report`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from jppo.cli.arguments import RunDirs
from jppo.cli.output import StatusLine
from jppo.errors import Refused


@dataclasses.dataclass(frozen=True)
class Report:
    """Write an HTML page with the curves, settings and speed of runs.

    The page is one file, which needs no network.
    """

    run_dirs: RunDirs
    """Run directories written by `jppo train`."""
    output: Path = Path("report.html")
    """Output file."""
    video: bool = False
    """Also show an episode of the run with the highest return of each environment."""
    env: Annotated[str | None, tyro.conf.arg(metavar="MODULE:NAME")] = None
    """With --video: environment of runs in your own environment, as module:name. Imports that module."""

    def run(self) -> int:
        from jppo.runs.report import write_report

        if not self.run_dirs:
            raise Refused("no run directory; name at least one, for example: jppo report runs/CartPole-v1/*")
        if self.env is not None and not self.video:
            raise Refused("--env has no effect without --video")
        with StatusLine() as status:
            write_report(self.run_dirs, self.output, video=self.video, env=self.env, progress=status.show)
        print(f"wrote {self.output}")
        return 0
