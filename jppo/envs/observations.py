"""Compares observations with their space."""

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jppo.envs.spaces import ObsSpec, PyTree, kind_of

_MAX_NUMBERS = 1024  # numbers of an observation that are kept


class MisfitError(Exception):
    """The structure or shape of an observation differs from its space."""


class Observations:
    """Compares observations with a space, and records the first fault of each kind."""

    def __init__(self, space: Any, casts: bool) -> None:
        """
        Args:
          space: a space of Gymnasium or gymnax, or ObsSpec leaves.
          casts: whether jppo casts observations to the dtype of the space.
        """
        self._space, self._casts = space, casts
        self.faults: dict[str, str] = {}  # "dtype", "loss", "range", "categories" or "finite" -> description

    @np.errstate(all="ignore")  # casts may underflow, and environments may make NumPy raise then
    def see(self, obs: PyTree, lead: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers [*lead, F] f32 and the checksums [*lead] u32 of observations [*lead, ...].

        Raises MisfitError if the structure or a shape differs from the space, or a leaf does not consist of numbers.
        """
        leaves = []
        for path, space, value in split_observation(self._space, obs, "observation"):
            leaf = _as_array(path, value)
            shape = tuple(space.shape)
            if leaf.shape != (*lead, *shape):
                raise MisfitError(f"{path} has shape {list(leaf.shape[len(lead) :])}; its space says {list(shape)}")
            self._compare(path, space, leaf)
            leaves.append(leaf.reshape(*lead, -1))
        return _kept(leaves), _digests(leaves, lead)

    def _compare(self, path: str, space: Any, leaf: np.ndarray) -> None:
        declared = np.dtype(space.dtype)
        categories = _num_categories(space)
        if not categories and leaf.dtype != declared:
            lossy = self._casts and not np.can_cast(leaf.dtype, declared, "same_kind")
            self._note("loss" if lossy else "dtype", f"{path} is {leaf.dtype}; its space says {declared}")
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            self._note("finite", f"{path} has {leaf[~np.isfinite(leaf)].flat[0]}")
        if categories:
            first = int(getattr(space, "start", 0))
            last = first + categories - 1
            if (outside := leaf[(leaf < first) | (leaf > last) | (leaf != np.floor(leaf))]).size:
                self._note("categories", f"{path} is {outside.flat[0]}; its space says {first} to {last}")
            return
        if leaf.dtype.kind == "b":
            return
        low, high = _bounds(space)
        low, high = (np.broadcast_to(np.asarray(bound), leaf.shape) for bound in (low, high))
        slack = 1e-5 * np.maximum(1.0, np.abs(np.where(np.isfinite(leaf), leaf, 0.0)))
        outside = (leaf < low - slack) | (leaf > high + slack)
        if outside.any():
            bounds = f"[{low[outside][0]:g}, {high[outside][0]:g}]"
            # MultiDiscrete is one-hot, so that others would be zeros; the network's input is uint8 / high.
            is_category = kind_of(space) == "MultiDiscrete" or (declared == np.uint8 and bool((high < 255).any()))
            self._note("categories" if is_category else "range", f"{path} has {leaf[outside][0]:g}, outside {bounds}")

    def _note(self, kind: str, text: str) -> None:
        self.faults.setdefault(kind, text)


def _as_array(path: str, value: Any) -> np.ndarray:
    try:
        leaf = np.asarray(value)
    except ValueError as error:  # NumPy's text explains which dimension
        raise MisfitError(f"{path} is not an array: {error}") from error
    if leaf.dtype.kind in "OSUMm":
        raise MisfitError(f"{path} has the dtype {leaf.dtype}, not numbers")
    return leaf


def split_observation(space: Any, value: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields path, space and value of each array of an observation. Raises MisfitError for another structure."""
    parts = getattr(space, "spaces", space)
    try:
        if isinstance(parts, Mapping):
            for key, part in parts.items():
                inner = value[key] if isinstance(value, Mapping) else getattr(value, key)
                yield from split_observation(part, inner, f"{path}[{key!r}]")
        elif isinstance(parts, tuple | list):
            for i, (part, inner) in enumerate(zip(parts, value, strict=True)):
                yield from split_observation(part, inner, f"{path}[{i}]")
        else:
            yield path, space, value
    except (KeyError, AttributeError, ValueError, TypeError) as error:
        found = "an array" if hasattr(value, "shape") else f"of type {type(value).__name__}"
        raise MisfitError(f"{path} is {found}, which does not fit {space}") from error


def _num_categories(space: Any) -> int:
    """Returns the number of categories of a Discrete space, and 0 for the others."""
    if isinstance(space, ObsSpec):
        return space.num_categories
    return int(space.n) if kind_of(space) == "Discrete" else 0


def _bounds(space: Any) -> tuple[Any, Any]:
    """Returns the smallest and the largest value of a space that is not Discrete."""
    kind = kind_of(space)
    if isinstance(space, ObsSpec):
        if space.dtype == "uint8" and not space.nvec:
            return 0, np.reshape(space.high, space.shape if np.ndim(space.high) else ())
        first = np.reshape(space.start, space.shape) if space.nvec else -np.inf
        return first, first + np.reshape(space.nvec, space.shape) - 1 if space.nvec else np.inf
    if kind == "MultiBinary":
        return 0, 1
    if kind == "MultiDiscrete":
        start = getattr(space, "start", np.zeros_like(space.nvec))
        return start, start + space.nvec - 1
    return space.low, space.high


def _kept(leaves: list[np.ndarray]) -> np.ndarray:
    flat = np.concatenate([leaf.astype(np.float32) for leaf in leaves], axis=-1)
    return flat[..., :: math.ceil(flat.shape[-1] / _MAX_NUMBERS)].copy()  # a view would keep all numbers in memory


def _digests(leaves: list[np.ndarray], lead: tuple[int, ...]) -> np.ndarray:
    result = np.zeros(lead, np.uint32)
    for index in np.ndindex(lead):
        crc = 0
        for leaf in leaves:
            crc = zlib.crc32(np.ascontiguousarray(leaf[index]).tobytes(), crc)
        result[index] = crc
    return result
