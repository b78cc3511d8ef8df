"""Tests the network of `benchmarks/fused_mlp.py`, a Pallas kernel, against jppo's."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lenient import lenient

from jppo.config.ppo import PPOConfig
from jppo.envs import make_env
from jppo.networks.actor_critic import make_network

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import fused_mlp


@pytest.fixture(autouse=True)
def promoting():
    """Allows promotion of dtypes, which Pallas needs."""
    with lenient():
        yield


def made(name, rows):
    env = make_env(name)
    network = make_network(PPOConfig(), env.obs_spec, env.action_spec)
    obs = jax.random.normal(jax.random.key(1), (rows, *env.obs_spec.shape))
    params = network.init(jax.random.key(0), obs)
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    return network, params, obs


def loss_of(network, obs):
    def loss(params):
        distribution, value = network.apply(params, obs)
        row = jnp.arange(1.0, len(obs) + 1.0) / len(obs)
        return jnp.sum(row * distribution.log_prob(distribution.mode() * 0)) + jnp.sum(jnp.square(value - row))

    return loss


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("CartPole-v1", 200), ("Pendulum-v1", 64)])
def test_kernel_equals_the_network(name, rows):
    network, params, obs = made(name, rows)
    want = jax.value_and_grad(loss_of(network, obs))(params)
    got = jax.value_and_grad(loss_of(fused_mlp.FusedActorCritic(network), obs))(params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="Pallas's Triton backend is deprecated, and wants a card")
def test_a_gpu_gets_kernels(monkeypatch):
    network, params, obs = made("CartPole-v1", 200)
    monkeypatch.setattr(fused_mlp, "_how", lambda: {"compiler_params": fused_mlp.plgpu.CompilerParams(num_warps=4)})
    traced = jax.jit(jax.grad(loss_of(fused_mlp.FusedActorCritic(network), obs))).trace(params)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("__gpu$xla.gpu.triton") == 2


@pytest.mark.slow
def test_unsupported_networks_are_rejected():
    network, params, obs = made("Breakout-MinAtar", 2)
    with pytest.raises(ValueError, match="observations have 400 numbers"):
        fused_mlp.FusedActorCritic(network).apply(params, obs)
    with pytest.raises(ValueError, match="two separate torsos"):
        fused_mlp.FusedActorCritic(network.clone(hidden_sizes=(64, 48)))
