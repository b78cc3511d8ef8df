"""Reads and writes the files of a run directory: config.json, metrics.jsonl and the policy."""

import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jppo.config import schedules
from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.ppo.types import PolicyState

PACKAGES = ("jppo", "jax", "jaxlib", "flax", "optax", "gymnax", "gymnasium", "ray", "numpy")
POLICY = "policy"
_BLOCK = 4096  # rows of metrics per block
UNFINISHED = ".orbax-checkpoint-tmp*"  # suffix of a directory that orbax is writing
_ROOM_BYTES = 1 << 18  # for orbax's metadata
_SETTINGS = {"env": str, "backend": str, "seed": int, "total_steps": int, "config": dict, "hyperparams": dict}


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that a run depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def default_run_dir(env_name: str, seed: int) -> Path:
    """Returns an unused path runs/<env>/<time>-<seed>."""
    base = Path("runs") / safe_name(env_name) / f"{time.strftime('%Y%m%d-%H%M%S')}-{seed}"
    return next(p for i in range(10_000) if not (p := base.with_name(base.name + (f".{i}" if i else ""))).exists())


def safe_name(name: str) -> str:
    """Returns the name with all characters replaced that a file name should not have."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name)


def run_config(
    env: str, backend: str, seed: int, total_steps: int, config: PPOConfig, hyperparams: Hyperparams, **more: Any
) -> dict[str, Any]:
    """Returns the content of config.json: all settings that are needed to repeat a run."""
    return {
        "env": env,
        "backend": backend,
        "seed": seed,
        "total_steps": total_steps,
        "config": dataclasses.asdict(config),
        "hyperparams": {name: schedules.to_json(value) for name, value in vars(hyperparams).items()},
        **more,
        "versions": versions(),
    }


def read_config(run_dir: Path) -> dict[str, Any]:
    """Returns config.json of a run. Raises ValueError if it is missing or damaged."""
    try:
        config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"{run_dir} is not a run directory: it has no config.json") from None
    except ValueError as error:  # not JSON or not UTF-8
        raise ValueError(f"{run_dir}/config.json is damaged: {error}") from None
    missing = set(_SETTINGS) - (set(config) if isinstance(config, dict) else set())
    if missing:
        raise ValueError(f"{run_dir}/config.json is damaged: it has no {', '.join(sorted(missing))}")
    for name, kind in (_SETTINGS | {"actors": dict}).items():
        if name in config and (not isinstance(config[name], kind) or isinstance(config[name], bool)):
            raise ValueError(f"{run_dir}/config.json is damaged: {name} is {config[name]!r}")
    return config


def config_of(settings: dict[str, Any], run_dir: Path) -> tuple[PPOConfig, Hyperparams]:
    """Returns the configuration in config.json. Raises ValueError if this version of jppo cannot read it."""
    try:
        fields = settings["config"] | {"hidden_sizes": tuple(settings["config"]["hidden_sizes"])}
        hyperparams = {name: schedules.from_json(value) for name, value in settings["hyperparams"].items()}
        return PPOConfig(**fields), Hyperparams(**hyperparams)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{run_dir}/config.json is damaged or of another version of jppo: {error}") from None


def metrics_until(run_dir: Path, update: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields metrics.jsonl up to an update in blocks of arrays [updates]; missing values are NaN."""
    rows = (row for _, _, row in rows_until(run_dir, update))
    while block := list(itertools.islice(rows, _BLOCK)):
        names = dict.fromkeys(name for row in block for name in row)
        yield {name: np.array([_or_nan(row.get(name)) for row in block]) for name in names}


def rows_until(run_dir: Path, update: int) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Yields the offset, the bytes and the content of each line of metrics.jsonl up to an update.

    Skips damaged lines and repeated updates.
    """
    last = start = 0
    with open(run_dir / "metrics.jsonl", "rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
                row = json.loads(line)
                if line.endswith(b"\n") and last < int(row["update"]) <= update:
                    last = int(row["update"])
                    yield start, line, row
            start += len(line)


def _or_nan(value: Any) -> Any:
    return value if isinstance(value, int | float) else math.nan


def read_metrics(run_dir: Path) -> dict[str, np.ndarray]:
    """Returns metrics.jsonl as arrays [updates]; null becomes NaN. Ignores an incomplete last line."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError:
        raise ValueError(f"{run_dir} is not a run directory: it has no metrics.jsonl") from None
    try:
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        names = rows[0] if rows else {}
        columns = {name: [np.nan if row[name] is None else row[name] for row in rows] for name in names}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{run_dir}/metrics.jsonl is damaged: {error}") from None
    if not rows:
        raise ValueError(f"{run_dir}/metrics.jsonl has no updates yet")
    return {name: np.array(column) for name, column in columns.items()}


def save_policy(path: Path, policy: PolicyState) -> None:
    """Writes a policy atomically with orbax."""
    if jax.process_count() > 1:  # orbax refuses arrays on devices that others do not see
        policy = jax.device_get(policy)
    save_arrays(path, policy)


def save_arrays(path: Path, arrays: Any, **options: Any) -> None:
    """Writes a pytree with orbax. The directory appears when it is complete; a failed write leaves nothing.

    Raises OSError if the disk is full, before orbax logs hundreds of lines.
    """
    import orbax.checkpoint as ocp

    _check_room(path.parent, sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)))
    try:
        with ocp.StandardCheckpointer(multiprocessing_options=single_process_options()) as checkpointer:
            checkpointer.save(path.absolute(), arrays, **options)
    except BaseException:
        for part in path.parent.glob(f"{path.name}{UNFINISHED}"):  # it may be what fills the disk
            shutil.rmtree(part, ignore_errors=True)
        raise


def has_policy(run_dir: Path) -> bool:
    """Returns whether a run has a final policy."""
    return (run_dir / POLICY).exists()


def load_policy_state(run_dir: Path, like: Any) -> PolicyState:
    """Loads the final policy of a run. Raises ValueError if its structure or shapes differ from `like`."""
    import orbax.checkpoint as ocp

    path = (run_dir / POLICY).absolute()
    if not has_policy(run_dir):
        raise ValueError(f"{run_dir} has no policy: its run did not finish")
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like)
    try:
        with ocp.StandardCheckpointer(multiprocessing_options=single_process_options()) as checkpointer:
            return checkpointer.restore(path, like)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} does not hold the policy that {run_dir}/config.json describes: {error}") from error


def single_process_options() -> Any:
    """Returns orbax options that do not wait for the other processes of a run."""
    import orbax.checkpoint as ocp

    number = jax.process_index()
    return ocp.options.MultiprocessingOptions(number, {number}, barrier_sync_key_prefix=f"process{number}")


def _check_room(folder: Path, num_bytes: int) -> None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:  # unknown on this file system
        return
    if usage.total and usage.free < num_bytes + _ROOM_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_output(path: Path, *endings: str) -> None:
    """Checks that an output file can be written. Raises ValueError.

    Args:
      endings: accepted endings, each optionally followed by a description in the error message.
    """
    if path.suffix.lower() not in [ending.split()[0] for ending in endings]:
        raise ValueError(f"output {path} must end in {' or '.join(endings)}")
    if not path.parent.is_dir():
        raise ValueError(f"output {path} cannot be written: there is no directory {path.parent}")
