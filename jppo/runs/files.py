"""Reads and writes the files of run and sweep directories: regular files, written atomically, and JSON."""

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jppo.config.schedules import Schedule, to_json
from jppo.errors import Refused


def check_own_files(folder: Path, files: Iterable[str | Path], folders: Iterable[str | Path] = ()) -> None:
    """Raises Refused if one of jppo's files or folders in a folder is a link or of another kind; it may be missing."""
    for names, kind, is_kind in ((files, "regular file", os.path.isfile), (folders, "folder", os.path.isdir)):
        for path in map(folder.joinpath, names):
            if os.path.islink(path) or (os.path.exists(path) and not is_kind(path)):
                found = "a link" if os.path.islink(path) else f"not a {kind}"
                raise Refused(f"{path} is {found}, and jppo would write it; use another directory, or move it")


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file to read. Raises OSError, also for others: a named pipe would wait for ever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return open(path, "rb")


def write_atomically(path: Path, data: bytes | str | Iterable[bytes]) -> None:
    """Writes a whole file or nothing: writes a temporary file beside it, then renames it. It replaces a symbolic link.

    Args:
      data: the content, whole or in parts; a str is encoded as UTF-8.

    Raises:
      OSError: the file cannot be written. The previous file, if any, is unchanged.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        data = data.encode() if isinstance(data, str) else data
        with open(temporary, "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
        os.replace(temporary, path)
    except BaseException:  # also Ctrl-C
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file atomically. Raises OSError."""
    write_atomically(path, json.dumps(jsonable(content), indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Reads a JSON file. Raises OSError if it cannot be read, and ValueError if it is damaged."""
    try:
        with open_file(path) as file:
            return json.loads(file.read().decode())
    except RecursionError:
        raise Refused("its values are nested too deeply") from None


def jsonable(value: Any) -> Any:
    """Converts a value to JSON types: NumPy scalars to Python numbers, NaN and infinity to null, tuples to
    lists, schedules to the form of `jppo.config.schedules.to_json`."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Schedule):
        return to_json(value)
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def short_reason(error: BaseException) -> str:
    """Returns the cause of a failed write in a few words, because tensorstore's messages are hundreds of words long."""
    if isinstance(error, FileExistsError):  # of a folder
        return "a file has this name"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error)
    no_space = "No space left on device"
    if "ENOSPC" in text or no_space in text:
        return no_space
    lines = text.strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
