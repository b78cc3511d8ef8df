"""Run directories: what is written while training, and how it is read back."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jppo.config import Hyperparams, PPOConfig
from jppo.types import PolicyState

PACKAGES = ("jppo", "jax", "jaxlib", "flax", "optax", "gymnax", "gymnasium", "ray", "numpy")
_POLICY = "policy"
_BLOCK = 4096  # rows of metrics read at once


def versions() -> dict[str, str]:
    """Versions of Python and of what a run depends on."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def default_run_dir(env_name: str, seed: int) -> Path:
    """runs/<env>/<time>-<seed>, numbered on if that is taken."""
    base = Path("runs") / safe_name(env_name) / f"{time.strftime('%Y%m%d-%H%M%S')}-{seed}"
    return next(p for i in range(10_000) if not (p := base.with_name(base.name + (f".{i}" if i else ""))).exists())


def safe_name(name: str) -> str:
    """The name as that of a file."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name)


def check_seed(seed: Any) -> int:
    """The seed as an int. Raises ValueError where it is no whole number of 32 bits."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise ValueError(f"seed = {seed!r} must be a whole number from 0 to 2**32 - 1")
    return int(seed)


class RunWriter:
    """Owns a run's directory: config.json, metrics.jsonl, TensorBoard events, policy/, summary.json."""

    def __init__(self, path: Path, config: dict[str, Any], wandb: bool = False, goes_on: bool = False) -> None:
        """
        Args:
          goes_on: with the run that is there; nothing is changed before `rewind`.

        Raises:
          ValueError: the directory cannot be made, another process writes to it, or it already holds something else.
        """
        wandb_module = _import_wandb() if wandb else None
        self._new_parents = [parent for parent in path.parents if not parent.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()) and not goes_on:
                what = "already holds a run" if (path / "config.json").exists() else "is not empty"
                raise ValueError(f"run_dir {path} {what}; name another")
            self._metrics = open(path / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - held for the whole run
            _lock(self._metrics, path)
        except OSError as error:
            raise ValueError(f"run_dir {path} cannot be written: {error.strerror or error}") from error
        self.path, self._config, self._goes_on = path, config, goes_on
        self._tensorboard: Any = None
        self._wandb: Any = None
        try:
            if not goes_on:
                write_json(path / "config.json", config)
                self._tensorboard = _tensorboard(path)
            if wandb_module is not None:
                self._wandb = wandb_module.init(project="jppo", config=config, dir=str(path), name=path.name)
        except BaseException:
            self.abort()
            raise

    def rewind(self, update: int, step: int) -> None:
        """Of a run that goes on, takes back what was written after an update, and at its end."""
        if not self._goes_on:
            return
        end = sum(len(line) for line, _ in _rows_until(self.path, update))
        self._metrics.truncate(end)
        (self.path / "summary.json").unlink(missing_ok=True)
        shutil.rmtree(self.path / _POLICY, ignore_errors=True)
        write_json(self.path / "config.json", self._config)
        self._tensorboard = _tensorboard(self.path, purge_step=step + 1)

    def write_updates(self, rows: list[dict[str, Any]]) -> None:
        """One metrics.jsonl line per update; TensorBoard and W&B get the means over the rows at once."""
        self._metrics.writelines(json.dumps(jsonable(row)) + "\n" for row in rows)
        self._metrics.flush()
        step = rows[-1]["step"]
        means = {name: _mean(row[name] for row in rows) for name in rows[-1] if name not in ("update", "step")}
        means = {name: value for name, value in means.items() if not math.isnan(value)}
        for name, value in means.items():
            self._tensorboard.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log(means, step=step)

    def close(self, policy: PolicyState, summary: dict[str, Any]) -> None:
        """Writes the final policy and the summary, and closes every file."""
        save_policy(self.path / _POLICY, policy)
        write_json(self.path / "summary.json", summary)
        self._close()

    def abort(self) -> None:
        """Closes the files without a policy or summary; a new run without a single update leaves nothing behind."""
        self._close()
        if not self._goes_on and not (self.path / "metrics.jsonl").stat().st_size:
            shutil.rmtree(self.path)
            for parent in self._new_parents:
                with contextlib.suppress(OSError):  # another run is in it
                    parent.rmdir()

    def _close(self) -> None:
        self._metrics.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


def _tensorboard(path: Path, **options: Any) -> Any:
    from tensorboardX import SummaryWriter  # two seconds to import

    return SummaryWriter(str(path / "tensorboard"), **options)


def _lock(file: Any, path: Path) -> None:
    """Until it is closed, by whatever end of the process. Raises ValueError where another process has done so."""
    try:
        import fcntl
    except ImportError:  # Windows has none
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"run_dir {path} is being written by another process; name another") from None
    except OSError:  # a file system without locks
        return


def run_config(
    env: str, backend: str, seed: int, total_steps: int, config: PPOConfig, hyperparams: Hyperparams, **more: Any
) -> dict[str, Any]:
    """Everything to repeat a run."""
    return {
        "env": env,
        "backend": backend,
        "seed": seed,
        "total_steps": total_steps,
        "config": dataclasses.asdict(config),
        "hyperparams": {name: float(value) for name, value in vars(hyperparams).items()},
        **more,
        "versions": versions(),
    }


def read_config(run_dir: Path) -> dict[str, Any]:
    """config.json of a run. Raises ValueError where there is none or it is damaged."""
    try:
        config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"{run_dir} is not a run directory: it has no config.json") from None
    except ValueError as error:  # no JSON, or not even text
        raise ValueError(f"{run_dir}/config.json is damaged: {error}") from None
    missing = {"env", "backend", "config", "hyperparams"} - (set(config) if isinstance(config, dict) else set())
    if missing:
        raise ValueError(f"{run_dir}/config.json is damaged: it has no {', '.join(sorted(missing))}")
    return config


def config_of(settings: dict[str, Any], run_dir: Path) -> tuple[PPOConfig, Hyperparams]:
    """What config.json says. Raises ValueError where this version of jppo cannot read it."""
    try:
        fields = settings["config"] | {"hidden_sizes": tuple(settings["config"]["hidden_sizes"])}
        return PPOConfig(**fields), Hyperparams(**settings["hyperparams"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{run_dir}/config.json is damaged or of another version of jppo: {error}") from None


def metrics_until(run_dir: Path, update: int) -> Iterator[dict[str, np.ndarray]]:
    """metrics.jsonl up to an update, as arrays over some thousand updates at a time, NaN where a value was null."""
    rows = (row for _, row in _rows_until(run_dir, update))
    while block := list(itertools.islice(rows, _BLOCK)):
        yield {name: np.array([np.nan if row[name] is None else row[name] for row in block]) for name in block[0]}


def _rows_until(run_dir: Path, update: int) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of metrics.jsonl and what they say, to the last one before a later update, or damage."""
    last = 0
    with open(run_dir / "metrics.jsonl", "rb") as lines:
        for line in lines:
            try:
                row = json.loads(line)
                number = row["update"]
            except (ValueError, KeyError, TypeError):
                return
            if not line.endswith(b"\n") or not last < number <= update:
                return
            last = number
            yield line, row


def read_metrics(run_dir: Path) -> dict[str, np.ndarray]:
    """metrics.jsonl as arrays over updates, NaN where a value was null. A torn last line is left out."""
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
    """Writes a policy with orbax, atomically: the directory appears when it is complete."""
    import orbax.checkpoint as ocp

    if jax.process_count() > 1:  # orbax refuses arrays on devices that others do not see
        policy = jax.device_get(policy)
    with ocp.StandardCheckpointer(multiprocessing_options=alone()) as checkpointer:
        checkpointer.save(path.absolute(), policy)


def has_policy(run_dir: Path) -> bool:
    """Whether a run came to its end, and so to its final policy."""
    return (run_dir / _POLICY).exists()


def load_policy_state(run_dir: Path, like: Any) -> PolicyState:
    """The policy of a run, in the structure, shapes and dtypes of `like`. Raises ValueError where it has others."""
    import orbax.checkpoint as ocp

    path = (run_dir / _POLICY).absolute()
    if not has_policy(run_dir):
        raise ValueError(f"{run_dir} has no policy: its run did not finish")
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like)
    try:
        with ocp.StandardCheckpointer(multiprocessing_options=alone()) as checkpointer:
            return checkpointer.restore(path, like)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} does not hold the policy that {run_dir}/config.json describes: {error}") from error


def alone() -> Any:
    """For orbax, which would wait for all processes of a run; files are for one of them."""
    import orbax.checkpoint as ocp

    number = jax.process_index()
    return ocp.options.MultiprocessingOptions(number, {number}, barrier_sync_key_prefix=f"process{number}")


def check_output(path: Path, *endings: str) -> None:
    """Raises ValueError where the file cannot be written, before any work is done for it.

    Args:
      endings: which it may have, each with what is to be said of it.
    """
    if path.suffix.lower() not in [ending.split()[0] for ending in endings]:
        raise ValueError(f"output {path} must end in {' or '.join(endings)}")
    if not path.parent.is_dir():
        raise ValueError(f"output {path} cannot be written: there is no directory {path.parent}")


def write_json(path: Path, content: Any) -> None:
    """Writes a whole JSON file or nothing."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(jsonable(content), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise ValueError("--wandb needs the wandb package: pip install 'jppo[wandb]'") from None
    return wandb


def _mean(values: Iterable[float]) -> float:
    present = [value for value in values if not math.isnan(value)]
    return sum(present) / len(present) if present else math.nan


def jsonable(value: Any) -> Any:
    """JSON has no NaN: null stands for it. Nor has it NumPy's numbers."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
