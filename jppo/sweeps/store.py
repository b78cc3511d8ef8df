"""The results of a sweep in memory and in its directory."""

import csv
import io
import time
from pathlib import Path
from typing import Any

from jppo.config.ppo import Hyperparams
from jppo.config.schedules import from_json
from jppo.errors import Refused
from jppo.runs.files import check_own_files, read_json, short_reason, write_atomically, write_json
from jppo.runs.groups import format_value
from jppo.runs.run_dir import unused_path, versions
from jppo.sweeps.grid import ProgramGroup, RunSpec, describe_run, run_fingerprint
from jppo.sweeps.results import RUN_DIRS, SweepResult
from jppo.sweeps.sweep_run import INTERRUPTED, RunOutcome, SweepRun, read_outcome, to_columns, write_outcome
from jppo.training.settings import list_own_parts

_SWEEP, _RUNS, _TABLE, _COPIES, _PICTURE = "sweep.json", "runs", "runs.csv", "copies.csv", "curves.png"


def default_sweep_dir() -> Path:
    """Returns an unused path runs/sweeps/<time>."""
    return unused_path(Path("runs") / "sweeps" / time.strftime("%Y%m%d-%H%M%S"))


class SweepStore:
    """Collects the results of the runs, writes them to the sweep's directory and reads those of an earlier call."""

    def __init__(self, path: str | Path | None, groups: list[ProgramGroup], values: dict[str, list[Any]]) -> None:
        """
        Args:
          path: directory of the sweep; None writes no files.
          values: the values of each setting.

        Raises:
          ValueError: the directory contains something else, cannot be written, or a file in it is damaged.
        """
        self.path = None if path is None else Path(path)
        self._groups, self._values = groups, values
        self._runs: dict[int, SweepRun] = {}
        if self.path is None:
            return
        self._prepare_directory(self.path)
        for group in groups:
            saved = [spec for spec in group.runs if self._file(group, spec).exists()]
            if group.selection is not None and len(saved) < len(group.runs):
                continue  # the result of a run depends on the others, so all of them must run together
            for spec in saved:
                self._add(group, spec, read_outcome(self._file(group, spec), group.agent)[0])

    def missing_runs(self, group: ProgramGroup) -> tuple[RunSpec, ...]:
        """Returns the runs of a group that have no result yet."""
        return tuple(spec for spec in group.runs if spec.number not in self._runs)

    def add(self, group: ProgramGroup, spec: RunSpec, outcome: RunOutcome) -> None:
        """Adds the result of a run of a group. Writes its file unless the run was interrupted."""
        self._add(group, spec, outcome)
        if self.path is not None and outcome.status != INTERRUPTED:
            write_outcome(self._file(group, spec), outcome, describe_run(group, spec))

    def checkpoint_dir(self, group: ProgramGroup) -> Path | None:
        """Returns the directory of the checkpoints of population-based training."""
        return None if self.path is None else self.path / f"population-{run_fingerprint(group, group.runs[0])}"

    def result(self) -> SweepResult:
        """Returns the result; writes the table and the pictures."""
        swept = [name for name, choices in self._values.items() if len(choices) > 1]
        not_started = sum(len(self.missing_runs(group)) for group in self._groups)
        runs = [self._runs[number] for number in sorted(self._runs)]
        result = SweepResult(runs, swept, self.path, not_started)
        if self.path is not None and runs:
            _write_table(self.path / _TABLE, [run.row for run in runs])
            if copies := result.copies:
                _write_table(self.path / _COPIES, copies)
            else:  # of an earlier sweep in this directory
                (self.path / _COPIES).unlink(missing_ok=True)
            if any(run.episodes for run in runs):
                result.plot(self.path / _PICTURE)
        return result

    def __len__(self) -> int:
        return len(self._runs)

    def _prepare_directory(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            check_own_files(path, (_SWEEP, _TABLE, _COPIES, _PICTURE), (_RUNS, RUN_DIRS))
            if any(path.iterdir()) and not (path / _SWEEP).exists():
                raise Refused(f"sweep_dir {path} is not empty and contains no sweep; name another directory")
            check_own_files(path, [self._file(group, spec) for group in self._groups for spec in group.runs])
            (path / _RUNS).mkdir(exist_ok=True)
            description = {
                "envs": list(dict.fromkeys(group.env_name for group in self._groups)),
                "settings": self._values,
                "seeds": sorted({spec.seed for group in self._groups for spec in group.runs}),
                "runs": [run_fingerprint(group, spec) for group in self._groups for spec in group.runs],
                "versions": versions(),
            }
            write_json(path / _SWEEP, description)
        except OSError as error:
            raise Refused(f"sweep_dir {path} cannot be written: {short_reason(error)}") from error

    def _add(self, group: ProgramGroup, spec: RunSpec, outcome: RunOutcome) -> None:
        self._runs[spec.number] = SweepRun(
            **vars(outcome),
            **spec._asdict(),
            env=group.env_name,
            agent=group.agent,
            custom_parts=list_own_parts(group.settings.env, vars(group.settings)),
            name=run_fingerprint(group, spec),
        )

    def _file(self, group: ProgramGroup, spec: RunSpec) -> Path:
        assert self.path is not None
        return self.path / _RUNS / f"{run_fingerprint(group, spec)}.npz"


def load_sweep(path: Path) -> SweepResult:
    """Returns the finished runs of a sweep directory, without their policies.

    Raises:
      ValueError: the directory contains no sweep, no finished run, or a damaged file.
    """
    try:
        description = read_json(path / _SWEEP)
        swept = [name for name, choices in description["settings"].items() if len(choices) > 1]
        runs = [
            _read_run(file, number, list(description["settings"]))
            for number, name in enumerate(description["runs"])
            if (file := path / _RUNS / f"{name}.npz").exists()
        ]
    except Refused:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise Refused(f"{path} is not a sweep directory of this version of jppo ({short_reason(error)})") from None
    if not runs:
        raise Refused(f"{path} contains no finished run yet")
    return SweepResult(runs, swept, path)


def _read_run(path: Path, number: int, settings: list[str]) -> SweepRun:
    """Returns a finished run without its policy."""
    outcome, about = read_outcome(path, None)
    hyperparams = {name: from_json(value) for name, value in about["hyperparams"].items()}
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in (about["config"] | hyperparams).items()}
    return SweepRun(
        **vars(outcome),
        number=number,
        seed=about["seed"],
        settings={name: values[name] for name in settings},
        hyperparams=Hyperparams(**hyperparams),
        env=about["env"],
        agent=None,
        custom_parts=(),
        name=path.stem,
    )


def _write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows as CSV."""
    file, columns = io.StringIO(newline=""), to_columns(rows)
    writer = csv.writer(file)
    writer.writerow(columns)
    writer.writerows(zip(*(map(format_value, column) for column in columns.values()), strict=True))
    write_atomically(path, file.getvalue())
