"""`jppo compare`."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from jppo.cli.runs import wrap
from jppo.config.checks import escape_controls

_RESULTS = ("runs", "return", "95 % interval")
_WIDE = 10_000  # columns


@dataclasses.dataclass(frozen=True)
class Compare:
    """Show which settings differ between runs and whether returns differ.

    Runs that differ only in the seed form one setting.

    Compares each setting with the first one of its environment.
    """

    run_dirs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR [RUN_DIR ...]")]
    """Run directories written by `jppo train`."""
    json: bool = False
    """Print one line of JSON instead of a table."""

    def run(self) -> int:
        from jppo.runs.comparison import compare
        from jppo.runs.files import jsonable

        if not self.run_dirs:
            raise ValueError("no run directory; name at least two, for example: jppo compare runs/CartPole-v1/*")
        result = compare(self.run_dirs)
        if self.json:
            print(json.dumps(jsonable(result.summary())))
            return 0
        for env in dict.fromkeys(score.group.env for score in result.scores):
            _print_table(env, [score for score in result.scores if score.group.env == env])
        for one in result.differences:
            interval = f" (95 % interval {_show(one.interval)})" if one.interval else ""
            print(f"{one.second} - {one.first} = {one.difference:.1f}{interval}: {one.verdict}")
        if len(result.differences) > 1:
            print("The intervals are not corrected for several comparisons.")
        if len(result.scores) == 1:
            found = "There is one run" if len(set(self.run_dirs)) == 1 else "All runs have the same settings"
            print(f"{found}; there is nothing to compare.")
        for note in result.notes:
            print(f"note: {escape_controls(note)}")
        return 0


def _print_table(env: str, scores: list[Any]) -> None:
    """Prints one row per setting of an environment, or a few lines per setting if the terminal is too narrow."""
    from rich.console import Console
    from rich.table import Table

    settings = [score.group.settings for score in scores]
    all_names = dict.fromkeys(name for one in settings for name in one)
    names = [name for name in all_names if len({repr(one.get(name)) for one in settings}) > 1]
    table = Table("", *map(escape_controls, names), *_RESULTS, title=escape_controls(env))
    rows = [_row(score, names) for score in scores]
    for row in rows:
        table.add_row(*row)
    console = Console(file=sys.stdout, markup=False)
    if console.measure(table, options=console.options.update(max_width=_WIDE)).maximum <= console.width:
        console.print(table)
        return
    print(escape_controls(env))
    for name, *cells in rows:
        texts = (f"{column} = {cell}" for column, cell in zip([*names, *_RESULTS], cells, strict=True))
        print(f"  {name}", *wrap(escape_controls(", ".join(texts)), 4), sep="\n")


def _row(score: Any, names: list[str]) -> list[str]:
    """Returns the cells of a setting."""
    from jppo.runs.groups import format_value

    settings = score.group.settings
    return [
        score.name,
        *(format_value(settings[name]) if name in settings else "-" for name in names),
        escape_controls(", ".join(f"{count} {status}" for status, count in score.statuses.items())),
        f"{score.score:.1f}" if len(score.returns) else "-",
        _show(score.interval) if score.interval else "-",
    ]


def _show(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.1f} to {interval[1]:.1f}"
