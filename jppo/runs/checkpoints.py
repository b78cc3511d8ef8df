"""Saves the state of a run with orbax and restores it, so that a resumed run continues exactly."""

import contextlib
import dataclasses
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.config.schedules import from_json, to_json
from jppo.devices.mesh import allgather_ints
from jppo.envs.spaces import PyTree
from jppo.errors import Refused
from jppo.runs.files import check_own_files, jsonable, read_json, short_reason
from jppo.runs.leaves import copy_leaves, restore_leaves
from jppo.runs.run_dir import unused_path, versions

FORMAT = 7
FOLDER = "checkpoints"
_DEFAULTS = jsonable(dataclasses.asdict(PPOConfig()) | {k: to_json(v) for k, v in vars(Hyperparams()).items()})


class Checkpoint(NamedTuple):
    """An intact checkpoint in memory."""

    path: Path
    update: int  # completed updates
    seconds: float  # training time
    counts: dict[str, int]  # counters of the training loop
    log: dict[str, Any]  # state of the logger, as JSON
    leaves: dict[str, np.ndarray]  # the state's leaves by tree path; PRNG keys as their uint32 data

    def restore(self, like: PyTree, prefix: str = "") -> PyTree:
        """Returns the state with the structure and the shardings of `like`, see `restore_leaves`."""
        return restore_leaves(self.leaves, like, prefix, self.path)


class Checkpoints:
    """Saves checkpoints of a training run: orbax numbers them by update, writes them in a background thread and deletes
    old ones.

    In a program of several processes, all processes construct it with the same directory, and all call `save`.

    Attributes:
      start: the newest intact checkpoint at construction, or None.
      update: number of updates of the newest saved checkpoint, 0 without one.
      every_updates: number of updates between two checkpoints; 0 if the time decides.
      keeps_hyperparams: whether a resumed run uses the hyperparameters of the checkpoint, which a callback may have
        changed.
    """

    every_updates = 0
    keeps_hyperparams = True

    def __init__(self, run_dir: Path, seconds: float, max_checkpoints: int, message: Callable[[str], None]) -> None:
        """Reads the newest intact checkpoint and renames newer damaged ones. orbax deletes incomplete ones.

        Args:
          seconds: minimum time between two checkpoints.
          max_checkpoints: number of most recent checkpoints to keep.
          message: called with a text for each problem.

        Raises:
          ValueError: all checkpoints are damaged, or they have another format, or a folder is a link or not jppo's.
        """
        _check_folder(run_dir)
        self._folder, self._max_checkpoints, self._message = run_dir / FOLDER, max_checkpoints, message
        self._interval = seconds
        self._manager: Any = None  # made by the first save, because orbax is slow to import
        self.start = latest_checkpoint(run_dir, message)
        self.update = 0 if self.start is None else self.start.update
        if len(set(allgather_ints([self.update])[:, 0].tolist())) > 1:
            raise Refused(
                f"the processes of this run read different checkpoints in {self._folder}; use one shared disk"
            )
        if not jax.process_index():
            with contextlib.suppress(OSError):  # saving reports it
                self._folder.mkdir(exist_ok=True)
                for path in list_checkpoints(self._folder):
                    if int(path.name) > self.update:  # orbax would keep it instead of the next ones
                        path.rename(unused_path(path.with_name(f"{path.name}.damaged")))
        self._pending: int | None = None  # the update that is being saved
        self._failed, self._last_save = False, time.monotonic()

    def due(self, update: int) -> bool:
        """Returns whether to save a checkpoint after `update` updates."""
        if self._pending is not None and not self._manager.is_saving_in_progress():
            self.wait()
        elapsed = time.monotonic() - self._last_save
        return self._pending is None and elapsed >= self._interval and update > self.update

    def save(
        self,
        update: int,
        seconds: float,
        counts: dict[str, int],
        state: PyTree,
        log: dict[str, Any] | None = None,
    ) -> None:
        """Copies the state and starts to write it. A failure is reported by `message`, and training continues.

        Args:
          update, seconds, counts, log: see `Checkpoint`.
          state: arrays; in a program of several processes, `jax.Array`s of all processes or equal NumPy arrays.
        """
        self.wait()
        if update == self.update:
            return
        leaves = copy_leaves(state)
        info = {"format": FORMAT, "jppo": versions()["jppo"], "seconds": seconds, "counts": counts}
        info |= {"update": update, "log": log or {}, "leaves": list(leaves)}
        self._last_save = time.monotonic()
        try:
            self._start_save(update, leaves, info)
            self._pending = update
        except Exception as error:  # see read_checkpoint
            self._report(update, error)

    def close(self) -> None:
        """Waits until the last checkpoint is written. Repeated calls do nothing."""
        self.wait()
        if self._manager is not None:
            manager, self._manager = self._manager, None
            manager.close()

    def _start_save(self, update: int, leaves: dict[str, Any], info: dict[str, Any]) -> None:
        import orbax.checkpoint as ocp

        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self._max_checkpoints, cleanup_tmp_directories=True, save_root_metadata=False
            )
            self._manager = ocp.CheckpointManager(self._folder.absolute(), options=options)
        self._manager.save(update, args=ocp.args.StandardSave(leaves), custom_metadata=info, force=True)

    def wait(self) -> None:
        """Waits until the pending checkpoint, if any, is written."""
        if self._pending is None:
            return
        update, self._pending = self._pending, None
        try:
            self._manager.wait_until_finished()
            self.update, self._failed = update, False
        except Exception as error:  # see save
            self._report(update, error)

    def _report(self, update: int, error: Exception) -> None:
        """Reports the first of consecutive failures. The next save uses a new manager, which removes the remains."""
        if jax.process_count() == 1 and self._manager is not None:
            manager, self._manager = self._manager, None
            with contextlib.suppress(Exception):  # the same error again
                manager.close()
        if not self._failed:
            newest = f"the newest checkpoint is of update {self.update}" if self.update else "there is no checkpoint"
            self._message(
                f"the checkpoint of update {update} could not be written ({short_reason(error)}); {newest}. "
                "Training continues"
            )
        self._failed = True


def latest_checkpoint(run_dir: Path, message: Callable[[str], None]) -> Checkpoint | None:
    """Returns the newest intact checkpoint of a run; None if the run has none yet.

    Args:
      message: called with a text for each damaged checkpoint.

    Raises:
      ValueError: all checkpoints are damaged, or they have another format.
    """
    paths = list_checkpoints(run_dir / FOLDER)
    for path in reversed(paths):
        try:
            return read_checkpoint(path)
        except _Damaged as error:
            following = "; the checkpoint before it is used" if path != paths[0] else ""
            message(f"{path} is damaged ({error}){following}")
    if paths:
        raise Refused(f"all {len(paths)} checkpoints in {run_dir} are damaged; use another run_dir")
    return None


class _Damaged(Exception):
    """The files of a checkpoint are incomplete or changed."""


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads one checkpoint. Raises _Damaged, or ValueError for another format."""
    try:
        info = read_json(path / "_CHECKPOINT_METADATA")["custom_metadata"]
        if int(info["format"]) == FORMAT:
            if info["update"] != int(path.name):
                raise Refused(f"it is a copy of {info['update']}")
            return Checkpoint(
                path=path,
                update=int(path.name),
                seconds=float(info["seconds"]),
                counts=dict(info["counts"]),
                log=dict(info["log"]),
                leaves=_read_arrays(path, info["leaves"]),
            )
    except Exception as error:  # orbax, tensorstore and the file system raise many types
        raise _Damaged(short_reason(error)) from error
    version = info.get("jppo")
    advice = "" if version == versions()["jppo"] else "resume with that version, or "
    raise Refused(
        f"{path} has checkpoint format {info['format']}, this version of jppo reads {FORMAT}; it was written by jppo "
        f"{version}: {advice}start a new run in another run_dir"
    )


def _read_arrays(path: Path, names: list[str]) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp  # slow to import

    kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    arrays: dict[str, np.ndarray] = ocp.PyTreeCheckpointer().restore(path.absolute() / "default", restore_args=kinds)
    return arrays


def check_same_run(run_dir: Path, before: dict[str, Any], now: dict[str, Any], has_ended: bool) -> None:
    """Checks that a run can be resumed with other settings.

    Args:
      before, now: config.json of the run, and that of the new settings.
      has_ended: by its summary, the run was finished, stopped or solved.

    Raises:
      ValueError: the settings differ in more than total_steps and resources, or total_steps is lower than before.
    """
    run = f"run_dir {run_dir} already contains a run"
    metrics = run_dir / "metrics.jsonl"
    # A run that was killed before its first checkpoint starts again; one that ended must not be overwritten.
    is_lost = not list_checkpoints(run_dir / FOLDER) if has_ended else not (run_dir / FOLDER).is_dir()
    if is_lost and metrics.exists() and metrics.stat().st_size:
        raise Refused(f"{run} without checkpoints; use another run_dir")
    old, new = _identity_fields(before), _identity_fields(jsonable(now))
    names = [name for name in old | new if old.get(name) != new.get(name)]
    if names:
        differences = "; ".join(
            f"{name} is {_show_setting(old, name)} in the run, but {_show_setting(new, name)} now" for name in names
        )
        remedy = "pass the values of the run to resume it, or use another run_dir for the new ones"
        raise Refused(f"{run} with other settings: {differences}; {remedy}")
    old_steps, new_steps = before["total_steps"], now["total_steps"]
    scheduled = [name for name, value in now["hyperparams"].items() if isinstance(value, dict)]
    if new_steps != old_steps and scheduled:
        raise Refused(
            f"{run} with total_steps = {old_steps}; it cannot change to {new_steps}, because schedules depend on it: "
            + ", ".join(f"{name} = {_show_setting(new, name)}" for name in scheduled)
        )
    if new_steps < old_steps:
        raise Refused(f"{run} with total_steps = {old_steps}; it can be increased, but {new_steps} is lower")


def _identity_fields(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that must not change on resume: all but the resources. Missing ones have their defaults."""
    names = (
        "env",
        "backend",
        "seed",
        "environment",
        "network",
        "optimizer",
        "loss",
        "advantages",
        "learner",
        "callback_every",
    )
    fields = {name: settings[name] for name in names if name in settings}
    fields["log_every"] = settings.get("log_every", 1)
    if "actors" in settings:
        fields["policy_lag"] = settings["actors"].get("policy_lag")
    return _DEFAULTS | settings["config"] | settings["hyperparams"] | fields


def _show_setting(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name, "not set")
    return str(from_json(value) if isinstance(value, dict) else value)


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the directories of complete or damaged checkpoints, oldest first."""
    return sorted(filter(_is_checkpoint, _list_numbers(folder)), key=lambda path: int(path.name))


def _list_numbers(folder: Path) -> list[Path]:
    """Returns the paths that orbax treats as checkpoints; it deletes old ones."""
    return [path for path in folder.glob("*") if re.fullmatch(r"0|[1-9]\d*", path.name)]


def _is_checkpoint(path: Path) -> bool:
    """Returns whether the files in a folder are those of a checkpoint. Damaged ones may have none."""
    names = os.listdir(path) if path.is_dir() else []
    return path.name != "0" and (not names or "_CHECKPOINT_METADATA" in names or "default" in names)


def _check_folder(run_dir: Path) -> None:
    """Raises Refused if the folder of checkpoints, or one of them, is a link or not jppo's."""
    numbers = _list_numbers(run_dir / FOLDER)
    check_own_files(run_dir, (), (FOLDER, *numbers))
    if others := [path for path in numbers if not _is_checkpoint(path)]:
        raise Refused(f"{others[0]} is not a checkpoint, and checkpoints have numbers as names; rename or move it")


def delete_checkpoints(run_dir: Path) -> None:
    """Deletes all checkpoints of a run, and its directory if it contains no other files."""
    for path in list_checkpoints(run_dir / FOLDER):
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # with files of others
        (run_dir / FOLDER).rmdir()
        run_dir.rmdir()
