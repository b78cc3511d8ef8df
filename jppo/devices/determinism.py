"""The same run twice, bit for bit: what that takes, and how it is shown."""

import hashlib
import os
from typing import Any

import jax
import numpy as np

GPU_FLAG = "--xla_gpu_deterministic_ops=true"  # neither atomics in sums, nor kernels chosen by a stopwatch


def ask_for_determinism() -> None:
    """Sets XLA_FLAGS, for this process and what it starts; without effect once JAX has started."""
    flags = os.environ.get("XLA_FLAGS", "")
    if GPU_FLAG not in flags.split():
        os.environ["XLA_FLAGS"] = f"{flags} {GPU_FLAG}".strip()


def inherited_flags() -> str:
    """What of XLA_FLAGS the processes that this one starts on other machines are to have too."""
    return GPU_FLAG if GPU_FLAG in os.environ.get("XLA_FLAGS", "").split() else ""


def check_determinism() -> None:
    """Raises ValueError where JAX computes on a GPU and was not asked for determinism when it started."""
    if jax.default_backend() == "gpu" and not inherited_flags():
        raise ValueError(
            f"deterministic = True needs XLA_FLAGS={GPU_FLAG} in the environment when JAX starts on a GPU (jppo train "
            "--deterministic sets it)"
        )


def fingerprint(tree: Any) -> str:
    """SHA-256 of the leaves' paths, dtypes, shapes and bytes, in hexadecimal: equal where all bits are."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
