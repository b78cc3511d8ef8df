"""Reporters show the progress of a run to the user."""

import math
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column

from jppo.config.terminal import OutputStream
from jppo.errors import Refused
from jppo.runs.plots import format_steps

_LINE_SECONDS = 5.0  # between two lines of LineReporter
_REDRAW_SECONDS = 0.5
_BAR_COLUMNS = 80  # a terminal with fewer columns shows no bar, so that the numbers have room
_STATUS_COLUMNS = 60  # a terminal with fewer columns shows only steps, return and the remaining time
_INTERRUPT = "^C"  # a terminal shows this behind the line; on the next line, it would leave the old progress visible
_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKLINE = 8  # characters


class Reporter:
    """Receives the progress of a run. Subclasses override the methods they need; these do nothing."""

    def start(self) -> None:
        """The arguments are valid; compilation starts."""

    def message(self, text: str) -> None:
        """A message for the user."""

    def tick(self) -> None:
        """Called several times per second, for animations."""

    def update(self, env_steps: int, steps_per_second: float, recent_return: float) -> None:
        """Updates were logged. `recent_return` is the mean of the last 100 episodes, NaN before the first."""

    def evaluated(self, env_steps: int, return_mean: float) -> None:
        """The policy after `env_steps` steps was evaluated."""

    def close(self) -> None:
        """The run has ended."""


class NullReporter(Reporter):
    """Shows nothing. Warnings of the run become Python warnings."""


class PrintReporter(Reporter):
    """Prints messages."""

    def message(self, text: str) -> None:
        print(text, file=OutputStream(sys.stdout), flush=True)


class WorkerReporter(Reporter):
    """Passes on the messages of a process that is not the first, with the number of the process."""

    def __init__(self, reporter: Reporter, number: int) -> None:
        self._reporter, self._number = reporter, number

    def message(self, text: str) -> None:
        self._reporter.message(f"process {self._number}: {text}")


class BarReporter(Reporter):
    """Shows a progress bar on a terminal."""

    def __init__(self, console: Console, total_steps: int) -> None:
        # By default, rich ends a long line with an ellipsis, which not every encoding has.
        crop = Column(no_wrap=True, overflow="crop")
        status = TextColumn("{task.fields[status]}", table_column=crop)
        columns: list[ProgressColumn] = [status]
        if console.width >= _BAR_COLUMNS:  # the bar takes the columns that the status does not need
            columns = [BarColumn(bar_width=None), TextColumn("{task.percentage:>3.0f}%", table_column=crop), status]
        self._progress = _Line(console, *columns)
        self._total = total_steps
        self._returns = Sparkline() if console.encoding.startswith("utf") else None
        self._task = self._progress.add_task("training", total=total_steps, status="compiling")
        self._drawn, self._evaluation = 0.0, math.nan

    def start(self) -> None:
        self._progress.start()

    def message(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)

    def tick(self) -> None:
        if time.monotonic() - self._drawn >= _REDRAW_SECONDS:
            self._drawn = time.monotonic()
            self._progress.refresh()

    def update(self, env_steps: int, steps_per_second: float, recent_return: float) -> None:
        columns = self._progress.console.width
        status = format_status(env_steps, self._total, steps_per_second, recent_return, self._evaluation, columns)
        if self._returns is not None:
            self._returns.add(recent_return)
            status += f" {self._returns}" if columns >= _STATUS_COLUMNS else ""
        self._progress.update(self._task, completed=min(env_steps, self._total), status=status, refresh=True)
        self._drawn = time.monotonic()

    def evaluated(self, env_steps: int, return_mean: float) -> None:
        self._evaluation = return_mean

    def close(self) -> None:
        self._progress.stop()


class _Line(Progress):
    """Leaves columns free at the end of the line for the characters that a terminal shows on Ctrl-C."""

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        self._console = console
        # A drawing thread would slow down the training loop.
        super().__init__(*columns, console=console, auto_refresh=False, expand=True)

    def get_renderable(self) -> RenderableType:
        return Constrain(super().get_renderable(), self._console.width - len(_INTERRUPT))


class Sparkline:
    """Draws the course of a value as a few block characters. Its memory does not grow with the number of values."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._stride, self._count = 1, 0

    def add(self, value: float) -> None:
        """Adds a value; NaN is ignored."""
        if math.isnan(value):
            return
        if self._count % self._stride == 0:
            self._values.append(value)
        self._count += 1
        if len(self._values) == 2 * _SPARKLINE:
            self._values, self._stride = self._values[::2], 2 * self._stride

    def __str__(self) -> str:
        values = [x for x in self._values if math.isfinite(x)]
        if len(values) < 2:
            return ""
        shown = [values[i * (len(values) - 1) // (_SPARKLINE - 1)] for i in range(_SPARKLINE)]
        shown = values if len(values) < _SPARKLINE else shown
        low, high = min(shown), max(shown)
        scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
        return "".join(_BLOCKS[round((value - low) * scale)] for value in shown)


class LineReporter(Reporter):
    """Prints a line every few seconds, for output that is not a terminal."""

    def __init__(self, stream: TextIO, total_steps: int) -> None:
        self._stream, self._total, self._last = stream, total_steps, -math.inf
        self._evaluation = math.nan

    def message(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def update(self, env_steps: int, steps_per_second: float, recent_return: float) -> None:
        if time.monotonic() - self._last >= _LINE_SECONDS or env_steps >= self._total:
            self._last = time.monotonic()
            self.message(format_status(env_steps, self._total, steps_per_second, recent_return, self._evaluation))

    def evaluated(self, env_steps: int, return_mean: float) -> None:
        self._evaluation = return_mean


def check_progress(progress: Any) -> None:
    """Raises ValueError if `progress` is not "auto", "none" or a reporter."""
    if isinstance(progress, type):
        name = progress.__name__
        raise Refused(f"progress = {name} is a class; pass an instance, {name}(...)")
    if not isinstance(progress, Reporter) and progress not in ("none", "auto"):
        raise Refused(f"progress = {progress!r} must be 'auto', 'none' or a jppo.Reporter")


def make_reporter(progress: str | Reporter, total_steps: int, stream: TextIO | None = None) -> Reporter:
    """Returns the reporter that `RunConfig.progress` selects. Raises ValueError for an invalid value."""
    check_progress(progress)
    if isinstance(progress, Reporter):
        return progress
    if progress == "none":
        return NullReporter()
    display: Any = OutputStream(stream or sys.stdout)
    if display.isatty():
        return BarReporter(Console(file=display), total_steps)
    return LineReporter(display, total_steps)


def format_status(
    env_steps: int,
    total_steps: int,
    steps_per_second: float,
    recent_return: float,
    evaluation: float = math.nan,
    columns: int | None = None,
) -> str:
    """Returns the steps so far, the speed, the remaining time, the recent return and the last evaluation in a line.

    Args:
      columns: width of a terminal, which gets rounded numbers and, if it is narrow, neither speed nor evaluation.
    """
    seconds_left = max(0, total_steps - env_steps) / steps_per_second if steps_per_second else math.inf
    left = f"{_format_duration(seconds_left)} left"
    returns = "no episode yet" if math.isnan(recent_return) else f"return {recent_return:.1f}"
    if columns is None:
        steps, speed = f"{env_steps:,}/{total_steps:,} steps", f"{format_steps(steps_per_second)} steps/s"
    else:
        steps = f"{format_steps(env_steps)}/{format_steps(total_steps)}"
        speed = f"{format_steps(steps_per_second)}/s"
    if columns is not None and columns < _STATUS_COLUMNS:
        return "  ".join((steps, returns, left))
    evaluated = () if math.isnan(evaluation) else (f"eval {evaluation:.1f}",)
    return "  ".join((steps, speed, left, returns, *evaluated))


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """Returns the summary of a run as two to four lines of text."""
    mean, std = summary["return_mean"], summary["return_std"]
    has_episodes = mean is not None and not math.isnan(mean)
    returns = f"return {mean:.1f} +- {std:.1f} over the last episodes" if has_episodes else "no episode ended"
    start = "starting" if summary["backend"] == "ray" else "compiling"
    lines = [
        f"{summary['status']}: {summary['steps']:,} steps, {summary['updates']:,} updates in "
        f"{summary['seconds']:.1f} s ({format_steps(summary['steps_per_second'])} steps/s)",
        f"{returns}; {summary['compile_seconds']:.1f} s of {start}",
    ]
    if "eval_return_mean" in summary:
        lines.append(f"last evaluation: return {summary['eval_return_mean']:.1f}")
    if summary["run_dir"]:
        missing = f" without {', '.join(summary['failed_writes'])}" if "failed_writes" in summary else ""
        lines.append(f"saved in {short_path(summary['run_dir'])}{missing}")
    return lines


def short_path(path: str | Path) -> Path:
    """Returns the path relative to the working directory if it lies below it, otherwise unchanged."""
    path, here = Path(path), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _format_duration(seconds: float) -> str:
    """Returns seconds as [hours:]minutes:seconds."""
    if math.isinf(seconds):
        return "?"
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
