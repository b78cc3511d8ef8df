"""Which processes there are, as Linux tells."""

import os
import time
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    pid: int
    parent: int
    session: int
    started: int  # a process of the same pid that started at another time is another one
    command: str


def running():
    """All that are no zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat = (path / "stat").read_text().rpartition(")")[2].split()
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # gone meanwhile
            continue
        if stat[0] not in "ZX":
            found.append(Process(int(path.name), int(stat[1]), int(stat[3]), int(stat[19]), command))
    return found


def of_session(session):
    """Everything that a process started with start_new_session=True has started, itself included."""
    return [process for process in running() if process.session == session]


def descendants(pid=None):
    """Of a process, this one by default."""
    everything, found = running(), []
    parents = {os.getpid() if pid is None else pid}
    while parents:
        children = [process for process in everything if process.parent in parents]
        found += children
        parents = {child.pid for child in children}
    return found


def left_of(processes, seconds):
    """Which of these are still there after that long; returns as soon as none is."""
    end, meant = time.monotonic() + seconds, {(process.pid, process.started) for process in processes}
    while True:
        left = [process for process in running() if (process.pid, process.started) in meant]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)
