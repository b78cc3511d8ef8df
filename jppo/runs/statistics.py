"""Statistics of returns over seeds."""

import itertools
import math

import numpy as np

_RESAMPLES = 10_000
_MAX_EXACT = 5  # with at most this number of seeds, all resamples are counted instead of drawn


def interquartile_mean(x: np.ndarray) -> np.ndarray:
    """Returns the mean of the middle half over the first axis; of all values if there are fewer than four.
    Agarwal et al. (2021), "Deep reinforcement learning at the edge of the statistical precipice"."""
    cut = len(x) // 4
    return np.sort(x, axis=0)[cut : len(x) - cut].mean(axis=0)


def bootstrap_interval(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the 95 % bootstrap percentile interval of the interquartile mean over the first axis."""
    if len(x) <= _MAX_EXACT:
        picks, weights = _all_resamples(len(x))
    else:
        picks = np.random.default_rng(0).integers(len(x), size=(_RESAMPLES, len(x)))
        weights = np.ones(_RESAMPLES)
    blocks = np.array_split(picks, max(1, len(picks) // 500))  # so that wide curves fit into memory
    means = np.concatenate([interquartile_mean(x[block.T]) for block in blocks])
    low, high = np.percentile(means, [2.5, 97.5], axis=0, method="inverted_cdf", weights=weights)
    return low, high


def _all_resamples(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct resamples of n values as indices [resamples, n], and how many of the n**n equal each."""
    picks = np.array(list(itertools.combinations_with_replacement(range(n), n)))
    repeats = [math.prod(math.factorial(k) for k in np.bincount(pick)) for pick in picks]
    return picks, math.factorial(n) / np.array(repeats)
