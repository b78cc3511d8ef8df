"""Tests that the package contains its types, and that its version has one source."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jppo

ROOT = Path(__file__).parent.parent


def test_package_contains_its_types_and_its_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["jppo"] == ["py.typed"]
    assert (ROOT / "jppo/py.typed").exists()
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "jppo.__version__"}


def test_typed_program_uses_every_public_name():
    tree = ast.parse((ROOT / "tests/typed_program.py").read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jppo"
    }
    assert used == set(jppo.__all__)


@pytest.mark.slow
def test_program_of_a_user_passes_a_strict_type_checker(tmp_path):
    program = tmp_path / "program.py"  # outside the project, whose settings of mypy are less strict
    wrong = """
jppo.train('CartPole-v1', total_steps='many')
train_policy().policy.action
jppo.train('CartPole-v1', num_envs='many')
jppo.train('CartPole-v1', learning_rate='fast', max_checkpoints=1.5, recurrent='rnn')
jppo.train('CartPole-v1', num_env=4)
jppo.sweep('CartPole-v1', gamma=[0.9, 'x'], run_dir='x')
jppo.bench('CartPole-v1', eval_every=4)
jppo.tune.trainable('CartPole-v1', num_actors='two')
"""
    program.write_text((ROOT / "tests/typed_program.py").read_text() + wrong)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "--cache-dir",
        str(tmp_path / "cache"),
        str(program),
    ]
    env = os.environ | {"MYPYPATH": str(ROOT)}
    checked = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=300)
    errors = re.findall(r"error: .* \[([\w-]+)\]$", checked.stdout, re.MULTILINE)
    expected = [
        "arg-type",
        "attr-defined",
        "arg-type",
        *["arg-type"] * 3,
        "call-arg",
        "call-arg",
        "list-item",
        "call-arg",
    ]
    assert errors == [*expected, "arg-type"], checked.stdout
