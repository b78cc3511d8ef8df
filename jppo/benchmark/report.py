"""The result of `jppo.bench` as a table and as a picture."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from jppo.devices.memory import show_bytes
from jppo.runs.display import DisplayedResult, show_count
from jppo.runs.plots import draw_bars, format_steps

ROLLOUT_PARTS = ("environment", "policy", "other")


class Speed(NamedTuple):
    """Environment steps per second: the middle (a median, or the mean of a whole run) and the quartiles."""

    steps_per_second: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class BenchResult(DisplayedResult):
    """The speed and the memory of a run, and how the time of an update divides into parts.

    The parts are "environment", "policy" and "other" (together the rollout), and "update". With Ray actors there are
    also "waiting" (for the slowest actor) and "transfer" (of the rollout to the devices).
    """

    env: str
    backend: str
    """"device" or "ray"."""
    device: str
    num_cores: int
    num_envs: int
    num_steps: int
    num_devices: int
    num_actors: int | None
    """None on the device, as the next two."""
    envs_per_actor: int | None
    policy_lag: int | None
    compile_seconds: float
    """Compile time; with Ray actors, until the actors are ready."""
    run: Speed
    """Speed of a whole run with its logging."""
    loop: Speed
    """Speed of rollouts and updates without logging."""
    alone: dict[str, Speed]
    """Speed of "environment", "policy" and "update" if the other parts took no time."""
    seconds: dict[str, float]
    """Median time of each part, per update."""
    shares: dict[str, float]
    """Share of each part in the time of an update; the sum is 1. With policy_lag = 1, rollouts run in parallel with
    the updates and have no share."""
    memory: dict[str, int]
    """Device memory by purpose in bytes, on each device."""
    memory_free: int
    largest_num_envs: int | None = None
    """With dry_run: the largest multiple of num_envs that fits, with the other settings unchanged; speeds are NaN."""

    def summary(self) -> dict[str, Any]:
        """Returns all fields as a dict for JSON."""
        values = dataclasses.asdict(self)
        alone = {part: speed._asdict() for part, speed in self.alone.items()}
        return values | {"run": self.run._asdict(), "loop": self.loop._asdict(), "alone": alone}

    @property
    def _displayed(self) -> dict[str, Any]:
        if self.largest_num_envs is not None:
            needed = show_bytes(sum(self.memory.values()))
            return {"env": self.env, "memory_needed": needed, "largest_num_envs": self.largest_num_envs}
        shares = ", ".join(f"{part} {share:.0%}" for part, share in self.shares.items())
        speed = format_steps(self.run.steps_per_second)
        return {"env": self.env, "backend": self.backend, "steps_per_second": speed, "shares": shares}


def print_bench(result: BenchResult) -> None:
    """Prints the result as a table, or without speeds as lines."""
    memory = [
        f"memory on each device: {show_bytes(sum(result.memory.values()))} of {show_bytes(result.memory_free)} free",
        *(f"  {purpose}: {show_bytes(size)}" for purpose, size in result.memory.items()),
    ]
    if result.largest_num_envs is not None:
        lines = [bench_title(result), f"compile time: {result.compile_seconds:.1f} s", *memory]
        print(*lines, f"largest num_envs: {result.largest_num_envs:,}", sep="\n")
        return
    table = Table("part", title=bench_title(result))
    for name in ("ms per update", "share", "steps/s", "quartiles"):
        table.add_column(name, justify="right")
    rollout = sum(result.seconds[part] for part in ROLLOUT_PARTS)
    rollout_share = sum(result.shares[part] for part in ROLLOUT_PARTS if part in result.shares)
    table.add_row("rollout", _show_ms(rollout), _show_share(rollout_share or None))
    for part, seconds in result.seconds.items():
        name = f"  {part}" if part in ROLLOUT_PARTS else part
        columns = _show_speed(result.alone[part]) if part in result.alone else ()
        table.add_row(name, _show_ms(seconds), _show_share(result.shares.get(part)), *columns)
    table.add_section()
    for name, speed in (("without logging", result.loop), ("whole run", result.run)):
        batch_seconds = result.num_envs * result.num_steps / speed.steps_per_second
        quartiles = _show_speed(speed) if speed is result.loop else _show_speed(speed)[:1]  # the run's is a mean
        table.add_row(name, _show_ms(batch_seconds), "", *quartiles)
    lines = [
        f"{'start-up' if result.num_actors else 'compile time'}: {result.compile_seconds:.1f} s",
        *memory,
    ]
    if result.num_actors is None:
        lines.append("parts are timed alone; together in one program they can take less time")
    if result.policy_lag:
        lines.append("policy_lag = 1: rollouts run in parallel with the updates")
    Console(markup=False).print(table, *lines, sep="\n", highlight=False)


def bench_title(result: BenchResult) -> str:
    """Returns a title with environment, sizes, actors and devices."""
    words = [f"{result.env}, {result.num_envs} x {result.num_steps}"]
    if result.num_actors is not None:
        words.append(
            show_count(result.num_actors, "actor") + (f" of {result.envs_per_actor}" if result.num_actors else "")
        )
    return ", ".join([*words, f"{show_count(result.num_devices, 'device')} ({result.device})"])


def draw_bench(result: BenchResult, output: Path) -> None:
    """Draws the time of each part as bars, and writes a PNG."""
    labels = {part: f"{_show_ms(seconds)} ms" for part, seconds in result.seconds.items()}
    for part, share in result.shares.items():
        labels[part] += f" ({share:.0%})"
    values = {part: 1e3 * seconds for part, seconds in result.seconds.items()}
    title = f"{bench_title(result)}: {format_steps(result.run.steps_per_second)} steps/s"
    draw_bars(title, values, labels, "milliseconds per update (share)", output)


def _show_ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


def _show_share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _show_speed(speed: Speed) -> tuple[str, str]:
    return f"{speed.steps_per_second:,.0f}", f"{format_steps(speed.low)} - {format_steps(speed.high)}"
