"""The documents name what the code has."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
from lenient import lenient_env

import jppo
from jppo.ppo import losses
from jppo.ppo.losses import ppo_loss

ROOT = Path(__file__).parent.parent


def test_the_metrics_table_defines_exactly_what_a_run_logs():
    config = jppo.PPOConfig(num_envs=4, num_steps=16)
    result = jppo.train(lenient_env("CartPole-v1"), total_steps=64, config=config)
    ray = jppo.train("CartPole-v1", total_steps=64, config=config, backend="ray", num_actors=0)
    assert set(result.metrics) < set(ray.metrics)
    named = re.findall(r"^\| `([a-z_/]+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(ray.metrics)


def test_the_details_table_names_functions_that_exist():
    import importlib

    text = (ROOT / "docs/details.md").read_text()
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("|") and "`" in line.split("|")[2]]
    assert len(rows) > 20
    for row in rows:
        module, *path = re.search(r"`([\w.]+)`", row)[1].split(".")
        found = importlib.import_module(f"jppo.{module}")
        for name in path:
            found = getattr(found, name)


def test_the_extension_guides_loss_trains():
    def with_symmetric_kl(distribution, value, batch, hyperparams, config):
        total, metrics = ppo_loss(distribution, value, batch, hyperparams, config)
        penalty = jax.numpy.mean(jax.numpy.square(distribution.log_prob(batch.action) - batch.log_prob))
        return total + 0.1 * penalty, metrics | {"loss/penalty": penalty}

    config = jppo.PPOConfig(num_envs=4, num_steps=16)
    result = jppo.train(lenient_env("CartPole-v1"), total_steps=256, config=config, loss=with_symmetric_kl)
    assert (result.metrics["loss/penalty"] > 0).all()


def test_every_public_function_of_the_losses_has_a_docstring_and_every_option_a_meaning():
    assert all(function.__doc__ for name, function in vars(losses).items() if callable(function) and name[0] != "_")
    source = (ROOT / "jppo/config/ppo.py").read_text()
    for field in (*dataclasses.fields(jppo.PPOConfig), *dataclasses.fields(jppo.Hyperparams)):
        assert re.search(rf'    {field.name}: .*\n    """', source), field.name


def test_the_readmes_python_runs():
    """With fewer steps; strict modes are the tests' own affair, so in a process without them."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = "\n".join(blocks).replace("500_000", "10_000")
    assert code.count("10_000") == 4
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, timeout=300)
