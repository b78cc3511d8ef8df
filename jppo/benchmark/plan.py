"""What a run would need, measured before it is run."""

import dataclasses
import functools
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.config.presets import PRESETS, preset_for
from jppo.devices.jit import jit
from jppo.devices.memory import bytes_free, bytes_needed, show_bytes
from jppo.devices.mesh import max_usable_devices
from jppo.envs.backends import choose_backend
from jppo.ppo.anakin import CHUNK_CAPACITY, Anakin, AnakinState, make_anakin, run_chunk
from jppo.ppo.types import PyTree
from jppo.sweeps.population import MAX_RUNS_PER_CPU_DEVICE, compile_population
from jppo.training.settings import check_preset


class PlanResult(NamedTuple):
    """A run's needs; memory is that of one device."""

    env: str
    num_envs: int
    num_steps: int
    num_devices: int
    parameters: int  # numbers in the network
    bytes: dict[str, int]  # by part, as the compiled program has it
    bytes_needed: int  # of the program at its peak
    bytes_free: int
    compile_seconds: float
    steps_per_second: float  # in a trial of some seconds
    run_steps: int  # of the preset's run
    run_seconds: float  # that it would take, without compiling
    largest_num_envs: int  # that fits, with the other settings as they are
    largest_population: int  # lanes of this size that fit at once on all devices


def plan(
    env: Any,
    *,
    config: PPOConfig | None = None,
    preset: str = "auto",
    num_devices: int | None = None,
    seconds: float = 2.0,
) -> PlanResult:
    """Compiles a run on the device, tries it, and says how far it could grow, for which it compiles three or four more.

    Args:
      env: as for `jppo.train`, on the device.
      config: the preset's when None.
      preset: see `jppo.train`; also says how long a run is.
      num_devices: as many as there are and fit when None.
      seconds: of the trial.

    Raises:
      ValueError: anything given that cannot be, or a run that does not fit in memory.
    """
    if not 0.0 < seconds < math.inf:
        raise ValueError(f"seconds = {seconds} must be more than 0")
    if isinstance(env, str) and choose_backend(env) == "ray":
        raise ValueError(f"{env} is an environment of Gymnasium's; a plan is of a run on the device")
    name = env if isinstance(env, str) else ""
    chosen = PRESETS[check_preset(preset_for(name) if preset == "auto" else preset)]
    config = chosen.config if config is None else config
    num_devices = max_usable_devices(config) if num_devices is None else num_devices
    free = bytes_free(num_devices)
    agent = make_anakin(env, config, num_devices=num_devices)
    chunk, compile_seconds = _compile(agent)
    needed = bytes_needed(chunk)
    largest = _largest_num_envs(agent, needed, free)
    if needed > free:
        fits = f"the largest num_envs that fits is {largest}" if largest else "lower num_steps, too"
        raise ValueError(
            f"num_envs = {config.num_envs} and num_steps = {config.num_steps} need {show_bytes(needed)} of device "
            f"memory and {show_bytes(free)} are free; {fits}"
        )
    speed = _try(agent, chunk, seconds)
    state = jax.eval_shape(agent.init, jax.random.key(0), Hyperparams())
    return PlanResult(
        env=agent.env.name,
        num_envs=config.num_envs,
        num_steps=config.num_steps,
        num_devices=num_devices,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.train.policy.params)),
        bytes=_parts(state, chunk, num_devices),
        bytes_needed=needed,
        bytes_free=free,
        compile_seconds=compile_seconds,
        steps_per_second=speed,
        run_steps=chosen.total_steps,
        run_seconds=chosen.total_steps / speed,
        largest_num_envs=largest,
        largest_population=_largest_population(config, agent),
    )


def print_plan(planned: PlanResult) -> None:
    """As a table."""
    table = Table(show_header=False, title=f"{planned.env}, {planned.num_envs} x {planned.num_steps}")
    table.add_row("parameters", f"{planned.parameters:,}")
    for part, size in planned.bytes.items():
        table.add_row(f"  {part}", show_bytes(size))
    per = f"per device ({planned.num_devices})" if planned.num_devices > 1 else "on the device"
    table.add_row(f"memory {per}", f"{show_bytes(planned.bytes_needed)} of {show_bytes(planned.bytes_free)} free")
    table.add_row("compile time", f"{planned.compile_seconds:.1f} s")
    table.add_row("speed", f"{planned.steps_per_second:,.0f} steps/s")
    table.add_row(f"a run of {planned.run_steps:,} steps", f"{planned.run_seconds:,.1f} s")
    table.add_row("largest num_envs", f"{planned.largest_num_envs:,}")
    table.add_row("largest population", f"{planned.largest_population:,} lanes of this size")
    Console().print(table)


def _compile(agent: Anakin) -> tuple[Any, float]:
    """The program of a run, and how long that took."""
    start = time.perf_counter()
    shapes = jax.eval_shape(agent.init, jax.random.key(0), Hyperparams())
    state = AnakinState(
        train=_placed(agent.sharding.train, shapes.train), collect=_placed(agent.sharding.collect, shapes.collect)
    )
    finite = jax.ShapeDtypeStruct((), bool, sharding=agent.sharding.train)
    chunk = jit(functools.partial(run_chunk, agent), donate_argnums=0)
    return chunk.lower(state, finite, jnp.int32(0)).compile(), time.perf_counter() - start


def _placed(sharding: Any, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _try(agent: Anakin, chunk: Any, seconds: float) -> float:
    """Steps per second of whole updates."""
    state = jit(agent.init, out_shardings=agent.sharding.out_shardings)(jax.random.key(0), Hyperparams())
    finite = jax.device_put(np.ones((), bool), agent.sharding.train)
    updates, length, elapsed = 0, 1, 0.0
    state, finite, _ = jax.block_until_ready(chunk(state, finite, jnp.int32(1)))
    start = time.perf_counter()
    while elapsed < seconds:
        state, finite, _ = jax.block_until_ready(chunk(state, finite, jnp.int32(length)))
        updates, elapsed = updates + length, time.perf_counter() - start
        length = max(1, min(2 * length, CHUNK_CAPACITY, int((seconds - elapsed) * updates / elapsed)))
    return updates * agent.config.batch_size / elapsed


def _parts(state: AnakinState, chunk: Any, num_devices: int) -> dict[str, int]:
    stats = chunk.memory_analysis()
    train = state.train
    parts = {
        "parameters": _bytes(train.policy.params),
        "optimiser": _bytes(train.opt_state),
        "environments": _bytes(state.collect) // num_devices,
    }
    parts["other state"] = max(0, stats.argument_size_in_bytes - sum(parts.values()))
    parts["metrics"] = max(0, stats.output_size_in_bytes - stats.alias_size_in_bytes)
    parts["rollout, gradients and other temporaries"] = stats.temp_size_in_bytes
    return parts


def _bytes(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _largest_num_envs(agent: Anakin, needed: int, free: int) -> int:
    """The largest num_envs that fits, a multiple of the one at hand where that does; 0 where none is found.

    From what programs of other sizes need by their own account; the last one that is asked is that of the answer.
    """
    config, devices = agent.config, agent.sharding.mesh.size

    def needs(num_envs: int) -> int:
        other = dataclasses.replace(config, num_envs=num_envs)
        return bytes_needed(_compile(make_anakin(agent.env, other, num_devices=devices))[0])

    if needed <= free:
        unit = config.num_envs
        most = (2**31 - 1) // config.num_steps
        per_env = max(1, needs(2 * unit) - needed) / unit if 2 * unit <= most else needed / unit
        times = int(min(most, unit + (free - needed) / per_env)) // unit
    else:
        unit = devices * config.num_minibatches // math.gcd(devices * config.num_steps, config.num_minibatches)
        times = int(config.num_envs * free / needed) // unit
    while times > 0:
        if (size := needed if times * unit == config.num_envs else needs(times * unit)) <= free:
            return times * unit
        times = min(times - 1, int(times * free / size))
    return 0


def _largest_population(config: PPOConfig, agent: Anakin) -> int:
    """Lanes that fit on all devices of this process, from what a program of two needs; on a CPU no more than are run
    at a time."""
    pair, devices = compile_population(make_anakin(agent.env, config), 2).bytes, len(jax.local_devices())
    lanes = max(1, int(bytes_free(devices) / (pair / 2)))
    return min(lanes, MAX_RUNS_PER_CPU_DEVICE if jax.default_backend() == "cpu" else lanes) * devices
