"""Statistics of returns over seeds."""

import numpy as np

_RESAMPLES = 1000
MIN_SEEDS = 5  # with fewer, an interval of the difference of two settings is too narrow


def interquartile_mean(x: np.ndarray) -> np.ndarray:
    """Returns the mean of the middle half over the first axis; of all values if there are fewer than four.
    Agarwal et al. (2021), "Deep reinforcement learning at the edge of the statistical precipice"."""
    cut = len(x) // 4
    return np.sort(x, axis=0)[cut : len(x) - cut].mean(axis=0)


def bootstrap_interval(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the 95 % bootstrap percentile interval of the interquartile mean over the first axis."""
    return _percentile_interval(_resample(x, np.random.default_rng(0)))


def difference_interval(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Returns the 95 % bootstrap percentile interval of the difference between the interquartile means of b and a.

    Args:
      a, b: returns [seeds] of independent runs.
    """
    rng = np.random.default_rng(0)
    low, high = _percentile_interval(_resample(b, rng) - _resample(a, rng))
    return float(low), float(high)


def _resample(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the interquartile means of resamples over the first axis, [resamples, ...]."""
    picks = rng.integers(len(x), size=(_RESAMPLES, len(x)))
    return np.array([interquartile_mean(x[pick]) for pick in picks])


def _percentile_interval(means: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, high = np.percentile(means, [2.5, 97.5], axis=0, method="nearest")
    return low, high
