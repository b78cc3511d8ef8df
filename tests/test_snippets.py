"""Runs the Python code and the commands of the documentation. `test_docs` runs README's code.

The blocks of a page run in order, with one set of names, in an empty folder. `shrink_runs` limits all runs, and sweeps
of the command line have two seeds. A block that cannot run needs the line `<!-- not run: REASON -->` before it. Lines
that install packages with pip are not run.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import gymnasium
import numpy as np
import pytest
from gymnax.environments.classic_control.cartpole import CartPole
from lenient import lenient
from snippets import PAGES, ROOT, arguments, blocks, expand, lines, run, shrink_runs

import jppo
from jppo.cli.main import main

TUTORIAL = [
    ROOT / f"docs/tutorial/{name}.md" for name in ("train", "inspect", "own-environment", "own-network", "many-seeds")
]
SLOW = ("extending.md", "recurrence_and_masks.md", "agents.md", "scaling.md", "schedules.md", "sweeps.md")


def make_env():
    return gymnasium.make("CartPole-v1")


class Net(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return jppo.Categorical(nn.Dense(2)(obs)), nn.Dense(1)(obs)[:, 0]


# Names that the reader's code defines: environments for the device and the host, a network, and an observation.
READERS_NAMES = {
    "MyEnv": CartPole,
    "Net": Net,
    "make_env": make_env,
    "obs": np.array([0.0, 0.1, 0.0, -0.1], np.float32),
}
READERS_FILES = {
    "my_package.py": "import gymnasium\n\ndef make_env():\n    return gymnasium.make('CartPole-v1')\n",
    "train.py": "import jppo\n\njppo.train('CartPole-v1', num_envs=4, num_steps=16, total_steps=64)\n",
}
STAND_INS = {  # environments from packages that may be missing, and their replacements in commands
    "HalfCheetah-v5": "Pendulum-v1 --backend ray",
    "craftax:Craftax-Classic-Symbolic-v1": "CartPole-v1",
    "envpool:Pong-v5": "CartPole-v1 --backend ray",
    "jaxmarl:HeuristicEnemySMAX": "CartPole-v1",
    "pettingzoo:mpe/simple_spread_v3": "CartPole-v1 --backend ray",
}


def pages():
    """Yields the pages with Python code outside README and the tutorial, the slow ones with a mark."""
    for page in PAGES:
        if blocks(page, "python") and page.parent not in (ROOT, ROOT / "docs/tutorial"):
            marks = [pytest.mark.slow] if page.name in SLOW else []
            yield pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Runs a test in an empty folder with small runs. Afterwards, forgets the modules that Python imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shrink_runs(monkeypatch)
    before = set(sys.modules)
    with lenient():
        yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("page", list(pages()))
def test_python_code_runs(page, folder):
    names = READERS_NAMES | {"__name__": "__main__"}
    for block in blocks(page, "python"):
        if not block.reason:
            run(block, names)


@pytest.mark.slow
def test_tutorial_runs(folder):
    """Runs the code and the `jppo` commands of all pages in order, in one folder."""
    names = {"__name__": "__main__"}
    for block in (block for page in TUTORIAL for block in blocks(page)):
        if block.title:
            Path(block.title).write_text(block.text)
        elif block.language == "python":
            run(block, names)
        elif block.language == "sh":
            for line in lines(block):
                if line.startswith("jppo "):
                    run_line(line)


def pages_with_commands():
    """Yields the pages with commands that can run, except the tutorial."""
    for page in PAGES:
        if page.parent != ROOT / "docs/tutorial" and not all(block.reason for block in blocks(page, "sh")):
            yield pytest.param(page, id=str(page.relative_to(ROOT)))


@pytest.mark.slow
@pytest.mark.parametrize("page", list(pages_with_commands()))
def test_commands_run(page, folder, monkeypatch):
    """Runs `jppo` in this process, where `shrink_runs` limits the runs, and other commands in a shell."""
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    files = {block.title: block.text for block in blocks(page, "python") if block.title}
    for name, text in (READERS_FILES | files).items():
        Path(name).write_text(text)
    for block in (block for block in blocks(page, "sh") if not block.reason):
        for line in lines(block):
            run_line(line)


def run_line(line):
    """Runs a line of a block of commands, with few seeds and steps, short measurements and reports without videos."""
    for env, stand_in in STAND_INS.items():
        line = line.replace(env, stand_in)
    line = line.replace("--network cnn --compute-dtype bfloat16", "--compute-dtype bfloat16")  # slow on a CPU
    if "--network cnn" not in line:
        line = line.replace("Breakout-MinAtar", "CartPole-v1")  # compiles three times faster
    line = re.sub(r"--seeds \d+", "--seeds 2", line)
    line = re.sub(r"--steps \d+", "--steps 100", line).replace(" --video", "")
    if line.startswith("jppo ") and " > " not in line:
        argv = expand(arguments(line)) + (["--seconds", "0.1"] if line.startswith("jppo bench ") else [])
        assert main(argv) in ((0, 1) if argv[0] == "doctor" else (0,)), line  # a machine may have a problem
    elif not line.startswith("pip install "):
        subprocess.run(["bash", "-c", line], check=True, timeout=120)


def test_stand_ins_and_reasons_belong_to_a_block():
    texts = [block.text for page in PAGES for block in blocks(page, "sh")]
    assert [env for env in STAND_INS if not any(env in text for text in texts)] == []
    marks = sum(page.read_text().count("<!-- not run: ") for page in PAGES)
    assert marks == sum(bool(block.reason) for page in PAGES for block in blocks(page))


def test_every_block_has_a_known_language():
    languages = {block.language for page in PAGES for block in blocks(page)}
    assert languages == {"python", "sh", "yaml", ""}


def test_blocks_contain_all_fences():
    for page in PAGES:
        fences = re.findall(r"^ *```", page.read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(blocks(page)), page


def test_few_blocks_are_not_run():
    skipped = [block.language for page in PAGES for block in blocks(page) if block.reason]
    assert skipped.count("python") < 8
    assert skipped.count("sh") < 10
