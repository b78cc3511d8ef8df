"""Tests initial weights: orthogonal, and computed without LAPACK."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lenient import lenient

import jppo
from jppo.envs.spaces import ActionSpec, ObsSpec
from jppo.kernels.initial_weights import orthonormal
from jppo.networks.actor_critic import make_network
from jppo.ppo.policy import make_policy

DISCRETE, BOX = ActionSpec((), "int32", num_actions=3), ActionSpec((2,), "float32", low=(-1.0,) * 2, high=(1.0,) * 2)


def initial(shape, action, **options):
    """Returns the parameters of jppo's network, and those that its flax module initializes."""
    obs, spec = jnp.zeros((2, *shape)), ObsSpec(shape, "float32")
    network = make_network(jppo.PPOConfig(**options), spec, action)
    return (init(jax.random.key(5), obs) for init in (jax.jit(make_policy(network, spec, action).init), network.init))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "action", "options"),
    [
        ((4,), DISCRETE, {}),
        ((1,), BOX, {"shared_torso": True, "hidden_sizes": (7,)}),
        ((600,), BOX, {"hidden_sizes": (300, 64), "activation": "relu"}),
        ((10, 10, 4), DISCRETE, {"network": "cnn"}),
        ((40, 40, 3), DISCRETE, {"network": "cnn", "shared_torso": True}),
    ],
    ids=["dense", "one number", "large", "image", "screen"],
)
def test_weights_are_orthogonal_with_the_gains_of_the_flax_module(shape, action, options):
    ours, flaxs = initial(shape, action, **options)
    assert jax.tree.structure(ours) == jax.tree.structure(flaxs)
    for (path, weights), others in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(flaxs), strict=True):
        assert (weights.shape, weights.dtype) == (others.shape, others.dtype)
        if path[-1].key != "kernel":
            np.testing.assert_array_equal(weights, others)
            continue
        kernel, other = (np.asarray(x).reshape(-1, x.shape[-1]) for x in (weights, others))
        short = min(kernel.shape)
        products, wanted = (x @ x.T if len(x) == short else x.T @ x for x in (kernel, other))
        np.testing.assert_allclose(products, wanted, atol=1e-5)
        assert kernel.size < 8 or np.unique(np.abs(kernel)).size > kernel.size // 2


@pytest.mark.parametrize("number", [0, 1], ids=["jppo", "flax"])
def test_output_layers_have_gain_001_for_the_policy_and_1_for_the_value(number):
    """A policy that is almost uniform at first is one of PPO's implementation details."""
    params = list(initial((4,), DISCRETE))[number]["params"]
    policy, value = (np.linalg.svd(params[head]["kernel"], compute_uv=False) for head in ("policy", "value"))
    np.testing.assert_allclose(policy, 0.01, rtol=1e-4)
    np.testing.assert_allclose(value, 1.0, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(64, 64), (300, 64), (300, 300)], ids=["together", "apart", "two large"])
def test_layers_have_different_weights(sizes):
    (one, _), (same, _) = initial((600,), DISCRETE, hidden_sizes=sizes), initial((600,), DISCRETE, hidden_sizes=sizes)
    layers = [layer["kernel"] for torso in ("actor", "critic") for layer in one["params"][torso].values()]
    corners = [kernel[:64, :64] / np.linalg.norm(kernel[:64, :64]) for kernel in layers]
    alike = [abs(float((a * b).sum())) for i, a in enumerate(corners) for b in corners[:i]]
    assert max(alike) < 0.1
    jax.tree.map(np.testing.assert_array_equal, one, same)


def test_weights_are_uniformly_distributed():
    """Every entry of a uniformly distributed orthogonal 3 x 3 matrix has mean 0 and variance 1/3, and both signs of the
    determinant are equally likely."""
    bases = orthonormal(jax.random.normal(jax.random.key(0), (20_000, 3, 3)))
    error = 4 / math.sqrt(len(bases))
    np.testing.assert_allclose(bases.mean(axis=0), 0, atol=error * math.sqrt(1 / 3))
    np.testing.assert_allclose((bases**2).mean(axis=0), 1 / 3, atol=error * 0.3)
    assert abs(np.linalg.det(bases).mean()) < error


@pytest.mark.slow
def test_a_basis_is_that_of_a_qr_decomposition():
    rows = jax.random.normal(jax.random.key(1), (4, 12, 30))
    basis, triangle = np.linalg.qr(np.swapaxes(np.asarray(rows, np.float64), 1, 2))
    signs = np.sign(np.diagonal(triangle, axis1=1, axis2=2))
    np.testing.assert_allclose(orthonormal(rows), np.swapaxes(basis * signs[:, None], 1, 2), atol=1e-5)


@pytest.mark.parametrize("small", [1e-3, 1e-6])
def test_an_orthonormal_basis_of_nearly_dependent_rows(small):
    one, other = jax.random.normal(jax.random.key(0), (2, 20, 30))
    rows = one[:1] + small * other  # almost the same direction
    basis = orthonormal(rows[None])[0]
    np.testing.assert_allclose(basis @ basis.T, jnp.eye(20), atol=1e-5)
    np.testing.assert_allclose(basis[0], rows[0] / jnp.linalg.norm(rows[0]), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("env", "network"), [("CartPole-v1", "mlp"), ("Breakout-MinAtar", "cnn")])
def test_programs_call_no_lapack(env, network):
    with lenient():
        agent = jppo.make_anakin(env, jppo.PPOConfig(num_envs=8, num_steps=8, network=network))
        assert "custom_call" not in jax.jit(agent.train).lower(jax.random.key(0)).as_text()
