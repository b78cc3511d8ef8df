"""What a check says, and all of them as a table."""

import dataclasses
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.table import Table

PASS, FAIL, WARN, SKIPPED = "pass", "fail", "warn", "skipped"

MEANING = {
    "runs": "making, reset and step raise nothing",
    "jit": "reset and step can be traced",
    "contract": "reset and step return what the API says, in number and type",
    "carry": "the state has the same shapes and dtypes after a step as after a reset",
    "vmap": "it runs under vmap and scan, and does the same there as alone",
    "spaces": "observations have the shape, dtype and bounds that their space declares",
    "actions": "there is a choice of actions, bounded on both sides",
    "finite": "no NaN or infinity in observations and rewards",
    "determinism": "the same seed and actions give the same trajectory twice",
    "seeds": "other seeds give other trajectories for the same actions",
    "starts": "how often resets repeat a start, and that they do not all repeat one",
    "time_limit": "running out of time is truncated, not terminated",
    "final_obs": "the last observation of an episode is of that episode, not of the next",
    "hidden_reset": "nothing begins anew without terminated or truncated",
    "autoreset": "a vector environment resets in a way that keeps final observations",
    "speed": "environment steps per second, without a policy",
}
_COLOURS = {PASS: "green", FAIL: "bold red", WARN: "yellow", SKIPPED: "dim"}


class Check(NamedTuple):
    """One finding."""

    name: str  # of MEANING
    status: str  # pass, fail (training would be wrong or stop), warn (worth knowing) or skipped
    seen: str
    advice: str = ""  # what to do
    traceback: str = ""  # where the environment raised


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found in an environment."""

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
        """The check of that name."""
        return next(check for check in self.checks if check.name == name)

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return vars(self) | {"passed": self.passed, "checks": [check._asdict() for check in self.checks]}


def refused(error: ValueError, advice: str) -> Check:
    """Of an environment that jppo does not take, in jppo's words."""
    text = str(error)
    parts = {"observations differ": "contract", "action space": "actions", "bserv": "spaces"}
    parts |= {"autoreset_mode": "autoreset", "the state differs": "carry"}
    name = next((name for part, name in parts.items() if part in text), "contract")
    remedies = {"contract": advice, "spaces": "declare the space of what reset and step return"}
    return Check(name, FAIL, text, remedies.get(name, ""))


def make_report(names: tuple[str, ...], found: list[Check], **about: Any) -> Report:
    """Puts the checks in order; those that were not come to are skipped for the sake of the first that failed."""
    failed = next((check.name for check in found if check.status == FAIL), "")
    by_name = {check.name: check for check in found}
    missing = f"not looked at: {failed} failed"
    return Report(checks=tuple(by_name.get(name, Check(name, SKIPPED, missing)) for name in names), **about)


def print_report(report: Report, stream: TextIO | None = None) -> None:
    """As a table, with tracebacks below it."""
    sizes = f"{report.num_envs} x {report.steps:,} steps, seed {report.seed}"
    table = Table("check", "", "seen", "what to do", title=f"{report.env} ({report.backend}), {sizes}")
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for check in report.checks:
        colour = _COLOURS[check.status]
        table.add_row(check.name, f"[{colour}]{check.status}[/]", _plain(check.seen), _plain(check.advice))
    console = Console(file=stream)
    console.print(table)
    for check in report.checks:
        if check.traceback:
            console.print(check.traceback, markup=False, highlight=False)
    counts = [f"{sum(check.status == status for check in report.checks)} {status}" for status in _COLOURS]
    console.print(", ".join(count for count in counts if not count.startswith("0 ")), highlight=False)


def _plain(text: str) -> str:
    """Without rich's markup."""
    return text.replace("[", r"\[")
