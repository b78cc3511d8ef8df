"""Tests that the code and the paths through it do not grow; see code_sizes.toml."""

import json
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import pytest
from lenient import lenient_env

import jppo

ROOT = Path(__file__).parents[1]
PACKAGE = Path(jppo.__file__).parent
SIZES = tomllib.loads((ROOT / "tests/code_sizes.toml").read_text())
PATHS = {
    "jppo": "jppo/**/*.py",
    "algorithm": "jppo/ppo/*.py",
    "kernels": "jppo/kernels/*.py",
    "networks": "jppo/networks/*.py",
    "checks": "jppo/ppo/checks/*.py",
    "tests": "tests/**/*.py",
    "benchmarks": "benchmarks/**/*.py",
    "docs": "docs/**/*.md",
}


def sizes_of(pattern):
    """Returns the number of lines and of files; an empty file does not count."""
    counts = [len(path.read_text().splitlines()) for path in ROOT.glob(pattern)]
    return {"lines": sum(counts), "files": sum(count > 1 for count in counts)}


class Entered:
    """Records the functions of jppo that are called, in all threads, while it is active."""

    def __enter__(self) -> "Entered":
        self._codes: set[CodeType] = set()
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _hook(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            self._codes.add(frame.f_code)

    def sizes(self) -> dict[str, int]:
        """Returns the numbers of files and of lines of the functions; bodies of modules and classes do not count."""
        lines = set()
        for code in self._codes:
            if code.co_name != "<module>" and code.co_flags & 2:  # CO_NEWLOCALS: a function
                numbers = [line for _, _, line in code.co_lines() if line]
                lines |= {(code.co_filename, line) for line in range(code.co_firstlineno, max(numbers) + 1)}
        return {"lines": len(lines), "files": len({file for file, _ in lines})}


def compare(name, sizes):
    """Compares sizes with the table. Returns the problems."""
    names = {f"{name}_{part}": size for part, size in sizes.items() if f"{name}_{part}" in SIZES}
    return [f"{name} = {size}; the table allows {SIZES[name]}" for name, size in names.items() if size > SIZES[name]]


@pytest.mark.parametrize("name", PATHS)
def test_code_does_not_grow(name):
    assert not compare(name, sizes_of(PATHS[name]))


def test_an_update_enters_few_functions():
    jax.clear_caches()
    agent = jppo.make_anakin(lenient_env("CartPole-v1"), jppo.PPOConfig(num_envs=8, num_steps=8))
    state = jax.eval_shape(agent.init, jax.random.key(0))
    _, rollout, stats = jax.eval_shape(lambda state: collect(agent, state), state)
    with Entered() as entered:
        jax.eval_shape(agent.learner.update, state.train, rollout, stats)
    assert not compare("update", entered.sizes())


def collect(agent, state):
    from jppo.ppo.anakin import collect_rollout

    return collect_rollout(agent.env, agent.policy, agent.config, state.train, state.collect)


@pytest.mark.slow
def test_a_training_enters_few_functions(tmp_path):
    command = [sys.executable, __file__, "train", "CartPole-v1", "--total-steps", "4096", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not compare("train", json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    from jppo.cli.main import main

    with Entered() as functions:
        main(sys.argv[1:])
    imports = sum(name.split(".")[0] == "jppo" for name in sys.modules)
    print(json.dumps(functions.sizes() | {"imports": imports}))
