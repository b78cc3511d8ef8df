"""Runs the Python code of the documentation. The code of README and the tutorial is run by `test_docs`.

The blocks of a page run in order, with one set of names, in an empty folder. A block that cannot run needs the line
`<!-- not run: REASON -->` before it.
"""

import re
import sys

import gymnasium
import numpy as np
import pytest
from gymnax.environments.classic_control.cartpole import CartPole
from lenient import lenient
from snippets import PAGES, ROOT, blocks, run, shrink_runs

SLOW = ("extending.md", "recurrence_and_masks.md", "agents.md", "scaling.md", "schedules.md", "sweeps.md")


def make_env():
    return gymnasium.make("CartPole-v1")


# Names that the reader's code defines: an environment for the device, one for the host, and an observation.
READERS_NAMES = {"MyEnv": CartPole, "make_env": make_env, "obs": np.array([0.0, 0.1, 0.0, -0.1], np.float32)}


def pages():
    """Yields the pages with Python code outside README and the tutorial, the slow ones with a mark."""
    for page in PAGES:
        if blocks(page, "python") and page.parent not in (ROOT, ROOT / "docs/tutorial"):
            marks = [pytest.mark.slow] if page.name in SLOW else []
            yield pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("page", list(pages()))
def test_python_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shrink_runs(monkeypatch)
    before = set(sys.modules)
    names = READERS_NAMES | {"__name__": "__main__"}
    with lenient():
        for block in blocks(page, "python"):
            if not block.reason:
                run(block, names)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_every_block_has_a_known_language():
    languages = {block.language for page in PAGES for block in blocks(page)}
    assert languages == {"python", "sh", "yaml", ""}


def test_blocks_contain_all_fences():
    for page in PAGES:
        fences = re.findall(r"^ *```", page.read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(blocks(page)), page


def test_few_blocks_are_not_run():
    skipped = [block for page in PAGES for block in blocks(page, "python") if block.reason]
    assert len(skipped) < 10
