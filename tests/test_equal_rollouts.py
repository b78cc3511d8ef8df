"""Tests that both collectors return equal rollouts of the same environment, leaf by leaf.

Observations, rewards, discrete actions, shapes and dtypes are compared exactly. Real-valued outputs of the network
(values, log-probabilities, continuous actions and their consequences) may differ in the last digits, because the two
collectors compile the network for different batch sizes.
"""

import dataclasses
import functools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL
from flax import struct
from gymnax.environments import spaces

import jppo
from jppo.actors.env_runner import EnvRunner, RunnerSpec
from jppo.networks.actor_critic import make_network
from jppo.ppo.normalization import Moments
from jppo.ppo.policy import make_policy
from jppo.ppo.rollout import collect, init_collect
from jppo.ppo.types import PolicyState

GAMMA, STEPS = 0.5, 44
ENV_INDEX = np.array([7, 0, 3, 1, 12, 5], np.int32)
# Consecutive kinds of episodes: their lengths, and whether they are terminated, truncated, or both.
LENGTHS, TERMINATED, TRUNCATED = (4, 3, 5, 1, 1), (0, 1, 1, 1, 0), (1, 0, 1, 0, 1)
LOW, HIGH = (-2.0, 0.5), (2.0, 3.0)


@struct.dataclass
class State:
    ident: jax.Array  # [] i32, from the key of the first reset
    episode: jax.Array  # [] i32
    time: jax.Array  # [] i32
    last: jax.Array  # [] f32, the sum of the last action


class OnDevice:
    """An environment with gymnax's API. The key of the first reset and the actions determine everything."""

    default_params = None

    def __init__(self, kind, continuous):
        self.kind, self.continuous = kind, continuous

    def reset(self, key, params):
        ident = (jax.random.key_data(key)[-1] >> 1) % jnp.uint32(64)
        state = _begin(ident.astype(jnp.int32), jnp.zeros((), jnp.int32))
        return self._see(state), state

    def step(self, key, state, action, params):
        kind = (state.ident + state.episode) % 5
        last = jnp.sum(action) if self.continuous else action.astype(jnp.float32)
        reward = last + state.time.astype(jnp.float32)
        after = state.replace(time=state.time + 1, last=last)
        over = after.time >= jnp.asarray(LENGTHS)[kind]
        terminated, truncated = (over & (jnp.asarray(how)[kind] == 1) for how in (TERMINATED, TRUNCATED))
        following = jax.tree.map(functools.partial(jnp.where, over), _begin(state.ident, state.episode + 1), after)
        return self._see(following), following, reward, terminated, truncated, {"final_observation": self._see(after)}

    def _see(self, state):
        number = (state.ident + 3 * state.episode + state.time) % 16
        place = jnp.stack([state.ident / 64, state.episode / 4, state.time / 4, state.last])
        picture = jnp.full((3, 4, 1), 16 * number, jnp.uint8)
        return {"box": place, "uint8": picture, "discrete": number, "dict": {"z": place, "a": picture}}[self.kind]

    def action_space(self, params):
        return spaces.Box(jnp.asarray(LOW), jnp.asarray(HIGH), (2,)) if self.continuous else spaces.Discrete(3)

    def observation_space(self, params):
        return spaces.Discrete(16) if self.kind == "discrete" else None  # the other kinds do not need a space


def _begin(ident, episode):
    return State(ident=ident, episode=episode, time=jnp.zeros((), jnp.int32), last=jnp.zeros(()))


class OnHost(gymnasium.Env):
    """The same environment with Gymnasium's API."""

    def __init__(self, kind, continuous):
        place = gymnasium.spaces.Box(-np.inf, np.inf, (4,))
        picture = gymnasium.spaces.Box(0, 255, (3, 4, 1), np.uint8)
        both, number = gymnasium.spaces.Dict(z=place, a=picture), gymnasium.spaces.Discrete(16)
        self.observation_space = {"box": place, "uint8": picture, "discrete": number, "dict": both}[kind]
        box = gymnasium.spaces.Box(np.array(LOW, np.float32), np.array(HIGH, np.float32))
        self.action_space = box if continuous else gymnasium.spaces.Discrete(3)
        self.kind, self.ident, self.episode = kind, 0, -1

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.ident, self.episode = seed % 64, -1
        self.episode, self.time, self.last = self.episode + 1, 0, 0.0
        return self._see(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        kind, self.last = (self.ident + self.episode) % 5, np.sum(action)
        reward = self.last + self.time
        self.time += 1
        over = self.time >= LENGTHS[kind]
        return self._see(), reward, bool(over and TERMINATED[kind]), bool(over and TRUNCATED[kind]), {}

    def _see(self):
        number = (self.ident + 3 * self.episode + self.time) % 16
        place = np.array([self.ident / 64, self.episode / 4, self.time / 4, self.last], np.float32)
        picture = np.full((3, 4, 1), 16 * number, np.uint8)
        return {"box": place, "uint8": picture, "discrete": number, "dict": {"z": place, "a": picture}}[self.kind]


def policy_states(policy, obs_spec, normalize, num):
    """Yields states of policies with actions that depend strongly on the observation."""
    rng = np.random.default_rng(0)
    obs = jax.tree.map(lambda spec: jnp.zeros((1, *spec.shape), spec.dtype), obs_spec)
    shapes = jax.eval_shape(policy.init, jax.random.key(0), obs)
    for _ in range(num):
        params = jax.tree.map(lambda x: rng.normal(0.0, 0.4, x.shape).astype(x.dtype), shapes)
        mean = rng.normal(size=(4,)).astype(np.float32)
        stats = Moments(count=np.float32(9.0), mean=mean, m2=np.full(4, 12.0, np.float32)) if normalize else ()
        yield PolicyState(params=params, obs_stats=stats)


@pytest.mark.parametrize(
    ("kind", "continuous", "bounds", "num_steps"),
    [
        ("box", False, "clip", 11),
        ("box", True, "clip", 11),
        ("uint8", True, "tanh", 11),
        ("dict", False, "clip", 22),
        ("discrete", False, "clip", 1),
    ],
)
def test_both_collectors_give_the_same_rollouts(kind, continuous, bounds, num_steps):
    device, host = jppo.make_env(OnDevice(kind, continuous)), jppo.make_host_env(lambda: OnHost(kind, continuous))
    assert (device.obs_spec, device.action_spec) == (host.obs_spec, host.action_spec)
    config = jppo.PPOConfig(hidden_sizes=(8,), network="cnn" if kind == "uint8" else "mlp")
    network = make_network(config, host.obs_spec, host.action_spec)
    policy = make_policy(network, host.obs_spec, dataclasses.replace(host.action_spec, bounds=bounds))
    states = list(policy_states(policy, host.obs_spec, kind == "box", STEPS // num_steps))

    key = jax.random.key(3)
    run = jax.jit(functools.partial(collect, device, policy, num_steps))
    state = jax.jit(functools.partial(init_collect, device))(key, ENV_INDEX)
    spec = RunnerSpec(
        host, network, policy.action_spec, num_steps, jax.random.key_data(key), jax.eval_shape(lambda: states[0])
    )
    runner = EnvRunner(spec, ENV_INDEX)
    endings, actions = set(), set()
    for policy_state in states:
        state, expected, expected_stats = run(policy_state, state, jnp.float32(GAMMA))
        rollout, stats, *_ = runner.collect(policy_state, GAMMA)
        check_rollout(rollout, expected, continuous)
        jax.tree.map(functools.partial(check_leaf, exactly=False), stats, expected_stats)
        assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves((rollout, stats)))
        endings |= set(zip(rollout.terminated.ravel().tolist(), rollout.truncated.ravel().tolist(), strict=True))
        actions |= set(rollout.action.ravel().tolist())
    runner.close()
    assert len(endings) == 4, "the rollout must contain every kind of ending"
    assert len(actions) >= 3


def check_rollout(rollout, expected, continuous):
    assert jax.tree.structure(rollout) == jax.tree.structure(expected)
    for name, leaf in vars(rollout).items():
        computed = name in ("log_prob", "value", "next_value") or (continuous and name in ("obs", "action", "reward"))
        jax.tree.map(functools.partial(check_leaf, exactly=not computed, name=name), leaf, getattr(expected, name))


def check_leaf(given, expected, exactly, name=""):
    assert (given.shape, given.dtype) == (expected.shape, expected.dtype), name
    if exactly or not np.issubdtype(given.dtype, np.floating):
        np.testing.assert_array_equal(given, expected, name)
    else:
        np.testing.assert_allclose(given, expected, rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            {"recurrent": cell, "recurrent_size": 6, "sequence_length": 4, "keep_next_obs": True}
            for cell in ("gru", "lstm")
        ),
    ],
    ids=["feed-forward", "gru", "lstm"],
)
def test_both_modes_learn_the_same(options):
    """Compares all updates of two runs with the same seed."""
    config = SMALL(num_envs=8, num_epochs=2, num_minibatches=2, normalize_obs=True, normalize_reward=True, **options)
    on_device = jppo.make_anakin(OnDevice("box", False), config, total_steps=192)
    on_host = jppo.make_sebulba(lambda: OnHost("box", False), config, total_steps=192)
    key, rate = jax.random.key(5), jppo.Hyperparams(learning_rate=1e-2)
    expected, state = jax.jit(on_device.init)(key, rate), on_host.init(key, rate)
    step, runner = jax.jit(on_device.step), EnvRunner(on_host.runner_spec(key), np.arange(8))
    for _ in range(on_device.num_updates):
        expected, expected_metrics = step(expected)
        fragment = runner.collect(jax.device_get(state.policy_state), float(rate.gamma))
        state, metrics = on_host.update(state, *on_host.place([fragment]))
        close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
        jax.tree.map(close, metrics, expected_metrics)
        jax.tree.map(close, *(learnt.replace(key=()) for learnt in (state, expected.train)))
    assert state.update == 3
