"""Trains many runs as one compiled program: a `vmap` over runs, sharded over the devices."""

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
from jppo.ppo.anakin import Anakin, AnakinState, run_chunk
from jppo.ppo.types import Array, PyTree
from jppo.training.history import History, RecentEpisodes
from jppo.training.progress import Reporter

_HISTORY_ROWS = 1 << 20  # updates kept in memory, summed over all runs
_EPISODES = ("count", "return_mean", "return_std")
MAX_RUNS_PER_CPU_DEVICE = 64  # more runs at once take longer on a CPU (docs/performance.md)


class Population(NamedTuple):
    """A compiled program for `size` runs (R below). A run that diverges stops; the other runs are not affected."""

    init: Any  # (keys [R], hyperparams with leaves [R]) -> AnakinState with leaves [R, ...]
    chunk: Any  # (state (donated), finite [R], number of updates []) -> state, finite, metrics [R, CHUNK_CAPACITY]
    size: int
    state_shapes: AnakinState  # leaves are ShapeDtypeStruct
    sharding: NamedSharding  # of the runs over the devices
    bytes: int  # peak memory on each device
    compile_seconds: float


def compile_population(
    agent: Anakin, size: int, num_devices: int = 1, hyperparams: Hyperparams = Hyperparams()
) -> Population:
    """Compiles one program for `size` runs of an agent that was made for one device.

    Args:
      hyperparams: those of any run; all runs have the same kinds of schedules.
      size: number of runs, a multiple of num_devices. Each device gets an equal share.
    """
    start = time.perf_counter()
    mesh = mesh_1d(jax.local_devices()[:num_devices])
    split, whole = PartitionSpec(AXIS), PartitionSpec()
    sharding = NamedSharding(mesh, split)

    def shapes_of(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    keys, finite = jax.eval_shape(lambda: (_make_keys(np.zeros(size, np.uint32)), jnp.ones(size, bool)))
    numbers = jax.tree.map(lambda _: jax.ShapeDtypeStruct((size,), jnp.float32), hyperparams)
    init_arguments = shapes_of((keys, numbers))
    init = jit(shard_over_devices(jax.vmap(agent.init), mesh, split, split), out_shardings=sharding)
    state_shapes = shapes_of(jax.eval_shape(jax.vmap(agent.init), *init_arguments))
    updates = jax.vmap(functools.partial(run_chunk, agent), in_axes=(0, 0, None))
    chunk = jit(shard_over_devices(updates, mesh, (split, split, whole), split), donate_argnums=0)
    compiled_chunk = chunk.lower(state_shapes, shapes_of(finite), jax.ShapeDtypeStruct((), jnp.int32)).compile()
    compiled_init = init.lower(*init_arguments).compile()
    stats = compiled_chunk.memory_analysis()
    # The metrics of one chunk are read while the next chunk runs, so its outputs exist twice.
    needed = bytes_needed(compiled_chunk) + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Population(
        init=compiled_init,
        chunk=compiled_chunk,
        size=size,
        state_shapes=state_shapes,
        sharding=sharding,
        bytes=max(needed, bytes_needed(compiled_init)),
        compile_seconds=time.perf_counter() - start,
    )


def fitting_population(
    agent: Anakin,
    runs: int,
    num_devices: int = 1,
    max_parallel_runs: int | None = None,
    hyperparams: Hyperparams = Hyperparams(),
) -> Population:
    """Compiles a program for `runs` runs, or for an equal part of them if memory cannot hold all.

    Args:
      num_devices: maximum number of devices; fewer are used if that gives no device more runs.
      max_parallel_runs: maximum number of runs in the program. None: as many as memory holds.
      hyperparams: see `compile_population`.

    Raises:
      ValueError: not even one run per device fits into memory.
    """
    default_limit = num_devices * MAX_RUNS_PER_CPU_DEVICE if jax.default_backend() == "cpu" else runs
    parts = math.ceil(runs / (max_parallel_runs or default_limit))
    free = bytes_free(num_devices)
    while True:
        runs_per_device, devices = shares(math.ceil(runs / parts), num_devices)
        population = compile_population(agent, runs_per_device * devices, devices, hyperparams)
        if max_parallel_runs is not None or population.bytes <= free:
            return population
        if runs_per_device == 1:
            raise ValueError(
                f"one run needs {show_bytes(population.bytes)} of device memory and {show_bytes(free)} are free; lower "
                f"num_envs = {agent.config.num_envs} or num_steps = {agent.config.num_steps}"
            )
        parts = max(parts + 1, math.ceil(parts * population.bytes / free))


def shares(runs: int, num_devices: int) -> tuple[int, int]:
    """Returns the number of runs on each device, and the number of devices."""
    runs_per_device = math.ceil(runs / num_devices)
    return runs_per_device, math.ceil(runs / runs_per_device)


def init_population(population: Population, seeds: Sequence[int], hyperparams: Sequence[Hyperparams]) -> AnakinState:
    """Returns the initial states of the runs. If there are fewer runs than the program holds, the last one repeats."""
    rows = _padded_rows(population, 0, len(seeds))
    numbers = jax.tree.map(lambda *x: np.array(x, np.float32)[rows], *hyperparams)
    keys = _make_keys(np.array(seeds, np.uint32)[rows])
    return population.init(*jax.device_put((keys, numbers), population.sharding))


def to_host(state: PyTree, runs: int) -> PyTree:
    """Returns the states of the first `runs` runs as NumPy arrays; keys become key data."""
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if _is_key(x) else x)[:runs], state)


def from_host(population: Population, host_state: AnakinState, first: int) -> AnakinState:
    """Places the runs of a host state from index `first` on the devices. If there are fewer runs than the program
    holds, the last one repeats."""
    rows = _padded_rows(population, first, len(jax.tree.leaves(host_state)[0]))

    def place(x: Any, like: Any) -> Array:
        return jax.device_put(jax.random.wrap_key_data(x[rows]) if _is_key(like) else x[rows], population.sharding)

    return jax.tree.map(place, host_state, population.state_shapes)


class PopulationLogger:
    """Collects the metrics of the runs in a population."""

    def __init__(
        self,
        *,
        recent: dict[int, RecentEpisodes],
        batch_size: int,
        update: int,
        seconds: float,
        progress: "SweepProgress",
    ) -> None:
        """
        Args:
          recent: recent episodes of each run, by run number, in the program's order. Further runs are padding.
          update: number of updates before.
          seconds: training seconds before.
          progress: receives the sums over all runs.
        """
        self.seconds, self.reporter, self._recent = seconds, progress.reporter, recent
        self.updates = update  # of the runs that have not diverged
        self.completed = np.full(len(recent), update)  # [R], completed updates of each run
        self.finite = np.ones(len(recent), bool)
        self.empty_masks: dict[int, int] = {}  # t*N + n of the first row without a legal action, by index of the run
        self._batch_size, self._progress = batch_size, progress
        self._history = History(max(2, _HISTORY_ROWS // len(recent)))

    def add(self, metrics: dict[str, np.ndarray], now: float) -> bool:
        """Logs metrics [R, updates]. Returns False if all runs have diverged."""
        recent = list(self._recent.values())
        columns = {name: column[: len(recent)] for name, column in metrics.items() if name != "empty_mask"}
        finite = np.logical_and(self.finite[:, None], np.logical_and.accumulate(columns.pop("finite"), axis=1))
        if "empty_mask" in metrics:
            for index in np.flatnonzero(self.finite & ~finite[:, -1]):
                if (row := int(metrics["empty_mask"][index, np.argmin(finite[index])])) >= 0:
                    self.empty_masks[int(index)] = row
        length, passed = finite.shape[1], now - self.seconds
        number = self.updates + 1 + np.arange(length)
        rows: dict[str, np.ndarray] = {"update": number, "env_steps": number * self._batch_size}
        rows["time/elapsed"] = self.seconds + passed * np.arange(1, length + 1) / length
        self._history.add(rows | self._columns(columns, finite))
        for run, update in np.argwhere(np.logical_and(finite, columns["episode/count"] > 0)):
            recent[run].add(*(float(columns[f"episode/{name}"][run, update]) for name in _EPISODES))
        self.updates, self.seconds = self.updates + length, now
        self.completed += finite.sum(axis=1)
        self.finite = finite[:, -1]
        returns = {
            number: episodes.mean if well else -math.inf
            for (number, episodes), well in zip(self._recent.items(), self.finite, strict=True)
        }
        self._progress.add(int(finite.sum()) * self._batch_size, passed, returns)
        return bool(self.finite.any())

    def _columns(self, columns: dict[str, np.ndarray], finite: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the logged metrics, [updates, R] each.

        Args:
          columns: metrics of the program, [R, updates] each.
          finite: [R, updates] bool, False from the update on in which a run diverged.
        """
        return {name: column.T for name, column in columns.items()}

    def metrics_of(self, index: int) -> dict[str, np.ndarray]:
        """Returns the metrics of one run, [updates] each; {} if there was no update."""
        arrays = self._history.arrays()
        good = arrays.get("update", np.zeros(0)) <= self.completed[index]
        return {name: (column if column.ndim == 1 else column[:, index])[good] for name, column in arrays.items()}


class SweepProgress:
    """Adds up the progress of all runs for display."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter, self.env_steps, self._best = reporter, 0, math.nan

    def add(self, env_steps: int, seconds: float, returns: dict[int, float]) -> None:
        """Adds environment steps that took `seconds`, and the recent mean returns by run number."""
        self.env_steps += env_steps
        self._best = max((x for x in [self._best, *returns.values()] if not math.isnan(x)), default=math.nan)
        self.reporter.update(self.env_steps, env_steps / max(seconds, 1e-9), self._best)


def _make_keys(seeds: np.ndarray) -> Array:
    """Returns one key per seed: [R] u32 to [R]."""
    return jax.vmap(jax.random.key)(seeds)


def _padded_rows(population: Population, first: int, count: int) -> np.ndarray:
    """Returns the indices of the program's runs among `count` runs; the last index repeats."""
    return np.minimum(first + np.arange(population.size), count - 1)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
