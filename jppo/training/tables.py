"""Prints tables."""

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Column, Table

from jppo.config.checks import escape_controls


def print_table(title: str, rows: Sequence[dict[str, str]], stream: TextIO | None = None) -> None:
    """Prints rows, which map the names of the columns to cells. rich wraps the cells if the terminal is narrow."""
    table = Table(*(Column(escape_controls(name), overflow="fold") for name in rows[0]), title=escape_controls(title))
    for row in rows:
        table.add_row(*map(escape_controls, row.values()))
    Console(file=stream, markup=False).print(table)
