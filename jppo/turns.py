"""Processes that compute on the same core, one after the other.

Where the system shares a core out among them, each has it for a millisecond at a time, and finds its caches full of
another's data (docs/performance.md).
"""

import contextlib
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # it is Unix's
    fcntl: Any = None  # type: ignore[no-redef]


class Turns:
    """A process's turns on one core of its machine. Of one that dies the kernel takes the turn back."""

    def __init__(self, group: str, core: int) -> None:
        """
        Args:
          group: the name of those that share cores.
          core: the one that this process is to use, from 0.
        """
        self._group, self._core = group, core
        self._file: Any = None
        self._given: threading.Event | None = None  # set once the turn asked for has come

    def take(self, seconds: float) -> bool:
        """Waits for the turn, but no longer than this. Where that is not enough, the next call goes on waiting."""
        if self._file is None and not self._open():
            return True
        if self._given is None:
            self._given = threading.Event()
            threading.Thread(target=self._ask, args=(self._given,), daemon=True).start()
        return self._given.wait(seconds)

    def give(self) -> None:
        """Ends the turn, where there is one."""
        if self._given is not None:
            self._given = None
            self._lock(fcntl.LOCK_UN)

    def close(self) -> None:
        """Leaves no file behind."""
        self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return Path(tempfile.gettempdir()) / f"jppo-turns-{self._group}"

    def _open(self) -> bool:
        """Whether there are locks. Without, all compute at once."""
        if fcntl is not None:
            with contextlib.suppress(OSError):
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        return self._file is not None

    def _ask(self, given: threading.Event) -> None:
        self._lock(fcntl.LOCK_EX)
        given.set()

    def _lock(self, what: int) -> None:
        """Of a byte: a lock of the whole file would be shared by children that an environment forks."""
        with contextlib.suppress(OSError):
            fcntl.lockf(self._file, what, 1, self._core)
