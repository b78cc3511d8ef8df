"""The arrays of observations, and the dicts and tuples that contain them."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

FLOAT32, _UINT8 = np.dtype(np.float32), np.dtype(np.uint8)  # dtype objects are faster than np.float32 in calls


class ObsArray(NamedTuple):
    """One array of an observation."""

    shape: tuple[int, ...]
    dtype: np.dtype
    num_categories: int
    start: int

    @classmethod
    def from_json(cls, leaf: dict[str, Any]) -> "ObsArray":
        """Reads a description. Raises ValueError for an unknown dtype."""
        dtype = np.dtype(leaf["dtype"])
        if dtype.kind not in "biuf":
            raise ValueError(f"unknown dtype {leaf['dtype']!r}")
        return cls(tuple(leaf["shape"]), dtype, int(leaf["num_categories"]), int(leaf["start"]))

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of the network's input."""
        return (*self.shape, self.num_categories) if self.num_categories else self.shape

    def features(self, obs: np.ndarray) -> np.ndarray:
        """Returns the network's input [B, *feature_shape] f32: categories one-hot, colours divided by 255."""
        if self.num_categories:
            return (obs[..., None] == np.arange(self.start, self.start + self.num_categories)).astype(np.float32)
        features = obs.astype(FLOAT32, copy=False)
        return features / 255.0 if self.dtype == _UINT8 else features


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
