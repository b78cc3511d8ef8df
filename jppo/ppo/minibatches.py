"""The minibatch shuffle: a keyed bijection on indices, without a sort and without memory.

`jax.random.permutation` sorts, which took a third of a PPO update. Here, index i of a set of a*b is written as (l, r),
l < a, r < b, and scrambled by an alternating Feistel network:

    l <- (l + f_k(r)) mod a,    r <- (r + g_k(l)) mod b,    repeated with new round keys.

Every half-round can be undone by subtracting the same term, so the whole is an exact bijection for every a and b. See
Black and Rogaway (2002), "Ciphers with arbitrary finite domains", for the unbalanced network. The permutation must be
well mixed, but not secret, so the round function is an integer hash. A picture: rotate each row of a grid by its own
random amount, then each column, and so on.

With a recurrent network, the shuffled units are sequences of steps instead of single samples.

The shuffle is stratified: the environments are cut into strata (PPOConfig.num_strata), each is shuffled separately, and
minibatch m is the union of every stratum's m-th slice. A device that holds whole strata forms its part of every
minibatch alone, and the minibatches are the same sets of samples on any number of devices.
"""

import math

import jax
import jax.numpy as jnp

from jppo.config.ppo import PPOConfig
from jppo.ppo.types import Array, PyTree

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

    A Feistel network needs two factors of at least 4. Other sizes (primes, for example) are sorted by a keyed hash that
    is injective.

    Args:
      round_keys: [rounds, 2] u32, drawn by `round_keys` for this size; they determine the permutation.
      index: [...] integers in 0..size-1.
      size: static, below 2**31.
    """
    a, b = balanced_factors(size)
    index = index.astype(jnp.uint32)
    if a < _SMALLEST_FACTOR:
        hashed = _hash(_hash(jnp.arange(size, dtype=jnp.uint32), round_keys[0, 0]), round_keys[0, 1])
        return jnp.argsort(hashed).astype(jnp.uint32)[index]

    def double_round(halves: tuple[Array, Array], keys: Array) -> tuple[tuple[Array, Array], None]:
        left, right = halves
        left = _add_modulo(left, _bits_to_range(_hash(right, keys[0]), a), a)
        right = _add_modulo(right, _bits_to_range(_hash(left, keys[1]), b), b)
        return (left, right), None

    # A loop instead of unrolled code: XLA would fuse all rounds into every gather that uses the result, copy each value
    # once per use, and compile for minutes.
    (left, right), _ = jax.lax.scan(double_round, _divmod(index, b), round_keys)
    return left * jnp.uint32(b) + right


def epoch_keys(key: Array, config: PPOConfig, num_rows: int, strata: Array) -> Array:
    """Draws the round keys of each epoch of an update, [num_epochs, S, rounds, 2] u32.

    Args:
      key: one per update, the same on every device.
      num_rows: rows of this device's rollout, T*N.
      strata: [S] i32, global numbers of this rollout's strata, in the order of its environments.
    """
    return round_keys(key, (config.num_epochs, config.effective_strata), num_rows // strata.shape[0])[:, strata]


def minibatch_indices(keys: Array, num_steps: int, num_envs: int, num_minibatches: int) -> Array:
    """Returns the rows of an epoch's minibatches in a rollout flattened from [T, N] to [T*N].

    The result is [num_minibatches, rows] i32 and contains each row once.

    Args:
      keys: [S, rounds, 2] u32, one epoch of `epoch_keys`.
      num_steps, num_envs: T and N of this device's rollout.
      num_minibatches: divides T*N/S.
    """
    num_strata = keys.shape[0]
    envs = num_envs // num_strata
    size = num_steps * envs
    position = jnp.arange(size, dtype=jnp.uint32).reshape(num_minibatches, -1)

    def rows_of(keys: Array, first: Array) -> Array:
        step, env = _divmod(permute_index(keys, position, size), envs)
        return step * jnp.uint32(num_envs) + first + env

    rows = jax.vmap(rows_of, out_axes=1)(keys, envs * jnp.arange(num_strata, dtype=jnp.uint32))
    return rows.reshape(num_minibatches, -1).astype(jnp.int32)


def take_sequences(tree: PyTree, rows: Array, length: int) -> PyTree:
    """Returns sequences of a rollout: leaves [L, M, ...] of leaves [T, N, ...].

    Args:
      rows: [M] i32, indices of `minibatch_indices` for T/L "steps" and N environments: sequence k of environment n has
        the index k*N + n.
      length: L.
    """

    def take(x: Array) -> Array:
        num_envs = x.shape[1]
        sequences = x.reshape(-1, length, *x.shape[1:])
        return jax.vmap(lambda step: step[rows // num_envs, rows % num_envs], in_axes=1)(sequences)

    return jax.tree.map(take, tree)


def local_strata(config: PPOConfig, num_envs: int, axis_name: str | None) -> Array:
    """Returns the global numbers of the strata that this device's `num_envs` environments form, [S] i32.

    Raises:
      ValueError: they do not form whole strata.
    """
    strata = config.effective_strata
    if strata * num_envs % config.num_envs:
        raise ValueError(
            f"{num_envs} of num_envs = {config.num_envs} environments per device do not form whole strata of the "
            f"shuffle, of which there are {strata}; use a number of devices that divides {strata}"
        )
    count = strata * num_envs // config.num_envs
    first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * count
    return first + jnp.arange(count, dtype=jnp.int32)


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
    return _divmod(bits, bound)[1]


def _divmod(x: Array, by: int) -> tuple[Array, Array]:
    """Returns quotient and remainder, u32; `%` alone would be twelve operations."""
    quotient = x // jnp.uint32(by)
    return quotient, x - quotient * jnp.uint32(by)


def _add_modulo(x: Array, term: Array, bound: int) -> Array:
    total = x + term
    return jnp.where(total >= bound, total - jnp.uint32(bound), total)
