"""Tests GAE against the textbook sum and its identities at episode ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jppo.ppo.losses import gae

GOLDEN = {
    "reward": [1.0, 2.0, 3.0, 4.0, 5.0],
    "value": [0.5, -1.0, 2.0, 0.0, 1.0],
    "next_value": [-1.0, 2.0, 7.0, 1.0, 9.0],
    "terminated": [0, 0, 0, 0, 1],
    "truncated": [0, 0, 1, 0, 0],
}


def textbook(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    """Each advantage as the sum over l of (gamma lambda)^l delta_{t+l}, up to the end of the episode."""
    num_steps, num_envs = reward.shape
    advantage = np.zeros((num_steps, num_envs))
    for n in range(num_envs):
        for t in range(num_steps):
            weight = 1.0
            for k in range(t, num_steps):
                bootstrap = 0.0 if terminated[k, n] else next_value[k, n]
                advantage[t, n] += weight * (float(reward[k, n]) + gamma * bootstrap - float(value[k, n]))
                weight *= gamma * gae_lambda
                if terminated[k, n] or truncated[k, n]:
                    break
    return advantage


def random_rollout(seed, shape=(13, 4), ends=0.2):
    rng = np.random.default_rng(seed)
    reward, value, next_value = rng.normal(size=(3, *shape)).astype(np.float32)
    terminated, truncated = rng.random((2, *shape)) < ends
    return {
        "reward": reward,
        "value": value,
        "next_value": next_value,
        "terminated": terminated,
        "truncated": truncated,
    }


def ours(rollout, gamma, gae_lambda):
    return np.asarray(gae(**jax.tree.map(jnp.asarray, rollout), gamma=gamma, gae_lambda=gae_lambda))


def test_golden_numbers_by_hand():
    columns = {name: np.array(column, np.float32)[:, None] for name, column in GOLDEN.items()}
    for name in ("terminated", "truncated"):
        columns[name] = columns[name].astype(bool)
    # gamma = lambda = 0.5: deltas 0, 4, 4.5 | 4.5, 4; the truncated step bootstraps from 7, the terminated not from 9
    expected = np.array([[0 + 0.25 * (4 + 0.25 * 4.5)], [4 + 0.25 * 4.5], [4.5], [4.5 + 0.25 * 4], [4]])
    np.testing.assert_allclose(ours(columns, 0.5, 0.5), expected, rtol=1e-6)


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.7), (0.5, 0.3)])
def test_matches_the_textbook_with_both_kinds_of_end(gamma, gae_lambda):
    rollout = random_rollout(seed=0)
    assert rollout["terminated"].any(axis=0).all()
    assert (rollout["truncated"] & ~rollout["terminated"]).any()
    expected = textbook(**rollout, gamma=gamma, gae_lambda=gae_lambda)
    np.testing.assert_allclose(ours(rollout, gamma, gae_lambda), expected, rtol=1e-5, atol=1e-5)


def test_a_long_rollout_keeps_its_precision():
    rollout = random_rollout(seed=1, shape=(700, 2), ends=0.001)
    np.testing.assert_allclose(
        ours(rollout, 0.999, 0.99), textbook(**rollout, gamma=0.999, gae_lambda=0.99), rtol=1e-4, atol=1e-4
    )


def test_lambda_one_is_monte_carlo_with_bootstrap():
    gamma, rollout = 0.9, random_rollout(seed=2)
    rollout["next_value"][:-1] = np.where(  # within an episode, V(s_{t+1}) is the next step's value
        rollout["truncated"][:-1], rollout["next_value"][:-1], rollout["value"][1:]
    )
    done = rollout["terminated"] | rollout["truncated"]
    returns = np.zeros(done.shape)
    tail = rollout["next_value"][-1].astype(float)
    for t in reversed(range(len(done))):
        tail = np.where(done[t], rollout["next_value"][t], tail)
        tail = rollout["reward"][t] + gamma * np.where(rollout["terminated"][t], 0.0, tail)
        returns[t] = tail
    np.testing.assert_allclose(ours(rollout, gamma, 1.0) + rollout["value"], returns, rtol=1e-5, atol=1e-5)


def test_lambda_zero_is_the_td_error():
    rollout = random_rollout(seed=3)
    bootstrap = np.where(rollout["terminated"], 0.0, rollout["next_value"])
    expected = rollout["reward"] + 0.97 * bootstrap - rollout["value"]
    np.testing.assert_allclose(ours(rollout, 0.97, 0.0), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_advantages_do_not_cross_episode_ends(end):
    rollout = random_rollout(seed=4, ends=0.0)
    cut = 6
    rollout[end][cut] = True
    changed = {name: column.copy() for name, column in rollout.items()}
    for name in ("reward", "value", "next_value"):
        changed[name][cut + 1 :] += 100.0
    before, after = ours(rollout, 0.99, 0.95), ours(changed, 0.99, 0.95)
    np.testing.assert_array_equal(after[: cut + 1], before[: cut + 1])
    assert (np.abs(after[cut + 1 :] - before[cut + 1 :]) > 1.0).all()


@pytest.mark.parametrize("next_value", [1e30, -np.inf, np.nan])
def test_a_terminated_step_ignores_next_value(next_value):
    rollout = random_rollout(seed=5)
    changed = dict(rollout, next_value=np.where(rollout["terminated"], np.float32(next_value), rollout["next_value"]))
    np.testing.assert_array_equal(ours(changed, 0.99, 0.95), ours(rollout, 0.99, 0.95))


def test_a_truncated_step_bootstraps():
    rollout = random_rollout(seed=6, ends=0.0)
    rollout["truncated"][3] = True
    more = dict(rollout, next_value=rollout["next_value"] + rollout["truncated"])
    difference = ours(more, 0.9, 0.5) - ours(rollout, 0.9, 0.5)
    np.testing.assert_allclose(difference[3], 0.9, rtol=1e-5)
    np.testing.assert_allclose(difference[2], 0.9 * 0.45, rtol=1e-5)
    np.testing.assert_array_equal(difference[4:], 0.0)


_SHAPE = (6, 3)
_FLOATS = hnp.arrays(np.float32, _SHAPE, elements=st.floats(-100, 100, width=32))
_BOOLS = hnp.arrays(bool, _SHAPE)
_UNIT = st.floats(0, 1, width=32)


@settings(deadline=None, max_examples=100)
@given(reward=_FLOATS, value=_FLOATS, next_value=_FLOATS, terminated=_BOOLS, truncated=_BOOLS, g=_UNIT, lam=_UNIT)
def test_any_rollout_matches_the_textbook(reward, value, next_value, terminated, truncated, g, lam):
    expected = textbook(reward, value, next_value, terminated, truncated, g, lam)
    actual = _jitted(reward, value, next_value, terminated, truncated, np.float32(g), np.float32(lam))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-2)


_jitted = jax.jit(gae)
