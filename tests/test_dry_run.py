"""Tests `jppo.bench(dry_run=True)`: it has the memory of the compiled program, and refuses a run that does not fit."""

import dataclasses
import json

import jax
import pytest
from checks import SMALL, compiled_programs
from lenient import lenient
from probes import Counting

import jppo
from jppo.cli.main import main
from jppo.config.presets import PRESETS
from jppo.devices.memory import bytes_free, bytes_needed, show_bytes
from jppo.training.device_loop import compile_chunk

CONFIG = SMALL(num_envs=8, num_steps=16, num_minibatches=2)


def plan(free, config=CONFIG, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jppo.benchmark.bench.bytes_free", lambda devices: free)
        return jppo.bench(Counting(), config=config, dry_run=True, **{"num_devices": 1} | options)


@pytest.fixture(scope="module")
def planned():
    return plan(2_000_000)


def needs(num_envs, num_devices=1):
    agent = jppo.make_anakin(Counting(), dataclasses.replace(CONFIG, num_envs=num_envs), num_devices=num_devices)
    return bytes_needed(compile_chunk(agent, PRESETS["default"].hyperparams))


@pytest.mark.slow
def test_memory_by_purpose_adds_up_to_the_peak(planned):
    agent = jppo.make_anakin(Counting(), CONFIG)
    state = jax.jit(agent.init)(jax.random.key(0), jppo.Hyperparams())
    params = jax.tree.leaves(state.train.policy_state.params)
    num_parameters = 2 * (3 * 8 + 8) + 2 * 8 + 2 + 8 + 1
    assert planned.memory["parameters"] == 4 * sum(leaf.size for leaf in params) == 4 * num_parameters
    assert planned.memory["optimizer"] == 2 * planned.memory["parameters"] + 4  # two moments and a counter
    assert planned.memory["environments"] == sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.collect)
    )
    assert sum(planned.memory.values()) == needs(8)
    assert (planned.memory_free, planned.num_devices, planned.env) == (2_000_000, 1, "Counting")
    assert planned.compile_seconds > 0.0


@pytest.mark.slow
def test_the_largest_num_envs_fits_and_twice_as_many_do_not(planned):
    assert planned.largest_num_envs % 8 == 0
    assert needs(planned.largest_num_envs) <= 2_000_000
    assert needs(2 * planned.largest_num_envs) > 2_000_000


@pytest.mark.slow
def test_the_result_has_a_short_repr_and_a_summary(planned):
    assert repr(planned).startswith("BenchResult(env='Counting', memory_needed='")
    assert planned.summary()["memory"] == planned.memory
    assert planned.summary()["alone"] == {}


@pytest.mark.slow
def test_command_line(capsys):
    words = ["bench", "CartPole-v1", "--dry-run", "--num-envs", "8", "--num-steps", "16", "--num-devices", "1"]
    with lenient():
        assert main(words) == 0
    out = capsys.readouterr().out
    for text in ("CartPole-v1, 8 x 16", "  parameters: ", "  optimizer: ", "compile time: ", "largest num_envs: "):
        assert text in out, text
    with lenient():
        assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["num_envs"], result["run"]["steps_per_second"]) == (8, None)


@pytest.mark.slow
def test_devices_share_the_environments(planned):
    parts = plan(2_000_000, num_devices=4).memory
    assert parts["environments"] == planned.memory["environments"] // 4
    assert parts["parameters"] == planned.memory["parameters"]


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_an_error_with_a_remedy():
    free = needs(4)
    message = r"num_envs = 8 and num_steps = 16 need .* KiB .* and .* are free; the largest num_envs that fits is 4"
    with compiled_programs("run_chunk") as names, pytest.raises(ValueError, match=message):
        plan(free)
    assert len(names) <= 6
    with pytest.raises(ValueError, match="lower num_steps as well"):
        plan(10)


def test_devices_share_the_free_memory():
    assert 1 << 20 < bytes_free(8) < bytes_free(1) < 1 << 45


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0 bytes"), (1000, "1000 bytes"), (2048, "2 KiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5,120 GiB")],
)
def test_bytes_have_a_readable_unit(number, shown):
    assert show_bytes(number) == shown
