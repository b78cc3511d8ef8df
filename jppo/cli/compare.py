"""`jppo compare`."""

import dataclasses

from jppo.cli.arguments import RunDirs
from jppo.cli.output import print_json
from jppo.config.checks import escape_controls
from jppo.errors import Refused


@dataclasses.dataclass(frozen=True)
class Compare:
    """Show which settings differ between runs, and their returns.

    Runs that differ only in the seed form one setting.
    """

    run_dirs: RunDirs
    """Run directories written by `jppo train`."""
    json: bool = False
    """Print one line of JSON instead of a table."""

    def run(self) -> int:
        from jppo.runs.comparison import compare
        from jppo.training.tables import print_table

        if not self.run_dirs:
            raise Refused("no run directory; name at least two, for example: jppo compare runs/CartPole-v1/*")
        result = compare(self.run_dirs)
        if self.json:
            print_json(result.summary())
            return 0
        for env in dict.fromkeys(score.group.env for score in result.scores):
            print_table(env, result.rows(env))
        texts = []
        if len(result.scores) == 1:
            found = "There is one run" if len(set(self.run_dirs)) == 1 else "All runs have the same settings"
            texts.append(f"{found}; there is nothing to compare.")
        texts += [f"note: {escape_controls(note)}" for note in result.notes]
        print("".join(f"{text}\n" for text in texts), end="")
        return 0
