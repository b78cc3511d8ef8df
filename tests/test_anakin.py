"""Tests the on-device agent: its options, its errors, and its equality with separate rollouts and updates."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL, check_two_updates
from gymnax.environments import spaces
from probes import BoxTimeLimit, Counting, DictCounting, NaNReward, ObsActionReward, Probe

import jppo
from jppo.networks.distributions import Categorical
from jppo.ppo.types import derive_key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "options"),
    [
        (Counting(), {"shared_torso": True, "activation": "relu", "kl_control": "stop"}),
        (DictCounting(), {"normalize_obs": True, "normalize_reward": True, "kl_control": "adapt"}),
        (BoxTimeLimit(), {"normalize_obs": True, "action_bounds": "tanh", "activation": "swish"}),
        (BoxTimeLimit(), {"normalize_advantage": False, "clip_value": False}),
    ],
    ids=["kl stop", "kl adapt, dict obs", "box, tanh", "all off"],
)
def test_every_option_trains(env, options):
    _, metrics = check_two_updates(env, SMALL(**options))
    if options.get("kl_control") != "adapt":
        np.testing.assert_allclose(metrics["learning_rate"], [2.5e-4, 0.5 * 2.5e-4], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"normalize_obs": True, "normalize_reward": True, "kl_control": "adapt"}])
def test_step_is_traced_once(options):
    """A dtype, weak type or shape that differs between init's state and step's would compile the program twice."""
    agent = jppo.make_anakin(Counting(), SMALL(**options))
    chex.clear_trace_counter()  # of the other parameters of this test
    step = jax.jit(chex.assert_max_traces(agent.step, n=1))
    state = jax.jit(agent.init)(jax.random.key(0))
    for _ in range(5):
        state, _ = step(state)
    step(agent.init(jax.random.key(1), jppo.Hyperparams(learning_rate=jppo.schedules.linear(1, 0), gamma=0.5)))
    assert state.train.update == 5


def test_train_equals_a_loop_of_steps():
    agent = jppo.make_anakin(ObsActionReward(), SMALL(), total_steps=5 * 32)
    hyperparams = jppo.Hyperparams(learning_rate=1e-2)
    whole, stacked = jax.jit(agent.train)(jax.random.key(3), hyperparams)
    state, step, rows = jax.jit(agent.init)(jax.random.key(3), hyperparams), jax.jit(agent.step), []
    for _ in range(agent.num_updates):
        state, metrics = step(state)
        rows.append(metrics)
    for name, metric in stacked.items():
        np.testing.assert_allclose(metric, [row[name] for row in rows], rtol=1e-4, atol=1e-6, err_msg=name)
    assert_trees_close(whole.train.policy_state.params, state.train.policy_state.params)
    np.testing.assert_array_equal(whole.collect.obs, state.collect.obs)


@pytest.mark.slow
def test_vmapped_runs_equal_separate_runs():
    """Vmaps over seeds and learning rates; a sweep must report the same as single runs."""
    agent = jppo.make_anakin(ObsActionReward(), SMALL(), total_steps=3 * 32)
    rates = jnp.asarray([1e-3, 1e-2, 1e-2])
    keys = jax.vmap(jax.random.key)(jnp.arange(3, dtype=jnp.uint32))

    def train(key, rate):
        return agent.train(key, jppo.Hyperparams(learning_rate=rate))

    together, metrics = jax.jit(jax.vmap(train))(keys, rates)
    alone = jax.jit(train)
    for i in range(3):
        state, expected = alone(keys[i], rates[i])
        assert_trees_close(
            jax.tree.map(lambda x, i=i: x[i], together.train.policy_state.params), state.train.policy_state.params
        )
        np.testing.assert_allclose(metrics["episode/return_mean"][i], expected["episode/return_mean"], rtol=1e-5)
        np.testing.assert_allclose(metrics["loss/value"][i], expected["loss/value"], rtol=1e-3)
    assert (metrics["episode/return_mean"][1] != metrics["episode/return_mean"][2]).any(), "seeds do not differ"


@pytest.mark.slow
def test_every_hyperparameter_can_be_vmapped():
    agent = jppo.make_anakin(Counting(), SMALL(kl_control="stop"), total_steps=2 * 32)
    grid = jax.tree.map(lambda x: jnp.asarray([x, 0.5 * x], jnp.float32), jppo.Hyperparams())
    _, metrics = jax.jit(jax.vmap(agent.train, in_axes=(None, 0)))(jax.random.key(0), grid)
    assert metrics["finite"].all()
    assert metrics["finite"].shape == (2, 2)
    assert metrics["loss/value"][0, 1] != metrics["loss/value"][1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("normalize_reward", [False, True])
def test_a_nan_keeps_the_last_good_parameters(normalize_reward):
    """The reward is NaN at step 20, in the third update of 8 steps."""
    agent = jppo.make_anakin(NaNReward(), SMALL(normalize_reward=normalize_reward), total_steps=5 * 32)
    state, step, params, finite = jax.jit(agent.init)(jax.random.key(0)), jax.jit(agent.step), [], []
    for _ in range(5):
        key = derive_key(state.train.key, "next update")
        before = state.train.replace(update=state.train.update + 1, key=key)
        state, metrics = step(state)
        finite.append(bool(metrics["finite"]))
        params.append(state.train.policy_state.params)
        if not metrics["finite"]:
            jax.tree.map(np.testing.assert_array_equal, without_key(state.train), without_key(before))
    assert finite == [True, True, False, not normalize_reward, not normalize_reward]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    changed = jax.tree.map(lambda a, b: (a != b).any(), params[1], params[0])
    assert any(jax.tree.leaves(changed))


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_the_discount_reaches_the_statistics_of_rewards(gamma):
    agent = jppo.make_anakin(NaNReward(), SMALL())
    state, _ = jax.jit(agent.step)(agent.init(jax.random.key(0), jppo.Hyperparams(gamma=gamma)))
    np.testing.assert_allclose(state.collect.episode.discounted, sum(gamma**k for k in range(8)), rtol=1e-6)


def without_key(train_state):
    return train_state.replace(key=jax.random.key_data(train_state.key))


def assert_trees_close(actual, expected):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), actual, expected)


class FiveValues(Probe):
    def step(self, key, state, action, params=None):
        obs, state, reward, terminated, _, info = super().step(key, state, action, params)
        return obs, state, reward, terminated, info


class NoFinalObservation(Probe):
    def step(self, key, state, action, params=None):
        return *super().step(key, state, action, params)[:5], {}


class OtherObsDtype(Probe):
    def reset(self, key, params=None):
        obs, state = super().reset(key, params)
        return obs.astype(jnp.int32), state


class OtherObsDtypeAfterReset(Probe):
    def reset_env(self, key, params):
        obs, state = super().reset_env(key, params)
        return obs.astype(jnp.int32), state


class OtherState(Probe):
    def step(self, key, state, action, params=None):
        obs, state, *rest = super().step(key, state, action, params)
        return obs, state.replace(cue=state.cue[None]), *rest


class VectorReward(Probe):
    def reward(self, state, action):
        return jnp.ones(2)


class EmptyObs(Probe):
    def get_obs(self, state, params=None, key=None):
        return jnp.zeros((0,))


class IntegerBox(Probe):
    def action_space(self, params=None):
        return spaces.Box(0, 5000, (2,), jnp.int32)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("CartPol-v1", r"unknown environment 'CartPol-v1'; did you mean CartPole-v1"),
        ("xyzzy", r"unknown environment 'xyzzy'; `jppo envs` lists"),
        (object(), r"object is not a gymnax environment: it has no reset, step, action_space, observation_space"),
        ((object(), None), r"tuple is not a gymnax environment: .*pass jppo\.make_env\(env, params\)"),
        (FiveValues(), r"FiveValues: step returned 5 values; gymnax >= 1.0.1 returns six"),
        (NoFinalObservation(), r'NoFinalObservation: the info of step has no "final_observation"'),
        (OtherObsDtype(), r"OtherObsDtype: observations: int32\[1\] after reset, float32\[1\] after step"),
        (
            OtherObsDtypeAfterReset(),
            r"OtherObsDtypeAfterReset: observations: int32\[1\] after reset, float32\[1\] after step_env",
        ),
        (OtherState(), r"OtherState: state\.cue: float32\[\] after reset, float32\[1\] after step"),
        (VectorReward(), r"VectorReward: the reward must be a scalar, not of shape \(2,\)"),
        (EmptyObs(), r"EmptyObs: observation has shape \[0\]; its space says \[1\]"),
        (IntegerBox(), r"IntegerBox: action space Box\(.*int32\) is not supported; .* at most 1,024 integers"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 12 else type(value).__name__,
)
def test_invalid_environments_are_rejected(env, message):
    with pytest.raises(ValueError, match=message):
        jppo.make_anakin(env)


class Heads(nn.Module):
    num_actions: int = 2
    value_shape: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, obs):
        value = jnp.zeros((obs.shape[0], *self.value_shape))
        return Categorical(nn.Dense(self.num_actions)(obs)), value


class OnlyLogits(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return nn.Dense(2)(obs)


@pytest.mark.parametrize(
    ("env", "network", "message"),
    [
        (Probe(), Heads(value_shape=(1,)), r"value has shape \(7, 1\) for a batch of 7; it must be \(7,\)"),
        (Probe(), Heads(num_actions=3), r"the network has 3 logits; the environment has 2 actions"),
        (BoxTimeLimit(), Heads(), r"actions of shape \(7,\) .* this environment needs \(7, 2\)"),
        (Probe(), OnlyLogits(), r"the network returned .*; it must return \(distribution, value\)"),
    ],
    ids=["value shape", "action count", "action shape", "no value"],
)
def test_invalid_networks_are_rejected(env, network, message):
    with pytest.raises(ValueError, match=message):
        jppo.make_anakin(env, network=network)


def test_cnn_for_vector_observations_is_rejected():
    with pytest.raises(ValueError, match=r'"cnn" needs an image .* the observation is \(1,\): use network = "mlp"'):
        jppo.make_anakin(Probe(), jppo.PPOConfig(network="cnn"))


@pytest.mark.parametrize("total_steps", [0, -1, 1.5, float("nan"), "1000", True])
def test_invalid_total_steps_are_rejected(total_steps):
    with pytest.raises(ValueError, match=r"total_steps = .* must be a whole number of at least 1"):
        jppo.make_anakin(Probe(), total_steps=total_steps)


def test_total_steps_round_up_to_whole_updates():
    updates = [jppo.make_anakin(Probe(), SMALL(), total_steps=steps).num_updates for steps in (1, 32, 33, 1e3)]
    assert updates == [1, 1, 2, 32]
