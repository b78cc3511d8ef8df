"""The result of the checks, and its table."""

import contextlib
import dataclasses
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.table import Table

from jppo.envs.contract import BrokenContractError
from jppo.envs.modules import MissingDownloadError
from jppo.envs.observations import MisfitError
from jppo.errors import Refused, describe_error

PASS, FAIL, WARN, SKIPPED = "pass", "fail", "warn", "skipped"
_TABLE_COLUMNS = 70  # a terminal with fewer columns shows lines instead of a table
_COLOURS = {PASS: "green", FAIL: "bold red", WARN: "yellow", SKIPPED: "dim"}


class Check(NamedTuple):
    """The result of one check."""

    name: str
    status: str  # pass, fail (training would stop or learn something unintended), warn or skipped
    seen: str
    advice: str = ""  # the remedy
    traceback: str = ""  # traceback of an exception that the environment raised


def passed(name: str, seen: str) -> Check:
    """Returns the result of a check that passed."""
    return Check(name=name, status=PASS, seen=seen)


def failed(name: str, seen: str, advice: str) -> Check:
    """Returns the result of a check that failed."""
    return Check(name=name, status=FAIL, seen=seen, advice=advice)


def warning(name: str, seen: str, advice: str) -> Check:
    """Returns the result of a check that found something unusual."""
    return Check(name=name, status=WARN, seen=seen, advice=advice)


def skipped(name: str, seen: str, advice: str = "") -> Check:
    """Returns the result of a check that was not possible."""
    return Check(name=name, status=SKIPPED, seen=seen, advice=advice)


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """The results of all checks of an environment."""

    env: str
    backend: str  # device or ray
    seed: int
    steps: int  # of each environment
    num_envs: int
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(check.name for check in self.checks if check.status == FAIL)

    def __getitem__(self, name: str) -> Check:
        """Returns the check with this name."""
        return next(check for check in self.checks if check.name == name)

    def summary(self) -> dict[str, Any]:
        """Returns a dict for JSON."""
        return vars(self) | {"passed": self.passed, "checks": [check._asdict() for check in self.checks]}


class FailedCheckError(Exception):
    """A check failed, and further checks are impossible. The argument is the Check."""


@contextlib.contextmanager
def report_exceptions(name: str, action: str) -> Iterator[None]:
    """Turns exceptions of the environment into a failed check with this name."""
    try:
        yield
    except (FailedCheckError, BrokenContractError, MisfitError, MissingDownloadError):
        raise
    except (Exception, SystemExit) as error:  # an environment may raise any exception
        raise FailedCheckError(_describe_exception(name, action, error)) from error


def _describe_exception(name: str, action: str, error: BaseException) -> Check:
    """Returns a failed check with the traceback of an exception."""
    frames = error.__traceback__ and error.__traceback__.tb_next  # without the function that caught it
    text = "".join(traceback.format_exception(type(error), error, frames))
    seen = f"{action} raised {describe_error(error)}"
    return Check(name=name, status=FAIL, seen=seen, advice="see the traceback below the table", traceback=text)


@contextlib.contextmanager
def report_refusals() -> Iterator[None]:
    """Turns jppo's refusals of an environment into failed checks."""
    try:
        yield
    except (BrokenContractError, MissingDownloadError):
        raise
    except Refused as error:
        text = str(error)
        name = (
            "masks"
            if "action_mask" in text
            else "actions"
            if "action space" in text
            else "spaces"
            if "observation" in text
            else "contract"
        )
        raise FailedCheckError(failed(name, text, "see docs/extending.md")) from error


def collect_checks(checks: Iterable[Check], name: str) -> list[Check]:
    """Returns the checks up to the first fault that makes further checks impossible.

    Args:
      name: the check that reports exceptions which no other check expects, for example that of `close`.

    Raises:
      Refused: the name or an argument is invalid.
    """
    found = []
    try:
        for check in checks:
            found.append(check)  # keeps the checks before an exception
    except FailedCheckError as error:
        found.append(error.args[0])
    except BrokenContractError as error:
        problem, remedy = error.args
        found.append(failed(error.check, problem, remedy))
    except MisfitError as error:
        found.append(failed("spaces", str(error), "declare the space of the observations that you return"))
    except Refused:
        raise
    except (Exception, SystemExit) as error:  # an environment may raise any exception
        found.append(_describe_exception(name, "it", error))
    return found


def make_report(names: tuple[str, ...], found: list[Check], **fields: Any) -> CheckReport:
    """Returns a report in the order of the names. Missing checks are marked as skipped, because another one failed."""
    culprit = next((check.name for check in found if check.status == FAIL), "")
    by_name = {check.name: check for check in found}
    checks = (by_name.get(name, skipped(name, f"not checked, because {culprit} failed")) for name in names)
    return CheckReport(checks=tuple(checks), **fields)


def print_report(report: CheckReport, stream: TextIO | None = None) -> None:
    """Prints a table, or lines on a narrow terminal, and the tracebacks of exceptions below it."""
    sizes = f"{report.num_envs} x {report.steps:,} steps, seed {report.seed}"
    title = f"{report.env} ({report.backend}), {sizes}"
    rows = [
        (check.name, f"[{_COLOURS[check.status]}]{check.status}[/]", _plain(check.seen), _plain(check.advice))
        for check in report.checks
    ]
    console = Console(file=stream)
    if console.width < _TABLE_COLUMNS:
        console.print(title, *(": ".join(filter(None, row)) for row in rows), sep="\n", highlight=False)
    else:
        table = Table("check", "result", "finding", "remedy", title=title)
        table.columns[0].no_wrap = table.columns[1].no_wrap = True
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for check in report.checks:
        if check.traceback:
            console.print(check.traceback, markup=False, highlight=False)
    counts = [f"{sum(check.status == status for check in report.checks)} {status}" for status in _COLOURS]
    console.print(", ".join(count for count in counts if not count.startswith("0 ")), highlight=False)


def _plain(text: str) -> str:
    """Escapes the markup of rich."""
    return text.replace("[", r"\[")
