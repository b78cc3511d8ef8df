"""Resets of environments whose episode ended, for any reset function. Only the resets that are needed are computed."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jppo.envs.spaces import Array, PyTree

Reset = Callable[[Array], tuple[PyTree, PyTree]]  # key -> obs, state
Restart = Callable[[Array, Array, PyTree, PyTree], tuple[PyTree, PyTree]]  # done, key, obs, state -> obs, state

_BLOCKS = 16  # a batch of N environments resets in blocks of N/16


def make_restart(reset: Reset) -> Restart:
    """Returns a function that resets an environment where done, and returns its observation and state otherwise.

    `vmap` would turn a condition into a selection: each step would reset all N environments and discard nearly all
    results. Here, a batch resets blocks of N/16 environments until each ended one has been reset. The results are the
    same, because each environment uses its own key.
    """

    @jax.custom_batching.custom_vmap
    def restart(done: Array, key: Array, obs: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        return jax.lax.cond(done, lambda: reset(key), lambda: (obs, state))

    @restart.def_vmap
    def restart_batch(size: int, batched: PyTree, *arguments: PyTree) -> tuple[PyTree, PyTree]:
        rows = jax.tree.map(lambda x, has_rows: x if has_rows else _repeat(x, size), arguments, tuple(batched))
        results = _restart_rows(reset, size, *rows)
        return results, jax.tree.map(lambda _: True, results)

    return restart


def _repeat(x: Array, size: int) -> Array:
    return jnp.broadcast_to(x, (size, *jnp.shape(x)))


def _restart_rows(
    reset: Reset, size: int, done: Array, key: Array, obs: PyTree, state: PyTree
) -> tuple[PyTree, PyTree]:
    """Resets the environments where done; leaves [N, ...]."""
    block = -(-size // _BLOCKS)
    num_blocks = -(-size // block)
    ended = jnp.nonzero(done, size=num_blocks * block, fill_value=size)[0]  # numbers of environments, then N

    def reset_block(number: Array, results: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        rows = jax.lax.dynamic_slice_in_dim(ended, number * block, block)
        fresh = jax.vmap(reset)(key[rows])
        return jax.tree.map(lambda old, new: old.at[rows].set(new, mode="drop"), results, fresh)

    num_needed = (jnp.count_nonzero(done) + block - 1) // block
    results: tuple[PyTree, PyTree] = jax.lax.fori_loop(0, num_needed, reset_block, (obs, state))
    return results
