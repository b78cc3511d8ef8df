"""Output that cannot fail."""

import contextlib
import os
from typing import Any, TextIO


class OutputStream:
    """Passes text to a stream. If a write fails (full disk, closed pipe), it stores the error and drops the text."""

    def __init__(self, stream: TextIO | None) -> None:
        """
        Args:
          stream: None if the process has no such stream, for example after `jppo train ... >&-`.
        """
        self._stream = stream
        self.error: OSError | ValueError | None = None

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._call("write", text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        self._call("flush")

    def _call(self, method: str, *args: str) -> None:
        if self._stream is None or self.error is not None:
            return
        try:
            getattr(self._stream, method)(*args)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self.error = error
            with contextlib.suppress(OSError, ValueError):  # otherwise, Python would fail to write its buffer at exit
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
