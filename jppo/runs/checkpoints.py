"""Checkpoints: the state of a run on disk, from which it goes on as if it had never stopped (docs/checkpoints.md)."""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.ppo.types import PyTree
from jppo.runs import run_dir as runs
from jppo.runs.files import jsonable, short_reason
from jppo.runs.writer import SAVE_ERRORS

FORMAT = 3  # 2 kept the moments of Adam array by array
FOLDER = "checkpoints"
_REMOVED = ".removed"
DEFAULT_SECONDS = 60.0
_READ_ERRORS = (*SAVE_ERRORS, KeyError, TypeError, AttributeError, OverflowError)  # what files of nonsense lead to
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 300.0  # seconds, after a save that failed; doubled with each further one
_LOOKS = 5  # at checkpoints that are gone when they are read: a run that trains removes old ones
_DEFAULTS = jsonable(dataclasses.asdict(PPOConfig()) | dataclasses.asdict(Hyperparams()))


class Checkpoint(NamedTuple):
    """One that was read and found whole."""

    path: Path
    update: int  # updates done
    seconds: float  # of training
    counts: dict[str, int]  # what the loop has counted besides
    leaves: dict[str, np.ndarray]  # the state, by path in it; keys as their data

    def put(self, like: PyTree, part: str = "") -> PyTree:
        """The state in the structure, and on the devices, of another.

        Args:
          part: the path of what `like` is only a part of.

        Raises:
          ValueError: the state has another structure, shape or dtype.
        """
        leaves, structure = jax.tree_util.tree_flatten_with_path(like)
        wanted = {part + jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        has = {name: _signature(leaf) for name, leaf in self.leaves.items() if name.startswith(part)}
        needs = {name: _signature(leaf) for name, leaf in wanted.items()}
        for name in sorted(has | needs):
            if has.get(name) != needs.get(name):
                raise ValueError(
                    f"{self.path} does not fit: the run has {name} = {has.get(name, 'nothing')}, given is "
                    f"{needs.get(name, 'nothing')}"
                )
        return jax.tree.unflatten(structure, [_place(self.leaves[name], leaf) for name, leaf in wanted.items()])


class Checkpoints:
    """Owns the checkpoints of a run while it trains. A thread writes them, one at a time."""

    every_updates = 0  # updates between two checkpoints; 0: the time decides

    def __init__(
        self,
        run_dir: Path,
        settings: dict[str, Any],
        every: float,
        keep: int,
        message: Callable[[str], None],
        previous: dict[str, Any] | None = None,
    ) -> None:
        """Reads the newest good one, `start`, and puts aside what is left of any newer.

        Args:
          settings: config.json, by which a run's own are known.
          every: seconds between two.
          keep: how many stay, the newest.
          message: gets told, in words, what goes wrong.

        Raises:
          ValueError: there are checkpoints, but none that can be read.
        """
        self._folder, self._every, self._keep, self._message = run_dir / FOLDER, every, keep, message
        self._run, self._pause = identity(settings), 0.0
        self.start = newest(run_dir, settings if previous is None else previous, message)
        self.update = 0 if self.start is None else self.start.update  # that of the newest on disk
        with contextlib.suppress(OSError):  # which saving will say
            self._folder.mkdir(exist_ok=True)
        _put_aside(self._folder, self.update, message)
        self._pool = ThreadPoolExecutor(1, "checkpoints")
        self._writing: tuple[int, Future] | None = None  # the update, and what comes of it
        self._since, self._ends = time.monotonic(), False

    def due(self, update: int) -> bool:
        """Whether one is to be saved after `update` updates."""
        if self._writing is not None and self._writing[1].done():
            self._settle()
        waited = time.monotonic() - self._since >= max(self._every, self._pause)
        return waited and update > self.update and self._writing is None

    def save(self, update: int, seconds: float, counts: dict[str, int], state: PyTree) -> None:
        """Copies the state to the host and has it written. A failure is said, and ends neither this nor the run."""
        self._settle()
        if update == self.update:
            return
        header = {"format": FORMAT, "jppo": runs.versions()["jppo"], "run": self._run}
        header |= {"update": update, "seconds": seconds, "counts": counts}
        writing = self._pool.submit(write, self._folder / str(update), header, to_host(state), self._keep)
        self._writing, self._since = (update, writing), time.monotonic()

    def wait(self) -> None:
        """Waits for a checkpoint that is being written."""
        self._settle()

    def close(self) -> None:
        """Waits for what is being written."""
        self._ends = True
        self._settle()
        self._pool.shutdown()

    def _settle(self) -> None:
        """Waits for what is being written. A failure is said where it is the first, or the last."""
        if self._writing is None:
            return
        update, writing = self._writing
        try:
            writing.result()
            self.update, self._pause = update, 0.0
        except Exception as error:  # of the file system, of tensorstore, of orbax's threads, of memory
            if not self._pause or self._ends:
                newest_one = f"the newest is of update {self.update}" if self.update else "there is none"
                then = "" if self._ends else ". Training goes on, and tries again"
                self._message(
                    f"WARNING: the checkpoint of update {update} could not be written ({short_reason(error)}); "
                    f"{newest_one}{then}"
                )
            self._pause = min(max(_FIRST_PAUSE, 2.0 * self._pause), _LONGEST_PAUSE)
        finally:
            self._writing = None


def newest(run_dir: Path, settings: dict[str, Any], message: Callable[[str], None]) -> Checkpoint | None:
    """The newest good checkpoint of a run; None where not one was made.

    Args:
      settings: its config.json.
      message: gets told which ones are damaged, or another run's.

    Raises:
      ValueError: all are, or the newest good one is of another format.
    """
    folder, run = run_dir / FOLDER, identity(settings)
    for look in range(_LOOKS):
        paths, found = _saved(folder), None
        for path in reversed(paths):
            try:
                found = read(path, run)
                break
            except _Damaged as error:
                if _saved(folder) != paths and look + 1 < _LOOKS:  # the run trains on, and there is a newer one
                    break
                message(f"{path} is damaged ({error}); it is left out")
        else:
            if paths:
                raise ValueError(f"{run_dir} has checkpoints, but all {len(paths)} are damaged; name another run_dir")
        if found is not None or not paths:
            return found
    raise ValueError(f"{run_dir} has checkpoints that are replaced faster than they can be read; try again")


class _Damaged(Exception):
    """A checkpoint is not what was written."""


def write(path: Path, header: dict[str, Any], leaves: dict[str, np.ndarray], keep: int = 1) -> None:
    """Writes a checkpoint, whole or not at all, and then removes what is older than the `keep` newest."""
    sums = [[name, list(x.shape), str(x.dtype), zlib.crc32(x.tobytes())] for name, x in leaves.items()]
    arrays = {str(number): x for number, x in enumerate(leaves.values()) if x.size}  # orbax takes no empty ones
    header = header | {"leaves": sums}
    path.parent.mkdir(exist_ok=True)
    runs.save_arrays(path, arrays, custom_metadata=header | {"checksum": _checksum(header)})
    for old in _saved(path.parent)[:-keep]:
        removed = old.with_name(f"{old.name}{_REMOVED}")  # at once, so that nobody reads half of it
        with contextlib.suppress(OSError):
            old.rename(removed)
            shutil.rmtree(removed)


def read(path: Path, run: str) -> Checkpoint:
    """Raises ValueError for a checkpoint of another format, _Damaged for one that is not what `run` wrote."""
    import orbax.checkpoint as ocp

    try:
        with ocp.StandardCheckpointer(multiprocessing_options=runs.alone()) as checkpointer:
            header = checkpointer.metadata(path.absolute()).custom_metadata
            number = int(header["format"])
            if number == FORMAT:
                if header.pop("checksum") != _checksum(header) or header["update"] != int(path.name):
                    raise ValueError(f"its header is not that of update {path.name}")
                if header["run"] != run:
                    raise ValueError("it is another run's")
                arrays = checkpointer.restore(path.absolute())
                leaves = {entry[0]: _checked(entry, arrays.get(str(i))) for i, entry in enumerate(header["leaves"])}
                return Checkpoint(path, header["update"], header["seconds"], header["counts"], leaves)
    except _READ_ERRORS as error:
        raise _Damaged(short_reason(error)) from error
    age, advice = "older", "go on with it there, or begin anew in another run_dir"
    if number > FORMAT:
        age, advice = "newer", "update jppo"
    raise ValueError(
        f"{path} has format {number}, {age} than this jppo's {FORMAT}; it was written by jppo {header.get('jppo')}: "
        f"{advice}"
    )


def check_same_run(run_dir: Path, before: dict[str, Any], now: dict[str, Any], finished: bool) -> None:
    """Raises ValueError, with the differences, where config.json and what is given are not of the same run, or where
    there is nothing left to do."""
    run = f"run_dir {run_dir} already holds a run"
    metrics = run_dir / "metrics.jsonl"
    if not (run_dir / FOLDER).is_dir() and metrics.exists() and metrics.stat().st_size:
        raise ValueError(f"{run} without checkpoints; name another")
    was, given = _essence(before), _essence(jsonable(now))
    names = [name for name in was | given if was.get(name) != given.get(name)]
    if names:
        differences = "; ".join(
            f"the run has {name} = {was.get(name, 'none')}, given is {given.get(name, 'none')}" for name in names
        )
        raise ValueError(f"run_dir {run_dir} already holds another run: {differences}; name another")
    old, new = before["total_steps"], now["total_steps"]
    if new != old and now["config"]["anneal_learning_rate"]:
        raise ValueError(
            f"{run} of total_steps = {old}, towards whose end its learning rate falls; it cannot get {new} now "
            "(anneal_learning_rate)"
        )
    if new < old:
        raise ValueError(f"{run} of total_steps = {old}; it can get more, not {new}")
    if finished and new == old:
        more = "" if now["config"]["anneal_learning_rate"] else ", or give more total_steps"
        raise ValueError(f"{run}, which is finished; name another run_dir{more}")


def identity(settings: dict[str, Any]) -> str:
    """The same for two parts of a run, another one for other settings. A setting that a later jppo adds changes nothing
    while it has its default."""
    given = {name: x for name, x in _essence(jsonable(settings)).items() if x != _DEFAULTS.get(name)}
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]


def _checksum(header: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(jsonable(header), sort_keys=True).encode())


def _essence(settings: dict[str, Any]) -> dict[str, Any]:
    """What two parts of a run must have in common: not where it runs, and on how much."""
    named = {name: settings[name] for name in ("env", "backend", "seed") if name in settings}
    parts = {name: settings[name] for name in ("environment", "network", "optimizer", "loss") if name in settings}
    lag = {"policy_lag": settings["actors"].get("policy_lag")} if "actors" in settings else {}
    return named | _DEFAULTS | settings["config"] | settings["hyperparams"] | parts | lag


def _saved(folder: Path) -> list[Path]:
    """Those that were written to their end, oldest first."""
    names = (path for path in folder.glob("*") if path.name.isascii() and path.name.isdecimal())
    return sorted(names, key=lambda path: int(path.name))


def _put_aside(folder: Path, update: int, message: Callable[[str], None]) -> None:
    """Makes room for checkpoints after `update`: what is there is damaged, or was cut off."""
    for path in folder.glob(f"*{runs.UNFINISHED}"):
        message(f"{path} was cut off while it was written; it is left out")
        shutil.rmtree(path)
    for path in folder.glob(f"*{_REMOVED}"):
        shutil.rmtree(path, ignore_errors=True)
    for path in _saved(folder):
        if int(path.name) > update:
            aside = path.with_name(f"{path.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def _checked(entry: list[Any], array: np.ndarray | None) -> np.ndarray:
    name, shape, dtype, checksum = entry
    array = np.empty(shape, np.dtype(dtype)) if array is None and 0 in shape else np.asarray(array)
    if (list(array.shape), str(array.dtype), zlib.crc32(array.tobytes())) != (shape, dtype, checksum):
        raise ValueError(f"{name} has another checksum")
    return array


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_host(state: PyTree) -> dict[str, np.ndarray]:
    """Copies, since a chunk overwrites its state."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {
        jax.tree_util.keystr(path): np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
        for path, leaf in leaves
    }


def _signature(leaf: Any) -> str:
    """Dtype and shape, as f32[8,4]."""
    leaf = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _place(array: np.ndarray, like: Any) -> Any:
    if isinstance(like, np.ndarray):
        return array
    leaf = jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like)) if _is_key(like) else array
    return jax.device_put(leaf, like.sharding)
