"""Tests the learner of Ray mode: placement of fragments, updates, and whole runs compared with plain loops."""

import dataclasses
import functools
import json
import os
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL
from host_probes import Counting, NaNReward

import jppo
from jppo.actors import sebulba
from jppo.actors.env_runner import EnvRunner, Fragment
from jppo.errors import TrainingDiverged
from jppo.ppo.normalization import Moments
from jppo.ppo.types import EpisodeStats, Rollout
from jppo.runs.run_dir import load_policy_state, read_metrics
from jppo.training import ray_loop
from jppo.training.interrupts import stop_on_interrupt
from jppo.training.progress import NullReporter

CONFIG = SMALL(num_envs=8, num_steps=8, num_epochs=2, num_minibatches=2, normalize_obs=True, normalize_reward=True)
RATE = jppo.Hyperparams(learning_rate=jppo.schedules.linear(3e-3, 0.0), gamma=0.9)
UPDATES = 4
STEPS = UPDATES * CONFIG.batch_size


@pytest.fixture(scope="module")
def agent():
    return make_agent()


def make_agent(config=CONFIG, **options):
    return jppo.make_sebulba("CartPole-v1", config, total_steps=STEPS, **options)


def plain_loop(agent, sizes=(8,), lag=0):
    """Yields fragments, state and metrics of each update, for runners with these numbers of environments."""
    key, ends = jax.random.key(7), np.cumsum(sizes)
    runners = [EnvRunner(agent.runner_spec(key), np.arange(e - n, e)) for n, e in zip(sizes, ends, strict=True)]
    states = [agent.init(key, RATE)]
    for number in range(1, UPDATES + 1):
        policy = jax.device_get(states[max(0, number - 1 - lag)].policy_state)
        fragments = [runner.collect(policy, 0.9) for runner in runners]
        state, metrics = agent.update(states[-1], *agent.place(fragments))
        states.append(state)
        yield fragments, *jax.device_get((state, metrics))


@pytest.fixture(scope="module")
def alone(agent):
    """A run with one runner, one device and no policy lag."""
    return list(plain_loop(agent))


def random_fragment(num_envs, seed, num_steps=3):
    """Returns a fragment of random numbers, with observations of two leaves."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.normal(size=(num_steps, num_envs, *shape)).astype(np.float32)

    rollout = Rollout(
        obs={"a": draw(2), "b": rng.integers(255, size=(num_steps, num_envs, 2, 2)).astype(np.uint8)},
        action=draw(2),
        **{name: draw() for name in ("log_prob", "value", "next_value", "reward")},
        terminated=draw() > 0.5,
        truncated=draw() > 0.5,
    )
    moments = [
        Moments(**dict(zip(("count", "mean", "m2"), rng.uniform(1, 2, 3).astype(np.float32), strict=True)))
        for _ in "abc"
    ]
    stats = EpisodeStats(returns=moments[0], lengths=moments[1], discounted=moments[2])
    return Fragment(rollout, stats, {}, np.empty((num_envs, 2), np.uint32))


def test_the_update_is_traced_once(monkeypatch):
    build = sebulba.build_learner

    def build_counted(*args, **options):
        policy, learner, mesh, num_updates = build(*args, **options)

        @chex.assert_max_traces(n=1)
        def update(state, rollout, stats):
            return learner.update(state, rollout, stats)

        return policy, learner._replace(update=update), mesh, num_updates

    monkeypatch.setattr(sebulba, "build_learner", build_counted)
    assert len(list(plain_loop(make_agent(num_devices=2), sizes=(4, 4)))) == UPDATES


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_fragments_are_joined_and_split_over_devices(num_devices):
    place = make_agent(num_devices=num_devices).place
    for sizes in ((8,), (4, 4), (3, 5), (1, 6, 1), (5, 2, 1), (1,) * 8):
        fragments = [random_fragment(n, seed) for seed, n in enumerate(sizes)]
        rollout, stats = place(fragments)
        joined = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *(fragment.rollout for fragment in fragments))
        assert jax.tree.structure(rollout) == jax.tree.structure(joined)
        for given, expected in zip(jax.tree.leaves(rollout), jax.tree.leaves(joined), strict=True):
            assert (given.shape, given.dtype) == (expected.shape, expected.dtype)
            np.testing.assert_array_equal(given, expected)
            assert [shard.data.shape[1] for shard in given.addressable_shards] == [8 // num_devices] * num_devices
        for i, fragment in enumerate(fragments):
            jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), stats, fragment.stats)


@pytest.mark.parametrize(
    ("num_devices", "message"),
    [
        (0, "num_devices = 0 must be a whole number of at least 1"),
        (9, "num_devices = 9; JAX has 8 here"),
        (3, "num_devices = 3 must divide 8, the number of strata of the shuffle for num_envs = 8; set"),
    ],
)
def test_invalid_numbers_of_devices_are_refused(num_devices, message):
    with pytest.raises(ValueError, match=message):
        make_agent(num_devices=num_devices)
    with pytest.raises(ValueError, match=message):
        jppo.train("CartPole-v1", backend="ray", num_actors=0, config=CONFIG, num_devices=num_devices)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_a_run_does_not_depend_on_the_number_of_devices(alone, num_devices):
    agent = make_agent(num_devices=num_devices)
    state = agent.init(jax.random.key(7), RATE)
    assert len(state.update.sharding.device_set) == num_devices
    for fragments, expected, expected_metrics in alone:
        state, metrics = agent.update(state, *agent.place(fragments))
        check_close(state, expected)
        check_close(metrics, expected_metrics)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, 4), (1,) * 8], ids=str)
@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_a_run_does_not_depend_on_the_number_of_actors(agent, alone, recurrent, sizes):
    if recurrent != "none":
        config = dataclasses.replace(CONFIG, recurrent=recurrent, recurrent_size=8, sequence_length=4)
        agent = make_agent(config)
        alone = list(plain_loop(agent))
    together = plain_loop(agent, sizes)
    for (fragments, state, metrics), ((whole,), expected, expected_metrics) in zip(together, alone, strict=True):
        for name in ("obs", "action", "reward", "terminated", "truncated"):
            joined = np.concatenate([getattr(fragment.rollout, name) for fragment in fragments], axis=1)
            np.testing.assert_array_equal(joined, getattr(whole.rollout, name), name)
        check_close(state, expected)
        check_close(metrics, expected_metrics)


def check_close(given, expected, rtol=2e-4, atol=2e-5):
    def check(x, y):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, rtol, atol)

    jax.tree.map(check, given, expected)


check_equal = functools.partial(check_close, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_equals_a_plain_loop(tmp_path, agent, alone, lag):
    loop = alone if lag == 0 else list(plain_loop(agent, lag=1))
    options = {
        "backend": "ray",
        "num_actors": 0,
        "ray": jppo.RayConfig(policy_lag=lag),
        "config": CONFIG,
        "hyperparams": RATE,
    }
    result = jppo.train("CartPole-v1", total_steps=STEPS, seed=7, run_dir=tmp_path / "run", **options)
    *_, (_, state, _) = loop
    check_equal(result.state, state)
    check_equal(result.policy.state, state.policy_state)
    for name in set(loop[0][2]) - {"finite"}:
        np.testing.assert_array_equal(result.metrics[name], [metrics[name] for _, _, metrics in loop], name)
    assert result.metrics["actors/policy_lag"].tolist() == [0.0, lag, lag, lag]
    assert result.metrics["update"].tolist() == [1, 2, 3, 4]
    check_saved(tmp_path / "run", result)


def check_saved(run_dir, result):
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary == result.summary
    assert (summary["backend"], summary["status"], summary["num_actors"]) == ("ray", "finished", 0)
    assert (summary["envs_per_actor"], summary["lost_fragments"], summary["restarts"]) == (8, 0, 0)
    assert summary["episodes"] == result.metrics["episode/count"].sum() > 5
    check_equal(read_metrics(run_dir), result.metrics)
    check_equal(load_policy_state(run_dir, result.policy.state), result.policy.state)
    times = [result.metrics[f"time/{name}"] for name in ("wait_rollouts", "host_to_device", "update")]
    assert all((seconds > 0).all() for seconds in times)
    assert sum(times).sum() <= summary["seconds"]
    parts = [result.metrics[f"actors/{name}_seconds"] for name in ("env", "policy", "rollout")]
    assert (parts[0] + parts[1] < parts[2]).all()


@pytest.mark.slow
def test_a_nan_ends_the_run_with_the_last_good_policy(tmp_path):
    """The reward is NaN in step 20, in the third update; the fourth rollout is already running."""
    options = {"backend": "ray", "num_actors": 0, "ray": jppo.RayConfig(policy_lag=1), "config": CONFIG}
    with pytest.raises(TrainingDiverged, match=r"^update 3 made .* that of update 2\.") as caught:
        jppo.train(NaNReward, total_steps=STEPS, run_dir=tmp_path / "run", **options)
    result = caught.value.result
    assert result.metrics["update"].tolist() == read_metrics(tmp_path / "run")["update"].tolist() == [1, 2]
    assert (result.summary["status"], result.summary["updates"]) == ("diverged", 2)
    check_equal(load_policy_state(tmp_path / "run", result.policy.state), result.policy.state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.policy.state))
    assert result.policy.state.obs_stats.count == 2 * CONFIG.batch_size


@pytest.mark.slow
def test_an_interrupt_saves_the_result_so_far(tmp_path, monkeypatch):
    class Interrupting(NullReporter):
        def update(self, step, steps_per_second, recent_return):
            if step == 2 * CONFIG.batch_size:
                os.kill(os.getpid(), signal.SIGINT)

    closed, close = [], EnvRunner.close
    monkeypatch.setattr(EnvRunner, "close", lambda runner: (close(runner), closed.append(1)))
    monkeypatch.setattr(ray_loop, "_LOG_SECONDS", 0.0)
    options = {"backend": "ray", "num_actors": 0, "config": CONFIG, "progress": Interrupting()}
    result = jppo.train(Counting, total_steps=1e9, run_dir=tmp_path / "run", **options)
    assert result.summary["status"] == "interrupted"
    assert result.metrics["update"].tolist() == read_metrics(tmp_path / "run")["update"].tolist() == [1, 2]
    assert result.state.update == 2
    check_equal(load_policy_state(tmp_path / "run", result.policy.state), result.policy.state)
    assert closed == [1]


class Interrupted(Counting):
    """Is interrupted in a reset of the third rollout, after it has replaced the handler of Ctrl-C, as some libraries
    do."""

    steps = 0

    def reset(self, **options):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if type(self).steps > 2 * CONFIG.batch_size + 1:  # the check of the environment takes one step
            self.interrupt()
        return super().reset(**options)

    def step(self, action):
        type(self).steps += 1
        return super().step(action)


def send_interrupt(env):
    os.kill(os.getpid(), signal.SIGINT)


def raise_interrupt(env):
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", [raise_interrupt, send_interrupt])
def test_an_interrupt_in_an_environment_saves_the_result_so_far(tmp_path, interrupt):
    source = type("Once", (Interrupted,), {"interrupt": interrupt})
    options = {"backend": "ray", "num_actors": 0, "config": CONFIG}
    result = jppo.train(source, total_steps=1e9, run_dir=tmp_path / "run", **options)
    assert (result.summary["status"], result.summary["updates"], result.summary["checkpoint"]) == ("interrupted", 2, 2)


def test_ctrl_c_works_after_an_environment_has_replaced_its_handler():
    with stop_on_interrupt(NullReporter()) as stop_requested:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert not stop_requested()
        send_interrupt(None)
        assert stop_requested()
