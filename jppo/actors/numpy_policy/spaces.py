"""The arrays of observations, and the dicts and tuples that contain them."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

FLOAT32, _UINT8 = np.dtype(np.float32), np.dtype(np.uint8)  # dtype objects are faster than np.float32 in calls


class ObsArray(NamedTuple):
    """One array of an observation."""

    shape: tuple[int, ...]
    dtype: np.dtype
    num_categories: int
    start: int | tuple[int, ...]
    nvec: tuple[int, ...] = ()
    high: float | tuple[float, ...] = 255.0

    @classmethod
    def from_json(cls, leaf: dict[str, Any]) -> "ObsArray":
        """Reads a description. Raises ValueError for an unknown dtype."""
        dtype = np.dtype(leaf["dtype"])
        if dtype.kind not in "biuf":
            raise ValueError(f"unknown dtype {leaf['dtype']!r}")
        start = tuple(leaf["start"]) if isinstance(leaf["start"], list | tuple) else int(leaf["start"])
        nvec = tuple(map(int, leaf.get("nvec", ())))
        high = leaf.get("high", 255.0)  # files of jppo 0.2 lack it, and nvec
        high = tuple(high) if isinstance(high, list | tuple) else float(high)
        return cls(tuple(leaf["shape"]), dtype, int(leaf["num_categories"]), start, nvec, high)

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of the network's input."""
        if self.nvec:
            return (sum(self.nvec),)
        return (*self.shape, self.num_categories) if self.num_categories else self.shape

    @property
    def is_narrow(self) -> bool:
        """Whether the space of uint8 numbers is smaller than their dtype."""
        return self.dtype == _UINT8 and bool(np.min(self.high) < 255)

    def cast(self, obs: Any, name: str) -> np.ndarray:
        """Returns observations [..., *shape] in the array's dtype.

        Raises ValueError for numbers that the space does not have: other categories, and numbers that the dtype would
        change, such as 0.7 or 300 as uint8. The same error reports values that are not arrays of real numbers.
        """
        try:
            given = np.asarray(obs)
            if given.dtype == self.dtype and not (self.num_categories or self.nvec or self.is_narrow):
                return given
            if given.dtype.kind in "cmMSU":
                raise TypeError("it does not consist of real numbers")
            with np.errstate(all="ignore"):
                cast = given.astype(self.dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{name} cannot be converted to {self.dtype}: {error}") from None
        wrong = cast != given if self.dtype.kind in "biu" else np.zeros(cast.shape, bool)
        needed = str(self.dtype)
        if self.is_narrow and cast.shape[cast.ndim - len(self.shape) :] == self.shape:
            high = np.broadcast_to(self.high, np.shape(self.high)).reshape(self.shape if np.ndim(self.high) else ())
            wrong |= given > high
            needed = f"integers from 0 to {high.astype(int)}"
        if (self.num_categories or self.nvec) and cast.shape[cast.ndim - len(self.shape) :] == self.shape:
            low = np.reshape(self.start, self.shape)
            high = low + np.reshape(self.nvec or self.num_categories, self.shape) - 1
            wrong |= (given < low) | (given > high)
            needed = f"integers from {low} to {high}"
        if wrong.any():
            raise ValueError(f"{name} has {given[wrong].flat[0]}; its space has {needed}")
        return cast

    def features(self, obs: np.ndarray) -> np.ndarray:
        """Returns the network's input [B, *feature_shape] f32: categories one-hot, uint8 divided by its largest value.

        It is `jppo.ppo.policy.prepare_obs` in NumPy.
        """
        if self.num_categories:
            return (obs[..., None] == np.arange(self.num_categories) + np.asarray(self.start)).astype(np.float32)
        if self.nvec:
            columns, categories = _component_categories(self.nvec, self.start)
            return (obs.reshape(len(obs), -1)[:, columns] == categories).astype(np.float32)
        features = obs.astype(FLOAT32, copy=False)
        high = np.asarray(self.high, FLOAT32)
        return features / (high.reshape(self.shape) if high.ndim else high) if self.dtype == _UINT8 else features


def as_batch(leaves: list[np.ndarray], shapes: list[tuple[int, ...]]) -> tuple[list[np.ndarray], bool]:
    """Returns the arrays of observations [B, *obs], and whether the input was one observation without B.

    Raises ValueError if a shape differs from `shapes`, the shapes without B, or if an array contains NaN.
    """
    single = leaves[0].shape == shapes[0]
    batch = [leaf[None] for leaf in leaves] if single else leaves
    for given, leaf, wanted in zip(leaves, batch, shapes, strict=True):
        if leaf.shape[1:] != wanted or not leaf.ndim or len(leaf) != len(batch[0]):
            raise ValueError(f"an observation has shape {given.shape}; the policy takes {wanted} or a batch of it")
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            raise ValueError("the observation contains NaN or infinity; check the environment or the sensor")
    return batch, single


def starting_rows(episode_start: Any, size: int) -> np.ndarray:
    """Returns the rows in which an episode starts, [B] bool with B = size.

    Raises ValueError if `episode_start`, of a caller, is not bool or has another shape.
    """
    try:
        start = np.asarray(False if episode_start is None else episode_start)
    except ValueError:
        raise ValueError(f"episode_start is a ragged list; for {size} observations it must be {size} bools") from None
    if start.dtype != bool:
        raise ValueError(f"episode_start must be bool; it is {start.dtype}")
    if start.shape not in ((), (size,)):
        raise ValueError(f"episode_start has shape {start.shape}; for {size} observations it must be ({size},)")
    return np.broadcast_to(start, (size,))


@functools.lru_cache(64)
def _component_categories(nvec: tuple[int, ...], start: int | tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns, for each one-hot feature of a MultiDiscrete space, its component and its category, [sum(nvec)]."""
    first = np.concatenate([np.arange(n) for n in nvec])
    columns = np.repeat(np.arange(len(nvec)), nvec)
    return columns, first + np.repeat(np.broadcast_to(start, len(nvec)), nvec)


def array_descriptions(tree: Any) -> Iterator[dict[str, Any]]:
    """Yields the descriptions of a space's arrays in JAX's order."""
    if "dict" in tree:
        for name in sorted(tree["dict"]):
            yield from array_descriptions(tree["dict"][name])
    elif "tuple" in tree:
        for part in tree["tuple"]:
            yield from array_descriptions(part)
    else:
        yield tree


def rebuild(tree: Any, leaves: Iterator[Any]) -> Any:
    """Returns the arrays of a space in its dicts and tuples."""
    if "dict" in tree:
        return {name: rebuild(tree["dict"][name], leaves) for name in sorted(tree["dict"])}
    return tuple(rebuild(part, leaves) for part in tree["tuple"]) if "tuple" in tree else next(leaves)


def rebuild_names(tree: Any, name: str) -> Any:
    """Returns the names of the arrays of a space, for messages, in its dicts and tuples."""
    if "dict" in tree:
        return {key: rebuild_names(part, f"{name}[{key!r}]") for key, part in tree["dict"].items()}
    if "tuple" in tree:
        return tuple(rebuild_names(part, f"{name}[{i}]") for i, part in enumerate(tree["tuple"]))
    return name


def flatten(tree: Any, obs: Any, name: str) -> Iterable[Any]:
    """Returns the arrays of an observation in JAX's order.

    Args:
      name: of the observation, for messages.

    Raises:
      ValueError: the observation has other dicts or tuples.
    """
    if "dict" in tree:
        if not isinstance(obs, dict) or set(obs) != set(tree["dict"]):
            raise ValueError(f"{name} must be a dict of {', '.join(sorted(tree['dict']))}")
        return [leaf for key in sorted(obs) for leaf in flatten(tree["dict"][key], obs[key], f"{name}[{key!r}]")]
    if "tuple" in tree:
        if not isinstance(obs, tuple | list) or len(obs) != len(tree["tuple"]):
            raise ValueError(f"{name} must be a tuple of {len(tree['tuple'])}")
        parts = zip(tree["tuple"], obs, strict=True)
        return [leaf for i, (part, leaf) in enumerate(parts) for leaf in flatten(part, leaf, f"{name}[{i}]")]
    if isinstance(obs, dict):
        raise ValueError(f"{name} must be an array; it is a dict")
    return [obs]
