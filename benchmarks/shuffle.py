"""Compares the minibatch shuffle of one epoch with `jax.random.permutation` of the same number of rows.

python benchmarks/shuffle.py
"""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, hardware, interleaved

from jppo.config.ppo import PPOConfig
from jppo.devices.jit import jit
from jppo.envs.spaces import Array
from jppo.ppo.minibatches import epoch_keys, minibatch_indices
from jppo.runs.files import write_json

SIZES = ((64, 128), (1024, 32), (2048, 32))  # environments, steps


def epoch_rows(config: PPOConfig, key: Array) -> Array:
    """Returns the rows of all minibatches of an epoch, [num_minibatches, B/num_minibatches]."""
    strata = jnp.arange(config.effective_strata)
    keys = epoch_keys(key, dataclasses.replace(config, num_epochs=1), config.batch_size, strata)[0]
    return minibatch_indices(keys, config.num_steps, config.num_envs, config.num_minibatches)


def measure(num_envs: int, num_steps: int, repeats: int, max_others: float) -> dict[str, Any]:
    config = PPOConfig(num_envs=num_envs, num_steps=num_steps)
    key, size = jax.random.key(0), config.batch_size
    shuffle = functools.partial(jit(functools.partial(epoch_rows, config)), key)
    permutation = functools.partial(jit(lambda key: jax.random.permutation(key, size)), key)
    np.testing.assert_array_equal(np.sort(np.asarray(shuffle()).ravel()), np.arange(size))
    times, others = interleaved({"shuffle": shuffle, "permutation": permutation}, repeats, max_others)
    return {
        "num_envs": num_envs,
        "num_steps": num_steps,
        "rows": size,
        "ms": {name: 1e3 * float(np.median(seconds)) for name, seconds in times.items()},
        "ratio": float(np.median(times["permutation"] / times["shuffle"])),
        **others,
    }


def main(repeats: int = 200, max_others: float = math.inf, output: Path = RESULTS / "shuffle.json") -> None:
    """Compares the minibatch shuffle with `jax.random.permutation` and writes JSON.

    Args:
      repeats: timed epochs of each.
      max_others: measure only while other processes keep at most this many cores busy (Linux).
      output: JSON file.
    """
    rows = [measure(*size, repeats, max_others) for size in SIZES]
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, {"rows": rows, **hardware()})
    table = Table("rows", "jppo.ppo.minibatches ms", "jax.random.permutation ms", "ratio")
    for row in rows:
        table.add_row(
            f"{row['rows']:,}", f"{row['ms']['shuffle']:.2f}", f"{row['ms']['permutation']:.2f}", f"{row['ratio']:.1f}"
        )
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
