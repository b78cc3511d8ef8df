"""Measures one run on 1, 2, 4 and 8 devices: steps per second, and the time of the collectives.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python benchmarks/devices.py    # on a CPU
    python benchmarks/devices.py --devices 1 2 4                                       # on GPUs

Strong scaling: the environments of W1 are divided among D devices. Weak scaling: the number of
environments per device is that of W1. The time of the collectives is the difference to D independent runs without
collectives, each with one device's share of the environments. Each round times every program once; results are medians
over the rounds.
"""

import dataclasses
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, WORKLOADS, hardware

import jppo
from jppo.devices.jit import jit
from jppo.runs.files import write_json
from jppo.sweeps.population import compile_population, init_population


def sharded_update(env: str, config: jppo.PPOConfig, num_devices: int) -> Callable[[], Any]:
    """Returns a function that makes one update of a run on several devices."""
    agent = jppo.make_anakin(env, config, num_devices=num_devices)
    state = jit(agent.init, out_shardings=agent.sharding.out_shardings)(jax.random.key(0), jppo.Hyperparams())
    step = jit(agent.step, donate_argnums=0).lower(state).compile()

    def update() -> Any:
        nonlocal state
        state, metrics = step(state)
        return metrics

    return update


def separate_update(env: str, config: jppo.PPOConfig, num_devices: int) -> Callable[[], Any]:
    """Returns a function that makes one update of D independent runs, each with 1/D of the environments."""
    share = dataclasses.replace(config, num_envs=config.num_envs // num_devices)
    runs = compile_population(jppo.make_anakin(env, share), num_devices, num_devices)
    state = init_population(runs, list(range(num_devices)), [jppo.Hyperparams()] * num_devices)
    finite = jax.device_put(np.ones(num_devices, bool), runs.sharding)

    def update() -> Any:
        nonlocal state
        state, _, metrics = runs.chunk(state, finite, jnp.int32(1))
        return metrics

    return update


def seconds(update: Callable[[], Any], repeats: int) -> float:
    """Returns the mean duration of an update over `repeats` updates."""
    start = time.perf_counter()
    for _ in range(repeats):
        last = update()
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / repeats


def main(
    devices: tuple[int, ...] = (1, 2, 4, 8),
    workload: str = "W1",
    num_envs: int | None = None,
    rounds: int = 7,
    repeats: int = 3,
    output: Path = RESULTS / "devices.json",
) -> None:
    """Measures strong and weak scaling over devices and writes JSON.

    Args:
      devices: numbers of devices; each must divide the number of strata (8).
      workload: W1 to W4, see throughput.py.
      num_envs: number of environments; by default the workload's.
      rounds: number of rounds; each times every program once.
      repeats: consecutive updates that are timed together.
      output: JSON file.
    """
    if (there := len(jax.local_devices())) < max(devices):
        raise SystemExit(
            f"devices = {max(devices)} exceeds the {there} devices of JAX; on a CPU, set XLA_FLAGS as shown in --help"
        )
    env, config = WORKLOADS[workload].env, WORKLOADS[workload].config
    config = config if num_envs is None else dataclasses.replace(config, num_envs=num_envs)
    wide = {d: dataclasses.replace(config, num_envs=d * config.num_envs) for d in devices}
    programs = {
        **{("strong", d): sharded_update(env, config, d) for d in devices},
        **{("strong, apart", d): separate_update(env, config, d) for d in devices},
        **{("weak", d): sharded_update(env, wide[d], d) for d in devices},
        **{("weak, apart", d): separate_update(env, wide[d], d) for d in devices},
    }
    for update in programs.values():
        seconds(update, 1)
    times: dict[Any, list[float]] = {key: [] for key in programs}
    for _ in range(rounds):
        for key, update in programs.items():
            times[key].append(seconds(update, repeats))
    medians = {key: float(np.median(of_rounds)) for key, of_rounds in times.items()}
    rows = []
    for kind in ("strong", "weak"):
        for d in devices:
            size = (config if kind == "strong" else wide[d]).batch_size
            took, alone = medians[kind, d], medians[f"{kind}, apart", d]
            first = (config if kind == "strong" else wide[devices[0]]).batch_size / medians[kind, devices[0]]
            rows.append(
                {
                    "scaling": kind,
                    "devices": d,
                    "num_envs": size // config.num_steps,
                    "update_seconds": took,
                    "steps_per_second": size / took,
                    "speed_up": size / took / first,
                    "collective_seconds": took - alone,
                    "all_rounds": times[kind, d],
                }
            )
    content = {"rows": rows, "workload": workload, "date": datetime.date.today().isoformat()}
    write_json(output, content | hardware() | {"devices_there": there})
    table = Table(title=f"{env}, {config.num_envs} x {config.num_steps}; {there} devices, {hardware()['cores']} cores")
    for name in ("scaling", "devices", "num_envs", "update ms", "steps/s", "speed-up", "collectives ms", "of update"):
        table.add_column(name, justify="left" if name == "scaling" else "right")
    for row in rows:
        share = row["collective_seconds"] / row["update_seconds"]
        table.add_row(
            *(row["scaling"], str(row["devices"]), f"{row['num_envs']:,}", f"{1e3 * row['update_seconds']:.1f}"),
            *(f"{row['steps_per_second']:,.0f}", f"{row['speed_up']:.2f}"),
            *(f"{1e3 * row['collective_seconds']:.1f}", f"{share:.0%}"),
        )
    Console(width=120).print(table)
    print(f"wrote {output}")


if __name__ == "__main__":
    tyro.cli(main)
