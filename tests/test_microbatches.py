"""Tests that the mean of microbatches is the minibatch's gradient."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jppo.kernels import gradient


def loss(params, rows):
    """A mean over rows; its gradient is the rows' mean."""
    return (rows[0] @ params).mean(), {"scale": jnp.square(rows).mean()}


def differentiate(monkeypatch, pieces, rows, axis_name=None):
    """Returns (loss, metrics), gradient of rows [B, 3] in this number of pieces."""
    monkeypatch.setattr(gradient, "num_microbatches", lambda *args: pieces)
    return gradient.value_and_grad(loss, rows[None], is_mean=True, axis_name=axis_name)(jnp.ones(3))


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 5])
def test_microbatches_give_the_mean_over_all_rows(monkeypatch, pieces):
    rows = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    (total, metrics), vector = jax.jit(lambda rows: differentiate(monkeypatch, pieces, rows))(rows)
    np.testing.assert_allclose(total, rows.sum(1).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["scale"], np.square(rows).mean(), rtol=1e-5)
    np.testing.assert_allclose(vector, rows.mean(0), rtol=1e-5)


@pytest.mark.parametrize(("num_devices", "pieces", "at_once"), [(None, 4, 2), (None, 3, 1), (1, 2, 2), (2, 4, 1)])
def test_a_single_device_computes_two_microbatches_at_once(monkeypatch, num_devices, pieces, at_once):
    axis_name = num_devices and "devices"

    def mean(rows):
        return differentiate(monkeypatch, pieces, rows, axis_name)[1]

    if num_devices is not None:
        mesh, by_row = Mesh(np.array(jax.devices()[:num_devices]), (axis_name,)), PartitionSpec(axis_name)
        mean = jax.shard_map(mean, mesh=mesh, in_specs=by_row, out_specs=by_row, check_vma=False)
    scans = re.findall(r"unroll=(\d+)", str(jax.make_jaxpr(mean)(jnp.ones((24, 3)))))
    assert scans == [str(at_once)]


def test_microbatches_are_whole_sequences():
    """Each microbatch has two of the four sequences (the second index), with their steps and carries."""
    of_row, carry = jnp.arange(12).reshape(3, 4), jnp.arange(4)[None]
    parts = gradient.split_rows({"row": of_row, "carry": carry}, 2)
    for i in range(2):
        np.testing.assert_array_equal(parts["row"][i], of_row[:, 2 * i : 2 * i + 2])
        np.testing.assert_array_equal(parts["carry"][i], [[2 * i, 2 * i + 1]])
