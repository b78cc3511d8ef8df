"""Bit-for-bit reproducible runs: the XLA flag that they need, and a hash to compare their results."""

import hashlib
import os
from typing import Any

import jax
import numpy as np

from jppo.errors import Refused

GPU_FLAG = "--xla_gpu_deterministic_ops=true"  # no atomics in sums, and no kernels selected by timing


def ask_for_determinism() -> None:
    """Sets XLA_FLAGS for this process and its children. Has no effect after JAX has started."""
    flags = os.environ.get("XLA_FLAGS", "")
    if GPU_FLAG not in flags.split():
        os.environ["XLA_FLAGS"] = f"{flags} {GPU_FLAG}".strip()


def check_determinism() -> None:
    """Raises ValueError if JAX uses a GPU and was started without the flag."""
    if jax.default_backend() == "gpu" and GPU_FLAG not in os.environ.get("XLA_FLAGS", "").split():
        raise Refused(
            f"deterministic = True needs XLA_FLAGS={GPU_FLAG} in the environment when JAX starts on a GPU (jppo train "
            "--deterministic sets it)"
        )


def fingerprint(tree: Any) -> str:
    """Returns the SHA-256 of the leaves' paths, dtypes, shapes and bytes, in hexadecimal."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
