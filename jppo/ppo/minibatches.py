"""The minibatch shuffle: a keyed bijection on indices, with neither sort nor memory.

`jax.random.permutation` sorts, on one thread, and was a third of a whole PPO iteration on CPU. Here index i of a set
of a*b is written as (l, r), l < a, r < b, and scrambled by an alternating Feistel network:

    l <- (l + f_k(r)) mod a,    r <- (r + g_k(l)) mod b,    repeated with fresh round keys.

Every half-round is undone by subtracting the same term, so the whole is an exact bijection for every a and b. See
Black and Rogaway (2002), "Ciphers with arbitrary finite domains", for the unbalanced network; they need not be secret
here, only well mixed, so the round function is an integer hash. Picture: rotate each row of a grid by its own random
amount, then each column, and so on.

Stratified: the environments are cut into `num_strata` shards, each shuffled on its own, and minibatch m is the union of
every shard's m-th slice. A device that holds whole shards can thus form its part of every minibatch alone, and the
minibatches are the same sets of samples on any number of devices.
"""

import math

import jax
import jax.numpy as jnp

from jppo.config.ppo import PPOConfig
from jppo.ppo.types import Array

_SMALLEST_FACTOR = 4


def balanced_factors(size: int) -> tuple[int, int]:
    """(a, b) with a*b = size and a <= b as near as can be."""
    a = next(d for d in range(math.isqrt(size), 0, -1) if size % d == 0)
    return a, size // a


def round_keys(key: Array, shape: tuple[int, ...], size: int) -> Array:
    """What chooses permutations of 0..size-1, [*shape, rounds, 2] u32: by one draw, however many there are."""
    return jax.random.bits(key, (*shape, _double_rounds(*balanced_factors(size)), 2), jnp.uint32)


def permuted(round_keys: Array, index: Array, size: int) -> Array:
    """Where a keyed random permutation of 0..size-1 sends each index; same shape, u32.

    Sizes without two factors of at least 4 (primes and the like) have no network to mix them; they are sorted by a
    keyed hash, which gives no two numbers the same.

    Args:
      round_keys: [rounds, 2] u32, as `round_keys` gives them for this size; choose the permutation.
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
        left = _add_modulo(left, _below(_hash(right, keys[0]), a), a)
        right = _add_modulo(right, _below(_hash(left, keys[1]), b), b)
        return (left, right), None

    # A loop, not straight code: XLA would fuse all rounds into every gather that uses the result, each value copied
    # once per use, and compile for minutes.
    index = index + (round_keys[0, 0] & jnp.uint32(0))  # of the keys' type under shard_map, as scan's carry must be
    (left, right), _ = jax.lax.scan(double_round, _divided(index, b), round_keys)
    return left * jnp.uint32(b) + right


def epoch_keys(key: Array, config: PPOConfig, num_rows: int, strata: Array) -> Array:
    """What shuffles each epoch of an update, [num_epochs, S, rounds, 2] u32.

    Args:
      key: one per update, the same on every device.
      num_rows: of the rollout at hand (of this device), T*N.
      strata: [S] i32, global numbers of the shards that make up this rollout, in the order of its environments.
    """
    return round_keys(key, (config.num_epochs, config.num_strata), num_rows // strata.shape[0])[:, strata]


def minibatch_indices(keys: Array, num_steps: int, num_envs: int, num_minibatches: int) -> Array:
    """Rows of an epoch's minibatches in a rollout flattened from [T, N] to [T*N]; [num_minibatches, rows] i32, each row
    once.

    Args:
      keys: [S, rounds, 2] u32, one epoch's of `epoch_keys`.
      num_steps, num_envs: T and N of the rollout at hand (of this device).
      num_minibatches: divides T*N/S.
    """
    num_strata = keys.shape[0]
    envs = num_envs // num_strata
    size = num_steps * envs
    position = jnp.arange(size, dtype=jnp.uint32).reshape(num_minibatches, -1)

    def rows_of(keys: Array, first: Array) -> Array:
        step, env = _divided(permuted(keys, position, size), envs)
        return step * jnp.uint32(num_envs) + first + env

    rows = jax.vmap(rows_of, out_axes=1)(keys, envs * jnp.arange(num_strata, dtype=jnp.uint32))
    return rows.reshape(num_minibatches, -1).astype(jnp.int32)


def local_strata(config: PPOConfig, num_envs: int, axis_name: str | None) -> Array:
    """Global numbers of the shards that this device's `num_envs` environments make up, [S] i32.

    Raises:
      ValueError: they make up no whole number of them.
    """
    if config.num_strata * num_envs % config.num_envs:
        raise ValueError(
            f"{num_envs} of num_envs = {config.num_envs} environments per device do not make whole shards of the "
            f"shuffle, of which there are {config.num_strata}; use a number of devices that divides {config.num_strata}"
        )
    count = config.num_strata * num_envs // config.num_envs
    first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * count
    return first + jnp.arange(count, dtype=jnp.int32)


def _double_rounds(a: int, b: int) -> int:
    """How many mix an a x b grid: after n, neighbours in a row stay neighbours with odds of a^-n, so narrow grids need
    more than the four that do for square ones (chi-square tests over 400,000 keys). 1 where there is no network."""
    return 1 if a < _SMALLEST_FACTOR else max(4, 1 + math.ceil(math.log(100 * b) / math.log(a)))


def _hash(x: Array, key: Array) -> Array:
    """A 32-bit integer hash of x with the key mixed in (the finaliser of MurmurHash3)."""
    x = x * jnp.uint32(0x9E3779B1) + key
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _below(bits: Array, bound: int) -> Array:
    """Random bits scaled to 0..bound-1, without a division where the product fits 32 bits."""
    if bound <= 1 << 16:
        return ((bits >> 16) * jnp.uint32(bound)) >> 16
    return _divided(bits, bound)[1]


def _divided(x: Array, by: int) -> tuple[Array, Array]:
    """Quotient and remainder, u32; with `%` they are twelve operations."""
    quotient = x // jnp.uint32(by)
    return quotient, x - quotient * jnp.uint32(by)


def _add_modulo(x: Array, term: Array, bound: int) -> Array:
    total = x + term
    return jnp.where(total >= bound, total - jnp.uint32(bound), total)
