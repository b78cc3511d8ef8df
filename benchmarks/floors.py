"""How far each part of an update is from what the device could do at best, by operations and by bytes.

    python benchmarks/floors.py --workloads W1 W3

The device's rates are measured first: a large product, hyperbolic tangents, and a copy. A part's floor is the largest
of its operations, its tangents and its bytes at those rates, with nothing read or written but what must be:
observations and what is kept of each step, minibatches as they are gathered, weights and Adam's moments, no layer's
output. "through memory" adds those, as XLA has to where it cannot fuse products. Environments' operations are not
counted, only bytes. What fits into a cache can be faster than memory's rate, and than such a floor. Each part is
started by the host on its own, which on a GPU is a good deal of a short one's time.
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
from jppo.ppo.anakin import Anakin
from jppo.ppo.types import Array, PyTree
from jppo.runs.files import write_json

_TIMES = 16  # that a rate's program does its work, so that neither starting it nor new memory takes the time
_SCALARS = 5  # of a sample in a batch, besides observation and action: log-probability, value, advantage, target, row
_OUTPUTS = 2  # of the policy for a sample, besides the action: log-probability and value
_FLOAT = 4  # bytes


class Rates(NamedTuple):
    """Per second, of the device."""

    operations: float  # of a product, two for each multiplication
    tanhs: float
    bytes: float  # read or written

    def floor(self, work: "Work") -> float:
        """Seconds."""
        return max(work.operations / self.operations, work.tanhs / self.tanhs, work.bytes / self.bytes)


class Work(NamedTuple):
    """Of a part in an update."""

    operations: float
    tanhs: float
    bytes: float
    between_layers: float = 0.0  # bytes


def rates(size: int, repeats: int = 7) -> Rates:
    """Medians of a product of matrices [size, size], and of arrays as large."""
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
        "tanhs, as a CPU likes them": functools.partial(jit(functools.partial(in_a_loop, jnp.tanh)), small),
        "tanhs, as a GPU does": functools.partial(jit(in_a_row), small),
        "copies": functools.partial(jit(functools.partial(in_a_loop, lambda x: x + 1.0)), x),
    }
    product, *tanhs, copies = (float(np.median(times)) for times in interleaved(programs, repeats).seconds.values())
    return Rates(2.0 * size**3 / product, _TIMES * small.size / min(tanhs), _TIMES * 2.0 * x.nbytes / copies)


def works(agent: Anakin) -> dict[str, Work]:
    """Of throughput.py's parts, for separate networks of tanh layers."""
    config = agent.config
    samples, widths = config.batch_size, config.hidden_sizes
    obs = jax.tree.leaves(agent.env.obs_spec, is_leaf=lambda node: hasattr(node, "dtype"))
    inputs = sum(int(np.prod(spec.shape)) for spec in obs)
    seen = sum(int(np.prod(spec.shape)) * jnp.dtype(spec.dtype).itemsize for spec in obs) + _FLOAT  # and the action
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
            5 * kept * passes,  # layers' outputs written and read twice, what comes back through them written and read
        ),
        "adam": Work(0, 0, 7 * _FLOAT * weights * steps),
    }


def _num_bytes(tree: PyTree) -> int:
    sizes = jax.tree.map(
        lambda x: x.size * (8 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize), tree
    )
    return sum(jax.tree.leaves(sizes))


def measure(name: str, device: Rates, repeats: int) -> dict[str, Any]:
    """Of each part: its work, its floors and what it took, in ms."""
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
    """Measures and writes JSON.

    Args:
      workloads: as in versus_jax_peers.py.
      repeats: timed runs of each part.
      size: of the product that tells the device's rate: rows and columns.
      output: JSON.
    """
    if unknown := [name for name in workloads if name not in ALL]:
        raise SystemExit(f"unknown workloads: {', '.join(unknown)}; there are {', '.join(ALL)}")
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
