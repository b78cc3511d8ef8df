"""Tests EnvRunner: its rollouts agree with the known environments and with the policy, for any number of runners."""

import dataclasses
import functools

import gymnasium
import host_probes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_probes import Continuous, Counting, Failing, Listing, Parts

import jppo
from jppo.actors import action_selection
from jppo.actors.env_runner import EnvRunner, RunnerSpec, blank_fragment
from jppo.envs.masks import has_mask
from jppo.envs.spaces import ActionSpec, ObsSpec
from jppo.networks.actor_critic import ActorCritic, make_network
from jppo.ppo.normalization import moments_of
from jppo.ppo.policy import make_policy
from jppo.ppo.rollout import env_keys
from jppo.ppo.types import PolicyState

T, N, GAMMA = 9, 5, 0.9


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with pytest.MonkeyPatch.context() as patch:
        host_probes.share_programs(patch)
        yield


def make_spec(source, bounds="clip"):
    """Returns the spec of a runner, the policy and the policy's state."""
    env = jppo.make_host_env(source)
    network = make_network(jppo.PPOConfig(hidden_sizes=(4,)), env.obs_spec, env.action_spec)
    policy = make_policy(network, env.obs_spec, dataclasses.replace(env.action_spec, bounds=bounds))
    obs = jax.tree.map(lambda spec: jnp.zeros((1, *spec.shape), spec.dtype), env.obs_spec)
    shapes, rng = jax.eval_shape(policy.init, jax.random.key(0), obs), np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(0.0, 0.5, x.shape).astype(x.dtype), shapes)
    state = PolicyState(params=params, obs_stats=())
    key_data = np.asarray(jax.random.key_data(jax.random.key(0)))
    return RunnerSpec(env, network, policy.action_spec, T, key_data, jax.eval_shape(lambda: state)), policy, state


def apply(policy, state, obs):
    """Returns the distribution [T*N] and the value [T, N]."""
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)
    distribution, value = policy.step(state, flat)[:2]
    return distribution, np.asarray(value).reshape(T, N)


def successor(obs):
    """Returns the observations after those of Counting or Parts."""
    if isinstance(obs, dict):
        number, parity = obs["both"]
        return obs | {"picture": obs["picture"] + 1, "age": obs["age"] + 0.25, "both": (number + 1, 1 - parity)}
    return obs + np.array([0.0, 0.0, 0.25], np.float32)


@pytest.mark.parametrize(
    "source", [Counting, Listing, Parts, host_probes.disabled_parts], ids=lambda source: source.__name__
)
def test_rollouts_agree_with_the_environments_and_the_policy(source):
    spec, policy, state = make_spec(source)
    runner = EnvRunner(spec, np.arange(N))
    for _ in range(2):
        rollout = runner.collect(state, GAMMA).rollout
        assert (rollout.truncated & ~rollout.terminated).sum() > 2
        distribution, value = apply(policy, state, rollout.obs)
        np.testing.assert_allclose(rollout.value, value, rtol=1e-5, atol=1e-5)
        log_prob = distribution.log_prob(rollout.action.ravel())
        np.testing.assert_allclose(rollout.log_prob.ravel(), log_prob, rtol=1e-5, atol=1e-6)
        following = apply(policy, state, successor(rollout.obs))[1]
        expected = np.where(rollout.terminated, 0.0, following)
        np.testing.assert_allclose(rollout.next_value, expected, rtol=1e-5, atol=1e-5)
        cut = (rollout.truncated & ~rollout.terminated)[:-1]
        assert (np.abs(rollout.next_value[:-1] - value[1:])[cut] > 1e-2).all(), (
            "next_value is the value of the reset observation"
        )
    runner.close()


def test_random_numbers_and_episodes_continue_in_the_next_rollout():
    spec, policy, state = make_spec(Continuous)
    runner, noise = EnvRunner(spec, np.arange(N)), []
    for _ in range(2):
        rollout, stats, *_ = runner.collect(state, GAMMA)
        noise.append(rollout.action - apply(policy, state, rollout.obs)[0].mean.reshape(rollout.action.shape))
        lengths = 4.0 * rollout.obs[..., 2] + 1.0
        np.testing.assert_allclose(stats.lengths.mean, lengths[rollout.done].mean(), rtol=1e-5)
    assert (np.abs(noise[0] - noise[1]) > 1e-3).mean() > 0.9


@pytest.mark.parametrize("bounds", ["clip", "tanh"])
def test_recorded_actions_are_samples_and_executed_actions_are_bounded(bounds):
    spec, _, state = make_spec(Continuous, bounds)
    rollout = EnvRunner(spec, np.arange(N)).collect(state, GAMMA).rollout
    assert np.abs(rollout.action).max() > 1.0
    unit = np.tanh(rollout.action) if bounds == "tanh" else np.clip(rollout.action, -1.0, 1.0)
    taken = np.array([-2.0, 0.5]) + (unit + 1.0) / 2.0 * np.array([4.0, 2.5])
    time = 4.0 * rollout.obs[..., 2]
    np.testing.assert_allclose(rollout.reward, time + 0.5 * taken.sum(-1), rtol=1e-5, atol=1e-5)


DISCRETE, BOX = ActionSpec((), "int32", 3, start=-1), ActionSpec((2,), "float32", low=(-2.0, 0.5), high=(2.0, 3.0))
HALF = ActionSpec((2, 1), "float16", low=(-0.1, -np.inf), high=(np.inf, np.inf))
SEVERAL = ActionSpec((3, 1), "int16", nvec=(3, 2, 4), start=(1, 0, -5))
PICTURE = ObsSpec((5, 4, 3), "uint8")
MIXED = {1: (ObsSpec((), "int32", 3, start=-1), PICTURE), 0: ObsSpec((2, 2), "float32")}  # with integer keys


@pytest.mark.parametrize(
    ("obs_spec", "action_spec", "bounds", "normalized", "options"),
    [
        (ObsSpec((3,), "float32"), DISCRETE, "clip", False, {}),
        (ObsSpec((3,), "float32"), DISCRETE, "clip", True, {"hidden_sizes": ()}),
        (PICTURE, DISCRETE, "clip", False, {"activation": "relu"}),
        (PICTURE, BOX, "tanh", True, {"shared_torso": True}),
        (MIXED, DISCRETE, "clip", True, {"shared_torso": True}),
        (MIXED, BOX, "clip", False, {"hidden_sizes": (8, 8), "activation": "swish"}),
        (
            {"z": PICTURE, "action_mask": ObsSpec((3,), "int8"), "a": ObsSpec((2,), "float32")},
            DISCRETE,
            "clip",
            True,
            {},
        ),
        ({"a": MIXED, "action_mask": ObsSpec((9,), "bool")}, SEVERAL, "clip", False, {"recurrent": "gru"}),
        (MIXED, {"turn": DISCRETE, "arm": (BOX, SEVERAL)}, "tanh", True, {"recurrent": "lstm", "recurrent_size": 5}),
        (ObsSpec((3,), "float32"), HALF, "clip", False, {}),
        (ObsSpec((3,), "float32"), HALF, "tanh", True, {}),
    ],
    ids=str,
)
def test_numpy_and_xla_select_the_same_actions(obs_spec, action_spec, bounds, normalized, options):
    network = make_network(jppo.PPOConfig(**{"hidden_sizes": (8,)} | options), obs_spec, action_spec)
    action_spec = jax.tree.map(lambda spec: dataclasses.replace(spec, bounds=bounds), action_spec)
    policy = make_policy(network, obs_spec, action_spec)
    rng = np.random.default_rng(1)

    def draw_obs(spec):
        low, high = (spec.start, spec.start + spec.num_categories) if spec.num_categories else (0, 256)
        return rng.integers(low, high, (T, N, *spec.shape)).astype(spec.dtype) / (50 if spec.dtype == "float32" else 1)

    obs = jax.tree.map(lambda spec: np.asarray(draw_obs(spec), spec.dtype), obs_spec)
    if has_mask(obs_spec):
        mask = obs["action_mask"]
        legal = np.array([1, 1, 0] * (mask.shape[-1] // 3), mask.dtype).reshape(-1, 3)
        mask[...] = rng.permuted(np.broadcast_to(legal, (T, N, *legal.shape)), axis=-1).reshape(mask.shape)
    first = jax.tree.map(lambda x: x[0], obs)
    shapes = jax.eval_shape(policy.init, jax.random.key(0), first)
    params = jax.tree.map(lambda x: rng.normal(0.0, 0.5, x.shape).astype(x.dtype), shapes)
    stats = jax.tree.map(lambda x: moments_of(x, num_batch_dims=2), policy.prepare(obs)) if normalized else ()
    state, keys = PolicyState(params=params, obs_stats=stats), jax.random.split(jax.random.key(2), (T, N))
    chosen = []
    for make in (action_selection._select_with_xla, action_selection._select_with_numpy):
        draw, compile_ = make(policy)
        draws = np.asarray(draw(keys))
        act = compile_(jax.eval_shape(lambda: state), first, jax.ShapeDtypeStruct(draws.shape[1:], draws.dtype))(state)
        carry, steps = jax.tree.map(np.asarray, policy.initial_carry(N)), []
        for t in range(T):
            *actions, carry = act(jax.tree.leaves(jax.tree.map(lambda x, t=t: x[t], obs)), draws[t], carry)
            steps.append(actions)
        chosen.append((*jax.tree.map(lambda *x: np.stack(x), *steps), carry))
    (by_xla, xla_env, xla_carry), (by_numpy, numpy_env, numpy_carry) = chosen
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), numpy_carry, xla_carry)

    def compare(spec, xla, by_numpy, env_xla, env_numpy):
        assert env_xla.shape == env_numpy.shape == (T, N, *spec.shape)
        assert len(np.unique(xla)) > 1
        tolerance = 1e-4 if spec.is_box else 0.0
        np.testing.assert_allclose(by_numpy, xla, rtol=tolerance, atol=tolerance)
        tolerance = 2e-3 if spec.dtype == "float16" else tolerance
        np.testing.assert_allclose(env_numpy, env_xla, rtol=tolerance, atol=tolerance)

    jax.tree.map(compare, action_spec, by_xla, by_numpy, xla_env, numpy_env)


class Faint(Counting):
    """Returns values that underflow in float32, and makes NumPy raise on underflow."""

    action_space = gymnasium.spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([0.0, 1.0], np.float32))

    def __init__(self):
        super().__init__()
        np.seterr(all="raise")

    def see(self):
        return np.full(3, 1e-300)

    def step(self, action):
        return (self.see(), 1e-300, *super().step(action)[2:])


def test_underflow_does_not_raise():
    with np.errstate():  # restores the setting that the environment changes
        spec, _, state = make_spec(Faint)
        small = jax.tree.map(lambda x: x * np.float32(1e-30), state)
        assert np.isfinite(EnvRunner(spec, np.arange(N)).collect(small, GAMMA).rollout.value).all()
        assert np.geterr()["under"] == "raise"


def test_other_networks_select_actions_with_xla():
    class Own(ActorCritic):
        pass

    spec, policy, _ = make_spec(Counting)
    assert action_selection.make_action_selection(policy, N).sample_noise is not jax.random.key_data
    for network in (Own(spec.env.action_spec), ActorCritic(spec.env.action_spec, kind="cnn")):
        own = make_policy(network, spec.env.obs_spec, spec.env.action_spec)
        assert action_selection.make_action_selection(own, N).sample_noise is jax.random.key_data


def test_every_environment_has_a_separate_seed():
    spec, _, state = make_spec("CartPole-v1")
    index = [9, 2, 4, 1000, 0]
    first = EnvRunner(spec, np.array(index)).collect(state, GAMMA).rollout.obs[0]
    keys, _ = env_keys(jax.random.key(0), jnp.asarray(index))
    for key, obs in zip(keys, first, strict=True):
        seed = int(jax.random.key_data(key)[-1]) >> 1
        np.testing.assert_array_equal(gymnasium.make("CartPole-v1").reset(seed=seed)[0], obs)
    assert len(np.unique(first, axis=0)) == N


def test_the_next_rollout_does_not_change_a_fragment():
    spec, _, state = make_spec(Counting)
    runner = EnvRunner(spec, np.arange(N))
    first = runner.collect(state, GAMMA)
    before = jax.tree.map(np.copy, first)
    second = runner.collect(state, GAMMA)
    jax.tree.map(np.testing.assert_array_equal, first, before)
    assert (second.rollout.obs != first.rollout.obs).any()


def test_collecting_compiles_nothing_and_reports_its_times():
    spec, _, state = make_spec(Counting)
    runner, compiled = EnvRunner(spec, np.arange(N)), []

    def listen(event, duration, **kwargs):
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        seconds = runner.collect(jax.device_get(state), GAMMA).seconds
        assert compiled == []
        jax.jit(lambda x: x + 1)(0)
        assert compiled, "the listener does not work"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert seconds["env"] > 0.0
    assert seconds["policy"] > 0.0
    assert seconds["env"] + seconds["policy"] < seconds["rollout"] < 60.0


@pytest.mark.parametrize("source", [Counting, Parts, Continuous])
def test_the_blank_fragment_has_the_shapes_of_a_real_one(source):
    spec, _, state = make_spec(source)
    real, blank = EnvRunner(spec, np.arange(N)).collect(state, GAMMA), blank_fragment(spec, N)
    assert jax.tree.structure(real[:2]) == jax.tree.structure(blank[:2])
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), part[:2]) for part in (real, blank)]
    assert shapes[0] == shapes[1]


def test_errors_of_environments_are_raised_unchanged():
    spec, _, state = make_spec(Failing)
    runner = EnvRunner(spec, np.arange(N))
    with pytest.raises(ArithmeticError, match="the simulator broke"):
        runner.collect(state, GAMMA)
    runner.close()


def short_pendulum():
    return gymnasium.make("Pendulum-v1", max_episode_steps=4)


@pytest.mark.slow
def test_runners_of_any_size_collect_the_same():
    """tests/test_sebulba.py tests discrete actions, which are equal instead of close."""
    spec, _, state = make_spec(short_pendulum)
    states = [jax.tree.map(lambda x, scale=scale: scale * x, state) for scale in np.float32([1.0, 0.3, -2.0])]
    fragments = {}
    for size in (8, 4, 1):
        runners = [EnvRunner(spec, np.arange(first, first + size)) for first in range(0, 8, size)]
        fragments[size] = [[runner.collect(state, GAMMA) for runner in runners] for state in states]
    assert sum(fragment.rollout.done.sum() for (fragment,) in fragments[8]) > 5
    for (whole,), *divided in zip(*fragments.values(), strict=True):
        for parts in divided:
            joined = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *(part.rollout for part in parts))
            stats = functools.reduce(lambda a, b: a + b, (part.stats for part in parts))
            close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
            jax.tree.map(close, (joined, stats), whole[:2])
