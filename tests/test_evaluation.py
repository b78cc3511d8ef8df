"""Tests evaluation with on-device environments; tests/test_host_envs.py tests it on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL
from gymnasium import spaces
from probes import Counting, DictCounting, Probe

import jppo


class OnePerStep(Counting):
    """Counting with a reward of 1 per step, so that an episode's return is its length: 3 or 5."""

    def reward(self, state, action):
        return jnp.ones(())


class ThreeActions(Counting):
    """Counting with another number of actions."""

    def action_space(self, params=None):
        return spaces.Discrete(3)


@pytest.fixture(scope="module")
def trained():
    agent = jppo.make_anakin(OnePerStep(), SMALL())
    state = jax.jit(agent.init)(jax.random.key(0)).train.policy_state
    return agent.env, jppo.TrainedPolicy(agent.policy, state)


def test_returns_and_lengths_stop_at_the_end_of_the_episode(trained):
    result = jppo.evaluate(*trained, num_episodes=20)
    assert set(result.lengths.tolist()) == {3, 5}
    np.testing.assert_array_equal(result.returns, result.lengths)
    assert result.finished.all()


def test_episodes_longer_than_max_steps_are_reported_as_unfinished(trained):
    result = jppo.evaluate(*trained, num_episodes=20, max_steps=4)
    assert set(result.lengths.tolist()) == {3, 4}
    np.testing.assert_array_equal(result.finished, result.lengths == 3)


def test_the_seed_selects_the_episodes(trained):
    lengths = [jppo.evaluate(*trained, num_episodes=40, seed=seed, sampled=True).lengths.tolist() for seed in (1, 1, 2)]
    assert lengths[0] == lengths[1] != lengths[2]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            Probe(),
            r"Probe has other observations than the policy: ObsSpec\(shape=\(1,\).*trained for ObsSpec\(shape=\(3,\)",
        ),
        (DictCounting(), "DictCounting has other observations than the policy: {'cue'"),
        (ThreeActions(), r"ThreeActions has other actions than the policy: ActionSpec\(.*num_actions=3"),
    ],
)
def test_the_spaces_of_environment_and_policy_must_be_equal(trained, env, message):
    with pytest.raises(ValueError, match=message):
        jppo.evaluate(env, trained[1])


def test_a_feed_forward_policy_takes_no_state(trained):
    for function in (trained[1].act, trained[1].value):
        with pytest.raises(ValueError, match=r"this policy is not recurrent: call it without state"):
            function(np.zeros(3), np.zeros(1))


@pytest.mark.parametrize("option", [{"seed": -1}, {"seed": "a"}, {"max_steps": 0}])
def test_invalid_options_are_named(trained, option):
    (name, value), *_ = option.items()
    for function in (jppo.evaluate, jppo.play):
        with pytest.raises(ValueError, match=f"{name} = {value!r} must be a whole number"):
            function(*trained, **option)
