"""Lanes of one program: each is the run it would be alone, on however many devices and in however many pieces."""

import dataclasses
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from checks import SMALL, compiled_programs
from probes import NaNReward, ObsActionReward, Probe

import jppo
from jppo.errors import TrainingDiverged
from jppo.sweeps import population
from jppo.sweeps import sweep as sweeps
from jppo.sweeps.population import Total, begin, compile_population, fitting_population, park, resume, shares
from jppo.training.progress import NullReporter

CONFIG = SMALL(num_envs=8, num_steps=8, num_epochs=2, num_minibatches=2, normalize_obs=True, normalize_reward=True)
UPDATES = 6
STEPS = UPDATES * CONFIG.batch_size
BASE = jppo.Hyperparams(learning_rate=3e-3, gamma=0.9)
RATES, SEEDS = [1e-3, 1e-2], [0, 7, 2**32 - 1]


class Short(ObsActionReward):
    """Episodes of three steps, so that some end in every update."""

    length = 3


def swept(env=Short, **options):
    given = {"config": CONFIG, "hyperparams": BASE, "total_steps": STEPS, "num_devices": 1, "seeds": SEEDS} | options
    return jppo.sweep(env(), **({"learning_rate": RATES} | given))


@pytest.fixture(scope="module")
def raise_on_all_processes():
    return swept()


def assert_same_settings(lane, other, rtol=2e-4, atol=2e-5):
    assert (lane.number, lane.seed, lane.settings, lane.status) == (
        other.number,
        other.seed,
        other.settings,
        other.status,
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol, atol), lane.policy_state, other.policy_state)
    assert set(lane.metrics) == set(other.metrics)
    for name in set(lane.metrics) - {"time/elapsed"}:
        np.testing.assert_allclose(lane.metrics[name], other.metrics[name], rtol, atol, err_msg=name)


def test_a_lane_is_the_run_it_would_be_alone(raise_on_all_processes):
    assert [(lane.seed, lane.settings["learning_rate"]) for lane in raise_on_all_processes.lanes] == [
        (seed, rate) for rate in RATES for seed in SEEDS
    ]
    for lane in raise_on_all_processes.lanes:
        alone = jppo.train(Short(), total_steps=STEPS, seed=lane.seed, config=CONFIG, hyperparams=lane.hyperparams)
        for name in set(lane.metrics) - {"time/elapsed"}:
            np.testing.assert_allclose(lane.metrics[name], alone.metrics[name], 2e-4, 2e-5, err_msg=name)
        assert set(alone.metrics) - set(lane.metrics) == {"time/steps_per_second"}
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 2e-4, 2e-5), lane.policy_state, alone.policy.state)
        for name in ("status", "updates", "steps", "episodes"):
            assert getattr(lane, name) == alone.summary[name]
        np.testing.assert_allclose(
            [lane.return_mean, lane.return_std], [alone.summary[f"return_{x}"] for x in ("mean", "std")], 1e-5
        )
        obs = np.array([[1.0], [-1.0]], np.float32)
        np.testing.assert_array_equal(lane.policy.act(obs), alone.policy.act(obs))


def test_lanes_differ(raise_on_all_processes):
    final = [lane.metrics["loss/total"][-1] for lane in raise_on_all_processes.lanes]
    assert len(set(final)) == 6


@pytest.mark.parametrize(
    ("options", "programs"),
    [({"num_devices": 2}, 1), ({"num_devices": 4}, 1), ({"lanes_at_once": 2}, 1), ({"lanes_at_once": 4}, 1)],
    ids=["2 devices", "4 devices, 2 lanes too many", "3 pieces", "pieces of 3"],
)
def test_devices_and_pieces_change_nothing(raise_on_all_processes, options, programs):
    with compiled_programs("run_chunk") as names:
        result = swept(**options)
    assert len(names) == programs
    for lane, expected in zip(result.lanes, raise_on_all_processes.lanes, strict=True):
        assert_same_settings(lane, expected)


def test_lanes_are_shared_out_over_devices():
    agent = jppo.make_anakin(Short(), CONFIG, total_steps=STEPS)
    four = compile_population(agent, 8, 4)
    state = begin(four, list(range(8)), [BASE] * 8)
    for leaf in jax.tree.leaves(state):
        assert [shard.data.shape[0] for shard in leaf.addressable_shards] == [2] * 4


@pytest.mark.parametrize(
    ("lanes", "devices", "expected"), [(1, 8, (1, 1)), (6, 4, (2, 3)), (5, 4, (2, 3)), (9, 8, (2, 5)), (16, 8, (2, 8))]
)
def test_lanes_are_shared_over_as_few_devices_as_give_none_more(lanes, devices, expected):
    assert shares(lanes, devices) == expected


def test_a_program_is_cut_until_it_fits(raise_on_all_processes, monkeypatch):
    agent = jppo.make_anakin(Short(), CONFIG, total_steps=STEPS)
    whole, half = (compile_population(agent, lanes).bytes for lanes in (6, 3))
    assert half < whole < 3 * half
    monkeypatch.setattr(population, "bytes_free", lambda devices: whole - 1)
    assert fitting_population(agent, 6).lanes == 3
    monkeypatch.setattr(population, "bytes_free", lambda devices: half - 1)
    assert fitting_population(agent, 6).lanes < 3
    monkeypatch.setattr(population, "bytes_free", lambda devices: half)
    messages = Messages()
    result = swept(progress=lambda _: messages)
    assert any("3 of 6 lanes at a time" in text for text in messages.texts)
    for lane, expected in zip(result.lanes, raise_on_all_processes.lanes, strict=True):
        assert_same_settings(lane, expected)


def test_a_run_that_does_not_fit_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(population, "bytes_free", lambda devices: 1000)
    with pytest.raises(
        ValueError, match=r"one run needs .* KiB of device memory and 1000 bytes are free.*num_envs = 8"
    ):
        swept()


class Messages(NullReporter):
    def __init__(self):
        self.texts, self.updates = [], []

    def message(self, text):
        self.texts.append(text)

    def update(self, step, steps_per_second, recent_return):
        self.updates.append((step, recent_return))


def test_a_lane_that_diverges_leaves_the_others_untouched():
    """The middle lane's rate makes its parameters infinite at once; in the other population it is a normal one."""
    broken = swept(seeds=[7], learning_rate=[1e-3, 1e38, 1e-2])
    whole = swept(seeds=[7], learning_rate=[1e-3, 2e-3, 1e-2])
    assert [lane.status for lane in broken.lanes] == ["finished", "diverged", "finished"]
    for number in (0, 2):
        assert_same_settings(broken.lane(number), whole.lane(number), 0.0, 0.0)
    with pytest.raises(TrainingDiverged) as caught:
        jppo.train(Short(), total_steps=STEPS, seed=7, config=CONFIG, hyperparams=broken.lane(1).hyperparams)
    alone, lane = caught.value.result, broken.lane(1)
    assert lane.updates == alone.summary["updates"] == len(lane.metrics["update"]) < UPDATES
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 2e-4, 2e-5), lane.policy_state, alone.policy.state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(lane.policy_state))
    assert (lane.score, broken.status) == (-np.inf, "finished")


def test_all_lanes_may_diverge():
    """Their reward is NaN at step 20, in the third update."""
    result = swept(NaNReward, hyperparams=dataclasses.replace(BASE, gamma=0.5), total_steps=100 * STEPS)
    assert {lane.status for lane in result.lanes} == {"diverged"}
    assert {lane.updates for lane in result.lanes} == {2}
    assert result.status == "diverged"


def test_a_parked_state_goes_on_as_if_nothing_had_been():
    agent = jppo.make_anakin(Probe(), CONFIG, total_steps=STEPS)
    program = compile_population(agent, 3)
    finite = jax.device_put(np.ones(3, bool), program.sharding)
    straight = begin(program, [0, 1], [BASE, BASE])
    state, _, _ = program.chunk(straight, finite, np.int32(2))
    parked = park(state, 2)
    assert all(isinstance(leaf, np.ndarray) and len(leaf) == 2 for leaf in jax.tree.leaves(parked))
    expected, _, _ = program.chunk(state, finite, np.int32(2))
    given, _, _ = program.chunk(resume(program, parked, 0), finite, np.int32(2))
    jax.tree.map(np.testing.assert_array_equal, park(given, 2), park(expected, 2))
    second = park(resume(program, parked, 1), 3)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, np.stack([y[1]] * 3)), second, parked)


def test_the_total_counts_every_lane_and_keeps_the_best():
    messages = Messages()
    total = Total(messages)
    total.add(100, 2.0, {0: 3.0, 1: float("nan")})
    total.add(50, 1.0, {0: 1.0})
    assert messages.updates == [(100, 3.0), (150, 3.0)]


def test_progress_is_of_all_lanes():
    messages = Messages()
    swept(progress=lambda _: messages)
    assert messages.updates[-1][0] == 6 * STEPS
    assert messages.texts[0] == "6 lanes in 1 program"
    assert "6 lanes: compiled in" in messages.texts[1]
    assert sweeps.INTERRUPTED not in " ".join(messages.texts)


MANY_INITS = """
import jax, numpy as np, jppo
from jppo.sweeps.population import begin, compile_population
agent = jppo.make_anakin("CartPole-v1", jppo.PPOConfig(num_envs=2, num_steps=2, num_minibatches=1), total_steps=8)
lanes = compile_population(agent, 128, 2)
for _ in range(10):
    jax.block_until_ready(begin(lanes, np.arange(128), [jppo.Hyperparams()] * 128).train.update)
"""


def test_initial_weights_of_many_lanes_do_not_wait_for_each_other():
    """For ever, which jaxlib's QR decompositions of batches do in the second or third start."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run([sys.executable, "-c", MANY_INITS], env=os.environ | flags, check=True, timeout=120)
