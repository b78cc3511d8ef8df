"""Tests `make_env`, and the conversion of actions for the environment."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces
from lenient import lenient_env
from probes import Counting, Probe

import jppo
from jppo.envs import available, make_env
from jppo.envs import gymnax as envs_gymnax
from jppo.envs.spaces import ActionSpec, ObsSpec, to_env_action
from jppo.networks.actor_critic import make_network
from jppo.ppo.policy import make_policy, prepare_obs

INF = float("inf")


def steps_to_the_end(env, limit=20):
    """Returns the length of the first episode with action 0, and whether it was truncated."""
    _, state = env.reset(jax.random.key(0))
    for count in range(1, limit + 1):
        after = env.step(jax.random.key(count), state, jnp.zeros(env.action_spec.shape, env.action_spec.dtype))
        if after.terminated or after.truncated:
            return count, bool(after.truncated)
        state = after.state
    return None


def box(low, high):
    return ActionSpec((len(low),), "float32", low=tuple(low), high=tuple(high))


@pytest.mark.slow
def test_gymnax_is_imported_without_plotting_libraries():
    code = """
import sys
from jppo.envs import available, make_env
available()
assert not {"seaborn", "pandas", "matplotlib", "matplotlib.pyplot", "PIL"} & set(sys.modules), "imported early"
pong = make_env("Pong-misc")
from gymnax.environments.misc import pong as module
assert len(module.sns.color_palette("cubehelix", 3)) == 3
assert sys.modules["seaborn"].__file__, "the real module must be imported on use"
assert module.colors.ListedColormap(["red", "blue"]).N == 2
import matplotlib.pyplot
assert matplotlib.pyplot.__file__ and module.plt.Axes is matplotlib.pyplot.Axes
from jppo.envs.gymnax import _Placeholder
assert _Placeholder("matplotlib").pyplot is matplotlib.pyplot, "of a thread that imported matplotlib at the same time"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_lazy_module_imports_the_real_module_on_first_use(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    later = envs_gymnax._Placeholder("colorsys")
    monkeypatch.setitem(sys.modules, "colorsys", later)
    assert not hasattr(later, "__path__")
    assert sys.modules["colorsys"] is later, "hasattr must not import the module"
    assert later.rgb_to_hsv(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0), "attributes must come from the real module"
    assert sys.modules["colorsys"] is not later
    later.leave()
    assert "colorsys" in sys.modules, "the real module must stay"


def test_overrides_replace_parameters():
    assert steps_to_the_end(make_env(Counting(), max_steps_in_episode=2)) == (2, True)
    assert steps_to_the_end(make_env(Probe())) == (1, False)
    env = lenient_env("CartPole-v1", max_steps_in_episode=3, gravity=5.0)
    assert steps_to_the_end(env) == (3, True)
    assert env.params.gravity == 5.0


def test_parameters_can_be_passed():
    params = dataclasses.replace(Counting().default_params, max_steps_in_episode=1)
    assert steps_to_the_end(make_env(Counting(), params)) == (1, True)
    assert steps_to_the_end(make_env(Counting(), params, max_steps_in_episode=2)) == (2, True)


def test_unknown_overrides_are_refused():
    with pytest.raises(
        ValueError, match=r"unknown parameters max_steps; did you mean max_steps_in_episode\? choose from max_steps_in_"
    ):
        make_env(Counting(), max_steps=3)


def test_a_made_environment_is_returned_unchanged():
    env = make_env(Counting())
    assert make_env(env) is env
    with pytest.raises(ValueError, match="Counting is already made"):
        make_env(env, max_steps_in_episode=3)


class Delegating:
    """A wrapper like gymnax's: attributes that it lacks are those of the wrapped environment."""

    def __init__(self, env):
        self._env = env

    def __getattr__(self, name):
        return getattr(self._env, name)


def test_wrappers_that_delegate_attributes_can_be_made_and_checked():
    env = Delegating(Probe())
    assert make_env(env).obs_spec == make_env(Probe()).obs_spec
    assert jppo.check_env(env, steps=20).passed


def test_names_of_environments():
    assert len(available()) == len(set(available()))
    assert {"CartPole-v1", "Pendulum-v1", "Breakout-MinAtar"} <= set(available())
    assert lenient_env("CartPole-v1").name == "CartPole-v1"
    assert make_env(Counting()).name == "Counting"


def test_the_final_observation_is_the_true_successor_at_every_step():
    env = make_env(Counting())
    obs, state = env.reset(jax.random.key(0))
    ends = 0
    for i in range(12):
        after = env.step(jax.random.key(i + 1), state, jnp.zeros((), jnp.int32))
        np.testing.assert_array_equal(after.final_obs, obs + np.asarray([0.0, 0.0, 1.0], np.float32))
        done = bool(after.terminated | after.truncated)
        assert (after.obs == after.final_obs).all() == (not done)
        assert after.obs[2] == (0.0 if done else obs[2] + 1.0)
        obs, state, ends = after.obs, after.state, ends + done
    assert ends >= 2


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "Catch-bsuite"])
def test_a_step_keeps_the_types_of_a_reset(name):
    """Includes weak types, because another weak type would compile the step twice."""
    env = lenient_env(name)

    def types(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)

    obs, state = env.reset(jax.random.key(0))
    after = env.step(jax.random.key(1), state, jnp.zeros(env.action_spec.shape, env.action_spec.dtype))
    assert types(after.obs) == types(obs)
    assert types(after.state) == types(state)
    assert types(after[2:5]) == (((), jnp.float32, False), ((), bool, False), ((), bool, False))


def test_specs_of_cartpole_and_pendulum():
    cartpole, pendulum = lenient_env("CartPole-v1"), lenient_env("Pendulum-v1")
    assert cartpole.obs_spec == ObsSpec((4,), "float32")
    assert cartpole.action_spec == ActionSpec((), "int32", num_actions=2)
    assert pendulum.obs_spec == ObsSpec((3,), "float32")
    assert pendulum.action_spec == box([-2.0], [2.0])
    assert cartpole.action_spec.policy_shape == ()
    assert pendulum.action_spec.policy_shape == (1,)


def test_discrete_observations_become_one_hot():
    env = lenient_env("FrozenLake-misc")
    assert env.obs_spec == ObsSpec((), "int32", num_categories=16)
    assert env.obs_spec.feature_shape == (16,)
    network = make_network(jppo.PPOConfig(hidden_sizes=(8,)), env.obs_spec, env.action_spec)
    policy = make_policy(network, env.obs_spec, env.action_spec)
    obs = jnp.asarray([0, 7, 15], jnp.int32)
    np.testing.assert_array_equal(policy.prepare(obs), np.eye(16, dtype=np.float32)[[0, 7, 15]])
    params = policy.init(jax.random.key(0), obs)
    assert params["params"]["actor"]["Dense_0"]["kernel"].shape == (16, 8)


def test_uint8_observations_are_scaled_to_0_and_1():
    specs = {"image": ObsSpec((2,), "uint8"), "flag": ObsSpec((), "bool")}
    features = prepare_obs(specs, {"image": jnp.asarray([[0, 255]], jnp.uint8), "flag": jnp.asarray([True])})
    np.testing.assert_array_equal(features["image"], [[0.0, 1.0]])
    np.testing.assert_array_equal(features["flag"], [1.0])
    assert {leaf.dtype for leaf in jax.tree.leaves(features)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("spec", "bounds", "sample", "expected"),
    [
        (box([-2.0], [2.0]), "clip", [-5.0, -1.0, -0.5, 0.0, 1.0, 5.0], [-2.0, -2.0, -1.0, 0.0, 2.0, 2.0]),
        (box([0.0], [10.0]), "clip", [-3.0, -1.0, 0.0, 0.5, 3.0], [0.0, 0.0, 5.0, 7.5, 10.0]),
        (box([-2.0], [2.0]), "tanh", [-50.0, 0.0, 0.5, 50.0], [-2.0, 0.0, 2.0 * np.tanh(0.5), 2.0]),
        (box([0.0], [10.0]), "tanh", [-50.0, 0.0, 50.0], [0.0, 5.0, 10.0]),
        (box([1.0], [INF]), "clip", [-3.0, 0.5, 3.0], [1.0, 1.0, 3.0]),
        (box([1.0], [INF]), "tanh", [-3.0, 0.5, 3.0], [1.0, 1.0, 3.0]),
        (box([-INF], [1.0]), "clip", [-3.0, 0.5, 3.0], [-3.0, 0.5, 1.0]),
        (box([-INF], [INF]), "clip", [-3.0, 0.5, 300.0], [-3.0, 0.5, 300.0]),
        (box([-INF], [INF]), "tanh", [-3.0, 0.5, 300.0], [-3.0, 0.5, 300.0]),
    ],
)
def test_actions_are_fitted_into_their_bounds(spec, bounds, sample, expected):
    spec = dataclasses.replace(spec, bounds=bounds)
    action = to_env_action(spec, jnp.asarray(sample, jnp.float32)[:, None])
    assert action.shape == (len(sample), 1)
    np.testing.assert_allclose(action[:, 0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bounds", ["clip", "tanh"])
def test_every_dimension_has_its_own_bounds(bounds):
    spec = box([-2.0, 0.0, -INF, -INF, 3.0], [2.0, 1.0, 0.5, INF, INF])
    sample = 3.0 * jax.random.normal(jax.random.key(0), (7, 6, 5))
    spec = dataclasses.replace(spec, bounds=bounds)
    action = np.asarray(to_env_action(spec, sample))
    assert action.shape == (7, 6, 5)
    assert (action >= spec.low).all()
    assert (action <= spec.high).all()
    np.testing.assert_array_equal(action[..., 3], sample[..., 3])
    np.testing.assert_array_equal(action[2, 3], to_env_action(spec, sample[2, 3]))


def test_actions_have_the_shape_and_dtype_of_the_space():
    matrix = ActionSpec((2, 3), "float16", low=(-1.0,) * 6, high=(1.0,) * 6)
    assert matrix.policy_shape == (6,)
    action = to_env_action(matrix, jnp.linspace(-0.5, 0.5, 6)[None])
    assert (action.shape, action.dtype) == ((1, 2, 3), jnp.float16)
    np.testing.assert_allclose(action[0], np.linspace(-0.5, 0.5, 6).reshape(2, 3), atol=1e-3)
    scalar = ActionSpec((), "float32", low=(-2.0,), high=(2.0,))
    assert scalar.policy_shape == (1,)
    assert to_env_action(scalar, jnp.ones((4, 1))).shape == (4,)
    discrete = ActionSpec((), "int32", num_actions=3)
    np.testing.assert_array_equal(to_env_action(discrete, jnp.asarray([0, 2], jnp.int32)), [0, 2])


@pytest.mark.parametrize(
    ("low", "high", "shape"),
    [(-1.0, 2.0, (2,)), (np.asarray([-1.0, -1.0]), 2.0, (2,)), (jnp.asarray(-1.0), jnp.full((2,), 2.0), (2,))],
)
def test_bounds_may_be_scalars_or_arrays(low, high, shape):
    class Bounded(Probe):
        def action_space(self, params=None):
            return spaces.Box(low, high, shape)

    assert make_env(Bounded()).action_spec == box([-1.0, -1.0], [2.0, 2.0])


@pytest.mark.slow
def test_the_environment_receives_the_bounded_action():
    class Echo(Probe):
        """The reward is the action."""

        def action_space(self, params=None):
            return spaces.Box(0.0, 10.0, (1,))

        def reward(self, state, action):
            return action[0]

    agent = jppo.make_anakin(Echo(), jppo.PPOConfig(num_envs=4, num_steps=8, hidden_sizes=(8,)))
    state = agent.init(jax.random.key(0))
    _, metrics = agent.step(state)
    assert 0.0 < metrics["episode/return_mean"] < 10.0
    assert metrics["episode/return_std"] > 1.0


def test_bounds_of_the_largest_float_mean_unbounded():
    huge = float(np.finfo(np.float32).max)
    spec = ActionSpec(shape=(2,), dtype="float32", low=(-huge, -1.0), high=(huge, 3.0))
    np.testing.assert_allclose(to_env_action(spec, jnp.array([[5.0, 0.5]])), [[5.0, 2.0]])
