"""Writes the files of a run while it trains. A failed write is reported, and training continues."""

import contextlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jppo.devices.signals import defer_signals
from jppo.errors import Refused
from jppo.ppo.types import PolicyState
from jppo.runs.checkpoints import FOLDER, list_checkpoints
from jppo.runs.files import check_own_files, jsonable, open_file, short_reason, write_atomically, write_json
from jppo.runs.run_dir import BEST, POLICY, BestPolicy, rows_until, save_policy

_METRICS, _LOCK, _EVENTS = "metrics.jsonl", ".lock", "tensorboard"
_FILES = ("config.json", _METRICS, _LOCK, "summary.json", POLICY, BEST, "video.gif")  # that a run writes


class RunWriter:
    """Writes a run's directory: config.json, metrics.jsonl, TensorBoard events, the policies and summary.json."""

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        wandb: bool = False,
        resume: bool = False,
        message: Callable[[str], None] = warnings.warn,
    ) -> None:
        """Locks the directory and, for a new run, writes config.json.

        Args:
          config: content of config.json.
          wandb: log to Weights & Biases as well.
          resume: the directory contains a run, which `truncate_after` prepares for more updates.
          message: called with a text for each problem.

        Raises:
          ValueError: the directory cannot be written, another process writes to it, or it contains other files, or
            links with the names of a run's files.
        """
        wandb_module = _import_wandb() if wandb else None
        self._new_parents = [parent for parent in path.parents if not os.path.exists(parent)]
        self.path, self._config, self._resume, self._message = path, config, resume, message
        self._has_lines = False
        self._failed: list[str] = []  # names of the files that could not be written completely
        self._events: _TensorBoard | None = None
        self._wandb: Any = None
        with _as_value_error(path):
            path.mkdir(parents=True, exist_ok=True)
            check_own_files(path, _FILES, (FOLDER, _EVENTS))
            if not resume and not _is_new(path):
                content = "already contains a run" if (path / "config.json").exists() else "is not empty"
                raise Refused(f"run_dir {path} {content}; use another directory")
            self._lock = _lock(path)
            (path / _METRICS).touch()
        try:
            if not resume:
                with _as_value_error(path):
                    write_json(path / "config.json", config)
                    self._events = _TensorBoard(path)
            if wandb_module is not None:
                self._wandb = wandb_module.init(project="jppo", config=config, dir=str(path), name=path.name)
        except BaseException:
            self.abort()
            raise

    def truncate_after(self, update: int, step: int) -> None:
        """Removes from a resumed run the lines of later updates, damaged lines and the final files.

        Args:
          step: environment steps up to that update.

        Raises:
          ValueError: the directory cannot be written.
        """
        if not self._resume:
            return
        with _as_value_error(self.path):
            write_json(self.path / "config.json", self._config)
            self._events = _TensorBoard(self.path, purge_step=step + 1)
            write_atomically(self.path / _METRICS, (line for line, _ in rows_until(self.path, update)))
            for name in ("summary.json", POLICY):
                (self.path / name).unlink(missing_ok=True)

    def write_updates(self, rows: list[dict[str, Any]]) -> None:
        """Appends one line per update to metrics.jsonl; TensorBoard and W&B get the means over the rows."""
        self._has_lines = True
        lines = "".join(json.dumps(jsonable(row)) + "\n" for row in rows).encode()
        self._try(_METRICS, lambda: self._append(lines), "its lines are lost until the file can be written again")
        step = rows[-1]["env_steps"]
        means = {}
        for name in rows[-1]:
            values = [row[name] for row in rows if not math.isnan(row[name])]
            if values and name not in ("update", "env_steps"):
                means[name] = sum(values) / len(values)  # fmean raises for inf and -inf
        if self._events is not None:
            try:
                self._events.add(means, step)
            except OSError as error:
                self._events = None
                self._warn("tensorboard", error, f"no more events are written ({_METRICS} contains all metrics)")
        if self._wandb:
            self._wandb.log(means, step=step)

    def save_best(self, policy: PolicyState, best: BestPolicy) -> None:
        """Writes the best policy so far."""
        is_saved = self._try(BEST, lambda: save_policy(self.path, policy, best), "the one before stays")
        if is_saved and BEST in self._failed:
            self._failed.remove(BEST)

    def _append(self, lines: bytes) -> None:
        """Writes whole lines. Raises OSError, also if the file was deleted; the file is then as before."""
        path = self.path / _METRICS
        end = path.stat().st_size
        try:
            with open(path, "r+b") as file:
                file.seek(end)
                file.write(lines)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, end)
            raise

    def close(self, policy: PolicyState, summary: dict[str, Any]) -> list[str]:
        """Writes the final policy and the summary, and closes all files.

        Returns:
          the names of the files that could not be written completely; the summary has them as "failed_writes".
        """
        with contextlib.suppress(OSError):  # the other files report it
            if not (self.path / "config.json").exists():  # deleted during the run, but needed to load the policy
                self.path.mkdir(parents=True, exist_ok=True)
                write_json(self.path / "config.json", self._config)
        self._try(_METRICS, lambda: self._append(b""), "it is lost")  # fails if it was deleted after the last lines
        self._try(POLICY, lambda: save_policy(self.path, policy), "it is lost")
        summary = summary | ({"failed_writes": self._failed} if self._failed else {})
        self._try("summary.json", lambda: write_json(self.path / "summary.json", summary), "it is lost")
        self._close()
        return self._failed

    def abort(self) -> None:
        """Closes the files without a policy or summary. Deletes those of a new run that has saved no update."""
        try:
            with contextlib.suppress(Exception):  # the caller raises the original error
                self._close_wandb()
        finally:
            with defer_signals(), contextlib.suppress(Exception):
                self._close()
                if not (self._resume or self._has_lines or list_checkpoints(self.path / FOLDER)):
                    delete_run(self.path)
                    for parent in self._new_parents:
                        parent.rmdir()  # raises if it contains other files

    def _try(self, name: str, write: Callable[[], None], consequence: str) -> bool:
        """Writes a file and returns whether it succeeded. Reports the first failure of each file."""
        try:
            write()
        except OSError as error:
            if name not in self._failed:
                self._warn(name, error, consequence)
                self._failed.append(name)
            return False
        return True

    def _warn(self, name: str, error: Exception, consequence: str) -> None:
        self._message(f"{self.path / name} could not be written ({short_reason(error)}); {consequence}")

    def _close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None
        self._close_wandb()
        self._lock.release()

    def _close_wandb(self) -> None:
        """Waits until W&B has sent its data."""
        if self._wandb:
            run, self._wandb = self._wandb, None
            run.finish()


class _TensorBoard:
    """Writes scalars to a TensorBoard file.

    It uses tensorboardX's `EventsWriter`, which raises errors here. The thread of its `SummaryWriter` ends at a full
    disk, and then the training process waits for it forever.
    """

    def __init__(self, run_dir: Path, purge_step: int | None = None) -> None:
        """
        Args:
          purge_step: TensorBoard ignores earlier events from this step on.
        """
        from tensorboardX.event_file_writer import EventsWriter  # slow to import
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        folder = run_dir / _EVENTS
        folder.mkdir(exist_ok=True)
        self._event, self._summary = Event, Summary
        self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}.jppo")
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(step=purge_step, wall_time=time.time(), session_log=start))
        self._writer.flush()

    def add(self, values: dict[str, float], step: int) -> None:
        """Writes one event. Raises OSError."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = self._event(step=step, wall_time=time.time(), summary=self._summary(value=scalars))
        self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()


def delete_run(path: Path) -> None:
    """Deletes the files of a run, and its directory if it contains no others. Raises OSError."""
    for file in (*map(path.joinpath, _FILES), *(path / _EVENTS).glob("*.jppo")):
        file.unlink(missing_ok=True)
    for folder in (path / _EVENTS, path / FOLDER, path):
        with contextlib.suppress(OSError):  # missing, or with files of others
            folder.rmdir()


def _is_new(path: Path) -> bool:
    """Returns whether the directory contains no files except those of a process that was killed at its start."""
    names = {file.name for file in path.iterdir() if not file.name.startswith("config.json.")}
    return names <= {_METRICS, _LOCK, "wandb"} and not (_METRICS in names and (path / _METRICS).stat().st_size)


def _lock(path: Path) -> Any:
    """Locks a run directory until the process ends or the lock is released. Raises ValueError if it is locked."""
    import filelock

    lock = filelock.FileLock(path / _LOCK, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise Refused(f"run_dir {path} is being written by another process; use another directory") from None
    except NotImplementedError:  # a file system without locks
        pass
    return lock


def is_written(path: Path) -> bool:
    """Returns whether a process writes to a run directory now. Does not change the directory."""
    import fcntl  # because filelock would create a missing file

    try:
        with open_file(path / _LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file, or a file system without locks
        pass
    return False


@contextlib.contextmanager
def _as_value_error(path: Path) -> Any:
    """Converts an OSError to a ValueError before training starts."""
    try:
        yield
    except OSError as error:
        raise Refused(f"run_dir {path} cannot be written: {short_reason(error)}") from error


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise Refused("--wandb needs the wandb package: pip install 'jppo[wandb]'") from None
    return wandb
