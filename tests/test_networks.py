"""Tests networks, their validation, and the validation of optimizers."""

import functools
import re
import types
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import SMALL
from lenient import lenient, lenient_env
from probes import ObsActionReward

import jppo
from jppo.envs.spaces import ActionSpec, ObsSpec
from jppo.networks.actor_critic import make_network
from jppo.networks.distributions import Categorical, DiagGaussian
from jppo.networks.feed_forward import ConvTorso, Dense
from jppo.ppo.checks.network import check_network
from jppo.ppo.policy import make_policy
from jppo.ppo.types import PolicyState
from jppo.training.run import suggest_network

OBS = ObsSpec((3,), "float32")
BOX = ActionSpec((2,), "float32", low=(-1.0, -1.0), high=(1.0, 1.0))
TWO = ActionSpec((), "int32", num_actions=2)


class SharedScale(nn.Module):
    """A standard deviation without the batch's dim: each environment would draw with another dimension's."""

    broadcast: bool

    @nn.compact
    def __call__(self, obs):
        mean = nn.Dense(2)(obs)
        log_std = self.param("log_std", nn.initializers.zeros, (2,))
        return DiagGaussian(mean, jnp.broadcast_to(log_std, mean.shape) if self.broadcast else log_std), mean[:, 0]


class BareLogits(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return nn.Dense(2)(obs), nn.Dense(1)(obs)[:, 0]


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, obs):
        x = nn.Dropout(0.1, deterministic=False)(nn.Dense(2)(obs))
        return Categorical(x), x[:, 0]


class OneLogitTooMany(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return Categorical(nn.Dense(3)(obs)), nn.Dense(1)(obs)[:, 0]


def test_distribution_must_have_one_row_per_environment():
    check_network(SharedScale(broadcast=True), OBS, BOX)
    with pytest.raises(
        ValueError, match=r"shapes \[\(7, 2\), \(2,\)\] for a batch of 7; the first dim of each must be 7"
    ):
        check_network(SharedScale(broadcast=False), OBS, BOX)


def test_network_that_returns_logits_is_rejected():
    with pytest.raises(
        ValueError, match="is not a valid distribution: it has no method sample, log_prob, entropy, mode"
    ):
        check_network(BareLogits(), OBS, TWO)


@pytest.mark.parametrize(
    ("leaf", "dtype"),
    [
        (jnp.ones(2, jnp.complex64), "complex64"),
        (3, "int32"),
        (np.array(True), "bool"),
        (jax.random.key(0), "key<fry>"),
    ],
)
def test_parameters_must_be_real_floats(leaf, dtype):
    network = Given({"kernel": jnp.ones((3, 2)), "more": [leaf]}, lambda _, obs: obs[:, :2], lambda _, obs: obs[:, 0])
    with pytest.raises(ValueError, match=re.escape(f"parameter ['more'][0] is {dtype}, but must be a real float")):
        check_network(network, OBS, TWO)


def test_failing_network_gives_a_clear_error():
    with pytest.raises(ValueError, match=r"network = BareLogits is a class; pass an instance, BareLogits\(\.\.\.\)"):
        check_network(BareLogits, OBS, TWO)
    wrong = Given(jnp.ones((5, 2)), lambda params, obs: obs @ params, lambda _, obs: obs[:, 0])
    with pytest.raises(
        ValueError, match=r"the network's apply failed for observations of shape \(7, 3\): TypeError: dot"
    ):
        check_network(wrong, OBS, TWO)
    with pytest.raises(ValueError, match=r"the network's apply failed for .*: InvalidRngError: "):
        check_network(Noisy(), OBS, TWO)


def to_sums(grads, state, params=None):
    return jax.tree.map(jnp.sum, grads), state


def build(optimizer):
    return jppo.make_anakin(lenient_env("CartPole-v1"), jppo.PPOConfig(num_envs=4, num_steps=8), optimizer=optimizer)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            optax.adam(1e-3),
            r"failed \(TypeError: 'GradientTransformation.*' object is not callable\); it must be a function of",
        ),
        (lambda: optax.adam(1e-3), "function of the hyperparameters"),
        (lambda h: None, r"failed \(AttributeError: 'NoneType' object has no attribute 'init'\)"),
        (optax.identity, r"failed \(TypeError: identity\(\) takes 0 positional arguments but 1 was given"),
        (lambda h: optax.GradientTransformation(lambda params: (), to_sums), "optimizer returned updates .* for param"),
        (
            lambda h: optax.GradientTransformation(lambda p: 0, lambda g, s, p: (g, s + 0.5)),
            "optimizer changed its state",
        ),
        (lambda h: optax.lbfgs(), "those that need the loss's value, such as optax.lbfgs, do not fit"),
    ],
)
def test_invalid_optimizer_gives_a_clear_error(optimizer, message):
    with lenient(), pytest.raises(jppo.errors.Refused, match=message):
        build(optimizer)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda h: optax.rmsprop(h.learning_rate),
        lambda h: optax.adamw(h.learning_rate, weight_decay=1e-2),
        lambda h: optax.MultiSteps(optax.adam(h.learning_rate), 4),
        lambda h: optax.multi_transform(
            {"a": optax.adam(h.learning_rate), "b": optax.set_to_zero()}, {"network": "a", "loss": "b"}
        ),
    ],
)
def test_valid_optimizers_are_accepted(optimizer):
    with lenient():
        build(optimizer)


@jax.tree_util.register_pytree_node_class
class Holder:
    """A container that is equal to nothing but itself."""

    def __init__(self, leaf):
        self.leaf = leaf

    def tree_flatten(self):
        return (self.leaf,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def test_agent_can_be_made_while_tracing():
    network = Given(Holder(jnp.ones((1, 2))), lambda params, obs: obs @ params.leaf, lambda _, obs: obs[:, 0])

    def train(key):
        options = {"total_steps": 32, "network": network, "optimizer": lambda h: optax.trace(0.9)}
        return jppo.make_anakin(ObsActionReward(), SMALL(), **options).train(key)[1]["finite"]

    assert jax.jit(train)(jax.random.key(0)).all()


def test_class_with_static_methods_is_a_network():
    class Static:
        @staticmethod
        def init(key, obs):
            return jnp.ones((3, 2))

        @staticmethod
        def apply(params, obs):
            return Categorical(obs @ params), obs[:, 0]

    assert check_network(Static, OBS, TWO).shape == (3, 2)


def test_number_of_logits_must_match_number_of_actions():
    with pytest.raises(ValueError, match="3 logits; the environment has 2 actions"):
        check_network(OneLogitTooMany(), OBS, TWO)


@pytest.mark.slow
@pytest.mark.parametrize("size", [10, 40])
def test_images_with_channels_first(size):
    images = jax.random.uniform(jax.random.key(0), (2, size, size, 4))
    params = ConvTorso().init(jax.random.key(1), images)
    wanted = ConvTorso().apply(params, images)
    np.testing.assert_allclose(ConvTorso().apply(params, jnp.moveaxis(images, -1, 1)), wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [((84, 84, 4), True), ((4, 84, 84), True), ((1, 3, 3), True), ((3, 3, 1), True), ((5, 2, 4), False), ((4,), False)],
)
def test_cnn_needs_an_image(shape, fits):
    make = functools.partial(make_network, jppo.PPOConfig(network="cnn"), ObsSpec(shape, "uint8"), TWO)
    if fits:
        check_network(make(), ObsSpec(shape, "uint8"), TWO)
    else:
        with pytest.raises(ValueError, match="needs an image"):
            make()


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [
        ((210, 160, 3), {}, "observations are images (210, 160, 3), which network = mlp reads as 100,800 numbers"),
        ((210, 160, 3), {"network": "cnn"}, "network = cnn reads images [210, 160, 3] as 3 channels"),
        ((4, 84, 84), {"network": "cnn"}, "network = cnn reads images [4, 84, 84] as 4 channels"),
        ((10, 10, 4), {}, None),
        ((20_000,), {}, None),
    ],
    ids=str,
)
def test_hint_for_large_images(shape, options, said):
    given = suggest_network(jppo.PPOConfig(**options), ObsSpec(shape, "float32"))
    assert given == said or given.startswith(said)


class Half(nn.Module):
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, obs):
        x = obs.astype(self.dtype)
        dense = functools.partial(nn.Dense, dtype=self.dtype, param_dtype=self.dtype)
        return Categorical(dense(2)(x)), dense(1)(x)[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_parameters_with_16_bits(dtype):
    agent = jppo.make_anakin(ObsActionReward(), SMALL(), total_steps=64, network=Half(dtype))
    key, hyperparams = jax.random.key(0), jppo.Hyperparams(learning_rate=0.1)  # less than that is lost in rounding
    before = agent.init(key, hyperparams).train.policy_state.params
    with lenient():  # optax
        state, metrics = jax.jit(agent.train)(key, hyperparams)
    assert metrics["finite"].all()
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.train.policy_state.params), strict=True):
        assert old.dtype == new.dtype == dtype
        assert (old != new).any()


class Given:
    """A network made of two functions of its parameters."""

    def __init__(self, params, logits, value):
        self.params, self.logits, self.value, self.traced = params, logits, value, 0

    def init(self, key, obs):
        return self.params

    def apply(self, params, obs):
        self.traced += 1
        return Categorical(self.logits(params, obs)), self.value(params, obs)


def mixed(dtype):
    params = {"a": jnp.array([[0.5, -0.25]], dtype), "b": jnp.ones(1), "c": jnp.array([0.5, 0.25, -1.0], dtype)}

    def logits(params, obs):
        return obs @ params["a"].astype(jnp.float32) + params["c"].astype(jnp.float32)[None, :2]

    return Given(params, logits, lambda params, obs: obs @ params["b"] + params["c"][2].astype(jnp.float32))


@pytest.mark.slow
def test_parameters_with_different_dtypes():
    """One step of Adam has the size of the learning rate and the same direction for all dtypes."""
    config = SMALL(num_epochs=1, num_minibatches=1)
    after = []
    for dtype in (jnp.bfloat16, jnp.float32):
        network = mixed(dtype)
        agent = jppo.make_anakin(ObsActionReward(), config, total_steps=32, network=network)
        state, metrics = jax.jit(agent.train)(jax.random.key(0), jppo.Hyperparams(learning_rate=0.125))
        assert metrics["finite"].all()
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.train.opt_state)} == {"float32", "int32"}
        dtypes = [
            [leaf.dtype for leaf in jax.tree.leaves(tree)] for tree in (state.train.policy_state.params, network.params)
        ]
        assert dtypes[0] == dtypes[1]
        after.append([np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(state.train.policy_state.params)])
        before = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(network.params)]
        steps = np.concatenate([(new - old).ravel() for new, old in zip(after[-1], before, strict=True)])
        assert (abs(steps) > 0.1).all()
    for half, full in zip(*after, strict=True):
        np.testing.assert_allclose(half, full, atol=0.01)


def test_optimizer_gets_gradients_like_the_parameters():
    given = []

    def keep(grads, state, params):
        given.append(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), grads))
        return grads, state

    network = mixed(jnp.bfloat16)
    optimizer = optax.GradientTransformation(lambda params: (), keep)
    agent = jppo.make_anakin(ObsActionReward(), SMALL(), network=network, optimizer=lambda hyperparams: optimizer)
    jax.eval_shape(agent.step, jax.eval_shape(agent.init, jax.random.key(0)))
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), network.params)
    assert given[0] == {"network": shapes, "loss": ()}


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2])
def test_network_without_parameters(num_devices):
    network = Given((), lambda _, obs: jnp.zeros((len(obs), 2)), lambda _, obs: jnp.zeros(len(obs)))
    agent = jppo.make_anakin(ObsActionReward(), SMALL(), total_steps=64, network=network, num_devices=num_devices)
    state, metrics = jax.jit(agent.train)(jax.random.key(0))
    assert state.train.policy_state.params == ()
    np.testing.assert_array_equal(metrics["grad/norm"], 0.0)


def test_a_network_may_call_a_redefined_function():
    """In a notebook, a cell may redefine a function that `apply` calls."""

    def value_of(obs):
        return obs[:, 0]

    network = types.SimpleNamespace(
        init=lambda key, obs: {"w": jnp.zeros((3, 2))},
        apply=lambda params, obs: (Categorical(obs @ params["w"]), value_of(obs)),
    )
    check_network(network, OBS, TWO)

    def value_of(obs):  # noqa: F811
        return obs

    with pytest.raises(ValueError, match="the network's value has shape"):
        check_network(network, OBS, TWO)


def test_network_is_traced_once_for_rollouts_and_once_for_gradients():
    network = Given(jnp.ones((1, 2)), lambda params, obs: obs @ params, lambda params, obs: (obs @ params)[:, 0])
    agent = jppo.make_anakin(ObsActionReward(), SMALL(), network=network)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    network.traced = 0
    jax.eval_shape(agent.step, state)
    assert network.traced == 2


@pytest.mark.slow
def test_distributions_of_16_bit_networks_are_float32():
    policy = make_policy(Half(), OBS, TWO)
    obs = jnp.ones((4, 3))
    state = PolicyState(params=policy.init(jax.random.key(0), obs), obs_stats=())
    distribution, value = policy.step(state, obs)[:2]
    arrays = (distribution.logits, distribution.log_prob(jnp.zeros(4, jnp.int32)), value)
    assert [array.dtype for array in arrays] == [jnp.float32] * 3


@pytest.mark.slow
def test_dense_layer_equals_flax():
    x = jax.random.normal(jax.random.key(0), (5, 2, 3))
    ours, flaxs = Dense(4, 0.5), nn.Dense(4, kernel_init=nn.initializers.orthogonal(0.5))
    params = ours.init(jax.random.key(1), x)
    jax.tree.map(np.testing.assert_array_equal, params, flaxs.init(jax.random.key(1), x))
    np.testing.assert_allclose(ours.apply(params, x), flaxs.apply(params, x), rtol=1e-6, atol=1e-6)


def test_dense_layer_reports_invalid_weights():
    x, layer = jnp.ones((5, 3)), Dense(4, 1.0)
    weights = dict(layer.init(jax.random.key(0), x)["params"])
    for name, shape in {"kernel": (3, 1), "bias": (1,)}.items():
        with pytest.raises(flax.errors.ScopeParamShapeError, match=name):
            layer.apply({"params": weights | {name: jnp.ones(shape)}}, x)
        with pytest.raises(flax.errors.ScopeParamNotFoundError, match=name):
            layer.apply({"params": {other: array for other, array in weights.items() if other != name}}, x)
    with pytest.raises(flax.errors.ScopeCollectionNotFound):
        layer.apply({}, x)
    made = layer.apply({}, x, mutable=["params"], rngs={"params": jax.random.key(0)})[1]["params"]
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, weights)


def test_actor_and_critic_see_only_the_leaves_that_they_name():
    spec = {"seen": OBS, "privileged": OBS, "action_mask": ObsSpec((2,), "bool")}
    network = make_network(SMALL(actor_obs=("seen",), critic_obs=("privileged",)), spec, TWO)
    obs = {"seen": jnp.ones((4, 3)), "privileged": jnp.ones((4, 3))}
    params = network.init(jax.random.key(0), obs)
    before, value = network.apply(params, obs)
    for name, changes_actor in {"seen": True, "privileged": False}.items():
        distribution, new_value = network.apply(params, obs | {name: 2.0 * obs[name]})
        assert (distribution.logits != before.logits).any() == changes_actor
        assert (new_value == value).all() == changes_actor


@pytest.mark.parametrize("option", ["actor_obs", "critic_obs"])
@pytest.mark.parametrize(
    ("spec", "known"),
    [
        ({"x": OBS, "action_mask": ObsSpec((2,), "bool")}, "it has x"),
        ({"action_mask": ObsSpec((2,), "bool"), "x": OBS, "y": OBS}, "it has x, y"),
        (OBS, "it has no named leaves"),
    ],
    ids=["dict", "two", "array"],
)
def test_unknown_observation_leaves_are_named(option, spec, known):
    unknown, mask = (
        f"which the observation does not have; {known}",
        "which is never an input of the network; leave it out",
    )
    for name, problem in (("z", unknown), ("action_mask", mask)):
        message = f"{option} names '{name}', {problem}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            make_network(SMALL(**{option: (name,)}), spec, TWO)
