"""Runs the code and the commands of the tutorial with few steps, page after page, in one process and one folder.

A block with a title is saved as a file of this name. Lines that do not start with `jppo` are not run.
"""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGES = Path(__file__).parent.parent / "docs" / "tutorial"
NAMES = ("train", "inspect", "own-environment", "own-network", "many-seeds")
_BLOCK = re.compile(r'^```(python|sh)(?: title="([\w.]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A code block: a file, Python code or commands."""

    page: str
    language: str
    title: str
    text: str


def blocks() -> Iterator[Block]:
    """Yields the blocks of all pages in order."""
    for name in NAMES:
        for language, title, text in _BLOCK.findall((PAGES / f"{name}.md").read_text()):
            yield Block(name, language, title, text)


def commands(block: Block) -> list[list[str]]:
    """Returns the arguments of each `jppo` command of a block."""
    return [shlex.split(line, comments=True)[1:] for line in block.text.splitlines() if line.startswith("jppo ")]


def _prepare(argv: list[str]) -> list[str]:
    """Expands `*` in the current folder, and limits the steps of a command that trains."""
    argv = [path for word in argv for path in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
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
    names: dict[str, object] = {}
    for block in blocks():
        if block.title:
            Path(block.title).write_text(block.text)
        elif block.language == "python":
            code = re.sub(r"total_steps=[\d_]+", "total_steps=4096", block.text)
            exec(compile(code, block.page, "exec"), names)
        else:
            for argv in commands(block):
                assert main(_prepare(argv)) == 0, argv


if __name__ == "__main__":
    run_all()
