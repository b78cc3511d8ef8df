"""Many runs as one program: the lanes of a `vmap`, shared out over the devices, as many at a time as fit."""

import functools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jppo.config.ppo import Hyperparams
from jppo.devices.jit import jit
from jppo.devices.memory import bytes_free, bytes_needed, show_bytes
from jppo.devices.mesh import AXIS, mesh_1d, shard_over_devices
from jppo.ppo.anakin import Anakin, AnakinState
from jppo.ppo.types import Array, PyTree
from jppo.training.device_loop import run_chunk
from jppo.training.history import History, RecentEpisodes
from jppo.training.progress import Reporter

_HISTORY_ROWS = 1 << 20  # updates kept of all lanes together
_EPISODES = ("count", "return_mean", "return_std")
MOST_LANES_ON_CPU = 64  # per device: more at once take longer (docs/performance.md)


class Population(NamedTuple):
    """A compiled program of so many lanes, each a whole run. A lane that diverges stops as it would alone, and the
    others go on."""

    init: Any  # (keys [L], hyperparams with leaves [L]) -> AnakinState with leaves [L, ...]
    chunk: Any  # (state, finite [L], number of updates []) -> state, finite, metrics [L, CHUNK_CAPACITY]; takes `state`
    lanes: int
    like: AnakinState  # the state's shapes and dtypes
    sharding: NamedSharding  # of lanes over devices
    bytes: int  # that a device needs
    compile_seconds: float


def compile_population(agent: Anakin, lanes: int, num_devices: int = 1) -> Population:
    """One program for `lanes` runs of an agent (of one device) side by side, each device with its share of them.

    Args:
      lanes: a multiple of num_devices.
    """
    start = time.perf_counter()
    mesh = mesh_1d(jax.local_devices()[:num_devices])
    split, whole = PartitionSpec(AXIS), PartitionSpec()
    sharding = NamedSharding(mesh, split)

    def described(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    keys, finite = jax.eval_shape(lambda: (keys_of(np.zeros(lanes, np.uint32)), jnp.ones(lanes, bool)))
    numbers = jax.tree.map(lambda _: jax.ShapeDtypeStruct((lanes,), jnp.float32), Hyperparams())
    given = described((keys, numbers))
    init = jit(shard_over_devices(jax.vmap(agent.init), mesh, split, split), out_shardings=sharding)
    state = described(jax.eval_shape(jax.vmap(agent.init), *given))
    updates = jax.vmap(functools.partial(run_chunk, agent), in_axes=(0, 0, None))
    chunk = jit(shard_over_devices(updates, mesh, (split, split, whole), split), donate_argnums=0)
    compiled = chunk.lower(state, described(finite), jax.ShapeDtypeStruct((), jnp.int32)).compile()
    first = init.lower(*given).compile()
    stats = compiled.memory_analysis()  # metrics of one chunk are read while the next one runs
    needed = bytes_needed(compiled) + stats.output_size_in_bytes - stats.alias_size_in_bytes
    needed = max(needed, bytes_needed(first))
    return Population(first, compiled, lanes, state, sharding, needed, time.perf_counter() - start)


def fitting_population(agent: Anakin, lanes: int, num_devices: int = 1, at_once: int | None = None) -> Population:
    """A program for `lanes` runs, or for an equal part of them where memory does not hold them all at once.

    Args:
      num_devices: at most; as few as give none of them more lanes.
      at_once: the part, where it is not to be found out.

    Raises:
      ValueError: not even one lane per device fits.
    """
    most = at_once or (num_devices * MOST_LANES_ON_CPU if jax.default_backend() == "cpu" else lanes)
    free, pieces = bytes_free(num_devices), math.ceil(lanes / most)
    while True:
        each, devices = shares(math.ceil(lanes / pieces), num_devices)
        population = compile_population(agent, each * devices, devices)
        if at_once is not None or population.bytes <= free:
            return population
        if each == 1:
            raise ValueError(
                f"one run needs {show_bytes(population.bytes)} of device memory and {show_bytes(free)} are free; lower "
                f"num_envs = {agent.config.num_envs} or num_steps = {agent.config.num_steps}"
            )
        pieces = max(pieces + 1, math.ceil(pieces * population.bytes / free))


def shares(lanes: int, num_devices: int) -> tuple[int, int]:
    """Lanes on each device, and devices."""
    each = math.ceil(lanes / num_devices)
    return each, math.ceil(lanes / each)


def keys_of(seeds: np.ndarray) -> Array:
    """The keys [L] of runs with these seeds [L] u32."""
    return jax.vmap(jax.random.key)(seeds)


def begin(population: Population, seeds: Sequence[int], hyperparams: Sequence[Hyperparams]) -> AnakinState:
    """The state of as many runs as the population has lanes; where there are fewer, the last one fills it up."""
    rows = _rows(population, 0, len(seeds))
    numbers = jax.tree.map(lambda *x: np.array(x, np.float32)[rows], *hyperparams)
    keys = keys_of(np.array(seeds, np.uint32)[rows])
    return population.init(*jax.device_put((keys, numbers), population.sharding))


def park(state: PyTree, lanes: int) -> PyTree:
    """The first lanes of a state, as NumPy arrays."""
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if _is_key(x) else x)[:lanes], state)


def resume(population: Population, parked: AnakinState, first: int) -> AnakinState:
    """The lanes of a parked state from `first` on, back on the devices; where there are fewer than the population has,
    the last one fills it up."""
    rows = _rows(population, first, len(jax.tree.leaves(parked)[0]))

    def place(x: Any, like: Any) -> Array:
        return jax.device_put(jax.random.wrap_key_data(x[rows]) if _is_key(like) else x[rows], population.sharding)

    return jax.tree.map(place, parked, population.like)


class PopulationLog:
    """What the lanes of a population report."""

    def __init__(
        self, recent: dict[int, RecentEpisodes], batch_size: int, update: int, seconds: float, total: "Total"
    ) -> None:
        """
        Args:
          recent: by number, of each lane that counts, in order; others fill the program up.
          update: how many were made before.
          seconds: how long those took.
          total: is told what all lanes do.
        """
        self.seconds, self.reporter, self._recent = seconds, total.reporter, recent
        self.updates = np.full(len(recent), update)  # [lanes], done by each
        self.finite = np.ones(len(recent), bool)
        self._update, self._batch_size, self._total = update, batch_size, total
        self._history = History(max(2, _HISTORY_ROWS // len(recent)))

    def add(self, metrics: dict[str, np.ndarray], now: float) -> bool:
        """Logs columns [lanes, updates]; False when no lane is left."""
        recent = list(self._recent.values())
        columns = {name: column[: len(recent)] for name, column in metrics.items()}
        finite = np.logical_and(self.finite[:, None], np.logical_and.accumulate(columns.pop("finite"), axis=1))
        length, passed = finite.shape[1], now - self.seconds
        number = self._update + 1 + np.arange(length)
        rows: dict[str, np.ndarray] = {"update": number, "step": number * self._batch_size}
        rows["time/elapsed"] = self.seconds + passed * np.arange(1, length + 1) / length
        rows |= {name: column.T for name, column in columns.items()}
        self._history.add(rows)
        for lane, update in np.argwhere(np.logical_and(finite, columns["episode/count"] > 0)):
            recent[lane].add(*(float(columns[f"episode/{name}"][lane, update]) for name in _EPISODES))
        self._update, self.seconds = self._update + length, now
        self.updates += finite.sum(axis=1)
        self.finite = finite[:, -1]
        steps = int(finite.sum()) * self._batch_size
        means = {number: recent.mean for number, recent in self._recent.items()}
        self._total.add(
            steps, passed, means | {n: -math.inf for n, well in zip(means, self.finite, strict=True) if not well}
        )
        return bool(self.finite.any())

    def of_lane(self, lane: int) -> dict[str, np.ndarray]:
        """Its metrics, [updates] each."""
        arrays = self._history.arrays()
        good = arrays.get("update", np.zeros(0)) <= self.updates[lane]
        return {name: (column if column.ndim == 1 else column[:, lane])[good] for name, column in arrays.items()}


class Total:
    """Adds up what lanes do, for the eye."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter, self.steps, self._best = reporter, 0, math.nan

    def add(self, steps: int, seconds: float, returns: dict[int, float]) -> None:
        """Environment steps made by lanes in that time, and their recent returns."""
        self.steps += steps
        self._best = max((x for x in [self._best, *returns.values()] if not math.isnan(x)), default=math.nan)
        self.reporter.update(self.steps, steps / max(seconds, 1e-9), self._best)


def _rows(population: Population, first: int, count: int) -> np.ndarray:
    """Which of `count` lanes the population's are, from `first` on; the last one fills it up."""
    return np.minimum(first + np.arange(population.lanes), count - 1)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
