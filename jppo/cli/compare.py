"""`jppo compare`."""

import dataclasses
from typing import Any

from jppo.cli.arguments import RunDirs
from jppo.cli.output import print_json
from jppo.config.checks import escape_controls
from jppo.config.terminal import wrap

_RESULTS = ("runs", "return", "95 % interval")


@dataclasses.dataclass(frozen=True)
class Compare:
    """Show which settings differ between runs and whether returns differ.

    Runs that differ only in the seed form one setting.

    Compares each setting with the first one of its environment.
    """

    run_dirs: RunDirs
    """Run directories written by `jppo train`."""
    json: bool = False
    """Print one line of JSON instead of a table."""

    def run(self) -> int:
        from jppo.runs.comparison import compare

        if not self.run_dirs:
            raise ValueError("no run directory; name at least two, for example: jppo compare runs/CartPole-v1/*")
        result = compare(self.run_dirs)
        if self.json:
            print_json(result.summary())
            return 0
        for env in dict.fromkeys(score.group.env for score in result.scores):
            _print_table(env, [score for score in result.scores if score.group.env == env])
        texts = []
        for one in result.differences:
            interval = f" (95 % interval {_show(one.interval)})" if one.interval else ""
            texts.append(f"{one.second} - {one.first} = {one.difference:.1f}{interval}: {one.verdict}")
        if len(result.differences) > 1:
            texts.append("The intervals are not corrected for several comparisons.")
        if len(result.scores) == 1:
            found = "There is one run" if len(set(self.run_dirs)) == 1 else "All runs have the same settings"
            texts.append(f"{found}; there is nothing to compare.")
        texts += [f"note: {escape_controls(note)}" for note in result.notes]
        print(*(line for text in texts for line in wrap(text)), sep="\n")
        return 0


def _print_table(env: str, scores: list[Any]) -> None:
    """Prints one row per setting of an environment."""
    from rich.table import Table

    from jppo.training.tables import print_table

    settings = [score.group.settings for score in scores]
    all_names = dict.fromkeys(name for one in settings for name in one)
    names = [name for name in all_names if len({repr(one.get(name)) for one in settings}) > 1]
    table = Table("", *map(escape_controls, names), *_RESULTS, title=escape_controls(env))
    for score in scores:
        table.add_row(*map(escape_controls, _row(score, names)))
    print_table(table)


def _row(score: Any, names: list[str]) -> list[str]:
    """Returns the cells of a setting."""
    from jppo.runs.groups import format_value

    settings = score.group.settings
    return [
        score.name,
        *(format_value(settings[name]) if name in settings else "-" for name in names),
        ", ".join(f"{count} {status}" for status, count in score.statuses.items()),
        f"{score.score:.1f}" if len(score.returns) else "-",
        _show(score.interval) if score.interval else "-",
    ]


def _show(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.1f} to {interval[1]:.1f}"
