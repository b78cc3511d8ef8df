"""Output that cannot fail, and text that fits the width of the terminal."""

import contextlib
import os
import shutil
import textwrap
from collections.abc import Mapping
from typing import Any, TextIO

_MIN_COLUMNS = 40


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


def columns() -> int:
    """Returns the width of the terminal, or 40 if it is narrower."""
    return max(_MIN_COLUMNS, shutil.get_terminal_size().columns)


def wrap(text: str, indent: int = 0, *, start: str | None = None) -> list[str]:
    """Returns lines of text that fit the terminal. Does not break words, for example paths.

    Args:
      indent: number of spaces before each line.
      start: begins the first line in place of the spaces.
    """
    return textwrap.wrap(
        text,
        columns(),
        initial_indent=" " * indent if start is None else start,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def row_lines(name: str, cells: Mapping[str, str]) -> list[str]:
    """Returns a row of a table as lines, for a terminal that is too narrow: its name, then `title = cell`."""
    return [f"  {name}", *wrap(", ".join(f"{title} = {cell}" for title, cell in cells.items() if cell), 4)]
