"""Converts a state, a pytree of arrays, to named NumPy arrays and back."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.envs.spaces import PyTree
from jppo.errors import Refused


class LeafMismatch(Refused):
    """The saved state has other leaves, shapes or dtypes than the run needs."""


def copy_leaves(state: PyTree) -> dict[str, Any]:
    """Returns copies of a state's leaves by tree path, because training donates its buffers.

    The copies are NumPy arrays, or `jax.Array`s if other processes hold a part of them. PRNG keys become their uint32
    data. Empty arrays are left out, because orbax cannot store them.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): _copy(leaf) for path, leaf in leaves if not _is_empty(leaf)}


def restore_leaves(leaves: dict[str, np.ndarray], like: PyTree, prefix: str, path: Path) -> PyTree:
    """Returns the state with the structure and the shardings of `like`.

    In a program of several processes, all processes call it.

    Args:
      leaves: see `copy_leaves`.
      like: arrays or `jax.ShapeDtypeStruct`s; NumPy arrays are restored as NumPy arrays.
      prefix: tree path of `like` in the saved state, if it is a part of it.
      path: the file or directory of the leaves, for the error message.

    Raises:
      LeafMismatch: the saved state has other leaves, shapes or dtypes.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    wanted = {prefix + jax.tree_util.keystr(path): leaf for path, leaf in paths}
    saved = {name: describe_array(leaf) for name, leaf in leaves.items() if name.startswith(prefix)}
    needed = {name: describe_array(leaf) for name, leaf in wanted.items()}
    for name in sorted(saved | needed):
        if needed.get(name) != (found := saved.get(name)) and not (found is None and _is_empty(wanted[name])):
            raise LeafMismatch(
                f"{path} does not fit this run: it contains {name} = {found or 'nothing'}, the run needs "
                f"{needed.get(name, 'nothing')}"
            )
    return jax.tree.unflatten(structure, [_place(leaves.get(name), leaf) for name, leaf in wanted.items()])


def with_dtype(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns the array with its dtype if it is one that .npz files do not know, such as bfloat16."""
    return array.view(dtype) if array.dtype.kind == "V" and dtype is not None else array


def is_key(array: Any) -> bool:
    """Returns whether an array contains PRNG keys."""
    return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)


def _copy(leaf: Any) -> Any:
    data = jax.random.key_data(leaf) if is_key(leaf) else leaf
    if isinstance(data, jax.Array) and not data.is_fully_addressable:
        return np.array(data.addressable_data(0)) if data.is_fully_replicated else jnp.copy(data)
    return np.array(data)


def _is_empty(leaf: Any) -> bool:
    return 0 in leaf.shape


def describe_array(leaf: Any) -> str:
    """Returns dtype and shape, for example float32[8,4]."""
    data = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    return f"{data.dtype}[{','.join(map(str, data.shape))}]"


def _place(array: np.ndarray | None, like: Any) -> Any:
    """Returns the array on the devices of `like`; None stands for an empty array."""
    array = np.zeros(like.shape, like.dtype) if array is None else array
    if isinstance(like, np.ndarray):
        return array
    if is_key(like):
        wrap = functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(like))
        data = jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])
        return jax.jit(wrap, out_shardings=like.sharding)(data)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: array[index])
