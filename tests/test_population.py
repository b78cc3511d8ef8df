"""Tests that each run of a population equals a run trained alone, for any number of devices and of parallel runs."""

import dataclasses
import functools
import os
import subprocess
import sys
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from checks import SMALL, compiled_programs
from probes import NaNReward, ObsActionReward, Probe

import jppo
from jppo.errors import TrainingDiverged
from jppo.sweeps import population
from jppo.sweeps.grid import make_groups
from jppo.sweeps.log import SweepProgress
from jppo.sweeps.population import compile_group, compile_population, from_host, init_population, shares, to_host
from jppo.training.progress import NullReporter
from jppo.training.settings import RunSettings

CONFIG = SMALL(num_envs=8, num_steps=8, num_epochs=2, num_minibatches=2, normalize_obs=True, normalize_reward=True)
UPDATES = 6
STEPS = UPDATES * CONFIG.batch_size
BASE = jppo.Hyperparams(learning_rate=jppo.schedules.linear(3e-3, 0.0), gamma=0.9)
RATES, SEEDS = [1e-3, 1e-2], [0, 7, 2**32 - 1]


class Short(ObsActionReward):
    """Episodes of three steps, so that some end in every update."""

    length = 3


def swept(env=Short, **options):
    given = {"config": CONFIG, "hyperparams": BASE, "total_steps": STEPS, "num_devices": 1, "seeds": SEEDS} | options
    return jppo.sweep(env(), **({"learning_rate": RATES} | given))


@pytest.fixture(scope="module")
def population_runs():
    return swept()


def assert_same_run(run, other, rtol=2e-4, atol=2e-5):
    assert (run.number, run.seed, run.settings, run.status) == (
        other.number,
        other.seed,
        other.settings,
        other.status,
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol, atol), run.policy_state, other.policy_state)
    assert set(run.metrics) == set(other.metrics)
    for name in set(run.metrics) - {"time/elapsed"}:
        np.testing.assert_allclose(run.metrics[name], other.metrics[name], rtol, atol, err_msg=name)


@pytest.mark.slow
def test_each_run_equals_a_run_trained_alone(population_runs):
    assert [(run.seed, run.settings["learning_rate"]) for run in population_runs.runs] == [
        (seed, rate) for rate in RATES for seed in SEEDS
    ]
    for run in population_runs.runs[::2]:  # every seed, and both learning rates
        alone = jppo.train(Short(), total_steps=STEPS, seed=run.seed, config=CONFIG, hyperparams=run.hyperparams)
        for name in set(run.metrics) - {"time/elapsed"}:
            np.testing.assert_allclose(run.metrics[name], alone.metrics[name], 2e-4, 2e-5, err_msg=name)
        assert set(alone.metrics) - set(run.metrics) == {"time/steps_per_second"}
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 2e-4, 2e-5), run.policy_state, alone.policy.state)
        for name in ("status", "updates", "episodes"):
            assert getattr(run, name) == alone.summary[name]
        assert run.env_steps == alone.summary["steps"]
        np.testing.assert_allclose(
            [run.return_mean, run.return_std], [alone.summary[f"return_{x}"] for x in ("mean", "std")], 1e-5
        )
        obs = np.array([[1.0], [-1.0]], np.float32)
        np.testing.assert_array_equal(run.policy.act(obs), alone.policy.act(obs))


@pytest.mark.slow
def test_runs_with_different_settings_differ(population_runs):
    final = [run.metrics["loss/total"][-1] for run in population_runs.runs]
    assert len(set(final)) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "programs"),
    [
        pytest.param({"num_devices": 2}, 1, marks=pytest.mark.slow),
        ({"num_devices": 4}, 1),
        pytest.param({"max_parallel_runs": 2}, 1, marks=pytest.mark.slow),
        ({"max_parallel_runs": 4}, 1),
    ],
    ids=["2 devices", "4 devices, 2 padding runs", "3 slices", "slices of 3"],
)
def test_result_is_independent_of_devices_and_parallel_runs(population_runs, options, programs):
    with compiled_programs("run_chunk") as names:
        result = swept(**options)
    assert len(names) == programs
    for run, expected in zip(result.runs, population_runs.runs, strict=True):
        assert_same_run(run, expected)


@pytest.mark.slow
def test_runs_are_sharded_over_devices():
    agent = jppo.make_anakin(Short(), CONFIG, total_steps=STEPS)
    four = compile_population(agent, 8, 4)
    state = init_population(four, list(range(8)), [BASE] * 8)
    for leaf in jax.tree.leaves(state):
        assert [shard.data.shape[0] for shard in leaf.addressable_shards] == [2] * 4


@pytest.mark.parametrize(
    ("runs", "devices", "expected"), [(1, 8, (1, 1)), (6, 4, (2, 3)), (5, 4, (2, 3)), (9, 8, (2, 5)), (16, 8, (2, 8))]
)
def test_shares_uses_the_fewest_devices(runs, devices, expected):
    assert shares(runs, devices) == expected


@pytest.mark.slow
def test_program_shrinks_until_it_fits_into_memory(population_runs, monkeypatch):
    monkeypatch.setattr(population, "compile_population", functools.cache(compile_population))
    settings = RunSettings(env=Short(), config=CONFIG, hyperparams=jppo.Hyperparams(), total_steps=STEPS)
    (group,) = make_groups(settings, seeds=[0], values={})
    agent, reporter = group.agent, NullReporter()
    whole, half = (population.compile_population(agent, size, 1).bytes for size in (6, 3))
    assert half < whole < 3 * half
    evaluated = compile_population(agent, 6, 1, run=jppo.RunConfig(eval_every=1))
    stats = evaluated.evaluate.memory_analysis()
    assert evaluated.bytes == whole + stats.temp_size_in_bytes + stats.output_size_in_bytes
    monkeypatch.setattr(population, "bytes_free", lambda devices: whole - 1)
    assert compile_group(group, 6, reporter).size == 3
    monkeypatch.setattr(population, "bytes_free", lambda devices: half - 1)
    assert compile_group(group, 6, reporter).size < 3
    monkeypatch.setattr(population, "bytes_free", lambda devices: half)
    messages = Messages()
    result = swept(progress=lambda _: messages)
    assert any("3 of 6 runs at a time" in text for text in messages.texts)
    for run, expected in zip(result.runs, population_runs.runs, strict=True):
        assert_same_run(run, expected)


@pytest.mark.slow
def test_error_states_the_memory_that_one_run_needs(monkeypatch):
    monkeypatch.setattr(population, "bytes_free", lambda devices: 1000)
    with pytest.raises(
        ValueError, match=r"one run needs .* KiB of device memory and 1000 bytes are free.*num_envs = 8"
    ):
        swept(seeds=[7], learning_rate=[1e-3])


class Messages(NullReporter):
    def __init__(self):
        self.texts, self.updates = [], []

    def message(self, text):
        self.texts.append(text)

    def update(self, step, steps_per_second, recent_return):
        self.updates.append((step, recent_return))


@pytest.mark.slow
def test_diverging_run_does_not_affect_other_runs():
    """In the first population, the learning rate of the middle run makes its parameters infinite in one update."""
    broken = swept(seeds=[7], learning_rate=[1e-3, 1e38, 1e-2])
    whole = swept(seeds=[7], learning_rate=[1e-3, 2e-3, 1e-2])
    assert [run.status for run in broken.runs] == ["finished", "diverged", "finished"]
    for number in (0, 2):
        assert_same_run(broken.run(number), whole.run(number), 0.0, 0.0)
    with pytest.raises(TrainingDiverged) as caught:
        jppo.train(Short(), total_steps=STEPS, seed=7, config=CONFIG, hyperparams=broken.run(1).hyperparams)
    alone, run = caught.value.result, broken.run(1)
    assert run.updates == alone.summary["updates"] == len(run.metrics["update"]) < UPDATES
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 2e-4, 2e-5), run.policy_state, alone.policy.state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.policy_state))
    assert (run.score, broken.status) == (-np.inf, "finished")


@pytest.mark.slow
def test_sweep_ends_when_all_runs_have_diverged():
    """The reward is NaN at step 20, in the third update."""
    result = swept(NaNReward, hyperparams=dataclasses.replace(BASE, gamma=0.5), total_steps=100 * STEPS)
    assert {run.status for run in result.runs} == {"diverged"}
    assert {run.updates for run in result.runs} == {2}
    assert result.status == "diverged"


@pytest.mark.slow
def test_state_moved_to_the_host_and_back_continues_identically():
    agent = jppo.make_anakin(Probe(), CONFIG, total_steps=STEPS)
    program = compile_population(agent, 3)
    finite = jax.device_put(np.ones(3, bool), program.sharding)
    initial = init_population(program, [0, 1], [BASE, BASE])
    state, _, _ = program.chunk(initial, finite, np.int32(2))
    host_state = to_host(state, 2)
    assert all(isinstance(leaf, np.ndarray) and len(leaf) == 2 for leaf in jax.tree.leaves(host_state))
    expected, _, _ = program.chunk(state, finite, np.int32(2))
    restored, _, _ = program.chunk(from_host(program, host_state, 0), finite, np.int32(2))
    jax.tree.map(np.testing.assert_array_equal, to_host(restored, 2), to_host(expected, 2))
    second = to_host(from_host(program, host_state, 1), 3)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, np.stack([y[1]] * 3)), second, host_state)


def test_sweep_progress_sums_steps_and_keeps_the_best_return():
    messages = Messages()
    progress = SweepProgress(messages)
    progress.add(100, 2.0, [Mock(recent_return=3.0), Mock(recent_return=float("nan"))])
    progress.add(50, 1.0, [Mock(recent_return=1.0)])
    assert messages.updates == [(100, 3.0), (150, 3.0)]


@pytest.mark.slow
def test_reporter_shows_progress_of_all_runs():
    messages = Messages()
    swept(progress=lambda _: messages)
    assert messages.updates[-1][0] == 6 * STEPS
    assert messages.texts[0] == "6 runs in 1 program"
    assert "6 runs: compiled in" in messages.texts[1]


MANY_INITS = """
import jax, numpy as np, jppo
from jppo.sweeps.population import compile_population, init_population
agent = jppo.make_anakin("CartPole-v1", jppo.PPOConfig(num_envs=2, num_steps=2, num_minibatches=1), total_steps=8)
population = compile_population(agent, 128, 2)
for _ in range(10):
    jax.block_until_ready(init_population(population, np.arange(128), [jppo.Hyperparams()] * 128).train.update)
"""


@pytest.mark.slow
def test_initial_weights_of_many_runs_do_not_deadlock():
    """Batched QR decompositions of jaxlib deadlock in the second or third call."""
    flags = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"}
    subprocess.run([sys.executable, "-c", MANY_INITS], env=os.environ | flags, check=True, timeout=120)
