"""Lists processes through /proc."""

import os
import time
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    pid: int
    parent: int
    session: int
    started: int  # tells processes with the same pid apart
    command: str


def running():
    """Returns all processes except zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat = (path / "stat").read_text().rpartition(")")[2].split()
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # the process has ended
            continue
        if stat[0] not in "ZX":
            found.append(Process(int(path.name), int(stat[1]), int(stat[3]), int(stat[19]), command))
    return found


def of_session(session):
    """Returns a process that was started with start_new_session=True, and all processes of its session."""
    return [process for process in running() if process.session == session]


def descendants(pid=None):
    """Returns the descendants of a process; by default of this process."""
    everything, found = running(), []
    parents = {os.getpid() if pid is None else pid}
    while parents:
        children = [process for process in everything if process.parent in parents]
        found += children
        parents = {child.pid for child in children}
    return found


def left_of(processes, seconds):
    """Waits until the processes have ended, but at most `seconds`. Returns those that still run."""
    end, meant = time.monotonic() + seconds, {(process.pid, process.started) for process in processes}
    while True:
        left = [process for process in running() if (process.pid, process.started) in meant]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)
