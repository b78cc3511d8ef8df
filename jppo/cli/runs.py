"""`jppo runs`."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any

import tyro

from jppo.cli.output import print_json
from jppo.config.checks import escape_controls

_COLUMNS = ("run", "seed", "status", "steps", "return", "age")


@dataclasses.dataclass(frozen=True)
class Runs:
    """List the runs in a folder with their settings and returns.

    Shows the settings that differ from the preset of the environment.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]")] = Path("runs")
    """Folder with run directories, also in its subfolders."""
    json: bool = False
    """Print one line of JSON instead of a table."""

    def run(self) -> int:
        from jppo.runs.listing import RunState, find_runs

        found = find_runs(self.folder)
        runs = [one for one in found if isinstance(one, RunState)]
        damaged = [one for one in found if not isinstance(one, RunState)]
        if self.json:
            rows = [state._asdict() | {"path": str(state.path)} for state in runs]
            print_json({"runs": rows, "damaged": list(map(str, damaged))})
            return 0
        folders: dict[tuple[str, str], list[Any]] = {}
        for state in runs:
            folders.setdefault((str(state.path.parent), state.env), []).append(state)
        for (folder, env), states in folders.items():
            _print_lines(f"{env} in {folder}", *_table(states), "")
        if damaged:
            _print_lines("damaged:", *(f"  {error}" for error in damaged), "")
        print(f"{len(runs)} run{'s' * (len(runs) != 1)}" if found else f"there is no run in {self.folder}")
        return 0


def _print_lines(*lines: str) -> None:
    """Prints lines that may contain text of damaged files."""
    print(*map(escape_controls, lines), sep="\n")


def _table(states: list[Any]) -> list[str]:
    """Returns the lines of the table of runs; below each run the settings that differ from the preset."""
    from jppo.runs.groups import format_value
    from jppo.runs.listing import format_age
    from jppo.runs.plots import format_steps

    rows = [
        (
            state.path.name,
            str(state.seed),
            state.status,
            format_steps(state.steps) + ("" if state.status == "finished" else f"/{format_steps(state.total_steps)}"),
            "-" if math.isnan(state.return_mean) else f"{state.return_mean:.1f}",
            format_age(state.modified),
        )
        for state in states
    ]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    lines = [_align(_COLUMNS, widths)]
    for row, state in zip(rows, states, strict=True):
        changes = ", ".join(f"{name} = {format_value(value)}" for name, value in state.changes.items())
        lines += [_align(row, widths), *([f"      {changes}"] if changes else [])]
    return lines


def _align(row: tuple[str, ...], widths: list[int]) -> str:
    """Returns the cells of a row, texts to the left and numbers to the right."""
    cells = (
        cell.ljust(width) if name in ("run", "status") else cell.rjust(width)
        for name, cell, width in zip(_COLUMNS, row, widths, strict=True)
    )
    return "  " + "  ".join(cells).rstrip()
