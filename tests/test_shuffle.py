"""Tests the shuffle: it is an exact permutation for every size, well mixed, and independent of the number of devices.

Mixing is tested with statistics over many keys with fixed seeds. `jax.random.permutation` must pass the same
statistics, and a network with one double round must fail them.
"""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from jppo import kernels
from jppo.config.ppo import PPOConfig
from jppo.kernels import permutation as shuffle
from jppo.kernels.permutation import balanced_factors
from jppo.ppo.minibatches import epoch_keys, minibatch_indices

KEYS = 20_000
LEAST_P = 1e-4  # p-value below which a test fails; there are about a hundred statistics
MOST_STRATA = 12


def permuted(key, index, size):
    return shuffle.permute_index(shuffle.round_keys(key, (), size), index, size)


def whole(size, seed=0):
    return np.asarray(permuted(jax.random.key(seed), jnp.arange(size, dtype=jnp.int32), size))


def assert_permutation(result, size):
    assert result.dtype == np.uint32
    np.testing.assert_array_equal(np.sort(result), np.arange(size))


def test_balanced_factors():
    for size in range(1, 2000):
        a, b = balanced_factors(size)
        assert a * b == size
        assert a <= b
        assert not any(size % d == 0 for d in range(a + 1, int(size**0.5) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1, 601, 100))
def test_every_size_with_a_network_is_permuted_exactly(start):
    for size in range(start, start + 100):
        if balanced_factors(size)[0] < shuffle._SMALLEST_FACTOR:
            continue
        index = jnp.arange(600, dtype=jnp.int32) % size  # one shape for all sizes, so that operations are compiled once
        with jax.disable_jit():  # jit would compile a loop per size
            result = np.asarray(permuted(jax.random.key(size), index, size))
        assert_permutation(result[:size], size)
        np.testing.assert_array_equal(result[size:], result[:size][np.arange(size, 600) % size])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 9, 13, 22, 33, 127, 254, 298, 7919])
def test_sizes_without_a_network_are_permuted_exactly(size):
    assert balanced_factors(size)[0] < shuffle._SMALLEST_FACTOR
    assert_permutation(whole(size), size)


@pytest.mark.parametrize("size", [1, 64, 720])
def test_the_plain_form_permutes_sizes_with_a_network_exactly(monkeypatch, size):
    tuned = whole(size)
    monkeypatch.setattr(kernels, "ENABLED", False)
    assert_permutation(whole(size), size)
    assert size == 1 or (whole(size) != tuned).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "size",
    [
        *(2**k for k in (10, 13, 15, 16, 17)),
        46_368,
        99_999,
        1_000_000,
        1021 * 1031,
        65_537,  # a prime
        2 * 131_101,  # twice a prime
        4 * 43_691,
        4 * 65_537,  # a factor just beyond 16 bits
        8 * 131_101,
    ],
)
def test_large_sizes_are_permuted_exactly(size):
    assert_permutation(whole(size), size)


@pytest.mark.parametrize("size", [2**31 - 2**16, 4 * (2**29 - 3), 46_340 * 46_341])
def test_sizes_near_the_limit_have_distinct_images_in_range(size):
    index = np.unique(np.random.default_rng(0).integers(0, size, 100_000))
    result = np.asarray(permuted(jax.random.key(0), jnp.asarray(index, jnp.int32), size))
    assert result.min() >= 0
    assert result.max() < size
    assert len(np.unique(result)) == len(index)
    assert scipy.stats.kstest(result / size, "uniform").pvalue > LEAST_P


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 67, 720])
def test_other_keys_give_other_permutations_and_equal_keys_the_same(size):
    keys = jax.vmap(jax.random.key)(jnp.arange(30))
    results = jax.vmap(lambda key: permuted(key, jnp.arange(size, dtype=jnp.int32), size))(keys)
    assert len({tuple(result) for result in results.tolist()}) == 30
    np.testing.assert_array_equal(whole(size, 3), whole(size, 3))


def test_sorting_depends_on_both_words_of_a_key():
    index, keys = jnp.arange(67), jnp.asarray([[1, 2], [3, 2], [1, 3], [3, 3]], jnp.uint32)
    results = [shuffle.permute_index(key[None], index, 67) for key in keys]
    assert len({tuple(result.tolist()) for result in results}) == 4


@pytest.mark.parametrize("size", [96, 97])
def test_image_of_an_index_does_not_depend_on_the_other_indices(size):
    index = jnp.asarray([[5, 95], [0, 5]], jnp.int32)
    np.testing.assert_array_equal(permuted(jax.random.key(0), index, size), whole(size)[np.asarray(index)])


def by_sorting(key, index, size):
    return jax.random.permutation(key, size)[index]


def by_one_round(key, index, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "_num_rounds", lambda a, b: 1)
        return permuted(key, index, size)


METHODS = {"network": permuted, "sort": by_sorting, "one round": by_one_round}


@functools.partial(jax.jit, static_argnums=(0, 2))
def over_keys(method, index, size):
    """Returns the image of each index under KEYS keys, [KEYS, len(index)]."""
    keys = jax.random.split(jax.random.key(0), KEYS)
    return jax.vmap(lambda key: method(key, index, size))(keys)


def landings(method, index, size):
    return np.asarray(over_keys(METHODS[method], jnp.asarray(index, jnp.int32), size), np.int64)


def p_landing(method, size):
    """Returns the smallest p-value of chi-square tests that the images of some indices are uniform."""
    _, b = balanced_factors(size)
    landed = landings(method, [0, 1, b, size // 2 + 1, size - 1], size)
    return min(scipy.stats.chisquare(np.bincount(column, minlength=size)).pvalue for column in landed.T)


def p_displacement(method, size):
    """Returns the smallest p-value of tests that the distances between images of pairs of indices are uniform."""
    _, b = balanced_factors(size)
    first, *others = landings(method, [0, 1, b, b + 1, size - 1], size).T
    apart = [(other - first) % size - 1 for other in others]
    assert min(a.min() for a in apart) >= 0
    return min(scipy.stats.chisquare(np.bincount(a, minlength=size - 1)).pvalue for a in apart)


def p_pairs(method, size):
    """Returns the smallest p-value of tests that the images of two indices are uniform over pairs."""
    _, b = balanced_factors(size)
    first, *others = landings(method, [0, 1, b, size - 1], size).T
    pairs = [np.bincount(first * size + other, minlength=size**2).reshape(size, size) for other in others]
    return min(scipy.stats.chisquare(counts[~np.eye(size, dtype=bool)]).pvalue for counts in pairs)


def p_neighbours(method, size):
    """Returns the p-value of a test that neighbours stay neighbours as often as in a random permutation."""
    first, second = landings(method, [0, 1], size).T
    together = int(((second - first) % size == 1).sum())
    return scipy.stats.binomtest(together, KEYS, 1 / (size - 1)).pvalue


def p_composition(method, size):
    """Returns the smallest p-value of tests of the composition of a minibatch (a quarter of the rows).

    The numbers of samples in the lower half, with odd index, in the left columns and in the first row must have the
    mean and variance of a random quarter.
    """
    _, b = balanced_factors(size)
    sample = np.arange(size)
    kinds = np.stack([sample < size // 2, sample % 2, sample % b < b // 2, sample < b]).astype(np.float32)
    quarter = size // 4
    held = over_keys_composed(METHODS[method], jnp.asarray(kinds), size)
    held = np.asarray(held, float) - kinds.mean(1) * quarter
    variance = kinds.var(1) * quarter * (size - quarter) / (size - 1)
    means = held.mean(0) / np.sqrt(variance / KEYS)
    spreads = ((held**2).mean(0) / variance - 1) / np.sqrt(2 / KEYS)
    return min(2 * scipy.stats.norm.sf(np.abs([*means, *spreads])))


@functools.partial(jax.jit, static_argnums=(0, 2))
def over_keys_composed(method, kinds, size):
    index = jnp.arange(size // 4, dtype=jnp.int32)
    keys = jax.random.split(jax.random.key(1), KEYS)
    return jax.vmap(lambda key: kinds[:, method(key, index, size)].sum(1))(keys)


MIXING = [
    *((p_landing, size) for size in (256, 16, 35, 720)),
    *((p_displacement, size) for size in (64, 720)),
    *((p_pairs, size) for size in (16, 36)),
    *((p_neighbours, size) for size in (64, 256, 1024)),
    *((p_composition, size) for size in (32, 256, 4 * 257)),
]


def marks(cases):
    """Returns parameters of which all but the first of each statistic are slow."""
    seen = set()
    for statistic, size in cases:
        again = [pytest.mark.slow] * (statistic in seen)
        seen.add(statistic)
        yield pytest.param(statistic, size, marks=again, id=f"{statistic.__name__}-{size}")


by_name = pytest.mark.parametrize(("statistic", "size"), list(marks(MIXING)))


@by_name
def test_the_network_mixes(statistic, size):
    assert statistic("network", size) > LEAST_P


@pytest.mark.parametrize(
    "size", [65_536, 31 * 131_101, *(pytest.param(size, marks=pytest.mark.slow) for size in (2**13, 100_000))]
)
def test_the_network_mixes_large_sizes(size):
    """Counts in a thousand bins, because there are more indices than keys."""
    _, b = balanced_factors(size)
    first, *others = landings("network", [0, 1, b, b + 1, size - 1], size).T
    for places, total in [(first, size), *(((other - first) % size - 1, size - 1) for other in others)]:
        expected = np.bincount(np.arange(total) * 1000 // total) * KEYS / total
        counts = np.bincount(places * 1000 // total, minlength=1000)
        assert scipy.stats.chisquare(counts, expected, sum_check=False).pvalue > LEAST_P


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statistic", "size"),
    [(p_landing, 62), (p_displacement, 298), (p_pairs, 22), (p_neighbours, 62), (p_composition, 298)],
)
def test_sizes_without_a_network_are_mixed(statistic, size):
    assert balanced_factors(size)[0] < shuffle._SMALLEST_FACTOR
    assert statistic("network", size) > LEAST_P


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statistic", "size"),
    [(p_landing, 64), (p_displacement, 64), (p_pairs, 16), (p_neighbours, 64), (p_composition, 32)],
)
def test_sorting_passes_the_same_statistics(statistic, size):
    assert statistic("sort", size) > LEAST_P


@pytest.mark.parametrize(
    ("statistic", "size"), [(p_displacement, 64), (p_pairs, 16), (p_neighbours, 64), (p_composition, 32)]
)
def test_one_double_round_fails_the_same_statistics(statistic, size):
    assert statistic("one round", size) < LEAST_P


@pytest.mark.parametrize("size", [4 * 257, 5 * 257, 4 * 1021])
def test_the_network_mixes_narrow_grids(size):
    assert p_neighbours("network", size) > LEAST_P


def rows_of_epoch(seed, num_steps, num_envs, num_minibatches, strata):
    """Returns the rows of each minibatch, [M, rows]."""
    size = num_steps * num_envs // len(strata)
    keys = shuffle.round_keys(jax.random.key(seed), (MOST_STRATA,), size)[np.asarray(strata)]
    return np.asarray(minibatch_indices(keys, num_steps, num_envs, num_minibatches))


@st.composite
def epochs(draw):
    num_steps, envs, num_strata = draw(st.integers(1, 9)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    divisors = [d for d in range(1, num_steps * envs + 1) if num_steps * envs % d == 0]
    return num_steps, envs * num_strata, draw(st.sampled_from(divisors)), num_strata


@pytest.mark.slow
@settings(deadline=None, max_examples=5)
@given(epoch=epochs(), seed=st.integers(0, 100), first=st.integers(0, 7))
def test_an_epoch_visits_every_row_once(epoch, seed, first):
    num_steps, num_envs, num_minibatches, num_strata = epoch
    rows = rows_of_epoch(seed, num_steps, num_envs, num_minibatches, first + np.arange(num_strata))
    assert rows.shape == (num_minibatches, num_steps * num_envs // num_minibatches)
    np.testing.assert_array_equal(np.sort(rows, axis=None), np.arange(num_steps * num_envs))


NUM_STEPS, NUM_ENVS, NUM_MINIBATCHES, NUM_STRATA = 6, 48, 4, 8


def samples_on(num_devices, seed=0):
    """Returns the set of (t, global env) of each minibatch, over all devices."""
    envs, strata = NUM_ENVS // num_devices, NUM_STRATA // num_devices
    samples = [set() for _ in range(NUM_MINIBATCHES)]
    for device in range(num_devices):
        local = rows_of_epoch(seed, NUM_STEPS, envs, NUM_MINIBATCHES, device * strata + np.arange(strata))
        for minibatch, rows in zip(samples, local, strict=True):
            minibatch.update((row // envs, device * envs + row % envs) for row in rows.tolist())
    return samples


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_minibatches_do_not_depend_on_the_number_of_devices(num_devices):
    one, many = samples_on(1), samples_on(num_devices)
    assert one == many
    assert all(len(minibatch) == NUM_STEPS * NUM_ENVS // NUM_MINIBATCHES for minibatch in one)
    assert samples_on(num_devices, seed=1) != many


def test_every_minibatch_has_an_equal_share_of_every_stratum():
    for minibatch in samples_on(1):
        shares = np.bincount([env // (NUM_ENVS // NUM_STRATA) for _, env in minibatch], minlength=NUM_STRATA)
        np.testing.assert_array_equal(shares, NUM_STEPS * NUM_ENVS // NUM_MINIBATCHES // NUM_STRATA)


def test_every_epoch_and_stratum_has_separate_keys_on_any_device():
    config = PPOConfig(num_envs=NUM_ENVS, num_steps=NUM_STEPS, num_epochs=3)
    key, count = jax.random.key(0), config.effective_strata
    whole = np.asarray(epoch_keys(key, config, config.batch_size, jnp.arange(count)))
    assert whole.shape[:2] == (3, count)
    assert whole.dtype == np.uint32
    assert len(np.unique(whole)) == whole.size
    half = count // 2
    second = epoch_keys(key, config, config.batch_size // 2, half + jnp.arange(half))
    np.testing.assert_array_equal(second, whole[:, half:])


def test_strata_have_different_permutations():
    rows = rows_of_epoch(0, NUM_STEPS, NUM_ENVS, 1, range(NUM_STRATA))[0].reshape(NUM_STRATA, -1)
    envs = NUM_ENVS // NUM_STRATA
    within = {tuple(zip(row // NUM_ENVS, row % NUM_ENVS % envs, strict=True)) for row in rows}
    assert len(within) == NUM_STRATA


MANY_DEVICES = """
import jax
import numpy as np

import jppo

assert len(jax.devices()) == 32
for count in (16, 32):
    config = jppo.PPOConfig(
        num_envs=64, num_steps=4, num_epochs=1, num_minibatches=2, num_strata=count, hidden_sizes=(4,)
    )
    outcomes = []
    for num_devices in (1, count):
        agent = jppo.make_anakin("CartPole-v1", config, total_steps=256, num_devices=num_devices)
        init = jax.jit(agent.init, out_shardings=agent.sharding.out_shardings)
        state, metrics = jax.jit(agent.step)(init(jax.random.key(0), jppo.Hyperparams()))
        assert len(state.train.update.sharding.device_set) == num_devices
        outcomes.append(jax.device_get((state.train.policy_state.params, metrics["loss/total"])))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), *outcomes)
print("equal")
"""


@pytest.mark.slow
def test_updates_on_16_and_32_devices_equal_those_on_one():
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=32"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", MANY_DEVICES], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.slow
def test_minibatches_with_many_strata_do_not_depend_on_the_number_of_devices():
    strata = 16
    config = PPOConfig(num_envs=64, num_steps=6, num_minibatches=4, num_strata=strata)
    assert config.effective_strata == strata
    key, shape = jax.random.key(0), (config.num_steps, config.num_envs)
    rows_of = functools.partial(minibatch_indices, num_minibatches=config.num_minibatches)
    everything = np.arange(config.batch_size).reshape(shape)
    whole = rows_of(epoch_keys(key, config, config.batch_size, jnp.arange(strata))[0], *shape)
    np.testing.assert_array_equal(np.sort(np.ravel(whole)), np.arange(config.batch_size))
    parts, num_envs = [], config.num_envs // strata
    for device in range(strata):
        keys = epoch_keys(key, config, config.batch_size // strata, jnp.arange(device, device + 1))[0]
        rows = rows_of(keys, config.num_steps, num_envs)
        parts.append(everything[:, device * num_envs : (device + 1) * num_envs].reshape(-1)[np.asarray(rows)])
    np.testing.assert_array_equal(np.sort(np.concatenate(parts, axis=1)), np.sort(np.asarray(whole)))
