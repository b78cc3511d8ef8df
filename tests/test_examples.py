"""Every example runs, is short, and does what it claims."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from lenient import lenient

EXAMPLES = Path(__file__).parent.parent / "examples"


def quickstart(result):
    score, actions = result
    assert score > 200
    assert actions.tolist() == [0, 1], "it does not push towards where the pole falls"


def balances(score):
    assert score > 100  # a random policy: 22


def docks(result):
    first, last = result
    assert first < -20
    assert last > -5


def rates_matter(returns):
    assert returns.shape == (3, 2)
    assert len(np.unique(returns[1])) == 2, "seeds do not differ"
    slow, good, _ = returns.mean(axis=1)
    assert slow < 60
    assert good > 120


CLAIMS = {
    "quickstart": ({}, quickstart, "mean return"),
    "custom_network_linen": ({"total_steps": 100_000}, balances, "a residual network of 9219 parameters"),
    "custom_network_nnx": ({"total_steps": 100_000}, balances, "nnx, torso (4, 64)"),
    "custom_network_equinox": ({"total_steps": 100_000}, balances, "equinox, 2 hidden layers"),
    "custom_environment": ({"total_steps": 200_000}, docks, "at first"),
    "vmapped_seeds": ({"total_steps": 60_000, "num_seeds": 2}, rates_matter, "learning rate   mean return   per seed"),
}


def test_every_example_is_tested_and_short():
    files = {path.stem: path.read_text().count("\n") for path in EXAMPLES.glob("*.py")}
    assert set(files) == set(CLAIMS)
    assert max(files.values()) <= 60, files


@pytest.mark.parametrize("name", CLAIMS)
def test_example(name, capsys):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arguments, check, printed = CLAIMS[name]
    with lenient():
        check(module.main(**arguments))
    assert printed in capsys.readouterr().out
