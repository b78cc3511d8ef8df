"""Tests that the mean of microbatches is the minibatch's gradient."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jppo.kernels.microbatches import accumulate_gradients


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
