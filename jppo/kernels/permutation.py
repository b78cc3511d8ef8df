"""Keyed random permutations of 0..size-1, without a sort and without memory.

Gain: 18 to 71 times as fast as `jax.random.permutation` on 8,192 to 65,536 rows (CPU).
That sort took a third of an update. The plain form sorts hashes and gives other permutations.

Index i of a set of a*b is written as (l, r), l < a, r < b, and scrambled by an alternating Feistel network:

    l <- (l + f_k(r)) mod a,    r <- (r + g_k(l)) mod b,    repeated with new round keys.

Every half-round can be undone by subtracting the same term, so the whole is an exact bijection for every a and b. See
Black and Rogaway (2002), "Ciphers with arbitrary finite domains", for the unbalanced network. The permutation must be
well mixed, but not secret, so the round function is an integer hash. A picture: rotate each row of a grid by its own
random amount, then each column, and so on.
"""

import math

import jax
import jax.numpy as jnp

from jppo import kernels
from jppo.envs.spaces import Array

_SMALLEST_FACTOR = 4


def balanced_factors(size: int) -> tuple[int, int]:
    """Returns (a, b) with a*b = size and a <= b as close to each other as possible."""
    a = next(d for d in range(math.isqrt(size), 0, -1) if size % d == 0)
    return a, size // a


def round_keys(key: Array, shape: tuple[int, ...], size: int) -> Array:
    """Draws the round keys of permutations of 0..size-1, [*shape, rounds, 2] u32, all at once."""
    return jax.random.bits(key, (*shape, _num_rounds(*balanced_factors(size)), 2), jnp.uint32)


def permute_index(round_keys: Array, index: Array, size: int) -> Array:
    """Returns the image of each index under a keyed random permutation of 0..size-1; same shape, u32.

    The tuned form needs a size with two factors of at least 4, so primes, for example, are sorted.

    Args:
      round_keys: [rounds, 2] u32, drawn by `round_keys` for this size; they determine the permutation.
      index: [...] integers in 0..size-1.
      size: static, below 2**31.
    """
    has_network = balanced_factors(size)[0] >= _SMALLEST_FACTOR
    return (permute_index_tuned if kernels.ENABLED and has_network else permute_index_plain)(round_keys, index, size)


def permute_index_plain(round_keys: Array, index: Array, size: int) -> Array:
    """Plain form of `permute_index`: sorts by a keyed hash, which is injective."""
    index = index.astype(jnp.uint32)
    hashed = _hash(_hash(jnp.arange(size, dtype=jnp.uint32), round_keys[0, 0]), round_keys[0, 1])
    return jnp.argsort(hashed).astype(jnp.uint32)[index]


def permute_index_tuned(round_keys: Array, index: Array, size: int) -> Array:
    """Tuned form of `permute_index`."""
    a, b = balanced_factors(size)

    def double_round(halves: tuple[Array, Array], keys: Array) -> tuple[tuple[Array, Array], None]:
        left, right = halves
        left = _add_modulo(left, _bits_to_range(_hash(right, keys[0]), a), a)
        right = _add_modulo(right, _bits_to_range(_hash(left, keys[1]), b), b)
        return (left, right), None

    # A loop instead of unrolled code: XLA would fuse all rounds into every gather that uses the result, copy each value
    # once per use, and compile for minutes.
    (left, right), _ = jax.lax.scan(double_round, divmod_u32(index.astype(jnp.uint32), b), round_keys)
    return left * jnp.uint32(b) + right


def divmod_u32(x: Array, by: int) -> tuple[Array, Array]:
    """Returns quotient and remainder of x [...] u32; `%` alone would be twelve operations."""
    quotient = x // jnp.uint32(by)
    return quotient, x - quotient * jnp.uint32(by)


def _num_rounds(a: int, b: int) -> int:
    """Returns the number of double rounds that mix an a x b grid; 1 for sizes without a network.

    After n rounds, neighbours in a row are still neighbours with probability a^-n, so narrow grids need more than the
    four rounds that suffice for square ones (chi-square tests over 400,000 keys).
    """
    return 1 if a < _SMALLEST_FACTOR else max(4, 1 + math.ceil(math.log(100 * b) / math.log(a)))


def _hash(x: Array, key: Array) -> Array:
    """Returns a 32-bit integer hash of x and the key (the finalizer of MurmurHash3)."""
    x = x * jnp.uint32(0x9E3779B1) + key
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _bits_to_range(bits: Array, bound: int) -> Array:
    """Scales random bits to 0..bound-1, without a division if the product fits in 32 bits."""
    if bound <= 1 << 16:
        return ((bits >> 16) * jnp.uint32(bound)) >> 16
    return divmod_u32(bits, bound)[1]


def _add_modulo(x: Array, term: Array, bound: int) -> Array:
    total = x + term
    return jnp.where(total >= bound, total - jnp.uint32(bound), total)
