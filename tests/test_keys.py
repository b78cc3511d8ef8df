"""Tests that no random key is used for two purposes."""

import collections

import jax
import numpy as np
import pytest
from lenient import lenient

import jppo

CONFIG = jppo.PPOConfig(num_envs=2, num_steps=3, num_epochs=2, num_minibatches=1, hidden_sizes=(4,), num_strata=1)


@pytest.fixture
def derived(monkeypatch):
    """Records the data of every key that `split` or `fold_in` derives while a program runs."""
    keys = collections.Counter()

    def record(data):
        for row in np.asarray(data).reshape(-1, data.shape[-1]):
            keys[tuple(row.tolist())] += 1

    def recording(function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            jax.debug.callback(record, jax.random.key_data(result))
            return result

        return call

    jax.clear_caches()  # programs that were traced without the record
    monkeypatch.setattr(jax.random, "split", recording(jax.random.split))
    monkeypatch.setattr(jax.random, "fold_in", recording(jax.random.fold_in))
    yield keys
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["device", "ray"])
def test_train_resume_and_evaluate_use_different_keys(tmp_path, derived, backend):
    options = {"config": CONFIG, "seed": 0, "num_devices": 1, "run_dir": tmp_path / "run"}
    if backend == "ray":
        options |= {"backend": "ray", "num_actors": 0}
    run = jppo.RunConfig(checkpoint_seconds=0.0)
    with lenient():
        jppo.train("CartPole-v1", total_steps=12, run=run, learning_rate=1e-3, **options)
        first = dict(derived)
        result = jppo.train("CartPole-v1", total_steps=24, run=run, learning_rate=1e-3, **options)
        assert len(result.metrics["update"]) == 4
        trained = dict(derived)
        jppo.evaluate(result, num_episodes=2, seed=0, sampled=True, max_steps=5)
        jax.effects_barrier()
    assert len(first) > 30
    assert len(trained) > len(first)
    assert len(derived) > len(trained)
    # Only the keys of the initial state are repeated: a resumed run makes it again before it loads the checkpoint.
    repeated = [key for key, count in derived.items() if count > 1]
    assert all(first.get(key) == 1 and trained[key] == 2 == derived[key] for key in repeated)
    assert len(repeated) < len(first)


@pytest.mark.slow
def test_actions_with_and_without_a_seed_use_different_keys(derived):
    with lenient():
        agent = jppo.make_anakin("CartPole-v1", CONFIG)
        policy = jppo.TrainedPolicy(agent.policy, agent.init(jax.random.key(1)).train.policy_state)
        jax.effects_barrier()
        derived.clear()
        obs = np.zeros(4, np.float32)
        jppo.TrainedPolicy(agent.policy, policy.state).act(obs, sampled=True)
        policy.act(obs, sampled=True, seed=0)
        jax.effects_barrier()
    assert len(derived) == sum(derived.values()) > 2
