"""Random keys by purpose.

`jax.random.split(key)[i]` equals `jax.random.fold_in(key, i)`, so keys that are derived by small numbers for different
purposes can coincide. A derived key therefore depends on the name of its purpose.
"""

import zlib

import jax

from jppo.ppo.types import Array


def derive_key(key: Array, purpose: str) -> Array:
    """Returns a key for one purpose, such as "loss"; different purposes and different keys give different results."""
    return jax.random.fold_in(key, zlib.crc32(purpose.encode()))
