"""Sets eight host devices, JAX's strict modes, and a cache of compiled programs for the test run."""

# ruff: noqa: E402

import gc
import os
import shutil
import tempfile

gc.set_threshold(20_000, 10, 20)  # the defaults need 7 % of the time of the tests
CACHE = "JAX_COMPILATION_CACHE_DIR"  # shared by all workers of pytest and the processes that tests start
OWNS_CACHE = CACHE not in os.environ
if OWNS_CACHE:
    os.environ[CACHE] = tempfile.mkdtemp(prefix="jppo-tests-")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
PLATFORM = os.environ.get("JPPO_TEST_PLATFORM", "cpu")  # "cuda,cpu" runs tests on a GPU (CONTRIBUTING.md)
os.environ["JAX_PLATFORMS"] = PLATFORM
if PLATFORM != "cpu":
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"  # the default has 10 bits on a GPU
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # several processes share the GPU

import jax
import optax
import pytest
from lenient import leniently

from jppo.training import settings as run_settings

# With these flags, programs compile three times faster and run slower: no optimizations by LLVM, and none of copies
# (without LLVM's, they change the rounding). Before JAX 0.11, also XLA's older fusions, and one thread per compilation.
# Tests with `XLA_FLAGS` = "" in a new process use the compiler options of users.
UNOPTIMIZED = "--xla_backend_optimization_level=0 --xla_cpu_copy_insertion_use_region_analysis=false"
one_device = os.environ.get("XLA_FLAGS", "")
if PLATFORM == "cpu" and UNOPTIMIZED not in one_device:  # the processes of pytest-xdist inherit them
    one_device += f" {UNOPTIMIZED}"
    if jax.__version_info__ < (0, 11):  # an unknown flag ends the process
        one_device += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{one_device} --xla_force_host_platform_device_count=8"
assert PLATFORM != "cpu" or len(jax.devices()) == 8
os.environ["XLA_FLAGS"] = one_device  # processes that tests start have one device

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
optax.tree.bias_correction = leniently(optax.tree.bias_correction)  # computes float ** int32


# Runs use one device unless a test sets another number: collectives of eight devices on two cores are slow.
run_settings.max_usable_devices = lambda config: 1


@pytest.fixture
def optimized(monkeypatch):
    """Compiles with the optimizations of jppo's options, but XLA's older fusions: faster for long runs."""
    monkeypatch.setenv("XLA_FLAGS", one_device.replace(UNOPTIMIZED, ""))


def pytest_unconfigure():
    if OWNS_CACHE:
        shutil.rmtree(os.environ[CACHE], ignore_errors=True)
