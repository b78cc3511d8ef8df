"""Eight host devices, JAX's strict modes, and a cache of compiled programs for the run; set before JAX starts."""

# ruff: noqa: E402

import os
import shutil
import tempfile

CACHE = "JAX_COMPILATION_CACHE_DIR"  # that of pytest's first process serves the others, and what they start
OWNS_CACHE = CACHE not in os.environ
if OWNS_CACHE:
    os.environ[CACHE] = tempfile.mkdtemp(prefix="jppo-tests-")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
os.environ["JAX_PLATFORMS"] = "cpu"
one_device = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{one_device} --xla_force_host_platform_device_count=8"

import jax
import optax
import pytest
from checks import QUICK
from lenient import leniently

from jppo.devices import jit as compiling
from jppo.training import settings as run_settings

assert len(jax.devices()) == 8
os.environ["XLA_FLAGS"] = one_device  # of what tests start

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
optax.tree.bias_correction = leniently(optax.tree.bias_correction)  # raises a float to an int32 count


# Runs are on one of the eight unless a test says otherwise: collectives of eight on two cores take their time.
run_settings.max_usable_devices = lambda config: 1

AS_SHIPPED = compiling._CPU_OPTIONS  # as it still is in processes that tests start
compiling._CPU_OPTIONS = QUICK


@pytest.fixture
def as_shipped(monkeypatch):
    """For long runs: compiled as users have it."""
    monkeypatch.setattr(compiling, "_CPU_OPTIONS", AS_SHIPPED)


def pytest_unconfigure():
    if OWNS_CACHE:
        shutil.rmtree(os.environ[CACHE], ignore_errors=True)
