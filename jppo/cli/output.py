"""Output that several commands share: a line of JSON, and a line of progress."""

import json
import sys
import time
from typing import Any, Self


def print_json(content: Any) -> None:
    """Prints a value as one line of JSON. NaN and infinity become null."""
    from jppo.runs.files import jsonable

    print(json.dumps(jsonable(content)))


class StatusLine:
    """Shows the newest text on one line of the terminal; on other outputs, a line every five seconds."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last, self._width = time.monotonic(), 0

    def show(self, text: str) -> None:
        """Shows a text unless the last one is too recent."""
        if time.monotonic() - self._last < (0.1 if self._is_terminal else 5.0):
            return
        self._last = time.monotonic()
        end = "\r" if self._is_terminal else "\n"
        print(text.ljust(self._width), end=end, file=sys.stderr, flush=True)
        self._width = len(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Erases the line on a terminal."""
        if self._is_terminal:
            print(" " * self._width, end="\r", file=sys.stderr, flush=True)
