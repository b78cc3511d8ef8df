"""Random keys by purpose.

`jax.random.split(key)[i]` equals `jax.random.fold_in(key, i)`, so keys that are derived by small numbers for different
purposes can coincide. A derived key therefore depends on the name of its purpose.
"""

import zlib
from typing import Any

import jax
import jax.numpy as jnp

from jppo.ppo.types import Array


def derive_key(key: Array, purpose: str) -> Array:
    """Returns a key for one purpose, such as "loss"; different purposes and different keys give different results."""
    return jax.random.fold_in(key, _number(purpose))


def derive_keys(key: Array, *purposes: str) -> tuple[Array, ...]:
    """Returns `derive_key(key, purpose)` for each purpose. On CPUs, this is faster than a call for each.

    JAX's implementation unsafe_rbg gives other results in vmap, so only the first key equals that of `derive_key`.
    """
    numbers = jnp.array([_number(purpose) for purpose in purposes], jnp.uint32)
    return tuple(jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers))


def _number(purpose: str) -> int:
    return zlib.crc32(purpose.encode())


def is_key(array: Any) -> bool:
    """Returns whether an array contains PRNG keys."""
    return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
