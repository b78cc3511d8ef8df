"""`jppo compare`."""

import dataclasses

from jppo.cli.arguments import RunDirs
from jppo.cli.output import print_json
from jppo.config.checks import escape_controls
from jppo.config.terminal import wrap
from jppo.errors import Refused


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
        from rich.table import Table

        from jppo.runs.comparison import compare
        from jppo.training.tables import print_table

        if not self.run_dirs:
            raise Refused("no run directory; name at least two, for example: jppo compare runs/CartPole-v1/*")
        result = compare(self.run_dirs)
        if self.json:
            print_json(result.summary())
            return 0
        for env in dict.fromkeys(score.group.env for score in result.scores):
            rows = result.rows(env)
            table = Table(*map(escape_controls, rows[0]), title=escape_controls(env))
            for row in rows:
                table.add_row(*map(escape_controls, row.values()))
            print_table(table)
        texts = [one.describe() for one in result.differences]
        if len(result.differences) > 1:
            texts.append("The intervals are not corrected for several comparisons.")
        if len(result.scores) == 1:
            found = "There is one run" if len(set(self.run_dirs)) == 1 else "All runs have the same settings"
            texts.append(f"{found}; there is nothing to compare.")
        texts += [f"note: {escape_controls(note)}" for note in result.notes]
        print(*(line for text in texts for line in wrap(text)), sep="\n")
        return 0
