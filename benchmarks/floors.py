"""Compares the duration of each part of an update with a lower bound (a roofline model).

    python benchmarks/floors.py --workloads W1 W3

The device's rates are measured first, with a large matrix product, hyperbolic tangents, and a copy. The lower bound of
a part is the largest of three times: its arithmetic operations, its tangents and its bytes, each at the measured rate.
The bytes include observations, the recorded rollout, gathered minibatches, weights and Adam's moments, but not the
outputs of layers. The column "through memory" includes those outputs, because XLA writes them to memory if it cannot
fuse products. Operations of environments are not counted. Data in a cache can be faster than the memory's rate, and
thus faster than the bound. The host starts each part separately, which is a large share of a short part's time on GPU.
"""

import datetime
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, Updates, hardware, interleaved, parts_of
from versus_jax_peers import ALL

import jppo
from jppo.devices.jit import jit
from jppo.envs.spaces import Array, PyTree
from jppo.ppo.anakin import Anakin
from jppo.runs.files import write_json

_TIMES = 16  # repetitions within a rate's program, so that its start and memory allocation do not matter
_SCALARS = 5  # numbers per sample of a batch besides observation and action: log_prob, value, advantage, target, row
_OUTPUTS = 2  # outputs of the policy per sample besides the action: log_prob and value
_FLOAT = 4  # bytes of a float32


class Rates(NamedTuple):
    """Rates of the device, per second."""

    operations: float  # of a matrix product; a multiplication and an addition are two
    tanhs: float
    bytes: float  # read or written

    def floor(self, work: "Work") -> float:
        """Returns the lower bound of the duration in seconds."""
        return max(work.operations / self.operations, work.tanhs / self.tanhs, work.bytes / self.bytes)


class Work(NamedTuple):
    """Work of one part in one update."""

    operations: float
    tanhs: float
    bytes: float
    between_layers: float = 0.0  # bytes of the outputs of layers


def rates(size: int, repeats: int = 7) -> Rates:
    """Measures the rates with a product of two [size, size] matrices, and with arrays of that shape."""
    x = jnp.ones((size, size), jnp.float32) / size
    small = x[: max(1, size // 16)]  # fits a CPU's cache

    def in_a_loop(function: Callable[[Array], Array], x: Array) -> Array:
        return jax.lax.fori_loop(0, _TIMES, lambda _, x: function(x), x)

    def in_a_row(x: Array) -> Array:
        for _ in range(_TIMES):
            x = jnp.tanh(x)
        return x

    programs = {
        "product": functools.partial(jit(jnp.dot), x, x),
        "tanhs in a loop": functools.partial(jit(functools.partial(in_a_loop, jnp.tanh)), small),
        "unrolled tanhs": functools.partial(jit(in_a_row), small),
        "copies": functools.partial(jit(functools.partial(in_a_loop, lambda x: x + 1.0)), x),
    }
    product, *tanhs, copies = (float(np.median(times)) for times in interleaved(programs, repeats).seconds.values())
    return Rates(2.0 * size**3 / product, _TIMES * small.size / min(tanhs), _TIMES * 2.0 * x.nbytes / copies)


def works(agent: Anakin) -> dict[str, Work]:
    """Returns the work of each part that throughput.py times, for separate networks with tanh layers."""
    config = agent.config
    samples, widths = config.batch_size, config.hidden_sizes
    obs = jax.tree.leaves(agent.env.obs_spec, is_leaf=lambda node: hasattr(node, "dtype"))
    inputs = sum(int(np.prod(spec.shape)) for spec in obs)
    seen = sum(int(np.prod(spec.shape)) * jnp.dtype(spec.dtype).itemsize for spec in obs) + _FLOAT  # plus the action
    row = seen + _FLOAT * _SCALARS
    outputs = (agent.env.action_spec.num_actions or agent.env.action_spec.size) + 1
    first = 2 * inputs * widths[0]
    weights = first + 2 * sum(a * b for a, b in itertools.pairwise(widths)) + widths[-1] * outputs
    tanhs, kept = 2 * sum(widths), _FLOAT * 2 * sum(widths)
    state = jax.eval_shape(agent.init, jax.random.key(0)).collect
    passes, steps = config.num_epochs * samples, config.num_epochs * config.num_minibatches
    return {
        "environment": Work(0, 0, 2 * _num_bytes(state) * config.num_steps),
        "policy": Work(
            2 * weights * samples, tanhs * samples, (seen + _FLOAT * _OUTPUTS) * samples, 2 * kept * samples
        ),
        "advantages": Work(0, 0, (4 * _FLOAT + 2) * samples),
        "shuffle and gather": Work(0, 0, 2 * row * passes),
        "gradients": Work(
            (6 * weights - 2 * first) * passes,
            tanhs * passes,
            row * passes + 2 * _FLOAT * weights * steps,
            5 * kept * passes,  # outputs of layers: one write, two reads; their gradients: one write, one read
        ),
        "adam": Work(0, 0, 7 * _FLOAT * weights * steps),
    }


def _num_bytes(tree: PyTree) -> int:
    sizes = jax.tree.map(
        lambda x: x.size * (8 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize), tree
    )
    return sum(jax.tree.leaves(sizes))


def measure(name: str, device: Rates, repeats: int) -> dict[str, Any]:
    """Returns work, lower bound and measured milliseconds of each part."""
    workload = ALL[name]
    agent = jppo.make_anakin(workload.env, workload.config, total_steps=10**9)
    found = works(agent)
    timed = parts_of(agent, profile=True)
    programs: dict[str, Callable[[], Any]] = {part: timed[part] for part in found if part in timed}
    programs["update"] = Updates(agent)
    times = interleaved(programs, repeats).seconds
    milliseconds = {part: 1e3 * float(np.median(seconds)) for part, seconds in times.items()}
    floors = {part: 1e3 * device.floor(work) for part, work in found.items()}
    through = {
        part: 1e3 * device.floor(work._replace(bytes=work.bytes + work.between_layers)) for part, work in found.items()
    }
    return {
        "workload": name,
        **workload._asdict(),
        "work": {part: work._asdict() for part, work in found.items()},
        "floor_ms": floors | {"update": sum(floors.values())},
        "floor_ms_through_memory": through | {"update": sum(through.values())},
        "ms": milliseconds,
    }


def show(row: dict[str, Any]) -> None:
    table = Table("ms of", "floor", "through memory", "measured", "floor / measured", title=row["workload"])
    for part, floor in row["floor_ms"].items():
        ms = row["ms"].get(part)
        measured = ("-", "-") if ms is None else (f"{ms:.3g}", f"{floor / ms:.0%}")
        table.add_row(part, f"{floor:.3g}", f"{row['floor_ms_through_memory'][part]:.3g}", *measured)
    Console(width=100).print(table)


def main(
    workloads: tuple[str, ...] = ("W1", "W2", "W3", "W4"),
    repeats: int = 15,
    size: int = 4096,
    output: Path = RESULTS / "floors.json",
) -> None:
    """Compares the duration of each part of an update with a lower bound and writes JSON.

    Args:
      workloads: names of workloads, see versus_jax_peers.py.
      repeats: timed runs of each part.
      size: rows and columns of the matrices with which the device's rates are measured.
      output: JSON file.
    """
    if unknown := [name for name in workloads if name not in ALL]:
        raise SystemExit(f"unknown workloads: {', '.join(unknown)}; use {', '.join(ALL)}")
    if size < 1 or repeats < 1:
        raise SystemExit("size and repeats must be at least 1")
    output.parent.mkdir(parents=True, exist_ok=True)
    device = rates(size)
    print(f"{device.operations / 1e9:,.0f} GFLOP/s, {device.tanhs / 1e9:.2f} G tanh/s, {device.bytes / 1e9:.1f} GB/s")
    rows = []
    for name in workloads:
        rows.append(measure(name, device, repeats))
        write_json(
            output, {"rates": device._asdict(), "rows": rows, "date": datetime.date.today().isoformat()} | hardware()
        )
        show(rows[-1])
    print(f"wrote {output}")


if __name__ == "__main__":
    tyro.cli(main)
