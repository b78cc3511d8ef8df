"""What is kept of an environment that was played with, and how its observations are held against their space."""

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jppo.envs.spaces import ActionSpec, ObsSpec, PyTree

_MOST_NUMBERS = 1024  # of an observation that are kept
_EXTREME = 0.125  # share of the actions that are at a bound
COUNTERS = frozenset(
    [
        *("time", "t", "step", "steps", "num_steps", "step_count", "step_counter", "current_step", "elapsed_steps"),
        *("timestep", "timesteps", "episode_step", "episode_length", "frame", "frame_number"),
    ]
)


class Trace(NamedTuple):
    """N environments, T steps each, with F numbers of each observation; NumPy throughout."""

    obs: np.ndarray  # [T+1, N, F] f32, what a policy would see: after the end of an episode that of the next
    digest: np.ndarray  # [T+1, N] u32, of the whole observation
    final: np.ndarray  # [T, N, F] f32, the true successor, as the environment says
    reward: np.ndarray  # [T, N]
    terminated: np.ndarray  # [T, N] bool
    truncated: np.ndarray  # [T, N] bool
    counters: dict[str, np.ndarray]  # [T+1, N], numbers of the state that may count the steps of an episode
    resets: np.ndarray  # [T, N] i32, calls of the environment's reset that it made itself, within the step

    @property
    def done(self) -> np.ndarray:
        """[T, N] bool: an episode ends."""
        return self.terminated | self.truncated


class Box(NamedTuple):
    """What is asked of such a space, where there is no space object."""

    shape: tuple[int, ...]
    dtype: str
    low: float = -np.inf
    high: float = np.inf


class Discrete(NamedTuple):
    """Likewise."""

    dtype: str
    n: int
    start: int
    shape: tuple[int, ...] = ()


class Dict(NamedTuple):
    """Likewise."""

    spaces: dict[str, Any]


class Tuple(NamedTuple):
    """Likewise."""

    spaces: tuple[Any, ...]


def space_of(spec: PyTree) -> Any:
    """A space as told by ObsSpecs."""
    if isinstance(spec, ObsSpec):
        categories = spec.num_categories
        return Discrete(spec.dtype, categories, spec.start) if categories else Box(spec.shape, spec.dtype)
    if isinstance(spec, Mapping):
        return Dict({key: space_of(part) for key, part in spec.items()})
    return Tuple(tuple(space_of(part) for part in spec))


class Starts(NamedTuple):
    """R resets each way."""

    obs: np.ndarray  # [R, F] f32, each with a seed of its own
    digest: np.ndarray  # [R] u32
    following: np.ndarray  # [R] u32, of resets without a seed in one environment; [0] where there are none such


class RaisedError(Exception):
    """Something that the environment raised (its cause), and when."""


class MisfitError(Exception):
    """An observation that does not fit its space, so that nothing more can be said."""


def draw_actions(spec: ActionSpec, seed: int, num_steps: int, num_envs: int) -> np.ndarray:
    """[T, N, *shape] actions; the first half of the environments, but at least two, get the same ones.

    Uniform between bounds and often at them, normal where there are none.
    """
    rng = np.random.default_rng(seed)
    size = (num_steps, num_envs)
    if spec.num_actions:
        action = rng.integers(spec.num_actions, size=size) + spec.start
    else:
        low, high = (np.asarray(bound, np.float64).reshape(spec.shape) for bound in (spec.low, spec.high))
        boxed = np.isfinite(high - low)
        unit = rng.uniform(size=(*size, *spec.shape))
        unit = np.where(rng.uniform(size=unit.shape) < _EXTREME, np.round(unit), unit)
        inside = np.where(boxed, low, 0) + unit * np.where(boxed, high - low, 0)
        action = np.clip(np.where(boxed, inside, rng.normal(size=unit.shape)), low, high)
    action[:, : alike(num_envs)] = action[:, :1]
    return action.astype(spec.dtype)


def alike(num_envs: int) -> int:
    """How many environments get the same actions."""
    return min(num_envs, max(2, num_envs // 2))


class Observations:
    """Holds observations against a space, and remembers the first of each kind of fault."""

    def __init__(self, space: Any, casts: bool) -> None:
        """Args: casts: whether jppo brings observations into the dtype of the space."""
        self._space, self._casts = space, casts
        self.faults: dict[str, str] = {}  # "dtype", "range", "categories" or "finite" -> where and what

    def see(self, obs: PyTree, lead: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Observations with leading dims [*lead]: [*lead, F] f32 of their numbers, and their digests [*lead] u32.

        Raises MisfitError for one of another structure or shape.
        """
        leaves = []
        for path, space, value in _parts(self._space, obs, "observation"):
            leaf = np.asarray(value)
            shape = tuple(space.shape)
            if leaf.shape != (*lead, *shape):
                raise MisfitError(f"{path} has shape {list(leaf.shape[len(lead) :])}; its space says {list(shape)}")
            self._compare(path, space, leaf)
            leaves.append(leaf.reshape(*lead, -1))
        return _kept(leaves), _digests(leaves, lead)

    def _compare(self, path: str, space: Any, leaf: np.ndarray) -> None:
        declared = np.dtype(space.dtype)
        kind = type(space).__name__
        if kind != "Discrete" and leaf.dtype != declared:
            lossy = self._casts and not np.can_cast(leaf.dtype, declared, "same_kind")
            self._note("loss" if lossy else "dtype", f"{path} is {leaf.dtype}; its space says {declared}")
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            self._note("finite", f"{path} has {leaf[~np.isfinite(leaf)].flat[0]}")
        if kind == "Discrete":
            first = int(getattr(space, "start", 0))
            outside = leaf[(leaf < first) | (leaf >= first + int(space.n))]
            if outside.size:
                self._note(
                    "categories", f"{path} is {outside.flat[0]}; its space says {first} to {first + space.n - 1}"
                )
            return
        if leaf.dtype.kind == "b":
            return
        low, high = (0, 1) if kind == "MultiBinary" else (space.low, space.high)
        low, high = (np.broadcast_to(np.asarray(bound), leaf.shape) for bound in (low, high))
        slack = 1e-5 * np.maximum(1.0, np.abs(np.where(np.isfinite(leaf), leaf, 0.0)))
        outside = (leaf < low - slack) | (leaf > high + slack)
        if outside.any():
            bounds = f"[{low[outside][0]:g}, {high[outside][0]:g}]"
            self._note("range", f"{path} has {leaf[outside][0]:g}, outside {bounds}")

    def _note(self, kind: str, text: str) -> None:
        self.faults.setdefault(kind, text)


def _parts(space: Any, value: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Path, space and value of every array of an observation; those of Dict and Tuple spaces are taken apart."""
    kind = type(space).__name__
    try:
        if kind == "Dict":
            for key, part in space.spaces.items():
                inner = value[key] if isinstance(value, Mapping) else getattr(value, key)
                yield from _parts(part, inner, f"{path}[{key!r}]")
        elif kind == "Tuple":
            for i, (part, inner) in enumerate(zip(space.spaces, value, strict=True)):
                yield from _parts(part, inner, f"{path}[{i}]")
        else:
            yield path, space, value
    except (KeyError, AttributeError, ValueError, TypeError) as error:
        raise MisfitError(f"{path} is a {type(value).__name__} that does not fit {space}: {error}") from error


def _kept(leaves: list[np.ndarray]) -> np.ndarray:
    flat = np.concatenate([leaf.astype(np.float32) for leaf in leaves], axis=-1)
    return flat[..., :: math.ceil(flat.shape[-1] / _MOST_NUMBERS)]


def _digests(leaves: list[np.ndarray], lead: tuple[int, ...]) -> np.ndarray:
    result = np.zeros(lead, np.uint32)
    for index in np.ndindex(lead):
        crc = 0
        for leaf in leaves:
            crc = zlib.crc32(np.ascontiguousarray(leaf[index]).tobytes(), crc)
        result[index] = crc
    return result
