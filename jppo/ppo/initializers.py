"""Initial weights of jppo's own networks."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jppo.ppo.types import Array, PyTree

_SMALL = (256, 512)  # kernels of at most this shape are made together, however theirs differ
_TINY = 1e-30


def orthogonal_params(key: Array, shapes: PyTree, gains: Mapping[str, float]) -> PyTree:
    """Arrays of these shapes: a layer's "kernel" [..., outputs] is orthogonal, all else is zero.

    Saxe, McClelland and Ganguli (2014), "Exact solutions to the nonlinear dynamics of learning in deep linear neural
    networks".

    flax draws and decomposes each kernel by itself, by LAPACK's QR: more to compile, an import of scipy.linalg, and for
    batches of kernels a way to wait for ever (docs/performance.md). Here it is one draw and one loop, and one more for
    every shape of large kernels, which take up to three times as long as LAPACK: 0.6 s for 1,024 x 1,024.

    Args:
      gains: by the name of a layer; sqrt(2) for those that it does not name.
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
        for number, basis in zip(numbers, _bases(group_key, matrices), strict=True):
            path, leaf = leaves[number]
            kernel = basis if leaf.shape[-1] > math.prod(leaf.shape[:-1]) else basis.T
            params[number] = (gains.get(path[-2].key, math.sqrt(2.0)) * kernel).reshape(leaf.shape).astype(leaf.dtype)
    return jax.tree.unflatten(structure, params)


def orthonormal(rows: Array) -> Array:
    """Orthonormal bases of the spaces that rows [K, N, M] span, N <= M: the first row's direction, then what is left of
    each next one without the rows before it. Zeros for rows of zeros.

    Gram and Schmidt's process, each row projected twice, which is as good as Householder's whatever the rows' condition
    (Giraud, Langou and Rozloznik 2005, "The loss of orthogonality in the Gram-Schmidt orthogonalization process"). Of
    normal rows the result is uniformly distributed (Mezzadri 2007, "How to generate random matrices from the classical
    compact groups").
    """

    def add(number: Array, bases: Array) -> Array:
        row = rows[:, number]
        for _ in range(2):
            along = jnp.einsum("knm,km->kn", bases, row, precision="highest")
            row -= jnp.einsum("kn,knm->km", along, bases, precision="highest")
        return bases.at[:, number].set(row / jnp.maximum(_TINY, jnp.linalg.norm(row, axis=1, keepdims=True)))

    return jax.lax.fori_loop(0, rows.shape[1], add, jnp.zeros_like(rows))


def _bases(key: Array, matrices: list[tuple[int, int]]) -> list[Array]:
    """Random orthonormal rows, [n, m] for each of these, by one loop over the largest shape."""
    sizes = np.array(matrices, np.int32)[:, :, None, None]
    most, longest = map(int, sizes.max(axis=0).ravel())
    normal = jax.random.normal(key, (len(matrices), most, longest))
    # computed, not a constant of the program
    inside = (jnp.arange(most)[None, :, None] < sizes[:, 0]) & (jnp.arange(longest)[None, None] < sizes[:, 1])
    bases = orthonormal(jnp.where(inside, normal, 0.0))
    return [basis[:n, :m] for basis, (n, m) in zip(bases, matrices, strict=True)]


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """(n, m), n <= m, of a kernel [..., outputs]."""
    inputs, outputs = math.prod(shape[:-1]), shape[-1]
    return min(inputs, outputs), max(inputs, outputs)


def _group(matrix: tuple[int, int]) -> tuple[int, int] | None:
    return None if matrix[0] <= _SMALL[0] and matrix[1] <= _SMALL[1] else matrix
