"""Tests the memory estimate of microbatches, and that their mean is the minibatch's gradient."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jppo
from jppo.envs.spaces import ActionSpec, ObsSpec
from jppo.ppo.kernels.microbatches import accumulate_gradients, dense_residual_bytes, residual_bytes
from jppo.ppo.losses import ppo_loss
from jppo.ppo.networks import make_network
from jppo.ppo.policy import make_policy
from jppo.ppo.types import Batch, PolicyState

ROWS = 2048


@pytest.mark.slow
@pytest.mark.parametrize(("shared", "activation"), [(False, "tanh"), (True, "tanh"), (False, "relu"), (True, "swish")])
@pytest.mark.parametrize(
    ("inputs", "sizes"), [(4, (64, 64)), (400, (64, 64)), (17, (256, 32, 64)), (17, (128, 128)), (17, (8,))]
)
@pytest.mark.parametrize(
    "action", [ActionSpec((), "int32", num_actions=18), ActionSpec((1,), "float32")], ids=["18", "box-1"]
)
def test_memory_estimate_of_dense_layers_equals_the_traced_one(action, inputs, sizes, activation, shared):
    config, obs_spec = (
        jppo.PPOConfig(hidden_sizes=sizes, activation=activation, shared_torso=shared),
        ObsSpec((inputs,), "float32"),
    )
    network = make_network(config, obs_spec, action)
    policy, numbers = make_policy(network, obs_spec, action), jnp.zeros(ROWS)
    actions = jnp.zeros((ROWS, *action.policy_shape), jnp.int32 if action.num_actions else jnp.float32)
    names = ("log_prob", "value", "advantage", "target")
    batch = Batch(obs=jnp.zeros((ROWS, inputs)), action=actions, **dict.fromkeys(names, numbers))

    def loss(params):
        state = PolicyState(params=params, obs_stats=())
        return ppo_loss(lambda obs: policy.step(state, obs)[:2], batch, jppo.Hyperparams(), config, jax.random.key(0))

    params = jax.eval_shape(policy.init, jax.random.key(0), batch.obs)
    assert ROWS * dense_residual_bytes(network, inputs) == pytest.approx(residual_bytes(loss, params), rel=0.1)


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 5])
def test_microbatches_give_the_mean_over_all_rows(pieces):
    rows = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)

    def gradient(rows):
        return {"scale": jnp.square(rows).mean()}, rows.mean(0)

    scalars, vector = jax.jit(lambda x: accumulate_gradients(gradient, x, pieces, jnp.zeros(3), axis_name=None))(rows)
    np.testing.assert_allclose(vector, rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(scalars["scale"], np.square(rows).mean(), rtol=1e-5)


@pytest.mark.parametrize(("num_devices", "pieces", "at_once"), [(None, 4, 2), (None, 3, 1), (1, 2, 2), (2, 4, 1)])
def test_a_single_device_computes_two_microbatches_at_once(num_devices, pieces, at_once):
    axis_name = num_devices and "devices"

    def mean(rows):
        return accumulate_gradients(lambda rows: ({}, rows.mean(0)), rows, pieces, 0.0 * rows[0], axis_name)[1]

    if num_devices is not None:
        mesh, by_row = Mesh(np.array(jax.devices()[:num_devices]), (axis_name,)), PartitionSpec(axis_name)
        mean = jax.shard_map(mean, mesh=mesh, in_specs=by_row, out_specs=by_row)
    scans = re.findall(r"unroll=(\d+)", str(jax.make_jaxpr(mean)(jnp.ones((24, 3)))))
    assert scans == [str(at_once)]
