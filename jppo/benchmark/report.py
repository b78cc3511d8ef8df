"""What a bench gives back: speeds, where the time of an update goes, and what would help."""

from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jppo.config.ppo import DEFAULT_STRATA, LEAST_SHARE
from jppo.runs.plots import draw_bars, format_steps

CEILINGS = ("environment", "policy", "learner")
_MUCH = 0.2  # share of an update that is worth hiding
_SLOW_RUN = 0.8  # of the bare loop's speed
_WAITS = 0.5  # cores that an environment keeps busy; below, it waits for something

_LEARN = "fewer num_epochs, fewer and larger minibatches (num_minibatches), or a smaller network"
_ACT = "more environments for each call ({envs}), or a smaller network"
_ON_DEVICE = {
    "environment": "more num_envs where the device is not full yet, more num_devices, or cheaper environments",
    "policy": _ACT.format(envs="num_envs"),
    "learner": _LEARN,
    "rest": "more num_envs or num_steps, so that what is done once a step or an update counts less",
}
_WITH_ACTORS = {
    "policy": _ACT.format(envs="envs_per_actor, with fewer actors"),
    "learner": _LEARN,
    "rest": "fewer and larger actors, larger num_steps, or smaller observations",
    "waiting": "fewer and larger actors, whose rollouts differ less in time, or policy_lag = 1",
    "transfer": "smaller observations (uint8 rather than float32), or fewer and larger actors",
}
_SUBJECTS = {
    "environment": "Stepping the environments takes",
    "policy": "The policy's calls in rollouts take",
    "learner": "The learner takes",
    "rest": "What is left of the rollout, such as storing it, takes",
    "waiting": "Waiting for the slowest actor, and for its rollout's way here, takes",
    "transfer": "Putting rollouts together and onto the devices takes",
}
_OF_ACTORS = {"environment": "their environments", "policy": "the policy's calls", "rest": "storing the rollout"}


class Speed(NamedTuple):
    """Environment steps per second: the median and the quartiles over rounds; of a whole run the mean, and the
    quartiles over its updates."""

    steps_per_second: float
    low: float
    high: float


class BenchResult(NamedTuple):
    """Where a run's time goes."""

    env: str
    backend: str  # anakin or ray
    device: str
    cores: int
    num_envs: int
    num_steps: int
    num_devices: int
    actors: dict[str, Any]  # of the Ray mode: num_actors, envs_per_actor, policy_lag, and whether they are local
    compile_seconds: float  # in the Ray mode until the actors are ready, too
    steady: Speed  # of updates in a loop that does nothing else
    end_to_end: Speed  # of a run with its logging, as `jppo.train` makes it
    ceilings: dict[str, Speed]  # of environment, policy and learner, were all else free
    seconds: dict[str, float]  # of each part in an update; in the Ray mode of the environments' by the actors' clocks
    shares: dict[str, float]  # of an update, 1 in all; with policy_lag = 1 without what actors do meanwhile
    cores_busy: float = 1.0  # by one actor's environments while they step: less than 1 where they wait for something

    @property
    def limit(self) -> str:
        """The part that takes most of an update."""
        return max(self.shares, key=lambda part: self.shares[part])

    @property
    def advice(self) -> str:
        """Which part limits, and what would help."""
        return advise(self)

    def summary(self) -> dict[str, Any]:
        """All of it, for JSON."""
        speeds = {"steady": self.steady._asdict(), "end_to_end": self.end_to_end._asdict()}
        ceilings = {part: speed._asdict() for part, speed in self.ceilings.items()}
        return self._asdict() | speeds | {"ceilings": ceilings, "limit": self.limit, "advice": self.advice}


def advise(benched: BenchResult) -> str:
    """One or two sentences: which part limits and the knobs for it, and what else stands out."""
    part, share = benched.limit, f"{benched.shares[benched.limit]:.0%} of an update"
    first = f"{_SUBJECTS[part]} {share}: {_knobs(benched, part)}."
    if part == "waiting" and benched.actors["policy_lag"]:
        slow = max(_OF_ACTORS, key=lambda name: benched.seconds[name])
        first = f"The learner waits for the actors for {share}, and they mostly for {_OF_ACTORS[slow]}: "
        first += f"{_knobs(benched, slow)}."
    return " ".join([first, *_remarks(benched)])


def _knobs(benched: BenchResult, part: str) -> str:
    if not benched.actors:
        return _ON_DEVICE[part]
    return _more_environments(benched) if part == "environment" else _WITH_ACTORS[part]


def _more_environments(benched: BenchResult) -> str:
    actors, cores = benched.actors, benched.cores
    if not actors["num_actors"]:
        return f"actors in processes of their own (num_actors; there are {cores} cores)"
    if benched.cores_busy < _WAITS:
        return "more actors, even more than there are cores, since these environments wait rather than compute"
    if not actors["local"]:
        return "more actors (num_actors), as far as the cluster has cores for them"
    if actors["num_actors"] < cores:
        return f"more actors (num_actors; there are {cores} cores)"
    return f"more cores than these {cores} (address joins a cluster), or cheaper environments"


def _remarks(benched: BenchResult) -> list[str]:
    """What would help besides: at most one sentence."""
    shares, actors = benched.shares, benched.actors
    if actors and actors["num_actors"] and not actors["policy_lag"]:
        learning = shares["learner"] + shares["transfer"]
        longer = max(learning, 1.0 - learning)
        if longer <= 1.0 - _MUCH:
            return [
                f"policy_lag = 1 lets actors and learner work at once: up to {1.0 / longer:.1f} times as "
                "fast, where there are cores for both."
            ]
    fraction = benched.end_to_end.steps_per_second / benched.steady.steps_per_second
    if fraction < _SLOW_RUN:
        return [
            f"A whole run is only {fraction:.0%} as fast as its bare updates, which are short: with larger ones "
            "(num_envs, num_steps) logging counts less."
        ]
    more, batch_size = 2 * benched.num_devices, benched.num_envs * benched.num_steps
    spare = benched.device == "cpu" and more <= min(benched.cores, DEFAULT_STRATA) and benched.num_envs % more == 0
    if spare and not actors and batch_size >= more * LEAST_SHARE:
        return [
            f"With num_devices = {more} the cores share the work better; a Python program has to be started with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={more} for it."
        ]
    return []


def print_bench(benched: BenchResult) -> None:
    """As a table, and the advice."""
    table = Table(title=escape(title_of(benched)))
    for name in ("", "steps/s", "quartiles", "ms of an update", "share"):
        table.add_column(name, justify="right" if name else "left")
    for name, speed in speeds_of(benched).items():
        part = name.removesuffix(" only")
        taken = 1e3 * benched.seconds[part] if part in benched.seconds else _milliseconds(benched, speed)
        table.add_row(name, *_shown(speed), f"{taken:,.2f}", _share(benched, part))
    for part in benched.seconds:
        if part not in benched.ceilings:
            table.add_row(part, "", "", f"{1e3 * benched.seconds[part]:,.2f}", _share(benched, part))
    console, start = Console(), "starting" if benched.actors else "compiling"
    console.print(table)
    console.print("end to end is the mean of a whole run, beside the quartiles of its updates", highlight=False)
    console.print(f"{start}: {benched.compile_seconds:.1f} s", highlight=False)
    console.print(benched.advice, highlight=False, markup=False)


def title_of(benched: BenchResult) -> str:
    """What was measured."""
    sizes = f"{benched.env}, {benched.num_envs} x {benched.num_steps}"
    devices = f"{benched.num_devices} device{'s' if benched.num_devices > 1 else ''}"
    if not benched.actors:
        return f"{sizes}, {devices}"
    number, each = benched.actors["num_actors"], benched.actors["envs_per_actor"]
    actors = f"{number} actor{'s' if number > 1 else ''} of {each}" if number else "no actors"
    return f"{sizes}, {actors}, {devices}" + (", policy_lag = 1" if benched.actors["policy_lag"] else "")


def speeds_of(benched: BenchResult) -> dict[str, Speed]:
    """All speeds, by what a reader calls them."""
    ceilings = {f"{part} only": speed for part, speed in benched.ceilings.items()}
    return {"end to end": benched.end_to_end, "steady": benched.steady} | ceilings


def _shown(speed: Speed) -> tuple[str, str]:
    return f"{speed.steps_per_second:,.0f}", f"{format_steps(speed.low)} - {format_steps(speed.high)}"


def _milliseconds(benched: BenchResult, speed: Speed) -> float:
    return 1e3 * benched.num_envs * benched.num_steps / speed.steps_per_second


def _share(benched: BenchResult, part: str) -> str:
    return f"{benched.shares[part]:.0%}" if part in benched.shares else ""


def draw_bench(benched: BenchResult, output: Path) -> None:
    """As a PNG."""
    draw_bars(title_of(benched), speeds_of(benched), benched.shares, output)
