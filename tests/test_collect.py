"""Tests rollouts against known environments and NumPy computations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Counting, DictCounting, Probe

import jppo
from jppo.devices.jit import jit
from jppo.envs import Environment, Step, make_env
from jppo.envs.spaces import ActionSpec, ObsSpec
from jppo.networks.actor_critic import make_network
from jppo.networks.distributions import DiagGaussian
from jppo.ppo.normalization import Moments
from jppo.ppo.policy import make_policy
from jppo.ppo.rollout import collect, init_collect
from jppo.ppo.types import PolicyState

T, N, GAMMA = 16, 8, 0.9


def collector(env, network=None, num_steps=T):
    """Returns an environment, its policy, the initial states and a compiled `collect`."""
    env = make_env(env)
    network = network or make_network(jppo.PPOConfig(hidden_sizes=(8,)), env.obs_spec, env.action_spec)
    policy = make_policy(network, env.obs_spec, env.action_spec)
    obs = jax.tree.map(lambda spec: jnp.zeros((1, *spec.shape), spec.dtype), env.obs_spec)
    policy_state = PolicyState(params=policy.init(jax.random.key(1), obs), obs_stats=())
    run = jit(functools.partial(collect, env, policy, num_steps))
    return env, policy, policy_state, lambda state: run(policy_state, state, jnp.asarray(GAMMA))


def start(env, index=range(N), seed=0):
    return init_collect(env, jax.random.key(seed), jnp.asarray(list(index), jnp.int32))


@pytest.fixture(scope="module")
def counting():
    """Collects two consecutive fragments of Counting; the first contains every kind of ending."""
    env, policy, policy_state, run = collector(Counting())
    state, first, _ = run(start(env))
    _, second, _ = run(state)
    terminated, truncated = first.terminated, first.truncated
    for ending in (terminated & ~truncated, truncated & ~terminated, truncated & terminated, ~(terminated | truncated)):
        assert ending.any()
    return policy, policy_state, first, second


@pytest.mark.slow
def test_shapes_and_dtypes(counting):
    _, _, rollout, _ = counting
    shapes = {
        "obs": ((T, N, 3), "float32"),
        "action": ((T, N), "int32"),
        "log_prob": ((T, N), "float32"),
        "value": ((T, N), "float32"),
        "next_value": ((T, N), "float32"),
        "reward": ((T, N), "float32"),
        "terminated": ((T, N), "bool"),
        "truncated": ((T, N), "bool"),
    }
    assert {name: (getattr(rollout, name).shape, str(getattr(rollout, name).dtype)) for name in shapes} == shapes
    np.testing.assert_array_equal(rollout.done, np.asarray(rollout.terminated) | np.asarray(rollout.truncated))


@pytest.mark.slow
def test_shapes_and_dtypes_of_boxes_and_pytrees():
    class BoxDictCounting(DictCounting):
        continuous = True

        def reward(self, state, action):
            return jnp.sum(action)

    env, _, _, run = collector(BoxDictCounting())
    _, rollout, _ = run(start(env))
    assert {name: (x.shape, str(x.dtype)) for name, x in rollout.obs.items()} == {
        "cue": ((T, N, 1), "float32"),
        "time": ((T, N, 2, 2), "uint8"),
    }
    assert rollout.action.shape == (T, N, 2)
    assert np.abs(rollout.action).max() > 1.0, "actions are recorded before they are clipped"
    np.testing.assert_allclose(rollout.reward, np.clip(rollout.action, -1.0, 1.0).sum(-1), rtol=1e-5, atol=1e-6)


def test_value_and_log_prob_are_the_behaviour_policys(counting):
    policy, policy_state, rollout, _ = counting
    distribution, value = policy.step(policy_state, rollout.obs.reshape(-1, 3))[:2]
    np.testing.assert_allclose(rollout.value.ravel(), value, rtol=1e-5, atol=1e-6)
    log_prob = distribution.log_prob(rollout.action.ravel())
    np.testing.assert_allclose(rollout.log_prob.ravel(), log_prob, rtol=1e-5)


def test_consecutive_observations_follow_the_environment(counting):
    _, _, first, second = counting
    obs, done = (np.concatenate([getattr(r, name) for r in (first, second)]) for name in ("obs", "done"))
    np.testing.assert_array_equal(obs[0, :, 2], 0.0)
    np.testing.assert_array_equal(obs[1:, :, 2], np.where(done[:-1], 0.0, obs[:-1, :, 2] + 1.0))
    same_episode = obs[1:, :, 0] == obs[:-1, :, 0]
    np.testing.assert_array_equal(same_episode, ~done[:-1])


def test_next_value_is_of_the_true_successor(counting):
    """The true successor of [cue, kind, t] is [cue, kind, t+1], also at the end of an episode."""
    policy, policy_state, rollout, _ = counting
    successor = rollout.obs + jnp.asarray([0.0, 0.0, 1.0])[None, None]
    value = policy.step(policy_state, successor.reshape(-1, 3))[1].reshape(T, N)
    expected = np.where(rollout.terminated, 0.0, value)
    np.testing.assert_allclose(rollout.next_value, expected, rtol=1e-5, atol=1e-6)
    after_reset = np.asarray(rollout.truncated & ~rollout.terminated)[:-1]
    assert (np.abs(rollout.next_value[:-1] - rollout.value[1:])[after_reset] > 1e-3).all()


def test_the_last_step_has_the_value_of_its_successor(counting):
    _, _, first, second = counting
    going_on = ~np.asarray(first.done[-1])
    assert going_on.any()
    np.testing.assert_allclose(first.next_value[-1][going_on], second.value[0][going_on], rtol=1e-5)


@pytest.mark.parametrize("length", [1, 4])
def test_next_value_where_the_fragment_ends_with_an_episode(length):
    class Limited(Counting):
        limit = length

        def is_terminated(self, state, params):
            return state.time < 0

    env, policy, policy_state, run = collector(Limited(), num_steps=4)
    _, rollout, _ = run(start(env))
    assert rollout.truncated[-1].all()
    successor = rollout.obs[-1] + jnp.asarray([0.0, 0.0, 1.0])[None]
    np.testing.assert_allclose(rollout.next_value[-1], policy.step(policy_state, successor)[1], rtol=1e-5)


@pytest.mark.slow
def test_observations_are_recorded_without_normalization():
    agent = jppo.make_anakin(Counting(), jppo.PPOConfig(num_envs=N, num_steps=T, hidden_sizes=(8,), normalize_obs=True))
    state, _ = jit(agent.step)(agent.init(jax.random.key(0)))
    policy_state = state.train.policy_state
    assert policy_state.obs_stats.count == N * T
    run = jit(functools.partial(collect, agent.env, agent.policy, T))
    _, rollout, _ = run(policy_state, state.collect, jnp.asarray(GAMMA))
    assert set(np.unique(rollout.obs[..., 1])) == {0.0, 1.0, 2.0}
    assert set(np.unique(rollout.obs[..., 2])) == {0.0, 1.0, 2.0, 3.0, 4.0}
    flat = rollout.obs.reshape(-1, 3)
    np.testing.assert_allclose(rollout.value.ravel(), agent.policy.step(policy_state, flat)[1], rtol=1e-5, atol=1e-6)
    raw = agent.policy.step(policy_state.replace(obs_stats=()), flat)[1]
    assert np.abs(rollout.value.ravel() - raw).max() > 1e-2, "the policy must see normalized observations"


def test_episode_statistics_match_a_recount():
    """The lengths of episodes and of fragments differ, so episodes continue across four fragments."""
    env, _, _, run = collector(Counting(), num_steps=7)
    state = start(env)
    running_return, running_discounted = np.zeros(N), np.zeros(N)
    running_length = np.zeros(N, int)
    for _ in range(4):
        state, rollout, stats = run(state)
        returns, lengths, discounted = [], [], []
        for reward, done in zip(np.asarray(rollout.reward, np.float64), np.asarray(rollout.done), strict=True):
            running_return += reward
            running_length += 1
            running_discounted = GAMMA * running_discounted + reward
            returns += running_return[done].tolist()
            lengths += running_length[done].tolist()
            discounted += running_discounted.tolist()
            for running in (running_return, running_length, running_discounted):
                running[done] = 0
        assert returns, "no episode ended"
        check_moments(stats.returns, returns)
        check_moments(stats.lengths, lengths)
        check_moments(stats.discounted, discounted)
        np.testing.assert_allclose(state.episode.returns, running_return, rtol=1e-5)
        np.testing.assert_array_equal(state.episode.lengths, running_length)
        np.testing.assert_allclose(state.episode.discounted, running_discounted, rtol=1e-5)


def check_moments(moments: Moments, samples):
    assert moments.count == len(samples)
    np.testing.assert_allclose(moments.mean, np.mean(samples), rtol=1e-5)
    np.testing.assert_allclose(moments.m2, np.var(samples) * len(samples), rtol=1e-4, atol=1e-4)


def test_no_statistics_where_no_episode_ended():
    env, _, _, run = collector(Counting(), num_steps=2)
    _, rollout, stats = run(start(env))
    assert not rollout.done.any()
    assert stats.returns.count == stats.lengths.count == 0
    assert stats.discounted.count == 2 * N


def noise_env() -> Environment:
    """Returns an environment with three normal draws from the key of each reset and step as observation."""

    def draw(key):
        return jax.random.normal(key, (3,))

    def reset(key):
        return draw(key), jnp.zeros(())

    def step(key, state, action):
        obs = draw(key)
        return Step(obs, state, jnp.sum(action), jnp.zeros((), bool), jnp.zeros((), bool), obs)

    action_spec = ActionSpec((3,), "float32", low=(-np.inf,) * 3, high=(np.inf,) * 3)
    return Environment("noise", reset, step, ObsSpec((3,), "float32"), action_spec)


class StandardNormal:
    """A policy with actions equal to its noise."""

    def init(self, key, obs):
        return {}

    def apply(self, params, obs):
        return DiagGaussian(jnp.zeros_like(obs), jnp.zeros_like(obs)), jnp.zeros(obs.shape[0])


def test_every_draw_has_a_separate_key():
    """Resets, steps and actions all draw normal(key, (3,)), so a key that is used twice gives equal draws."""
    env, _, _, run = collector(noise_env(), StandardNormal())
    state, first, _ = run(start(env))
    last, second, _ = run(state)
    drawn = [first.obs, second.obs, last.obs[None], first.action, second.action]
    draws = np.concatenate([x.reshape(-1, 3) for x in drawn])
    assert len(draws) == (4 * T + 1) * N
    assert len(np.unique(draws, axis=0)) == len(draws)
    np.testing.assert_allclose([draws.mean(), draws.std()], [0.0, 1.0], atol=0.1)


def test_rewards_with_a_wrong_shape_are_an_error():
    """A reward [1] of each environment would broadcast."""
    env = noise_env()
    wrong = env._replace(step=lambda *args: (after := env.step(*args))._replace(reward=after.reward[None]))
    with pytest.raises(ValueError, match=r"step returned reward of shape \(1,\); it must be \(\)"):
        collector(wrong, StandardNormal())[3](start(env))


@pytest.mark.slow
@pytest.mark.parametrize("env", [Counting(), noise_env()], ids=["counting", "noise"])
def test_environments_do_not_depend_on_how_they_are_grouped(env):
    env, _, _, run = collector(env)
    whole_state, whole, whole_stats = run(start(env))
    states, halves, stats = zip(*[run(start(env, index)) for index in (range(4), range(4, 8))], strict=True)
    joined = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *halves)
    for name in ("obs", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name), err_msg=name)
    for name in ("action", "reward", "log_prob", "value", "next_value"):  # rounding
        np.testing.assert_allclose(getattr(joined, name), getattr(whole, name), rtol=1e-5, atol=1e-6, err_msg=name)
    keys = np.concatenate([jax.random.key_data(state.key) for state in states])
    np.testing.assert_array_equal(keys, jax.random.key_data(whole_state.key))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), stats[0] + stats[1], whole_stats)


def test_runs_repeat_and_seeds_differ():
    env, _, _, run = collector(Counting())
    again = [run(start(env, seed=seed))[1] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(again[0].obs, again[1].obs)
    np.testing.assert_array_equal(again[0].action, again[1].action)
    assert (again[0].obs != again[2].obs).any()
    assert (again[0].action != again[2].action).any()


class Blank(Probe):
    """Truncated every third step, with constant observations."""

    continuous = True
    length, limit, obs_size = 10, 3, 2

    def get_obs(self, state, params=None, key=None):
        return jnp.zeros((2,))


@pytest.mark.parametrize(("limit", "extra"), [(3, 2), (100, 0)])
def test_no_critic_pass_over_final_observations_unless_truncated(limit, extra):
    """The critic evaluates final observations only in steps with a truncation."""
    passes = []

    class Watched(StandardNormal):
        def apply(self, params, obs):
            jax.debug.callback(lambda: passes.append(1))
            return super().apply(params, obs)

    env, _, _, run = collector(make_env(Blank(), max_steps_in_episode=limit), Watched(), num_steps=6)
    state = start(env)
    passes.clear()
    jax.block_until_ready(run(state))
    jax.effects_barrier()
    assert len(passes) == 6 + 1 + extra
