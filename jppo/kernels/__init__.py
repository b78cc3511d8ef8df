"""Faster implementations of parts of the algorithm, most of them tuned for XLA's CPU backend.

Each module holds a plain form, a tuned form that computes the same, and the measured gain (docs/performance.md). To use
the plain forms everywhere, set the environment variable JPPO_PLAIN_KERNELS=1 before jppo is imported. Initial
weights and the order of samples are then drawn in another way, and the optimizer's state has another structure: resume
a run with the setting that it was started with.
"""

import os

import jax

ENABLED = os.environ.get("JPPO_PLAIN_KERNELS", "") in ("", "0")  # read when a program is traced


def on_cpu() -> bool:
    """Returns whether to use the forms that are faster on a CPU only."""
    return ENABLED and jax.default_backend() == "cpu"
