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
from jppo.config.run import RunConfig
from jppo.devices.jit import jit, lower
from jppo.devices.memory import bytes_free, bytes_needed, bytes_needed_beside, show_bytes
from jppo.devices.mesh import AXIS, mesh_1d, shard_over_devices
from jppo.envs.spaces import Array, PyTree
from jppo.errors import Refused
from jppo.ppo.anakin import Anakin, AnakinState
from jppo.runs.display import show_count
from jppo.runs.leaves import is_key
from jppo.sweeps.grid import ProgramGroup
from jppo.sweeps.log import PopulationLogger
from jppo.training.device_loop import check_first_steps, make_target, run_chunk
from jppo.training.evaluator import evaluation_key, make_evaluation
from jppo.training.history import RecentEpisodes
from jppo.training.progress import Reporter

MAX_RUNS_PER_CPU_DEVICE = 64  # more runs at once take longer on a CPU (docs/performance.md)


class Population(NamedTuple):
    """A compiled program for `size` runs (R below). A run that diverges stops; the other runs are not affected."""

    init: Any  # (keys [R], hyperparams with leaves [R]) -> AnakinState with leaves [R, ...]
    chunk: Any  # (state (donated), flags [R], number of updates []) -> state, flags, metrics [R, CHUNK_CAPACITY]
    evaluate: Any  # (policy, keys [R], number of updates []) -> metrics, policy, steps without a legal action; or None
    target: float | None  # recent return at which a run stops; the flags are then a `ReturnTarget`
    size: int
    state_shapes: AnakinState  # leaves are ShapeDtypeStruct
    sharding: NamedSharding  # of the runs over the devices
    bytes: int  # peak memory on each device
    compile_seconds: float


def compile_population(
    agent: Anakin,
    size: int,
    num_devices: int = 1,
    hyperparams: Hyperparams = Hyperparams(),
    run: RunConfig = RunConfig(),
) -> Population:
    """Compiles one program for `size` runs of an agent that was made for one device.

    Args:
      hyperparams: those of any run; all runs have the same kinds of schedules.
      size: number of runs, a multiple of num_devices. Each device gets an equal share.
      run: settings of evaluations and of the return at which a run stops.
    """
    start = time.perf_counter()
    mesh = mesh_1d(jax.local_devices()[:num_devices])
    split, whole = PartitionSpec(AXIS), PartitionSpec()
    sharding = NamedSharding(mesh, split)

    def shapes_of(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    target = None if run.eval_every else run.stop_at_return
    keys, flags = jax.eval_shape(
        lambda: (_make_keys(np.zeros(size, np.uint32)), _make_flags(np.ones(size, bool), target, [RecentEpisodes()]))
    )
    numbers = jax.tree.map(lambda _: jax.ShapeDtypeStruct((size,), jnp.float32), hyperparams)
    init_arguments = shapes_of((keys, numbers))
    init = jit(shard_over_devices(jax.vmap(agent.init), mesh, split, split), out_shardings=sharding)
    state_shapes = shapes_of(jax.eval_shape(jax.vmap(agent.init), *init_arguments))
    updates = jax.vmap(functools.partial(run_chunk, agent), in_axes=(0, 0, None))
    chunk = jit(shard_over_devices(updates, mesh, (split, split, whole), split), donate_argnums=0)
    compiled_chunk = lower(chunk, state_shapes, shapes_of(flags), jax.ShapeDtypeStruct((), jnp.int32)).compile()
    compiled_init = init.lower(*init_arguments).compile()
    evaluate = None
    if run.eval_every:
        play = shard_over_devices(
            jax.vmap(make_evaluation(agent, run), in_axes=(0, 0, None)), mesh, (split, split, whole), split
        )
        policies = state_shapes.train.policy_state
        evaluate = jit(play, out_shardings=sharding).lower(policies, shapes_of(keys), np.int32(0)).compile()
    stats = compiled_chunk.memory_analysis()
    # The metrics of one chunk are read while the next chunk runs, so its outputs exist twice.
    needed = bytes_needed(compiled_chunk) + stats.output_size_in_bytes - stats.alias_size_in_bytes
    if evaluate is not None:  # it may run at the same time, and its policies are those of the chunk
        needed += bytes_needed_beside(evaluate)
    return Population(
        init=compiled_init,
        chunk=compiled_chunk,
        evaluate=evaluate,
        target=target,
        size=size,
        state_shapes=state_shapes,
        sharding=sharding,
        bytes=max(needed, bytes_needed(compiled_init)),
        compile_seconds=time.perf_counter() - start,
    )


def compile_group(group: ProgramGroup, runs: int, reporter: Reporter) -> Population:
    """Compiles the program for this number of a group's runs, or for an equal part of them if memory cannot hold all.

    It uses fewer devices than the group has if that gives no device more runs.

    Raises:
      ValueError: not even one run per device fits into memory.
    """
    agent, num_devices, limit = group.agent, group.num_devices, group.max_parallel_runs
    check_first_steps(agent.env)
    default_limit = num_devices * MAX_RUNS_PER_CPU_DEVICE if jax.default_backend() == "cpu" else runs
    parts = math.ceil(runs / (limit or default_limit))
    hyperparams, free = group.runs[0].hyperparams, bytes_free(num_devices)
    while True:
        runs_per_device, devices = shares(math.ceil(runs / parts), num_devices)
        population = compile_population(agent, runs_per_device * devices, devices, hyperparams, group.settings.run)
        if limit is not None or population.bytes <= free:
            break
        if runs_per_device == 1:
            raise Refused(
                f"one run needs {show_bytes(population.bytes)} of device memory and {show_bytes(free)} are free; lower "
                f"num_envs = {agent.config.num_envs} or num_steps = {agent.config.num_steps}"
            )
        parts = max(parts + 1, math.ceil(parts * population.bytes / free))
    count = show_count(runs, "run") if population.size >= runs else f"{population.size} of {runs} runs at a time"
    reporter.message(
        f"{group.env_name}, {count}: compiled in {population.compile_seconds:.1f} s; needs "
        f"{show_bytes(population.bytes)} of {show_bytes(free)}"
    )
    return population


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


def evaluation_keys(population: Population, seeds: Sequence[int]) -> Array:
    """Returns the keys of the runs' evaluations."""
    keys = _make_keys(np.array(seeds, np.uint32)[_padded_rows(population, 0, len(seeds))])
    return jax.device_put(jax.vmap(evaluation_key)(keys), population.sharding)


def place_flags(population: Population, log: PopulationLogger) -> Any:
    """Returns the flags of a program's next chunk. Only runs that have not ended are trained; padding is not."""
    active = np.zeros(population.size, bool)
    active[: len(log.runs)] = log.active
    flags = _make_flags(active, population.target, [run.recent for run in log.runs])
    return jax.device_put(flags, population.sharding)


def _make_flags(active: np.ndarray, target: float | None, recent: list[RecentEpisodes]) -> Any:
    """Returns which runs are trained, [R] bool, or a `ReturnTarget` of it, as NumPy arrays.

    Args:
      recent: recent episodes of the first runs; for further runs, the last element repeats.
    """
    if target is None:
        return active
    rows = np.minimum(np.arange(len(active)), len(recent) - 1)
    targets = [make_target(target, recent[row]) for row in rows]
    return jax.tree.map(lambda *x: np.stack(x), *targets).replace(finite=active)


def to_host(state: PyTree, runs: int) -> PyTree:
    """Returns the states of the first `runs` runs as NumPy arrays; keys become key data."""
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x)[:runs], state)


def from_host(population: Population, host_state: AnakinState, first: int) -> AnakinState:
    """Places the runs of a host state from index `first` on the devices. If there are fewer runs than the program
    holds, the last one repeats."""
    rows = _padded_rows(population, first, len(jax.tree.leaves(host_state)[0]))

    def place(x: Any, like: Any) -> Array:
        return jax.device_put(jax.random.wrap_key_data(x[rows]) if is_key(like) else x[rows], population.sharding)

    return jax.tree.map(place, host_state, population.state_shapes)


def _make_keys(seeds: np.ndarray) -> Array:
    """Returns one key per seed: [R] u32 to [R]."""
    return jax.vmap(jax.random.key)(seeds)


def _padded_rows(population: Population, first: int, count: int) -> np.ndarray:
    """Returns the indices of the program's runs among `count` runs; the last index repeats."""
    return np.minimum(first + np.arange(population.size), count - 1)
