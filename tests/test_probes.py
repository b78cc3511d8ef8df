"""Tests that PPO solves each probe environment; each probe isolates one part of the algorithm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import (
    ActionReward,
    BoxActionReward,
    BoxTimeLimit,
    DelayedReward,
    ObsActionReward,
    ObsValue,
    Probe,
    TimeLimit,
)

import jppo
from jppo.devices.jit import jit

CONFIG = jppo.PPOConfig(num_envs=8, num_steps=16, num_minibatches=2, hidden_sizes=(16,), clip_value=False)


def learn(env, obs, *, steps=20_000, config=CONFIG, **hyperparams):
    """Trains on a probe; returns the distribution and values at the given observations, and the metrics."""
    agent = jppo.make_anakin(env, config, total_steps=steps)
    hyperparams = {"learning_rate": jppo.schedules.linear(1e-2, 0.0), "ent_coef": 0.0} | hyperparams
    state, metrics = jit(agent.train)(jax.random.key(0), jppo.Hyperparams(**hyperparams))
    assert metrics["finite"].all()
    distribution, value = agent.policy.step(state.train.policy_state, jnp.asarray(obs, jnp.float32)[:, None])[:2]
    return distribution, np.asarray(value), metrics


@pytest.mark.slow
def test_the_critic_learns_a_constant():
    _, value, metrics = learn(Probe(), [0.0])
    np.testing.assert_allclose(value, [1.0], atol=0.02)
    np.testing.assert_allclose(metrics["episode/return_mean"], 1.0)
    np.testing.assert_allclose(metrics["episode/length_mean"], 1.0)


@pytest.mark.slow
def test_the_critic_tells_observations_apart():
    _, value, metrics = learn(ObsValue(), [1.0, -1.0])
    np.testing.assert_allclose(value, [1.0, -1.0], atol=0.02)
    assert metrics["value/explained_variance"][-1] > 0.99


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95])
def test_reward_flows_back_one_step_with_its_discount(gae_lambda):
    _, value, _ = learn(DelayedReward(), [0.0, 1.0], gamma=0.5, gae_lambda=gae_lambda)
    np.testing.assert_allclose(value, [0.5, 1.0], atol=0.02)


@pytest.mark.slow
def test_the_actor_prefers_the_rewarded_action():
    distribution, value, metrics = learn(ActionReward(), [0.0])
    assert jax.nn.softmax(distribution.logits)[0, 1] > 0.98
    np.testing.assert_allclose(value, [1.0], atol=0.05)
    assert metrics["episode/return_mean"][0] < 0.5, "the initial policy must not already be optimal"


@pytest.mark.slow
def test_the_actor_tells_observations_apart():
    distribution, value, _ = learn(ObsActionReward(), [-1.0, 1.0])
    probs = jax.nn.softmax(distribution.logits)
    assert probs[0, 0] > 0.98
    assert probs[1, 1] > 0.98
    np.testing.assert_allclose(value, [1.0, 1.0], atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("bounds", ["clip", "tanh"])
def test_the_actor_finds_real_valued_actions(bounds):
    config = jppo.PPOConfig(
        num_envs=16, num_steps=32, num_minibatches=4, hidden_sizes=(16,), clip_value=False, action_bounds=bounds
    )
    distribution, _, metrics = learn(BoxActionReward(), [-1.0, 1.0], config=config, steps=80_000)
    mode = distribution.mode()
    action = np.tanh(mode) if bounds == "tanh" else np.clip(mode, -1.0, 1.0)
    np.testing.assert_allclose(action, [[-0.5, 0.5], [0.5, -0.5]], atol=0.1)
    assert metrics["episode/return_mean"][-1] > -0.1
    assert np.exp(distribution.log_std).max() < 0.3, "exploration did not shrink"


@pytest.mark.slow
@pytest.mark.parametrize("env", [TimeLimit(), BoxTimeLimit()], ids=["discrete", "box"])
@pytest.mark.parametrize("normalize_obs", [False, True])
def test_time_limit_does_not_end_the_value(env, normalize_obs):
    """V = r / (1 - gamma); truncation taken for termination would give 1 / (1 - 0.9 * 0.8) = 3.6 or less."""
    config = jppo.PPOConfig(
        num_envs=8, num_steps=16, num_minibatches=2, hidden_sizes=(16,), clip_value=False, normalize_obs=normalize_obs
    )
    _, value, metrics = learn(env, [0.0], gamma=0.9, config=config, steps=60_000)
    np.testing.assert_allclose(value, [10.0], rtol=0.02)
    np.testing.assert_allclose(metrics["episode/length_mean"], 5.0)
