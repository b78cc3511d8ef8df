"""Reads and writes the files of a run directory: config.json, metrics.jsonl and the policy."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import platform
import struct
import time
import zipfile
import zlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jppo import __version__
from jppo.config import schedules
from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.envs.spaces import PyTree
from jppo.errors import Refused
from jppo.ppo.types import PolicyState
from jppo.runs.files import open_file, read_json, short_reason, write_atomically
from jppo.runs.leaves import copy_leaves, restore_leaves, with_dtype

PACKAGES = ("jax", "jaxlib", "flax", "optax", "gymnax", "gymnasium", "ray", "numpy")
POLICY, BEST = "policy_state.npz", "best_policy.npz"
_BLOCK = 4096  # rows of metrics per block
# a damaged archive raises many types
NPZ_ERRORS: tuple[type[Exception], ...] = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, EOFError, RuntimeError, zipfile.BadZipFile),
    *(struct.error, zlib.error, MemoryError),  # MemoryError: the header claims a huge array
)
_SETTINGS = {"env": str, "backend": str, "seed": int, "total_steps": int, "config": dict, "hyperparams": dict}


def versions() -> dict[str, str]:
    """Returns the versions of Python, of jppo and of the installed packages that a run depends on."""
    found = {"python": platform.python_version(), "jppo": __version__}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def default_run_dir(env_name: str, seed: int) -> Path:
    """Returns an unused path runs/<env>/<time>-<seed>."""
    return unused_path(Path("runs") / safe_name(env_name) / f"{time.strftime('%Y%m%d-%H%M%S')}-{seed}")


def unused_path(base: Path) -> Path:
    """Returns the path, or with .1, .2, ... appended if it exists."""
    paths = (base.with_name(base.name + (f".{i}" if i else "")) for i in range(10_000))
    return next(path for path in paths if not os.path.exists(path))


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
        config = read_json(run_dir / "config.json")
    except (FileNotFoundError, NotADirectoryError):
        raise Refused(f"{run_dir} is not a run directory: it has no config.json{_hint(run_dir)}") from None
    except OSError as error:
        raise Refused(f"{run_dir}/config.json cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Refused(f"{run_dir}/config.json is damaged: {error}") from None
    missing = set(_SETTINGS) - (set(config) if isinstance(config, dict) else set())
    if missing:
        raise Refused(f"{run_dir}/config.json is damaged: it has no {', '.join(sorted(missing))}")
    for name, kind in (_SETTINGS | {"actors": dict, "log_every": int}).items():
        if name in config and (not isinstance(config[name], kind) or isinstance(config[name], bool)):
            raise Refused(f"{run_dir}/config.json is damaged: {name} is {config[name]!r}")
    return config


def _hint(path: Path) -> str:
    """Returns where the runs of a directory may be, if it is not a run itself."""
    if os.path.exists(path / "sweep.json"):
        return "; it is the directory of a sweep, and `jppo sweep --run-dirs` writes run directories into it"
    return f"; `jppo runs {path}` lists the runs in it" if os.path.isdir(path) else ""


def config_of(settings: dict[str, Any], run_dir: Path) -> tuple[PPOConfig, Hyperparams]:
    """Returns the configuration in config.json. Raises ValueError if this version of jppo cannot read it."""
    try:
        fields = settings["config"] | {"hidden_sizes": tuple(settings["config"]["hidden_sizes"])}
        hyperparams = {name: schedules.from_json(value) for name, value in settings["hyperparams"].items()}
        return PPOConfig(**fields), Hyperparams(**hyperparams)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Refused(f"{run_dir}/config.json is damaged or of another version of jppo: {error}") from None


def metrics_until(run_dir: Path, update: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields metrics.jsonl up to an update in blocks of arrays [updates]; missing values are NaN."""
    rows = (row for _, row in rows_until(run_dir, update))
    while block := list(itertools.islice(rows, _BLOCK)):
        yield _to_columns(block)


def rows_until(run_dir: Path, update: int) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields the text and the content of each line of metrics.jsonl up to an update.

    Skips damaged lines and repeated updates. Raises ValueError if the file cannot be read.
    """
    last, path = 0, run_dir / "metrics.jsonl"
    try:
        for line, row in _complete_lines(path):
            if row is not None and last < row["update"] <= update:
                last = row["update"]
                yield line, row
    except OSError as error:
        raise Refused(f"{path} cannot be read ({error.strerror}); use another run_dir") from None


def read_metrics(run_dir: Path) -> dict[str, np.ndarray]:
    """Returns metrics.jsonl as arrays [lines]; missing values are NaN. Ignores an incomplete last line.

    Raises:
      ValueError: the file is missing, empty or damaged.
    """
    path, rows = run_dir / "metrics.jsonl", []
    try:
        for number, (_, row) in enumerate(_complete_lines(path), 1):
            if row is None:
                raise Refused(f"{path} is damaged: line {number} does not contain the metrics of an update")
            rows.append(row)
    except OSError:
        raise Refused(f"{run_dir} is not a run directory: it has no metrics.jsonl") from None
    if not rows:
        raise Refused(f"{path} has no updates yet")
    return _to_columns(rows)


def _complete_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yields the lines of metrics.jsonl with their content, see `parse_row`. Raises OSError."""
    with open_file(path) as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield line, parse_row(line)


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Returns the metrics in a line of metrics.jsonl; None if the line is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("update")) is int else None


def _to_columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([_or_nan(row.get(name)) for row in rows]) for name in names}


def _or_nan(value: Any) -> Any:
    return value if isinstance(value, int | float) and not abs(value) >= 2**63 else math.nan


class BestPolicy(NamedTuple):
    """Describes the policy of a run with the highest mean return so far."""

    update: int  # number of updates of the policy
    score: float  # mean return
    measure: str  # "evaluation" or "recent return"


def save_policy(run_dir: Path, policy: PolicyState, best: BestPolicy | None = None) -> None:
    """Writes the final policy, or the best one, atomically as an .npz file with one array per leaf. Raises OSError."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **copy_leaves(policy), **({} if best is None else best._asdict()))
    write_atomically(run_dir / (POLICY if best is None else BEST), file.getvalue())


def read_best(run_dir: Path) -> BestPolicy | None:
    """Returns the description of a run's best policy, or None.

    Raises:
      ValueError: the file is damaged.
    """
    path = run_dir / BEST
    if not path.exists():
        return None
    try:
        with open_file(path) as opened, np.load(opened, allow_pickle=False) as file:
            return BestPolicy(int(file["update"]), float(file["score"]), str(file["measure"]))
    except NPZ_ERRORS as error:
        raise Refused(f"{path} is damaged: {short_reason(error)}") from error


def load_policy_state(run_dir: Path, like: Any, best: bool = False) -> PolicyState:
    """Loads the final policy of a run, or the best one.

    Args:
      like: a policy of the same structure, shapes and dtypes: arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: the run has no policy, the file is damaged, or it does not fit `like`.
    """
    path = run_dir / (BEST if best else POLICY)
    if best and not path.exists():
        raise Refused(f"{run_dir} has no best policy yet; omit best=True (--best) to load the newest one")
    if not path.exists():
        raise Refused(f"{run_dir} has no policy: its run did not finish")
    like = on_one_device(like)
    dtypes = {jax.tree_util.keystr(key): leaf.dtype for key, leaf in jax.tree_util.tree_leaves_with_path(like)}
    try:
        with open_file(path) as opened, np.load(opened, allow_pickle=False) as file:
            leaves = {
                name: with_dtype(file[name], dtypes.get(name)) for name in file.files if name not in BestPolicy._fields
            }
        return restore_leaves(leaves, like, "", path)
    except NPZ_ERRORS as error:
        raise Refused(
            f"{path} does not hold the policy that {run_dir}/config.json describes: {short_reason(error)}"
        ) from error


def on_one_device(like: PyTree) -> PyTree:
    """Returns the shapes and dtypes of a pytree, placed on the first device of this process."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like)


def check_output(path: Path, *endings: str) -> None:
    """Checks that an output file can be written. Raises ValueError.

    Args:
      endings: accepted endings, each optionally followed by a description in the error message.
    """
    if path.suffix.lower() not in [ending.split()[0] for ending in endings]:
        raise Refused(f"output {path} must end in {' or '.join(endings)}")
    if not os.path.isdir(path.parent):
        raise Refused(f"output {path} cannot be written: there is no directory {path.parent}")
    if os.path.exists(path) and not os.path.isfile(path):  # Path.exists raises OSError for a name that is too long
        raise Refused(f"output {path} cannot be written: it is not a regular file")


def write_output(path: Path, data: bytes, ending: str) -> None:
    """Writes an output file and follows a link. Raises ValueError if its ending is another, or it cannot be written."""
    check_output(path, ending)
    try:
        write_atomically(Path(os.path.realpath(path)), data)
    except OSError as error:
        raise Refused(f"output {path} cannot be written: {error.strerror or error}") from error
