"""Orthogonal initial weights of all layers at once.

Gain: the program that makes the initial state compiles in 0.9 s instead of 1.4 s (CPU), since flax draws and decomposes
each kernel by itself, with LAPACK. The plain form (flax) has the same distribution, but gives other numbers.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo import kernels
from jppo.envs.spaces import Array, PyTree

_SMALL = (256, 512)  # kernels of at most this shape are made in one loop, even if their shapes differ
_TINY = 1e-30

Init = Callable[[Array, PyTree, PyTree], PyTree]  # (key, features [B, *features], carry [B, ...]) -> params


def make_init(init: Init, gains: Mapping[str, float] | None, shapes: PyTree | None = None) -> Init:
    """Returns a function that makes initial parameters.

    Args:
      init: the network's own function, and the plain form.
      gains: gain of each named layer, see `orthogonal_params`; None to call `init` of a user's network.
      shapes: the parameters' shapes, to avoid tracing `init` for them.
    """
    if gains is not None and kernels.ENABLED:
        return lambda key, features, carry: orthogonal_params(
            key, jax.eval_shape(init, key, features, carry) if shapes is None else shapes, gains
        )
    # On a CPU, a batched QR decomposition (flax's orthogonal initializer under vmap) runs on the thread pool that waits
    # for it; two at once can wait for ever.
    return jax.custom_batching.sequential_vmap(init) if jax.default_backend() == "cpu" else init


def get_param(module: Any, name: str, init: Callable[..., Array], shape: tuple[int, ...]) -> Array:
    """Returns a flax module's parameter. Plain form: `module.param`, which traces `init` again to compare shapes.

    Gain: together with fewer random draws, 10 to 13 % of a second start (CPU, two workloads).
    """
    existing: Any = module.get_variable("params", name) if kernels.ENABLED else None
    param: Array = existing if getattr(existing, "shape", None) == shape else module.param(name, init, shape)
    return param


def orthogonal_params(key: Array, shapes: PyTree, gains: Mapping[str, float]) -> PyTree:
    """Returns arrays of the given shapes: a layer's "kernel" [..., outputs] is orthogonal, everything else is zero.

    Saxe, McClelland and Ganguli (2014), "Exact solutions to the nonlinear dynamics of learning in deep linear neural
    networks". One draw and one loop make all small kernels; each shape of large kernels has its own. Large kernels take
    up to three times as long as with LAPACK (0.6 s for 1,024 x 1,024).

    Args:
      gains: gain of each named layer; sqrt(2) for the others.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    params = [jnp.zeros(leaf.shape, leaf.dtype) for _, leaf in leaves]
    groups: dict[tuple[int, int] | None, list[int]] = {}
    for number, (path, leaf) in enumerate(leaves):
        if path[-1].key == "kernel":
            groups.setdefault(_group(_matrix(leaf.shape)), []).append(number)
    group_keys = jax.random.split(key, len(groups)) if len(groups) > 1 else [key]
    for group_key, numbers in zip(group_keys, groups.values(), strict=True):
        matrices = [_matrix(leaves[number][1].shape) for number in numbers]
        for number, basis in zip(numbers, _random_bases(group_key, matrices), strict=True):
            path, leaf = leaves[number]
            kernel = basis if leaf.shape[-1] > math.prod(leaf.shape[:-1]) else basis.T
            gain = gains.get(path[-2].key, math.sqrt(2.0))
            params[number] = (gain * kernel).reshape(leaf.shape).astype(leaf.dtype)
    return jax.tree.unflatten(structure, params)


def orthonormal(rows: Array) -> Array:
    """Returns orthonormal bases of the spaces that rows [K, N, M] span, N <= M; zeros for rows of zeros.

    Gram-Schmidt process, each row projected twice, which is as accurate as Householder's method (Giraud, Langou and
    Rozloznik 2005, "The loss of orthogonality in the Gram-Schmidt orthogonalization process"). For normal rows the
    result is uniformly distributed (Mezzadri 2007, "How to generate random matrices from the classical compact
    groups").
    """

    def add(number: Array, bases: Array) -> Array:
        row = rows[:, number]
        for _ in range(2):
            along = jnp.einsum("knm,km->kn", bases, row, precision="highest")
            row -= jnp.einsum("kn,knm->km", along, bases, precision="highest")
        return bases.at[:, number].set(row / jnp.maximum(_TINY, jnp.linalg.norm(row, axis=1, keepdims=True)))

    return jax.lax.fori_loop(0, rows.shape[1], add, jnp.zeros_like(rows))


def _random_bases(key: Array, matrices: list[tuple[int, int]]) -> list[Array]:
    """Returns random orthonormal rows [n, m] for each (n, m), by one loop over the largest shape."""
    sizes = np.array(matrices, np.int32)[:, :, None, None]
    max_rows, max_columns = map(int, sizes.max(axis=0).ravel())
    normal = jax.random.normal(key, (len(matrices), max_rows, max_columns))
    # computed, not a constant of the program
    inside = (jnp.arange(max_rows)[None, :, None] < sizes[:, 0]) & (jnp.arange(max_columns)[None, None] < sizes[:, 1])
    bases = orthonormal(jnp.where(inside, normal, 0.0))
    return [basis[:n, :m] for basis, (n, m) in zip(bases, matrices, strict=True)]


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns (n, m), n <= m, of a kernel [..., outputs] seen as a matrix."""
    inputs, outputs = math.prod(shape[:-1]), shape[-1]
    return min(inputs, outputs), max(inputs, outputs)


def _group(matrix: tuple[int, int]) -> tuple[int, int] | None:
    """Returns the key of the kernel's group: None for all small kernels, which are made in one loop."""
    return None if matrix[0] <= _SMALL[0] and matrix[1] <= _SMALL[1] else matrix
