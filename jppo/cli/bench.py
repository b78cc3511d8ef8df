"""`jppo bench`."""

import dataclasses
import sys
from pathlib import Path

from jppo.cli.arguments import EXIT_FAILED, RunArguments
from jppo.cli.output import print_json
from jppo.config.checks import escape_controls


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench(RunArguments):
    """Measure the speed of a run and how much time each part of it takes.

    Trains for a few seconds. On the device, it then runs each part alone.

    Saves nothing.
    """

    seconds: float = 2.0
    """Measuring time of the run and, on the device, of its slowest part, in seconds."""
    dry_run: bool = False
    """Only compile: show the memory, the compile time and the largest num_envs that fits. The exit code is 2 if the run does not fit."""  # noqa: E501
    output: Path | None = None
    """Also draw the result, as this PNG file."""
    json: bool = False
    """Print one line of JSON instead of a table."""

    def run(self) -> int:
        from jppo.benchmark.bench import bench
        from jppo.benchmark.report import draw_bench, print_bench
        from jppo.errors import ActorsFailed
        from jppo.runs.run_dir import check_output

        if self.output is not None:
            check_output(self.output, ".png")
        try:
            result = bench(**self.arguments(), seconds=self.seconds, dry_run=self.dry_run, message=_print_message)
        except ActorsFailed as error:
            _print_message(f"jppo: {error}")
            return EXIT_FAILED
        if self.json:
            print_json(result.summary())
        else:
            print_bench(result)
        if self.output is not None and not self.dry_run:
            draw_bench(result, self.output)
            _print_message(f"wrote {self.output}")
        return 0


def _print_message(text: str) -> None:
    print(escape_controls(text), file=sys.stderr, flush=True)
