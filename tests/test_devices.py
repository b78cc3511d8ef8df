"""Tests that a run does not depend on the number of devices."""

import dataclasses
import json
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL, compiled_programs
from lenient import lenient_env
from probes import Counting

import jppo
from jppo.devices import mesh as devices
from jppo.devices.mesh import make_mesh, max_usable_devices, shard_over_devices
from jppo.ppo.losses import ppo_loss
from jppo.training import settings as run_settings

CONFIG = SMALL(num_envs=8, num_steps=16, num_epochs=2, num_minibatches=4, normalize_obs=True, normalize_reward=True)
RATE = jppo.Hyperparams(learning_rate=jppo.schedules.linear(3e-3, 0.0), gamma=0.9)
UPDATES = 6
EPISODES = ("return_mean", "return_std", "length_mean", "count")


def train_on(num_devices, env=None, config=CONFIG):
    """Returns the initial state and the states after each update, and the metrics of each update."""
    agent = jppo.make_anakin(
        env or lenient_env("CartPole-v1"), config, total_steps=UPDATES * config.batch_size, num_devices=num_devices
    )
    step = jax.jit(agent.step)
    states = [jax.jit(agent.init, out_shardings=agent.sharding.out_shardings)(jax.random.key(3), RATE)]
    rows = []
    for _ in range(UPDATES):
        state, metrics = step(states[-1])
        states.append(state)
        rows.append(metrics)
    return states, rows


@pytest.fixture(scope="module")
def alone():
    return train_on(1)


def arrays(tree):
    keys = jax.dtypes.prng_key
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, keys) else x) for x in jax.tree.leaves(tree)]


def check_integers(tree, other):
    pairs = [pair for pair in zip(arrays(tree), arrays(other), strict=True) if np.issubdtype(pair[0].dtype, np.integer)]
    assert len(pairs) > 2, "there are integers: keys, time and lengths"
    for x, y in pairs:
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 8])
def test_a_run_does_not_depend_on_the_number_of_devices(alone, num_devices):
    """Floats agree up to rounding. Integers of the first rollout, which does not depend on sums, are equal."""
    states, rows = train_on(num_devices)
    for state, expected in zip(states, alone[0], strict=True):
        for x, y in zip(arrays(state), arrays(expected), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    for state, expected in zip(states[:2], alone[0][:2], strict=True):
        check_integers(state.collect, expected.collect)
    for row, expected in zip(rows, alone[1], strict=True):
        for name in (f"episode/{name}" for name in EPISODES):
            np.testing.assert_allclose(row[name], expected[name], rtol=1e-6, err_msg=name)
        for name in set(row) - {f"episode/{name}" for name in EPISODES}:
            np.testing.assert_allclose(row[name], expected[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 8])
def test_integer_environments_are_bit_identical_on_any_number_of_devices(num_devices):
    """The states of Counting do not depend on the actions, and therefore not on rounding."""
    expected, actual = (train_on(n, Counting(), CONFIG) for n in (1, num_devices))
    for state, other in zip(expected[0], actual[0], strict=True):
        check_integers(state.collect, other.collect)


@pytest.mark.slow
def test_parameters_are_replicated_and_environments_are_sharded(alone):
    states, _ = train_on(4)
    for state in (states[0], states[-1]):
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state.train))
        for leaf in jax.tree.leaves(state.collect):
            assert [shard.data.shape[0] for shard in leaf.addressable_shards] == [2] * 4
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(alone[0][-1]))


@pytest.mark.slow
def test_a_minibatch_has_one_all_reduce_of_all_gradients():
    """Two more collectives per update gather the moments of advantages and of episodes."""
    agent = jppo.make_anakin(lenient_env("CartPole-v1"), SMALL(), num_devices=2)
    state = jax.eval_shape(agent.init, jax.random.key(0), RATE)
    text = jax.jit(agent.step).lower(state).compile().as_text()
    assert text.count(" all-reduce(") == 1
    assert text.count(" all-gather(") == 2
    (flat,) = re.findall(r" = f32\[(\d+)\]\{0\} all-reduce\(", text)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(state.train.policy_state.params))
    assert num_params < int(flat) < num_params + 10, "gradients and metrics are not summed as one array"


@pytest.mark.slow
def test_integer_and_boolean_metrics_are_averaged_over_devices():
    def counting(apply, batch, hyperparams, config, key):
        total, metrics = ppo_loss(apply, batch, hyperparams, config, key)
        return total, metrics | {"ones": jnp.sum(batch.action), "many": jnp.sum(batch.action) > 3}

    config = dataclasses.replace(CONFIG, num_epochs=1, num_minibatches=1)
    found = []
    for num_devices in (1, 2, 4):
        agent = jppo.make_anakin(lenient_env("CartPole-v1"), config, loss=counting, num_devices=num_devices)
        state = jax.jit(agent.init, out_shardings=agent.sharding.out_shardings)(jax.random.key(1), RATE)
        metrics = jax.jit(agent.step)(state)[1]
        assert metrics["many"] == 1.0
        found.append(num_devices * float(metrics["ones"]))
    assert found[0] % 4, "otherwise integer division would give the same result"
    assert found == [found[0]] * 3


@pytest.mark.slow
def test_the_program_is_compiled_once():
    with compiled_programs("run_chunk") as names:
        jppo.train(Counting(), config=CONFIG, total_steps=40 * CONFIG.batch_size, num_devices=4)
    assert len(names) == 1


@pytest.mark.slow
def test_train_uses_the_largest_suitable_number_of_devices(monkeypatch, tmp_path):
    monkeypatch.setattr(run_settings, "max_usable_devices", max_usable_devices)
    monkeypatch.setattr(devices, "LEAST_SHARE", CONFIG.batch_size // 8)
    results = [
        jppo.train(
            Counting(), config=CONFIG, total_steps=4 * CONFIG.batch_size, num_devices=n, run_dir=tmp_path / str(n)
        )
        for n in (1, None)
    ]
    assert [result.summary["num_devices"] for result in results] == [1, 8]
    assert json.loads((tmp_path / "None" / "config.json").read_text())["num_devices"] == 8
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), *(r.policy.state for r in results)
    )
    leaves = jax.tree.leaves(results[1].policy.state)
    assert all(len(leaf.sharding.device_set) == 1 for leaf in leaves), "the policy must be on one device"


@pytest.mark.parametrize(
    ("num_envs", "num_steps", "most"),
    [
        *((num_envs, 48_000, most) for num_envs, most in ((8, 8), (64, 8), (4, 4), (6, 6), (12, 6), (1, 1), (7, 7))),
        *((num_envs, 48_000, most) for num_envs, most in ((10, 5), (9, 3))),
        (8, 256 * 8, 8),
        (8, 256 * 8 - 2, 4),
        (8, 256 * 2, 2),
        (8, 256 * 2 - 2, 1),
        (8, 2, 1),
    ],
)
def test_largest_suitable_number_of_devices(num_envs, num_steps, most):
    """On CPU, each device needs at least 2,048 samples per update."""
    assert max_usable_devices(SMALL(num_envs=num_envs, num_steps=num_steps, num_minibatches=2)) == most


@pytest.mark.parametrize(
    ("num_devices", "message"),
    [
        (0, "num_devices = 0 must be a whole number of at least 1"),
        (9, r"num_devices = 9; JAX has 8 here \(cpu\)"),
        (True, "num_devices = True must be a whole number of at least 1"),
        (2.5, r"num_devices = 2\.5 must be a whole number of at least 1"),
        (3, "num_devices = 3 must divide 8, the number of strata of the shuffle for num_envs = 8; set"),
    ],
)
def test_invalid_numbers_of_devices_are_refused(num_devices, message):
    for make in (jppo.make_anakin, jppo.train):
        with pytest.raises(ValueError, match=message):
            make(Counting(), config=CONFIG, num_devices=num_devices)


def test_one_device_needs_no_shard_map():
    def double(x):
        return 2 * x

    assert shard_over_devices(double, make_mesh(CONFIG, 1), None, None) is double


@pytest.mark.parametrize("exception", [KeyboardInterrupt, devices.OtherProcessInterrupted])
def test_third_ctrl_c_ends_a_process_that_waits_for_the_others(monkeypatch, exception):
    handlers, before = [], signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(devices, "_exchange", lambda *_: handlers.append(signal.getsignal(signal.SIGINT)))
    with pytest.raises(exception), devices.interrupt_all_processes():
        raise exception
    assert handlers == ([signal.SIG_DFL] if exception is KeyboardInterrupt else [])
    assert signal.getsignal(signal.SIGINT) is before
