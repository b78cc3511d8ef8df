"""Fits text to the width of the terminal."""

import shutil
import textwrap
from collections.abc import Mapping

_MIN_COLUMNS = 40


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
