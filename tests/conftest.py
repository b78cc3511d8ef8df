"""Eight host devices and JAX's strict modes, set before JAX starts."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",  # see jppo/compiling.py
    ]
)

import jax
import optax
from lenient import leniently

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
optax.tree.bias_correction = leniently(optax.tree.bias_correction)  # raises a float to an int32 count
