"""What a person is shown."""

import io
import math
import os

import pytest
from rich.console import Console

from jppo.training.progress import Bar, Lines, NullReporter, WorkerReporter, make_reporter, status_line, summary_lines


@pytest.mark.parametrize(
    ("step", "speed", "recent", "line"),
    [
        (0, 0.0, math.nan, "0/5,000,000 steps  0 steps/s  ? left  no episode yet"),
        (1_000_000, 2e6, 12.34, "1,000,000/5,000,000 steps  2M steps/s  0:02 left  return 12.3"),
        (1_000_000, 54_321, -3.0, "1,000,000/5,000,000 steps  54.3k steps/s  1:14 left  return -3.0"),
        (500, 99.6, 0.0, "500/5,000,000 steps  100 steps/s  13:56:36 left  return 0.0"),
        (5_000_100, 10, 1.0, "5,000,100/5,000,000 steps  10 steps/s  0:00 left  return 1.0"),
    ],
)
def test_status_line(step, speed, recent, line):
    assert status_line(step, 5_000_000, speed, recent) == line


@pytest.mark.parametrize("mean", [None, math.nan, 1.25])
@pytest.mark.parametrize("run_dir", [None, "a/b"])
def test_summary_lines(mean, run_dir):
    summary = {
        "status": "finished",
        "backend": "anakin",
        "steps": 1024,
        "updates": 2,
        "seconds": 2.0,
        "steps_per_second": 512.0,
    }
    summary |= {"compile_seconds": 3.0, "return_mean": mean, "return_std": 0.5, "run_dir": run_dir}
    lines = summary_lines(summary)
    assert lines[0].startswith("finished: 1,024 steps, 2 updates in 2.0 s (512 steps/s) after 3.0 s of compiling; ")
    assert lines[0].endswith("return 1.2 +- 0.5 over the last episodes" if mean == 1.25 else "no episode ended")
    assert lines[1:] == (["saved in a/b"] if run_dir else [])


def test_lines_are_few_but_the_last_one_is_shown():
    stream = io.StringIO()
    lines = make_reporter("auto", 100, stream)
    lines.start()
    assert isinstance(lines, Lines)
    for step in (10, 20, 30, 100):
        lines.update(step, 10.0, 1.0)
    lines.close()
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["10/100", "100/100"]


def test_a_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    bar = make_reporter("auto", 100, stream)
    bar.start()
    assert isinstance(bar, Bar)
    bar.message("[compiled]")
    bar.update(150, 10.0, 1.0)
    bar.close()
    shown = stream.getvalue()
    assert "[compiled]" in shown
    assert "100%" in shown


def test_a_bar_shows_the_status_of_its_last_update():
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    bar = Bar(console, 100)
    bar.start()
    bar.update(50, 10.0, 1.5)
    bar.close()
    assert "50/100 steps" in console.file.getvalue()


def test_kinds():
    assert isinstance(make_reporter("none", 1), NullReporter)
    with pytest.raises(ValueError, match="progress = 'loud' is neither auto nor none nor a reporter"):
        make_reporter("loud", 1)
    mine = NullReporter()
    assert make_reporter(mine, 1) is mine
    with pytest.raises(
        ValueError, match=r"progress = NullReporter is a class; give an instance, NullReporter\(\.\.\.\)"
    ):
        make_reporter(NullReporter, 1)
    for nothing in (None, False):
        with pytest.raises(ValueError, match=f"progress = {nothing} is neither .* nor a reporter: it has no start"):
            make_reporter(nothing, 1)


def test_training_outlives_the_reader_of_its_lines():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        lines = Lines(stream, 100)
        for step in (10, 100):
            lines.message("still here")
            lines.update(step, 10.0, 1.0)


def test_a_bar_that_was_never_started_shows_nothing():
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    Bar(console, 100).close()
    assert console.file.getvalue().strip() == ""


def test_one_of_several_processes_passes_on_messages_only():
    stream = io.StringIO()
    reporter = WorkerReporter(Lines(stream, 100), 3)
    reporter.start()
    reporter.update(100, 5.0, 1.0)
    reporter.message("actor 7 failed")
    reporter.close()
    assert stream.getvalue() == "process 3: actor 7 failed\n"
