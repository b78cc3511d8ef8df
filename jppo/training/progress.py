"""What a person sees while a run trains."""

import math
import os
import sys
import time
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from jppo.runs.plots import format_steps

_PLAIN_SECONDS = 5.0
_REDRAW_SECONDS = 0.5
_METHODS = ("start", "message", "tick", "update", "close")


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

    def close(self) -> None:
        """The run has ended."""


class NullReporter(Reporter):
    """Shows nothing. Warnings of the run become Python warnings."""


class PrintReporter(Reporter):
    """Prints messages."""

    def message(self, text: str) -> None:
        print(text, flush=True)


class WorkerReporter(Reporter):
    """Passes on the messages of a process that is not the first, with the number of the process."""

    def __init__(self, reporter: Reporter, number: int) -> None:
        self._reporter, self._number = reporter, number

    def message(self, text: str) -> None:
        self._reporter.message(f"process {self._number}: {text}")


class Bar(Reporter):
    """A progress bar for terminals."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,  # drawn when there is news: a drawing thread would take time from the loop
        )
        self._total = total_steps
        self._task = self._progress.add_task("training", total=total_steps, status="compiling")
        self._drawn = 0.0

    def start(self) -> None:
        self._progress.start()

    def message(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)

    def tick(self) -> None:
        if time.monotonic() - self._drawn >= _REDRAW_SECONDS:
            self._drawn = time.monotonic()
            self._progress.refresh()

    def update(self, env_steps: int, steps_per_second: float, recent_return: float) -> None:
        status = status_line(env_steps, self._total, steps_per_second, recent_return)
        self._progress.update(self._task, completed=min(env_steps, self._total), status=status, refresh=True)
        self._drawn = time.monotonic()

    def close(self) -> None:
        self._progress.stop()


class Lines(Reporter):
    """A line every few seconds, where the output is no terminal."""

    def __init__(self, stream: TextIO, total_steps: int) -> None:
        self._stream, self._total, self._last = stream, total_steps, -math.inf

    def message(self, text: str) -> None:
        try:
            print(text, file=self._stream, flush=True)
        except BrokenPipeError:
            silence(self._stream)

    def update(self, env_steps: int, steps_per_second: float, recent_return: float) -> None:
        if time.monotonic() - self._last >= _PLAIN_SECONDS or env_steps >= self._total:
            self._last = time.monotonic()
            self.message(status_line(env_steps, self._total, steps_per_second, recent_return))


def make_reporter(kind: str | Reporter, total_steps: int, stream: TextIO | None = None) -> Reporter:
    """A reporter: "none", or "auto" for a bar on a terminal and lines elsewhere; one that is given as it is."""
    if isinstance(kind, type):
        raise ValueError(f"progress = {kind.__name__} is a class; give an instance, {kind.__name__}(...)")
    if not isinstance(kind, str):
        if missing := [name for name in _METHODS if not hasattr(kind, name)]:
            raise ValueError(f"progress = {kind!r} is neither auto nor none nor a reporter: it has no {missing[0]}")
        return kind
    if kind not in ("none", "auto"):
        raise ValueError(f"progress = {kind!r} is neither auto nor none nor a reporter")
    stream = stream or sys.stdout
    if kind == "none":
        return NullReporter()
    return Bar(Console(file=stream), total_steps) if stream.isatty() else Lines(stream, total_steps)


def silence(stream: TextIO) -> None:
    """Lets a stream whose reader has gone (`jppo train ... | head`) lead nowhere, so that the run goes on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def status_line(step: int, total: int, steps_per_second: float, recent_return: float) -> str:
    """step/total, speed, time to go, recent return."""
    remaining = max(0, total - step) / steps_per_second if steps_per_second else math.inf
    shown = "no episode yet" if math.isnan(recent_return) else f"return {recent_return:.1f}"
    return f"{step:,}/{total:,} steps  {format_steps(steps_per_second)} steps/s  {_duration(remaining)} left  {shown}"


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """A finished run in a few lines."""
    mean, std = summary["return_mean"], summary["return_std"]
    returns = (
        "no episode ended"
        if mean is None or math.isnan(mean)
        else f"return {mean:.1f} +- {std:.1f} over the last episodes"
    )
    start = "starting" if summary["backend"] == "ray" else "compiling"
    lines = [
        f"{summary['status']}: {summary['steps']:,} steps, {summary['updates']:,} updates in "
        f"{summary['seconds']:.1f} s ({format_steps(summary['steps_per_second'])} steps/s) "
        f"after {summary['compile_seconds']:.1f} s of {start}; {returns}"
    ]
    lost = f", but for {', '.join(summary['failed_writes'])}" if "failed_writes" in summary else ""
    return lines + ([f"saved in {summary['run_dir']}{lost}"] if summary["run_dir"] else [])


def _duration(seconds: float) -> str:
    if math.isinf(seconds):
        return "?"
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
