"""Tests action distributions against scipy.stats, also with extreme logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from jppo.networks.distributions import Categorical, DiagGaussian

SAMPLES = 20_000


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(0.0, 2.0, (7, 5)).astype(np.float32)


@pytest.fixture
def gaussian():
    mean, log_std = np.random.default_rng(1).normal(0.0, 0.7, (2, 6, 3)).astype(np.float32)
    return mean, log_std


@functools.partial(jax.jit, static_argnums=1)
def draw(distribution, num):
    return jax.vmap(lambda key: distribution.sample(seed=key))(jax.random.split(jax.random.key(0), num))


def test_categorical_log_prob_and_entropy(logits):
    probs = scipy.special.softmax(logits.astype(float), axis=-1)
    for action in range(5):
        actual = Categorical(jnp.asarray(logits)).log_prob(jnp.full(7, action))
        np.testing.assert_allclose(actual, np.log(probs[:, action]), rtol=1e-5, atol=1e-6)
    expected = [scipy.stats.entropy(row) for row in probs]
    np.testing.assert_allclose(Categorical(jnp.asarray(logits)).entropy(), expected, rtol=1e-5)


def test_categorical_ignores_a_shift_of_its_logits(logits):
    plain, shifted = (Categorical(jnp.asarray(logits + shift)) for shift in (0.0, 64.0))
    np.testing.assert_allclose(shifted.entropy(), plain.entropy(), rtol=1e-4)
    np.testing.assert_allclose(shifted.log_prob(jnp.arange(7) % 5), plain.log_prob(jnp.arange(7) % 5), rtol=1e-4)


def test_categorical_samples_have_its_probabilities(logits):
    samples = np.asarray(draw(Categorical(jnp.asarray(logits)), SAMPLES))
    assert samples.shape == (SAMPLES, 7)
    assert samples.dtype == np.int32
    for row in range(7):
        counts = np.bincount(samples[:, row], minlength=5)
        expected = SAMPLES * scipy.special.softmax(logits[row].astype(float))
        assert scipy.stats.chisquare(counts, expected, sum_check=False).pvalue > 1e-3
        wrong = SAMPLES * scipy.special.softmax(1.1 * logits[row].astype(float))
        assert scipy.stats.chisquare(counts, wrong, sum_check=False).pvalue < 1e-3, "the statistic has power"


def test_one_key_gives_the_rows_of_a_batch_independent_samples():
    samples = np.asarray(Categorical(jnp.zeros((SAMPLES, 4))).sample(seed=jax.random.key(3)))
    assert scipy.stats.chisquare(np.bincount(samples, minlength=4)).pvalue > 1e-3
    pairs = np.bincount(samples[:-1] * 4 + samples[1:], minlength=16)
    assert scipy.stats.chisquare(pairs).pvalue > 1e-3


def test_modes(logits, gaussian):
    tied = jnp.asarray([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(Categorical(jnp.asarray(logits)).mode(), logits.argmax(-1))
    np.testing.assert_array_equal(Categorical(tied).mode(), [1, 0])
    assert Categorical(tied).mode().dtype == jnp.int32
    mean, log_std = map(jnp.asarray, gaussian)
    np.testing.assert_array_equal(DiagGaussian(mean, log_std).mode(), mean)


@pytest.mark.slow
def test_masked_actions_are_never_taken_and_cost_no_gradient():
    mask = jnp.asarray([0.0, -jnp.inf, 1.0, -jnp.inf])
    masked = Categorical(mask)
    samples = np.asarray(draw(masked, 2000))
    assert set(samples.tolist()) == {0, 2}
    assert float(masked.log_prob(jnp.asarray(1))) == -np.inf
    allowed = scipy.special.softmax([0.0, 1.0])
    assert float(masked.log_prob(jnp.asarray(2))) == pytest.approx(np.log(allowed[1]), rel=1e-5)
    assert float(masked.entropy()) == pytest.approx(scipy.stats.entropy(allowed), rel=1e-5)

    entropy_slope = jax.grad(lambda logits: Categorical(logits).entropy())(mask)
    open_slope = jax.grad(lambda logits: Categorical(logits).entropy())(mask[::2])
    np.testing.assert_allclose(entropy_slope[::2], open_slope, rtol=1e-5)
    np.testing.assert_array_equal(entropy_slope[1::2], 0.0)
    log_prob_slope = jax.grad(lambda logits: Categorical(logits).log_prob(jnp.asarray(2)))(mask)
    np.testing.assert_allclose(log_prob_slope, [-allowed[0], 0.0, allowed[0], 0.0], rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf, 3e38, -3e38])
def test_samples_and_modes_stay_in_range_for_any_logits(value):
    broken = jnp.stack([jnp.full(4, value), jnp.asarray([0.0, value, 1.0, value])])
    samples = np.asarray(draw(Categorical(broken), 500))
    assert samples.min() >= 0
    assert samples.max() <= 3
    modes = np.asarray(Categorical(broken).mode())
    assert ((modes >= 0) & (modes <= 3)).all()


@pytest.mark.slow
def test_extreme_logits_stay_finite():
    sure = Categorical(jnp.asarray([1e30, 0.0, -1e30]))
    assert float(sure.entropy()) == 0.0
    assert float(sure.log_prob(jnp.asarray(0))) == 0.0
    gradient = jax.grad(lambda logits: Categorical(logits).entropy())(sure.logits)
    assert np.isfinite(gradient).all()
    assert set(np.asarray(draw(sure, 100)).tolist()) == {0}


def test_gaussian_log_prob_and_entropy(gaussian):
    mean, log_std = gaussian
    action = np.random.default_rng(2).normal(size=mean.shape).astype(np.float32)
    ours = DiagGaussian(jnp.asarray(mean), jnp.asarray(log_std))
    theirs = [
        scipy.stats.multivariate_normal(m, np.diag(np.exp(2.0 * s)))
        for m, s in zip(mean.astype(float), log_std.astype(float), strict=True)
    ]
    log_prob = [d.logpdf(a) for d, a in zip(theirs, action, strict=True)]
    np.testing.assert_allclose(ours.log_prob(jnp.asarray(action)), log_prob, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours.entropy(), [d.entropy() for d in theirs], rtol=1e-5)


def test_gaussian_samples_are_independent_normals(gaussian):
    mean, log_std = gaussian
    samples = np.asarray(draw(DiagGaussian(jnp.asarray(mean), jnp.asarray(log_std)), SAMPLES), float)
    z = ((samples - mean) / np.exp(log_std)).reshape(SAMPLES, -1)
    for column in z.T:
        assert scipy.stats.kstest(column, "norm").pvalue > 1e-3
        assert scipy.stats.kstest(1.1 * column, "norm").pvalue < 1e-3, "the statistic has power"
    correlation = np.corrcoef(z.T) - np.eye(z.shape[1])
    assert np.abs(correlation).max() < 4.5 / np.sqrt(SAMPLES)


def test_gaussian_log_prob_survives_extreme_scales():
    for log_std in (-20.0, 20.0):
        narrow = DiagGaussian(jnp.zeros(2), jnp.full(2, log_std))
        at_mode = float(narrow.log_prob(jnp.zeros(2)))
        assert at_mode == pytest.approx(-2 * log_std - np.log(2 * np.pi), rel=1e-6)
