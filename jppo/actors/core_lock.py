"""Processes that compute on the same core, one after the other.

Where the system shares a core out among them, each has it for a millisecond at a time, and finds its caches full of
another's data (docs/performance.md).
"""

import contextlib
import os
import tempfile
import threading
from typing import Any

try:
    import fcntl
except ImportError:  # it is Unix's
    fcntl: Any = None  # type: ignore[no-redef]

_CORES = 2**12  # more than a machine has


class Turns:
    """A process's turns on one core of its machine. If it dies, the kernel frees its turn."""

    def __init__(self, group: int, core: int) -> None:
        """
        Args:
          group: of processes that share cores, less than 2^48.
          core: the one that this process is to use, from 0.
        """
        self._byte, self._file = group * _CORES + core, _open()
        self._mutex, self._asking, self._wanted = threading.Lock(), False, False
        self._mine = threading.Event()

    def take(self, seconds: float) -> bool:
        """Waits for the turn, but no longer than this; returns whether it has come."""
        if self._file is None:
            return False
        with self._mutex:
            self._wanted = True
            if not self._asking:
                try:
                    threading.Thread(target=self._ask, daemon=True).start()  # a call for a lock knows no time limit
                except RuntimeError:  # too many threads
                    return False
                self._asking = True
        return self._mine.wait(seconds)

    def give(self) -> None:
        """Ends the turn, or the wait for it."""
        with self._mutex:
            self._wanted = False
            if self._mine.is_set():
                self._mine.clear()
                self._lock(fcntl.LOCK_UN)

    def _ask(self) -> None:
        self._lock(fcntl.LOCK_EX)
        with self._mutex:
            self._asking = False
            if self._wanted:
                self._mine.set()
            else:
                self._lock(fcntl.LOCK_UN)

    def _lock(self, what: int) -> None:
        """Locks or unlocks one byte by fcntl, since children that an environment forks would share flock's lock.

        While a thread waits here, a lock that its environments wait for may fail with EDEADLK where who holds it waits
        for its turn: the kernel takes them for one. Only locks by fcntl, and only after a wait in vain.
        """
        with contextlib.suppress(OSError):  # without it, all compute at once
            fcntl.lockf(self._file, what, 1, self._byte)


def _open() -> Any:
    """The one file of all of a user's locks on this machine (a descriptor), or None where there can be none."""
    if fcntl is None:
        return None
    with contextlib.suppress(OSError):
        name = f"jppo-turns-{os.getuid()}-{os.uname().nodename}"  # machines may share the folder
        path = os.path.join(tempfile.gettempdir(), name)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return None
