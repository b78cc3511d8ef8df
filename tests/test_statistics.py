"""Tests running moments: merged, masked, with large offsets, and over several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, PartitionSpec

from jppo.ppo.normalization import (
    NORMALIZED_BOUND,
    Moments,
    all_reduce,
    empty_moments,
    moments_of,
    normalize,
    pool_moments,
    scale_reward,
)
from jppo.ppo.types import EpisodeStats


def assert_moments(moments, samples, rtol=1e-5, atol=1e-5):
    """Compares moments with float64 moments of samples [B, ...]."""
    samples = np.asarray(samples, float)
    assert float(moments.count) == len(samples)
    if len(samples):
        np.testing.assert_allclose(moments.mean, samples.mean(0), rtol=rtol, atol=atol)
        np.testing.assert_allclose(moments.variance, samples.var(0), rtol=rtol, atol=atol)
        np.testing.assert_allclose(moments.std, samples.std(0), rtol=rtol, atol=atol**0.5)


def test_moments_of_leading_dims():
    x = np.random.default_rng(0).normal(3.0, 2.0, (11, 5, 4)).astype(np.float32)
    assert_moments(moments_of(jnp.asarray(x)), x.reshape(-1, 4))
    assert_moments(moments_of(jnp.asarray(x), num_batch_dims=1), x)
    assert_moments(moments_of(jnp.asarray(x[..., 0])), x[..., 0].reshape(-1))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, bool])
def test_moments_of_other_dtypes(dtype):
    x = np.random.default_rng(0).integers(0, 200, (6, 7)).astype(dtype)
    moments = moments_of(jnp.asarray(x))
    assert_moments(moments, x.reshape(-1))
    assert {leaf.dtype for leaf in jax.tree.leaves(moments)} == {jnp.dtype("float32")}


def test_masked_moments_ignore_masked_samples():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(9, 6, 3)).astype(np.float32)
    where = rng.random((9, 6)) < 0.3
    assert_moments(moments_of(jnp.asarray(x), jnp.asarray(where)), x[where])
    x[~where] = np.nan
    assert_moments(moments_of(jnp.asarray(x), jnp.asarray(where)), x[where])


def test_an_empty_set_is_zero_and_adds_nothing():
    nothing = moments_of(jnp.ones((3, 4)), jnp.zeros((3, 4), bool))
    for leaf in jax.tree.leaves((nothing, empty_moments(), nothing + nothing)):
        assert float(leaf) == 0.0
    assert float(nothing.variance) == float(nothing.std) == 0.0
    x = np.random.default_rng(2).normal(5.0, 1.0, (8, 2)).astype(np.float32)
    some = moments_of(jnp.asarray(x))
    for whole in (nothing + some, some + nothing):
        for actual, expected in zip(jax.tree.leaves(whole), jax.tree.leaves(some), strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_a_large_offset_does_not_reduce_precision():
    """Plain float32 sums of squares would lose every digit: (1e6)^2 has steps of 65536."""
    rng = np.random.default_rng(3)
    parts = [(1e6 + rng.normal(0.0, 2.0, (64, 32))).astype(np.float32) for _ in range(50)]
    running = empty_moments()
    for part in parts:
        running = running + moments_of(jnp.asarray(part))
    exact = np.concatenate(parts).astype(float)
    assert float(running.count) == exact.size
    assert float(running.mean) == pytest.approx(exact.mean(), abs=0.07)  # one step of float32 there is 0.0625
    assert float(running.std) == pytest.approx(exact.std(), rel=1e-3)


def test_many_small_updates_agree_with_one_large_one():
    x = np.random.default_rng(4).gamma(2.0, 3.0, (2000, 16)).astype(np.float32)
    running, _ = jax.lax.scan(
        lambda old, row: (old + moments_of(row, num_batch_dims=1), None), empty_moments(), jnp.asarray(x)
    )
    assert_moments(running, x.reshape(-1), rtol=1e-4)


_SETS = st.lists(
    hnp.arrays(np.float32, st.tuples(st.integers(0, 9), st.just(2)), elements=st.floats(-1000, 1000, width=32)),
    min_size=2,
    max_size=3,
)


def _moments(samples):
    """Returns moments of x [B, 2], computed without jit and padded to one shape for all sizes."""
    where = np.arange(9) < len(samples)
    padded = np.zeros((9, 2), np.float32)
    padded[: len(samples)] = samples
    return moments_of(jnp.asarray(padded), jnp.asarray(where), num_batch_dims=1)


@settings(deadline=None, max_examples=60)
@given(sets=_SETS)
def test_moments_of_parts_merge_in_any_order(sets):
    whole = np.concatenate(sets)
    forward, backward = map(_moments, sets), map(_moments, reversed(sets))
    for parts in (forward, backward):
        total = next(parts)
        for part in parts:
            total = total + part
        assert_moments(total, whole, rtol=1e-4, atol=1.0)
    total = _moments(sets[0]) + (_moments(sets[1]) + _moments(sets[-1]))
    assert_moments(total, np.concatenate([sets[0], sets[1], sets[-1]]), rtol=1e-4, atol=1.0)


def mesh_of(num_devices):
    return Mesh(np.array(jax.devices()[:num_devices]), ("devices",))


def sharded_moments(x, where, num_devices):
    """Returns `all_reduce` of moments over devices that each have some columns of x [T, N, ...]."""
    columns = PartitionSpec(None, "devices")

    def local(x, where):
        return all_reduce({"a": moments_of(x, where), "b": moments_of(x[..., 0])}, "devices")

    run = jax.shard_map(
        local, mesh=mesh_of(num_devices), in_specs=(columns, columns), out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(run)(jnp.asarray(x), jnp.asarray(where))


@pytest.mark.parametrize("num_devices", [1, 2, 8])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_all_reduce_gives_the_moments_of_all_samples(num_devices, offset):
    rng = np.random.default_rng(5)
    x = (offset + rng.normal(size=(5, 16, 3)) + np.arange(16)[:, None]).astype(np.float32)
    where = rng.random((5, 16)) < 0.4
    where[:, :2] = False  # with eight devices, the first has no samples
    reduced = sharded_moments(x, where, num_devices)
    assert_moments(reduced["a"], x[where], rtol=1e-3)
    assert_moments(reduced["b"], x[..., 0].reshape(-1), rtol=1e-3)


def test_all_reduce_of_nothing_is_nothing():
    reduced = sharded_moments(np.ones((2, 8, 1), np.float32), np.zeros((2, 8), bool), 8)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(reduced["a"]))


def test_all_reduce_without_an_axis_is_the_identity():
    moments = moments_of(jnp.ones((2, 3)))
    assert all_reduce(moments, None) is moments


def test_episode_stats_add():
    one, two = np.random.default_rng(6).normal(size=(2, 7)).astype(np.float32)
    stats = [
        EpisodeStats(**{k: moments_of(jnp.asarray(i * x), num_batch_dims=1) for i, k in NAMES}) for x in (one, two)
    ]
    total = stats[0] + stats[1]
    for scale, name in NAMES:
        assert_moments(getattr(total, name), scale * np.concatenate([one, two]), rtol=1e-4)


NAMES = list(enumerate(("returns", "lengths", "discounted"), start=1))


def test_normalize():
    rng = np.random.default_rng(7)
    x = rng.normal([5.0, -100.0], [0.1, 30.0], (400, 2)).astype(np.float32)
    stats = moments_of(jnp.asarray(x), num_batch_dims=1)
    expected = (x.astype(float) - x.mean(0, dtype=float)) / x.std(0, dtype=float)
    np.testing.assert_allclose(normalize(jnp.asarray(x), stats), expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(
        normalize(jnp.asarray(x.reshape(20, 20, 2)), stats).reshape(400, 2), normalize(jnp.asarray(x), stats)
    )
    far = normalize(jnp.asarray([[1e9, -1e9]]), stats)
    np.testing.assert_array_equal(far, [[NORMALIZED_BOUND, -NORMALIZED_BOUND]])


def test_a_constant_feature_normalizes_to_zero():
    stats = moments_of(jnp.full((50, 1), 7.0), num_batch_dims=1)
    np.testing.assert_array_equal(normalize(jnp.full((3, 1), 7.0), stats), 0.0)


def test_scale_reward_divides_and_does_not_centre():
    stats = Moments(count=jnp.asarray(10.0), mean=jnp.asarray(50.0), m2=jnp.asarray(40.0))
    np.testing.assert_allclose(scale_reward(jnp.asarray([0.0, 1.0, -3.0]), stats), [0.0, 0.5, -1.5], rtol=1e-6)
    np.testing.assert_array_equal(scale_reward(jnp.asarray([1e9, -1e9]), stats), [NORMALIZED_BOUND, -NORMALIZED_BOUND])


def test_without_samples_nothing_is_scaled():
    x = jnp.asarray([[0.5, -3.0], [-11.0, 1e6]])
    for unscaled in (normalize(x, empty_moments((2,))), scale_reward(x, empty_moments())):
        np.testing.assert_array_equal(unscaled, [[0.5, -3.0], [-NORMALIZED_BOUND, NORMALIZED_BOUND]])


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_pooled_sets_equal_the_union(offset):
    """The sets have different sizes, and one is empty."""
    x = np.random.default_rng(2).normal(offset, 2.0, (5, 40, 3)).astype(np.float32)
    where = np.arange(40) < np.array([40, 1, 0, 17, 33])[:, None]
    sets = [moments_of(jnp.asarray(x[k]), jnp.asarray(where[k]), num_batch_dims=1) for k in range(5)]
    both = pool_moments({"a": jax.tree.map(lambda *leaves: jnp.stack(leaves), *sets)})["a"]
    assert_moments(both, x[where], rtol=2e-4)
