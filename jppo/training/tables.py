"""Prints tables that fit the terminal."""

import sys
from typing import TextIO

from rich.console import Console
from rich.table import Table

from jppo.config.terminal import row_lines

_WIDE = 10_000  # columns


def print_table(table: Table, stream: TextIO | None = None) -> None:
    """Prints a table, or a few lines per row if the terminal is too narrow."""
    stream = stream or sys.stdout
    console = Console(file=stream, markup=False)
    if console.measure(table, options=console.options.update(max_width=_WIDE)).maximum <= console.width:
        console.print(table)
        return
    first, *others = (str(column.header) for column in table.columns)
    lines = [str(table.title)]
    for name, *cells in zip(*(column.cells for column in table.columns), strict=True):
        start = f"{first} = {str(name).strip()}" if first else str(name)
        lines += row_lines(start, dict(zip(others, map(str, cells), strict=True)))
    print(*lines, sep="\n", file=stream)
