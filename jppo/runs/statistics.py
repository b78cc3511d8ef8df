"""Statistics of returns over seeds."""

import itertools
import math

import numpy as np

_RESAMPLES = 10_000
_MAX_EXACT = 5  # with at most this number of seeds, all resamples are counted instead of drawn
MIN_SEEDS = 5  # with fewer, an interval of the difference of two settings is too narrow


def interquartile_mean(x: np.ndarray) -> np.ndarray:
    """Returns the mean of the middle half over the first axis; of all values if there are fewer than four.
    Agarwal et al. (2021), "Deep reinforcement learning at the edge of the statistical precipice"."""
    cut = len(x) // 4
    return np.sort(x, axis=0)[cut : len(x) - cut].mean(axis=0)


def bootstrap_interval(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the 95 % bootstrap percentile interval of the interquartile mean over the first axis."""
    picks, weights = _all_resamples(len(x)) if len(x) <= _MAX_EXACT else _draw(len(x), np.random.default_rng(0))
    return _percentile_interval(_resampled_means(x, picks), weights)


def difference_interval(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Returns the 95 % bootstrap percentile interval of the difference between the interquartile means of b and a.

    Args:
      a, b: returns [seeds] of independent runs.
    """
    if max(len(a), len(b)) <= _MAX_EXACT:
        (picks_a, weights_a), (picks_b, weights_b) = _all_resamples(len(a)), _all_resamples(len(b))
        differences = np.subtract.outer(_resampled_means(b, picks_b), _resampled_means(a, picks_a)).ravel()
        weights = np.outer(weights_b, weights_a).ravel()
    else:
        rng = np.random.default_rng(0)
        (picks_b, weights), (picks_a, _) = _draw(len(b), rng), _draw(len(a), rng)
        differences = _resampled_means(b, picks_b) - _resampled_means(a, picks_a)
    low, high = _percentile_interval(differences, weights)
    return float(low), float(high)


def _all_resamples(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct resamples of n values as indices [resamples, n], and how many of the n**n equal each."""
    picks = np.array(list(itertools.combinations_with_replacement(range(n), n)))
    repeats = [math.prod(math.factorial(k) for k in np.bincount(pick)) for pick in picks]
    return picks, math.factorial(n) / np.array(repeats)


def _draw(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return rng.integers(n, size=(_RESAMPLES, n)), np.ones(_RESAMPLES)


def _resampled_means(x: np.ndarray, picks: np.ndarray) -> np.ndarray:
    """Returns the interquartile means of resamples over the first axis, [resamples, ...]."""
    blocks = np.array_split(picks, max(1, len(picks) // 500))  # so that wide curves fit into memory
    return np.concatenate([interquartile_mean(x[block.T]) for block in blocks])


def _percentile_interval(means: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, high = np.percentile(means, [2.5, 97.5], axis=0, method="inverted_cdf", weights=weights)
    return low, high
