"""A run's directory while it trains. A disk that is full, or gone, costs what would be on it, not the run."""

import contextlib
import errno
import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jppo.ppo.types import PolicyState
from jppo.runs.files import jsonable, short_reason, write_atomically, write_json
from jppo.runs.run_dir import POLICY, UNFINISHED, rows_until, save_policy

SAVE_ERRORS = (OSError, ValueError, RuntimeError)  # of the file system, of tensorstore, and of orbax's threads
_METRICS = "metrics.jsonl"
_WAITING_BYTES = 1 << 26  # of metrics that cannot be written; what comes after is lost
_AGAIN_SECONDS = 10.0  # between two attempts to write them, and between two flushes of TensorBoard's file


class RunWriter:
    """Owns a run's directory: config.json, metrics.jsonl, TensorBoard events, policy/, summary.json."""

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        wandb: bool = False,
        goes_on: bool = False,
        say: Callable[[str], None] = warnings.warn,
    ) -> None:
        """
        Args:
          goes_on: with the run that is there; nothing is changed before `rewind`.
          say: gets told, in words, what cannot be written.

        Raises:
          ValueError: the directory cannot be made, another process writes to it, or it already holds something else.
        """
        wandb_module = _import_wandb() if wandb else None
        self._new_parents = [parent for parent in path.parents if not parent.exists()]
        self.path, self._config, self._goes_on, self._say = path, config, goes_on, say
        self._events: _Events | None = None
        self._wandb: Any = None
        with _refused(path):
            path.mkdir(parents=True, exist_ok=True)
            if not goes_on and not _is_new(path):
                what = "already holds a run" if (path / "config.json").exists() else "is not empty"
                raise ValueError(f"run_dir {path} {what}; name another")
            self._metrics = _Lines(path / _METRICS)
        try:
            if not goes_on:
                with _refused(path):
                    write_json(path / "config.json", config)
                    self._events = _Events(path)
            if wandb_module is not None:
                self._wandb = wandb_module.init(project="jppo", config=config, dir=str(path), name=path.name)
        except BaseException:
            self.abort()
            raise

    def rewind(self, update: int, step: int) -> None:
        """Of a run that goes on, takes back what was written after an update, and at its end; damaged lines too.

        Raises:
          ValueError: the directory cannot be written.
        """
        if not self._goes_on:
            return
        with _refused(self.path):
            write_json(self.path / "config.json", self._config)
            self._events = _Events(self.path, purge_step=step + 1)
            end, whole = 0, True
            for start, line, _ in rows_until(self.path, update):
                whole, end = whole and start == end, end + len(line)
            if whole:
                self._metrics.truncate(end)
            else:
                self._metrics = self._metrics.replaced(line for _, line, _ in rows_until(self.path, update))
            (self.path / "summary.json").unlink(missing_ok=True)
            for left in (self.path / POLICY, *self.path.glob(f"{POLICY}{UNFINISHED}")):
                shutil.rmtree(left, ignore_errors=True)

    def write_updates(self, rows: list[dict[str, Any]]) -> None:
        """One metrics.jsonl line per update; TensorBoard and W&B get the means over the rows at once."""
        waits = self._metrics.waits
        try:
            self._metrics.append("".join(json.dumps(jsonable(row)) + "\n" for row in rows).encode())
        except OSError as error:
            if not waits:
                self._warn(_METRICS, error, "its lines wait in memory, and are tried again")
        step = rows[-1]["env_steps"]
        means = {name: _mean(row[name] for row in rows) for name in rows[-1] if name not in ("update", "env_steps")}
        means = {name: value for name, value in means.items() if not math.isnan(value)}
        if self._events is not None:
            try:
                self._events.add(means, step)
            except OSError as error:
                self._events = None
                self._warn("tensorboard", error, f"no more is written there ({_METRICS} has it all)")
        if self._wandb:
            self._wandb.log(means, step=step)

    def close(self, policy: PolicyState, summary: dict[str, Any]) -> list[str]:
        """Writes what waits, the final policy and the summary, and closes every file; returns what could not be
        written, which the summary says as "failed_writes"."""
        failed_writes: list[str] = []
        for name, write in (
            (_METRICS, self._metrics.close),
            (POLICY, lambda: save_policy(self.path / POLICY, policy)),
            ("summary.json", lambda: write_json(self.path / "summary.json", _with(summary, failed_writes))),
        ):
            try:
                write()
            except SAVE_ERRORS as error:
                failed_writes.append(name)
                self._warn(name, error, "it is lost")
        self._close()
        return failed_writes

    def abort(self) -> None:
        """Closes the files without a policy or summary; a new run without a single update leaves nothing behind."""
        with contextlib.suppress(Exception):  # the one that led here is to be raised
            self._close()
            if not self._goes_on and not (self.path / _METRICS).stat().st_size:
                shutil.rmtree(self.path)
                for parent in self._new_parents:
                    parent.rmdir()  # raises where another run is in it

    def _warn(self, name: str, error: Exception, then: str) -> None:
        self._say(f"WARNING: {self.path / name} could not be written ({short_reason(error)}); {then}")

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._metrics.close()
        if self._events is not None:
            self._events.close()
        if self._wandb:
            self._wandb.finish()
            self._wandb = None


def _with(summary: dict[str, Any], failed_writes: list[str]) -> dict[str, Any]:
    return summary | {"failed_writes": failed_writes} if failed_writes else summary


class _Lines:
    """A file that is only appended to, in whole lines, by this process alone. What cannot be written waits."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, and ValueError where another process has it."""
        self._path, self._file = path, open(path, "ab", buffering=0)  # noqa: SIM115 - held for the whole run
        _lock(self._file, path.parent)
        self._waiting, self._again_at, self._lost = bytearray(), 0.0, 0

    @property
    def waits(self) -> bool:
        """Whether something could not be written yet."""
        return bool(self._waiting)

    def append(self, lines: bytes) -> None:
        """Raises OSError, after which the file is as it was before."""
        if len(self._waiting) + len(lines) <= _WAITING_BYTES:
            self._waiting += lines
        else:
            self._lost += lines.count(b"\n")
        if time.monotonic() >= self._again_at:
            self.flush()

    def flush(self) -> None:
        """Writes what waits. Raises OSError as append does."""
        end, written = os.fstat(self._file.fileno()).st_size, 0
        try:
            while written < len(self._waiting):
                written += self._file.write(memoryview(self._waiting)[written:]) or 0
        except OSError:
            self._again_at = time.monotonic() + _AGAIN_SECONDS
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise
        self._waiting.clear()

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def close(self) -> None:
        """Writes what waits, and closes the file; once. Raises OSError where lines are lost."""
        if self._file.closed:
            return
        try:
            self.flush()
        finally:
            self._file.close()
        if self._lost:
            raise OSError(errno.ENOSPC, f"{self._lost} lines were too many to wait for room")

    def replaced(self, lines: Iterable[bytes]) -> "_Lines":
        """The file of these lines, in its place; whole or not at all."""
        write_atomically(self._path, b"".join(lines))
        self._file.close()
        return _Lines(self._path)


class _Events:
    """TensorBoard's file, written by tensorboardX, but not by its thread: that one dies of a full disk, and with it the
    run waits for ever."""

    def __init__(self, run_dir: Path, purge_step: int | None = None) -> None:
        from tensorboardX.event_file_writer import EventsWriter  # two seconds to import
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        folder = run_dir / "tensorboard"
        folder.mkdir(exist_ok=True)
        self._event, self._summary = Event, Summary
        self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(step=purge_step, wall_time=time.time(), session_log=start))
        self._writer.flush()
        self._flushed = time.monotonic()

    def add(self, values: dict[str, float], step: int) -> None:
        """Raises OSError."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = self._event(step=step, wall_time=time.time(), summary=self._summary(value=scalars))
        self._writer.write_event(event)
        if time.monotonic() - self._flushed >= _AGAIN_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()


def _is_new(path: Path) -> bool:
    """Whether there is nothing, or what a process left that was killed before it had begun."""
    names = {file.name for file in path.iterdir()}
    leftovers = {name for name in names if name.startswith("config.json.")}
    return names - leftovers <= {_METRICS} and not (_METRICS in names and (path / _METRICS).stat().st_size)


@contextlib.contextmanager
def _refused(path: Path) -> Any:
    """Raises ValueError for an OSError: before a run has begun."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"run_dir {path} cannot be written: {error.strerror or error}") from error


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


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise ValueError("--wandb needs the wandb package: pip install 'jppo[wandb]'") from None
    return wandb


def _mean(values: Iterable[float]) -> float:
    present = [value for value in values if not math.isnan(value)]
    return sum(present) / len(present) if present else math.nan
