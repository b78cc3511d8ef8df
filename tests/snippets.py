"""Finds the code blocks of README and the documentation, and shrinks the runs that their Python code starts."""

import dataclasses
import re
import shlex
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)? *```(?P<language>\w*)(?P<options>[^\n]*)\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A code block of a page."""

    page: Path
    line: int  # of its first line of code, from 1
    language: str
    title: str  # a file name, or ""
    text: str
    reason: str  # why a test does not run it, or ""


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """Returns the code blocks of a page in order, of all languages or of one."""
    text = page.read_text()
    found = [
        Block(
            page=page,
            line=text.count("\n", 0, match.start("text")) + 1,
            language=match["language"],
            title="".join(re.findall(r'title="([^"]+)"', match["options"])),
            text=textwrap.dedent(match["text"]),
            reason=match["reason"] or "",
        )
        for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def commands(block: Block) -> list[list[str]]:
    """Returns the arguments of each `jppo` command, up to a pipe, an ampersand or a redirection."""
    return [arguments(line) for line in lines(block) if line.startswith("jppo ")]


def lines(block: Block) -> list[str]:
    """Returns the lines of a block of shell commands. A backslash continues a line."""
    return block.text.replace("\\\n", " ").splitlines()


def arguments(line: str) -> list[str]:
    """Returns the arguments of a `jppo` command, up to a pipe, an ampersand or a redirection."""
    return shlex.split(re.split(r" [|&>]", line)[0], comments=True)[1:]


def expand(argv: list[str]) -> list[str]:
    """Returns the words of a command, with `*` expanded in the current folder."""
    return [path for word in argv for path in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]


def run(block: Block, names: dict[str, object]) -> None:
    """Runs a block of Python code with the page's line numbers. Writes a block with a title to a file first."""
    if block.title:
        Path(block.title).write_text(block.text)
    exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), names)


def shrink_runs(monkeypatch) -> None:
    """Limits all runs to 4 environments, 16 steps, 4 minibatches and 50 updates, in the calling process.

    The settings of the code are validated before.
    """
    from jppo.ppo import anakin
    from jppo.training import settings

    check_total_steps = settings.check_total_steps
    spread = settings._spread_over_actors
    make_anakin = anakin.make_anakin

    def shrink(config, num_agents=1):
        sizes = {"num_envs": 4 * num_agents, "num_steps": 16, "num_minibatches": 4}
        if config.sequence_length or config.recurrent != "none":
            sizes["sequence_length"] = 16
        return config.replace(**{name: min(getattr(config, name) or size, size) for name, size in sizes.items()})

    def spread_small(settings, config, env, *rest):
        config, ray = spread(settings, config, env, *rest)
        config = shrink(config, env.num_agents)
        if ray.num_actors is not None:
            ray = dataclasses.replace(ray, num_actors=0, envs_per_actor=config.num_envs)
        return config, ray

    def make_small_anakin(env, config, **options):
        return make_anakin(env, shrink(config), **options | {"total_steps": 128})

    monkeypatch.setattr(settings, "check_total_steps", lambda steps: min(check_total_steps(steps), 50 * 4 * 16))
    monkeypatch.setattr(settings, "_spread_over_actors", spread_small)
    monkeypatch.setattr(anakin, "make_anakin", make_small_anakin)
