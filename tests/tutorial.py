"""Runs the code and the commands of the tutorial with few steps, page after page, in one process and one folder.

A block with a title is saved as a file of this name. Lines that do not start with `jppo` are not run.
"""

import re
import sys
from pathlib import Path

from snippets import ROOT, blocks, commands, expand, run

NAMES = ("train", "inspect", "own-environment", "own-network", "many-seeds")


def _prepare(argv: list[str]) -> list[str]:
    """Expands `*` in the current folder, and limits the steps of a command that trains."""
    argv = expand(argv)
    if argv[0] not in ("train", "sweep"):
        return argv
    if "--total-steps" in argv:
        start = argv.index("--total-steps")
        argv = argv[:start] + argv[start + 2 :]
    return [*argv, "--total-steps", "4096"]


def run_all() -> None:
    """Runs all blocks in the current folder. Raises an error if a command fails."""
    from jppo.cli.main import main

    sys.path.insert(0, "")
    names: dict[str, object] = {"__name__": "__main__"}
    for block in (block for name in NAMES for block in blocks(ROOT / f"docs/tutorial/{name}.md")):
        if block.title:
            Path(block.title).write_text(block.text)
        elif block.language == "python":
            run(block._replace(text=re.sub(r"total_steps=[\d_]+", "total_steps=4096", block.text)), names)
        elif block.language == "sh":
            for argv in commands(block):
                assert main(_prepare(argv)) == 0, argv


if __name__ == "__main__":
    run_all()
