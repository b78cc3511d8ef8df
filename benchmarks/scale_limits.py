"""Measures the constants of the model of one learner's limits, and checks its predictions (docs/notes/scale.md).

    python benchmarks/scale_limits.py learner
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python benchmarks/scale_limits.py devices
    python benchmarks/scale_limits.py nodes

learner: the duration of a gradient step by minibatch size, and the times of `jppo bench` with and without actors.
devices: all-reduces over 2 to 8 devices; benchmarks/devices.py measures whole updates. nodes: Ray clusters of 1 to 16
simulated nodes on this machine. Each has one actor that returns an array, and then one that steps environments that
sleep for 2 ms per step, so that they need almost no CPU time. Times are the fastest tenth of the repeats.
"""

import datetime
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, WORKLOADS, hardware

import jppo
from jppo.devices.jit import jit
from jppo.devices.mesh import AXIS, mesh_1d, shard_over_devices
from jppo.runs.files import write_json

_REDUCES = 10  # all-reduces in one program
_FAST = 0.1  # quantile of the repeats, so that other processes on the machine matter less than with medians
_MINIBATCHES = (64, 256, 1024, 4096, 16384)
_STEPS = 32  # of a rollout of an actor that sleeps


def save(name: str, content: dict[str, Any]) -> None:
    write_json(RESULTS / f"scale_{name}.json", content | {"date": datetime.date.today().isoformat()} | hardware())


def show(*columns: str, rows: list[tuple[Any, ...]]) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*(f"{value:,.3g}" if isinstance(value, float) else f"{value:,}" for value in row))
    Console(width=120).print(table)


def learner(bench_seconds: float = 2.0) -> None:
    """Measures gradient steps of CartPole's network, and runs of both modes, with `jppo.bench`."""
    config, rows = WORKLOADS["W1"].config, []
    count = config.num_epochs * config.num_minibatches
    for size in _MINIBATCHES:
        sizes = config.replace(num_envs=size * config.num_minibatches // config.num_steps)
        result = jppo.bench("CartPole-v1", config=sizes, seconds=bench_seconds, num_devices=1)
        step = result.seconds["update"] / count
        rows.append({"minibatch": size, "step_seconds": step, "run_steps_per_second": result.run.steps_per_second})
    sizes_and_times = np.array([(row["minibatch"], row["step_seconds"]) for row in rows])
    # t = fixed + minibatch / rate, with equal weights of the relative errors
    matrix = np.stack([np.ones(len(rows)), sizes_and_times[:, 0]], axis=1) / sizes_and_times[:, 1:]
    fixed, per_sample = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=None)[0]
    for row in rows:
        row["predicted_seconds"] = fixed + row["minibatch"] * per_sample
    actors = jppo.bench(
        "CartPole-v1",
        backend="ray",
        num_actors=2,
        seconds=bench_seconds,
        config=jppo.PPOConfig(num_envs=512, num_steps=128),
    ).summary()
    constants = {"fixed_seconds": float(fixed), "samples_per_second": float(1.0 / per_sample)}
    save("learner", {"rows": rows, "actors": actors} | constants)
    show(
        *("minibatch", "ms per gradient step", "predicted ms", "steps/s of the run"),
        rows=[
            (r["minibatch"], 1e3 * r["step_seconds"], 1e3 * r["predicted_seconds"], r["run_steps_per_second"])
            for r in rows
        ],
    )
    print(constants, {name: actors[name] for name in ("seconds", "alone")})


def all_reduce_seconds(num_devices: int, numbers: int, repeats: int = 60) -> float:
    """Returns the duration of a mean over devices of an array of float32."""

    def body(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _REDUCES, lambda _, x: jax.lax.pmean(x, AXIS) + 1.0, x)

    mesh = mesh_1d(jax.devices()[:num_devices])
    spec = PartitionSpec()
    program = jit(shard_over_devices(body, mesh, (spec,), spec))
    x = jnp.zeros(numbers)
    jax.block_until_ready(program(x))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(program(x))
        times.append((time.perf_counter() - began) / _REDUCES)
    return float(np.quantile(times, _FAST))


def devices(counts: tuple[int, ...] = (2, 4, 8)) -> None:
    """Measures all-reduces over several devices. benchmarks/devices.py measures whole updates on them."""
    agent = jppo.make_anakin(WORKLOADS["W1"].env, WORKLOADS["W1"].config)
    shapes = jax.eval_shape(agent.init, jax.random.key(0)).train.policy_state.params
    sizes = (1, sum(leaf.size for leaf in jax.tree.leaves(shapes)), 10**6)
    rows = [
        {"devices": count, "numbers": size, "seconds": all_reduce_seconds(count, size)}
        for count in counts
        for size in sizes
    ]
    save("devices", {"rows": rows})
    show("devices", "numbers", "ms", rows=[(r["devices"], r["numbers"], 1e3 * r["seconds"]) for r in rows])


def echo_seconds(num_actors: int, num_bytes: int, policy_bytes: int, rounds: int = 100) -> float:
    """Returns the time in which all actors of a cluster return an array once, without environments."""
    import ray

    @ray.remote(num_cpus=1)
    class Echo:
        def __init__(self) -> None:
            self.array = np.zeros(num_bytes, np.uint8)

        def collect(self, policy: bytes) -> np.ndarray:
            return self.array

    actors, policy = [Echo.remote() for _ in range(num_actors)], bytes(policy_bytes)
    ray.get([actor.collect.remote(policy) for actor in actors])
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for reference in [actor.collect.remote(policy) for actor in actors]:
            ray.get(reference)
        times.append(time.perf_counter() - began)
    for actor in actors:
        ray.kill(actor)
    return float(np.quantile(times, _FAST))


def nodes(counts: tuple[int, ...] = (1, 2, 4, 8, 16), updates: int = 25, train_up_to: int = 16) -> None:
    """Measures clusters of simulated nodes, and predicts the larger ones from those of up to four nodes.

    Args:
      counts: numbers of nodes.
      updates: updates of each training run.
      train_up_to: largest number of nodes with a training run.
    """
    import ray
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    rows: list[dict[str, Any]] = []
    for count in counts:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
            for _ in range(count):
                cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
        try:
            ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
            row = {"nodes": count, "small": echo_seconds(count, 5_000, 40_000)}
            row["large"] = echo_seconds(count, 4_000_000, 40_000)
            if count <= train_up_to:
                time.sleep(2.0)  # until the CPUs of these actors are free
                config = jppo.PPOConfig(num_envs=count, num_steps=_STEPS, num_strata=1)
                result = jppo.train(
                    "host_envs:waiting",
                    backend="ray",
                    num_actors=count,
                    num_devices=1,
                    total_steps=updates * config.batch_size,
                    config=config,
                )
                columns = {name: values[5:] for name, values in result.metrics.items()}
                for name in ("actors/rollout_seconds", "time/wait_rollouts", "time/host_to_device", "time/update"):
                    row[name] = float(np.median(columns[name]))
                row["iteration"] = row["time/wait_rollouts"] + row["time/host_to_device"] + row["time/update"]
            rows.append(row)
            print(row, flush=True)
        finally:
            ray.shutdown()
            cluster.shutdown()
        save("nodes", {"rows": rows, "updates": updates, "num_steps": _STEPS})
    few = [row for row in rows if row["nodes"] <= 4]
    fits = {
        kind: np.polyfit([row["nodes"] for row in few], [row[kind] for row in few], 1) for kind in ("small", "large")
    }
    for row in rows:
        for kind, fit in fits.items():
            row[f"predicted_{kind}"] = float(np.polyval(fit, row["nodes"]))
        if "iteration" in row:
            alone = rows[0]["actors/rollout_seconds"] + row["time/update"] + row["time/host_to_device"]
            row["predicted_iteration"] = alone + row["predicted_small"]
    constants = {
        "call_seconds": float(fits["small"][0]),
        "bytes_per_second": float((4e6 - 5e3) / (fits["large"][0] - fits["small"][0])),
    }
    save("nodes", {"rows": rows, "updates": updates, "num_steps": _STEPS} | constants)
    kinds = ("small", "predicted_small", "large", "predicted_large", "iteration", "predicted_iteration")
    show(
        "nodes",
        *(f"{kind}, ms" for kind in kinds),
        rows=[(r["nodes"], *(1e3 * r.get(k, math.nan) for k in kinds)) for r in rows],
    )
    print(constants)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"learner": learner, "devices": devices, "nodes": nodes})
