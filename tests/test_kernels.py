"""Each tuned kernel computes the same as its plain form, alone and in whole updates."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gymnax.environments import spaces
from probes import BoxTimeLimit, Counting, ObsActionReward

import jppo
from jppo import kernels
from jppo.envs.spaces import ActionSpec, ObsSpec
from jppo.kernels import categorical, convolution, dense, finite, gradient, joined_layers, permutation
from jppo.networks.actor_critic import make_network

TWO_ACTIONS = ActionSpec((), "int32", num_actions=2)
assert_close = functools.partial(chex.assert_trees_all_close, rtol=1e-4, atol=1e-5)


class Image(ObsActionReward):
    """Returns the cue as a square image."""

    def __init__(self, width):
        super().__init__()
        self.width = width

    def get_obs(self, state, params=None, key=None):
        pixels = jnp.linspace(-1.0, 1.0, self.width**2).reshape(self.width, self.width, 1)
        return super().get_obs(state, params, key).sum() * pixels

    def observation_space(self, params=None):
        return spaces.Box(-10.0, 10.0, (self.width, self.width, 1), jnp.float32)


def after_two_updates(env, config, params=None):
    """Returns the initial parameters, and the parameters after two rollouts and updates."""
    agent = jppo.make_anakin(env, config)
    state, step = jax.jit(agent.init)(jax.random.key(0)), jax.jit(agent.step)
    params = state.train.policy_state.params if params is None else params
    state = state.replace(train=state.train.replace(policy_state=state.train.policy_state.replace(params=params)))
    for _ in range(2):
        state, metrics = step(state)
        assert bool(metrics["finite"])
    return params, state.train.policy_state.params


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "options"),
    [
        (ObsActionReward(), {"normalize_obs": True}),
        (BoxTimeLimit(), {"kl_control": "adapt"}),
        (Image(6), {"network": "cnn", "hidden_sizes": (8,)}),
        (Image(36), {"network": "cnn", "hidden_sizes": (8,), "num_envs": 2, "num_steps": 4}),
        (Counting(), {"recurrent": "gru", "recurrent_size": 5, "sequence_length": 8}),
        (Counting(), {"recurrent": "lstm", "recurrent_size": 6}),
    ],
    ids=["categorical", "gaussian", "images", "screens", "gru", "lstm"],
)
def test_whole_updates_agree_with_the_plain_kernels(monkeypatch, env, options):
    """Uses the same parameters and permutations, because the plain forms draw others."""
    monkeypatch.setattr(permutation, "permute_index_plain", permutation.permute_index_tuned)
    monkeypatch.setattr("jppo.kernels.gradient._CACHE_BYTES", 4096)
    monkeypatch.setattr("jppo.kernels.dense.WIDE", 1)
    monkeypatch.setattr("jppo.kernels.joined_layers.WIDE", 1)
    config = jppo.PPOConfig(**{"num_envs": 8, "num_steps": 16, "num_epochs": 2, "num_minibatches": 2} | options)
    params, tuned = after_two_updates(env, config)
    monkeypatch.setattr(kernels, "ENABLED", False)
    _, plain = after_two_updates(env, config, params)
    assert jax.tree.structure(plain) == jax.tree.structure(tuned)
    assert_close(plain, tuned)


@pytest.mark.slow
def test_plain_kernels_can_train_from_their_own_initial_weights(monkeypatch):
    monkeypatch.setattr(kernels, "ENABLED", False)
    config = jppo.PPOConfig(num_envs=8, num_steps=16, num_epochs=1, num_minibatches=2, hidden_sizes=(8,))
    before, after = after_two_updates(ObsActionReward(), config)
    chex.assert_trees_all_equal_shapes_and_dtypes(before, after)
    assert any((x != y).any() for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (4, 64), (64, 2), (200, 8)])
def test_gradients_of_affine_equal_those_of_the_plain_form(rows, inputs, outputs):
    keys = jax.random.split(jax.random.key(0), 4)
    x, kernel = jax.random.normal(keys[0], (rows, inputs)), jax.random.normal(keys[1], (inputs, outputs))
    bias, weights = jax.random.normal(keys[2], (outputs,)), jax.random.normal(keys[3], (rows, outputs))

    def gradient(function):
        return jax.grad(lambda *args: jnp.sum(weights * jnp.tanh(function(*args))), (0, 1, 2))(x, kernel, bias)

    chex.assert_trees_all_close(gradient(dense.affine_tuned), gradient(dense.affine_plain), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_affine_has_forward_and_higher_derivatives():
    x, kernel = jax.random.normal(jax.random.key(0), (5, 3)), jax.random.normal(jax.random.key(1), (3, 2))
    args = (x, kernel, jnp.ones(2))

    def loss(function, args):
        return jnp.sum(jnp.tanh(function(*args)) ** 2)

    tuned, plain = functools.partial(loss, dense.affine_tuned), functools.partial(loss, dense.affine_plain)
    derivatives = {
        "forward": lambda f: jax.jvp(f, (args,), (args,)),
        "forward over reverse": lambda f: jax.jvp(jax.grad(f), (args,), (args,)),
        "reverse over reverse": lambda f: jax.grad(lambda a: sum(map(jnp.sum, jax.grad(f)(a))))(args),
        "vmapped": lambda f: jax.vmap(jax.grad(f))(jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), args)),
    }
    for derivative in derivatives.values():
        assert_close(derivative(tuned), derivative(plain))


@pytest.mark.slow
def test_gradients_of_affine_have_the_dtypes_of_the_arguments():
    args = (jnp.ones((4, 3), jnp.bfloat16), jnp.ones((3, 2), jnp.bfloat16), jnp.zeros(2, jnp.bfloat16))
    grads = jax.grad(lambda args: jnp.sum(dense.affine_tuned(*args)))(args)
    assert [grad.dtype for grad in grads] == [jnp.bfloat16] * 3


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("sizes", [(), (8, 6)], ids=str)
def test_joined_first_layers_equal_separate_ones(monkeypatch, sizes, shared):
    config = jppo.PPOConfig(hidden_sizes=sizes, shared_torso=shared)
    network = make_network(config, ObsSpec((13, 10), "float32"), TWO_ACTIONS)
    obs = jax.random.normal(jax.random.key(0), (128, 13, 10))
    params = network.init(jax.random.key(1), obs)

    def loss(params):
        distribution, value = network.apply(params, obs)
        return jnp.sum(distribution.logits**2) + jnp.sum(jnp.tanh(value)), (distribution.logits, value)

    def is_joined():
        def traced_anew(params):
            return loss(params)

        return "f32[130,16]" in str(jax.make_jaxpr(traced_anew)(params))

    joined = jax.value_and_grad(loss, has_aux=True)(params)
    assert is_joined() == (bool(sizes) and not shared)
    monkeypatch.setattr(joined_layers, "WIDE", 10**9)
    assert not is_joined()
    chex.assert_trees_all_equal(params, network.init(jax.random.key(1), obs))
    chex.assert_trees_all_close(joined, jax.value_and_grad(loss, has_aux=True)(params), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 127])
def test_first_layers_are_not_joined_for_few_rows(rows):
    network = make_network(jppo.PPOConfig(hidden_sizes=(8,)), ObsSpec((200,), "float32"), TWO_ACTIONS)
    obs = jnp.ones((rows, 200))
    params = network.init(jax.random.key(1), obs)
    assert "concatenate" not in str(jax.make_jaxpr(lambda params: network.apply(params, obs)[1])(params))


def test_exported_network_with_wide_inputs_takes_any_batch_size():
    network = make_network(jppo.PPOConfig(hidden_sizes=(8,)), ObsSpec((200,), "float32"), TWO_ACTIONS)
    params = network.init(jax.random.key(1), jnp.ones((1, 200)))
    (rows,) = jax.export.symbolic_shape("rows")
    obs = jax.ShapeDtypeStruct((rows, 200), jnp.float32)
    exported = jax.export.export(jax.jit(lambda obs: network.apply(params, obs)[1]))(obs)
    assert exported.call(jnp.ones((300, 200))).shape == (300,)


@pytest.mark.slow
def test_convolution_equals_its_plain_form():
    keys = jax.random.split(jax.random.key(0), 3)
    args = (jax.random.normal(keys[0], (2, 10, 8, 4)), jax.random.normal(keys[1], (36, 16)), jnp.arange(16.0))
    weights = jax.random.normal(keys[2], (2, 8, 6, 16))

    def value_and_gradient(function):
        return jax.value_and_grad(lambda *args: jnp.sum(weights * function(*args)), (0, 1, 2))(*args)

    tuned = value_and_gradient(convolution.convolve_3x3_tuned)
    plain = value_and_gradient(convolution.convolve_3x3_plain)
    chex.assert_trees_all_close(tuned, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stride"), [(8, 4), (4, 2), (3, 1)])
def test_strided_convolution_equals_its_plain_form(size, stride):
    """The height is not a multiple of the stride."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, kernel = jax.random.normal(keys[0], (2, 23, 16, 3)), jax.random.normal(keys[1], (size, size, 3, 5))
    shape = jax.eval_shape(lambda: convolution.convolve_plain(x, kernel, jnp.arange(5.0), stride)).shape
    weights = jax.random.normal(keys[2], shape)

    def value_and_gradient(function):
        total = lambda *args: jnp.sum(weights * function(*args, stride))  # noqa: E731
        return jax.value_and_grad(total, (0, 1, 2))(x, kernel, jnp.arange(5.0))

    tuned, plain = map(value_and_gradient, (convolution.convolve_tuned, convolution.convolve_plain))
    chex.assert_trees_all_close(tuned, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_categorical_kernels_equal_their_plain_forms():
    logits = jax.random.normal(jax.random.key(0), (6, 5, 3)).at[0, 0, 1].set(-jnp.inf)
    action = jax.random.randint(jax.random.key(1), (6, 5), 0, 3).at[0, 0].set(2).at[1, :2].set(jnp.array([-1, 3]))
    valid = (action >= 0) & (action < 3)

    def outputs(log_prob, entropy):
        def total(logits):
            return jnp.sum(jnp.where(valid, log_prob(logits, jnp.clip(action, 0, 2)), 0.0) + entropy(logits))

        return log_prob(logits, action), entropy(logits), jax.grad(total)(logits)

    tuned = outputs(categorical.log_prob_tuned, categorical.entropy_tuned)
    assert_close(tuned, outputs(categorical.log_prob_plain, categorical.entropy_plain))
    np.testing.assert_array_equal(np.isnan(tuned[0]), ~valid)


@pytest.mark.parametrize("enabled", [True, False])
def test_packed_gradients_are_restored(monkeypatch, enabled):
    monkeypatch.setattr(kernels, "ENABLED", enabled)
    tree = {"a": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "b": jnp.ones(())}
    packed = gradient.pack(tree)
    assert len(jax.tree.leaves(packed)) == (1 if enabled else 2)
    chex.assert_trees_all_equal(gradient.unpack(packed, tree), tree)


@pytest.mark.slow
def test_flat_adam_equals_adam():
    params = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(())}
    flat, plain = gradient.flatten(optax.scale_by_adam()), optax.scale_by_adam()
    states = flat.init(params), plain.init(params)
    for step in range(3):
        grads = jax.tree.map(lambda x, step=step: jnp.sin(x + step), params)
        ours, first = flat.update(grads, states[0])
        theirs, second = plain.update(grads, states[1])
        states = first, second
        chex.assert_trees_all_close(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("all_finite", [finite.all_finite_tuned, finite.all_finite_plain])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["scalar", "small", "large", "half", "complex"])
def test_a_number_that_is_not_finite_is_found_in_any_array(monkeypatch, all_finite, name, bad):
    monkeypatch.setattr(finite, "SMALL_SIZE", 64)
    leaves = {
        "scalar": jnp.ones(()),
        "small": jnp.ones((3, 5)),
        "large": jnp.ones((2, 64)),
        "half": jnp.ones(4, jnp.bfloat16),
        "complex": jnp.ones(2, jnp.complex64),
    }
    assert bool(all_finite(list(leaves.values())))
    bad = complex(0.0, bad) if name == "complex" else bad
    leaves[name] = leaves[name].at[(-1,) * leaves[name].ndim].set(bad)
    assert not bool(all_finite(list(leaves.values())))


def test_integers_and_keys_are_always_finite():
    assert bool(
        finite.all_finite({"count": jnp.full(2, 2**31 - 1, jnp.int32), "key": jax.random.key(0), "x": jnp.ones(1)})
    )
