"""Tests the reporters."""

import io
import math
import os
import re

import pytest
from rich.console import Console

from jppo.config.terminal import OutputStream
from jppo.runs.plots import format_steps
from jppo.training.progress import (
    BarReporter,
    LineReporter,
    NullReporter,
    Reporter,
    Sparkline,
    WorkerReporter,
    format_status,
    make_reporter,
    short_path,
    summary_lines,
)


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
def test_format_status(step, speed, recent, line):
    assert format_status(step, 5_000_000, speed, recent) == line


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (999.6, "1k"), (1_234, "1.23k"), (999_499, "999k"), (999_600, "1M"), (10**9, "1G")],
)
def test_format_steps(number, text):
    assert format_steps(number) == text


@pytest.mark.parametrize("mean", [None, math.nan, 1.25])
@pytest.mark.parametrize("run_dir", [None, "a/b"])
def test_summary_lines(mean, run_dir):
    summary = {
        "status": "finished",
        "backend": "device",
        "steps": 1024,
        "updates": 2,
        "seconds": 2.0,
        "steps_per_second": 512.0,
    }
    summary |= {"compile_seconds": 3.0, "return_mean": mean, "return_std": 0.5, "run_dir": run_dir}
    lines = summary_lines(summary)
    assert lines[0] == "finished: 1,024 steps, 2 updates in 2.0 s (512 steps/s)"
    returns = "return 1.2 +- 0.5 over the last episodes" if mean == 1.25 else "no episode ended"
    assert lines[1] == f"{returns}; 3.0 s of compiling"
    assert lines[2:] == (["saved in a/b"] if run_dir else [])
    lines = summary_lines(summary | {"failed_writes": ["policy"]})
    assert lines[2:] == (["saved in a/b without policy"] if run_dir else [])


def test_a_path_below_the_working_directory_is_shown_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(short_path(tmp_path / "runs" / "x")) == "runs/x"
    assert str(short_path("/elsewhere/x")) == "/elsewhere/x"


def test_line_reporter_prints_first_and_last_status():
    stream = io.StringIO()
    lines = make_reporter("auto", 100, stream)
    lines.start()
    assert isinstance(lines, LineReporter)
    for step in (10, 20, 30, 100):
        lines.update(step, 10.0, 1.0)
    lines.close()
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["10/100", "100/100"]


def test_terminal_gets_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    bar = make_reporter("auto", 100, stream)
    bar.start()
    assert isinstance(bar, BarReporter)
    bar.message("[compiled]")
    bar.update(150, 10.0, 1.0)
    bar.close()
    shown = stream.getvalue()
    assert "[compiled]" in shown
    assert "100%" in shown


def test_bar_shows_last_status():
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    bar = BarReporter(console, 100)
    bar.start()
    bar.update(50, 10.0, 1.5)
    bar.close()
    assert "50/100  10/s  0:05 left  return 1.5" in console.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80])
def test_bar_crops_a_long_line_on_an_ascii_terminal(width):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    bar = BarReporter(Console(file=OutputStream(file), width=width, force_terminal=True, color_system=None), 5_120_000)
    bar.start()
    bar.update(1_530_000, 54_321.0, -1e60)
    bar.close()
    file.flush()
    assert "1.53M/5.12M" in file.buffer.getvalue().decode("ascii")


@pytest.mark.parametrize(("encoding", "sparkline"), [("utf-8", "▁▂▃▄▅▆▇█"), ("latin-1", "")])
def test_bar_shows_everything_in_80_columns(encoding, sparkline):
    """A terminal without Unicode gets no character that it cannot show: such an error would silence all output."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    bar = BarReporter(Console(file=OutputStream(file), width=80, force_terminal=True, color_system=None), 5_120_000)
    bar.start()
    for value in range(8):
        bar.update(1_530_000, 54_321.0, 1_000.0 * value - 8_000.0)
    bar.close()
    file.seek(0)
    line = [text for text in re.split(r"[\r\n]|\x1b\[\??[0-9]+[A-Za-z]", file.read()) if text.strip()][-1]
    assert "30% 1.53M/5.12M  54.3k/s  1:06 left  return -1000.0" in line
    assert line.rstrip().endswith(sparkline or "return -1000.0")
    assert len(line) <= 80


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (80, "30% 1.53M/5.12M  54.3k/s  1:06 left  return -1000.0  eval -998.0 ▁▂▃▄▅▆▇█"),
        (40, "1.53M/5.12M  return -1000.0  1:06 left"),
    ],
)
def test_bar_with_an_evaluation_leaves_two_columns_for_the_echo_of_ctrl_c(width, shown):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    bar = BarReporter(console, 5_120_000)
    bar.start()
    bar.evaluated(1_000_000, -998.0)
    for value in range(8):
        bar.update(1_530_000, 54_321.0, 100.0 * value - 1_700.0)
    bar.close()
    assert shown in console.file.getvalue()
    drawn = re.split(r"[\r\n]|\x1b\[\??[0-9]*[A-Za-z]", console.file.getvalue())
    assert max(map(len, drawn)) == width - 2


def test_sparkline_shows_the_whole_course_of_many_values():
    line = Sparkline()
    assert str(line) == ""
    for value in (math.nan, 0.0, 7.0, 3.0):
        line.add(value)
    assert str(line) == "▁█▄"
    line = Sparkline()
    for value in range(10_000):
        line.add(float(value))
    assert list(str(line)) == sorted(str(line))
    assert (len(str(line)), str(line)[0], str(line)[-1]) == (8, "▁", "█")
    assert len(line._values) < 16
    line = Sparkline()
    line.add(1.0)
    line.add(1.0)
    assert str(line) == "▁▁"


@pytest.mark.parametrize(
    ("width", "shown"), [(70, "500k/1M  10k/s  0:50 left"), (40, "500k/1M  return 1.5  0:50 left")]
)
def test_narrow_terminal_shows_numbers_instead_of_bar(width, shown):
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    bar = BarReporter(console, 1_000_000)
    bar.start()
    bar.update(500_000, 10000.0, 1.5)
    bar.close()
    assert shown in console.file.getvalue()


def test_make_reporter_accepts_names_and_reporters():
    assert isinstance(make_reporter("none", 1), NullReporter)
    own = NullReporter()
    assert make_reporter(own, 1) is own
    assert Reporter().update(1, 1.0, 1.0) is None


@pytest.mark.parametrize(
    ("progress", "message"),
    [
        ("loud", "progress = 'loud' must be 'auto', 'none' or a jppo.Reporter"),
        (NullReporter, r"progress = NullReporter is a class; pass an instance, NullReporter\(\.\.\.\)"),
        (None, "progress = None must be"),
        (False, "progress = False must be"),
    ],
)
def test_make_reporter_refuses_other_values(progress, message):
    with pytest.raises(ValueError, match=message):
        make_reporter(progress, 1)


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


def closed_stream():
    stream = io.StringIO()
    stream.close()
    return stream


def full_disk():
    return open("/dev/full", "w")


@pytest.mark.parametrize("make_stream", [closed_pipe, closed_stream, full_disk, lambda: None])
def test_output_that_cannot_be_written_does_not_stop_training(make_stream):
    stream = make_stream()
    display = OutputStream(stream)
    for reporter in (LineReporter(display, 100), BarReporter(Console(file=display, force_terminal=True), 100)):
        reporter.start()
        for step in (10, 100):
            reporter.message("still here")
            reporter.update(step, 10.0, 1.0)
        reporter.close()
    if stream is not None:
        stream.close()  # writes what is left in the buffer


def test_output_escapes_characters_that_its_encoding_lacks():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print("ä\udc80", file=OutputStream(stream), flush=True)
    assert stream.buffer.getvalue() == b"\\xe4\\udc80\n"


def test_bar_prints_nothing_before_start():
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    BarReporter(console, 100).close()
    assert console.file.getvalue().strip() == ""


def test_worker_reporter_passes_on_messages_only():
    stream = io.StringIO()
    reporter = WorkerReporter(LineReporter(stream, 100), 3)
    reporter.start()
    reporter.update(100, 5.0, 1.0)
    reporter.message("actor 7 failed")
    reporter.close()
    assert stream.getvalue() == "process 3: actor 7 failed\n"
