"""The minibatches of an epoch: a random permutation of the rows of a rollout, cut into equal parts.

With a recurrent network, the shuffled units are sequences of steps instead of single samples.

The shuffle is stratified: the environments are cut into strata (PPOConfig.num_strata), each is shuffled separately, and
minibatch m is the union of every stratum's m-th slice. A device that holds whole strata forms its part of every
minibatch alone, and the minibatches are the same sets of samples on any number of devices.
"""

import jax
import jax.numpy as jnp

from jppo.config.ppo import PPOConfig
from jppo.ppo.kernels.permutation import divmod_u32, permute_index, round_keys
from jppo.ppo.types import Array, PyTree


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
        step, env = divmod_u32(permute_index(keys, position, size), envs)
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
    """Returns the global numbers of the strata that this device's `num_envs` environments form, [S] i32."""
    count = config.effective_strata * num_envs // config.num_envs
    first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * count
    return first + jnp.arange(count, dtype=jnp.int32)
