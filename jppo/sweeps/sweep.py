"""Settings times seeds, in as few compiled programs as there are shapes."""

import functools
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.ppo.anakin import Anakin
from jppo.ppo.learner import Loss
from jppo.ppo.networks import Network
from jppo.ppo.optimizer import Optimizer, adam
from jppo.runs import run_dir as runs
from jppo.sweeps.grid import (
    SHAPES,
    Group,
    Task,
    agent_of,
    check_count,
    check_devices,
    check_seeds,
    check_settings,
    identity,
    lay_out,
)
from jppo.sweeps.halving import run_group
from jppo.sweeps.population import Total
from jppo.sweeps.results import INTERRUPTED, Lane, SweepResult, read_lane, show, write_lane
from jppo.training.interrupts import stop_on_interrupt
from jppo.training.progress import NullReporter, Reporter, make_reporter

_SWEEP, _LANES = "sweep.json", "lanes"
_RESULT = ("status", "updates", "episodes", "return_mean", "return_std", "metrics", "policy_state")


def sweep(
    env: Any,
    *,
    seeds: int | Sequence[int] = 4,
    total_steps: int | float | None = None,
    config: PPOConfig | None = None,
    hyperparams: Hyperparams | None = None,
    preset: str = "auto",
    network: Network | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | None = None,
    halving: bool = False,
    lanes_at_once: int | None = None,
    num_devices: int | None = None,
    sweep_dir: str | Path | None = None,
    address: str | None = None,
    task_cpus: float = 1.0,
    task_gpus: float = 0.0,
    progress: str | Callable[[int], Reporter] = "none",
    **settings: Any,
) -> SweepResult:
    """Trains every combination of settings with every seed, on the device.

    The runs of one structure are the lanes of one compiled program; each ends as it would alone. One that diverges is
    marked, and leaves the others untouched.

    Args:
      env: as for `jppo.train` on the device, or several of them in a list.
      seeds: how many (0, 1, ...), or which.
      total_steps, config, hyperparams, preset, network, optimizer, loss: as for `jppo.train`; of every run.
      halving: after 1/16, 1/8, 1/4 and 1/2 of the updates the worse half of each program's lanes ends, and a smaller
        program goes on with the rest (fewer halvings where there are fewer than 16 lanes). Successive halving: Jamieson
        and Talwalkar (2016), "Non-stochastic best arm identification and hyperparameter optimization".
      lanes_at_once: by default as many as the devices' memory holds.
      num_devices: over which lanes are spread; all of this process by default.
      sweep_dir: where to keep every lane that has ended, a table (lanes.csv) and pictures; a lane that is found there
        is not run again.
      address: runs the programs as Ray tasks, side by side over a cluster, instead of one after the other: auto,
        host:port, ray://host:port, or "local" for a new Ray on this machine.
      task_cpus, task_gpus: what Ray reserves for each.
      progress: "auto" or "none", see `jppo.train`; or what makes a reporter, given the environment steps of all lanes.
      **settings: fields of `jppo.Hyperparams` and `jppo.PPOConfig`, each a value or a list of values. Each combination
        of the latter is a program of its own.

    Ctrl-C ends the sweep early and returns what was reached; a second one raises KeyboardInterrupt.

    Raises:
      ValueError: anything given that cannot be; before anything is run.
    """
    values = check_settings(settings)
    groups = lay_out(
        env, check_seeds(seeds), values, total_steps, config, hyperparams, preset,
        parts={"network": network, "optimizer": optimizer, "loss": loss}, halving=halving,
        lanes_at_once=check_count("lanes_at_once", lanes_at_once), num_devices=check_devices(num_devices),
    )  # fmt: skip
    agents = [agent_of(group) for group in groups]
    store = _Store(sweep_dir, groups, agents, values)
    left = [group._replace(tasks=store.missing(number)) for number, group in enumerate(groups)]
    planned = max(1, sum(group.planned_steps for group in left))
    reporter = make_reporter(progress(planned) if callable(progress) else progress, planned)
    try:
        reporter.start()
        with stop_on_interrupt(reporter) as stop_requested:
            _announce(left, store, reporter)
            numbered = {number: group for number, group in enumerate(left) if group.tasks}
            if address is None:
                total = Total(reporter)
                for number, group in numbered.items():
                    run_group(group, total, stop_requested, functools.partial(store.add, number))
            else:
                _run_on_cluster(numbered, store, reporter, stop_requested, address, task_cpus, task_gpus)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(f"memory ran out after all; give lanes_at_once (lanes_at_once = {lanes_at_once})") from error
    finally:
        reporter.close()
    return store.result([name for name, choices in values.items() if len(choices) > 1])


def default_sweep_dir() -> Path:
    """runs/sweeps/<time>, numbered on if that is taken."""
    base = Path("runs") / "sweeps" / time.strftime("%Y%m%d-%H%M%S")
    return next(p for i in range(10_000) if not (p := base.with_name(base.name + (f".{i}" if i else ""))).exists())


class _Store:
    """The lanes that have ended, and their files."""

    def __init__(
        self, path: str | Path | None, groups: list[Group], agents: list[Anakin], values: dict[str, list[Any]]
    ) -> None:
        """Reads what is there. Raises ValueError where the directory is no sweep's or cannot be written."""
        self.path = None if path is None else Path(path)
        self._groups, self._agents = groups, agents
        self._lanes: dict[int, Lane] = {}
        if self.path is None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if any(self.path.iterdir()) and not (self.path / _SWEEP).exists():
                raise ValueError(f"sweep_dir {self.path} is not empty, and no sweep's; name another")
            (self.path / _LANES).mkdir(exist_ok=True)
            described = {"envs": list(dict.fromkeys(group.env.name for group in groups)), "settings": values}
            described |= {"seeds": sorted({task.seed for group in groups for task in group.tasks})}
            runs.write_json(self.path / _SWEEP, described | {"versions": runs.versions()})
        except OSError as error:
            raise ValueError(f"sweep_dir {self.path} cannot be written: {error.strerror or error}") from error
        for number, group in enumerate(groups):
            there = [task for task in group.tasks if self._file(group, task).exists()]
            if group.halving and len(there) < len(group.tasks):
                continue  # lanes compete, so they run together or not at all
            for task in there:
                self._keep(number, task, read_lane(self._file(group, task), agents[number]))

    def missing(self, number: int) -> tuple[Task, ...]:
        """What is still to be run of a group."""
        return tuple(task for task in self._groups[number].tasks if task.number not in self._lanes)

    def add(self, number: int, outcome: dict[str, Any]) -> None:
        """Keeps what `run_group` says of a lane, in a file too, unless it was interrupted."""
        group = self._groups[number]
        task = group.tasks[outcome["number"] - group.tasks[0].number]
        self._keep(number, task, {name: outcome[name] for name in _RESULT})
        if self.path is not None and outcome["status"] != INTERRUPTED:
            write_lane(self._file(group, task), self._lanes[task.number], identity(group, task))

    def result(self, swept: list[str]) -> SweepResult:
        """Of the lanes there are, with the table and the pictures written."""
        missing = sum(len(self.missing(number)) for number in range(len(self._groups)))
        result = SweepResult([self._lanes[number] for number in sorted(self._lanes)], swept, self.path, missing)
        if self.path is not None and result.lanes:
            result.write_table(self.path / "lanes.csv")
            if any(lane.episodes for lane in result.lanes):
                result.plot(self.path / "curves.png")
                if len(swept) == 2:
                    result.plot_heat_map(self.path / "heat_map.png")
        return result

    def __len__(self) -> int:
        return len(self._lanes)

    def _keep(self, number: int, task: Task, outcome: dict[str, Any]) -> None:
        group = self._groups[number]
        given = task._asdict() | {"env": group.env.name, "agent": self._agents[number], "own": group.own}
        given["name"] = _name(group, task)
        self._lanes[task.number] = Lane(**given, **outcome)

    def _file(self, group: Group, task: Task) -> Path:
        assert self.path is not None
        return self.path / _LANES / f"{_name(group, task)}.npz"


def _name(group: Group, task: Task) -> str:
    """Of a lane's files."""
    text = json.dumps(runs.jsonable(identity(group, task)), sort_keys=True)
    return f"{runs.safe_name(group.env.name)}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _run_on_cluster(
    groups: dict[int, Group],
    store: _Store,
    reporter: Reporter,
    stop_requested: Callable[[], bool],
    address: str,
    cpus: float,
    gpus: float,
) -> None:
    """Each group as a Ray task. One that fails leaves the others to end first."""
    from jppo.sweeps.ray_tasks import run_tasks  # ray takes a second to import

    total = Total(reporter)
    start = time.perf_counter()
    failed: BaseException | None = None
    for number, outcome in run_tasks(_outcomes_of, groups, address, cpus, gpus, reporter, stop_requested):
        if isinstance(outcome, BaseException):
            reporter.message(f"{groups[number].env.name}: failed: {str(outcome).strip()[-200:]}")
            failed = outcome
            continue
        for lane in outcome:
            store.add(number, lane)
        steps = sum(lane["updates"] for lane in outcome) * groups[number].config.batch_size
        total.add(steps, time.perf_counter() - start, {lane["number"]: lane["return_mean"] for lane in outcome})
        start = time.perf_counter()
    if failed is not None:
        raise failed


def _outcomes_of(group: Group) -> list[dict[str, Any]]:
    """In a process of its own, with the devices it finds there."""
    outcomes: list[dict[str, Any]] = []
    group = group._replace(num_devices=len(jax.local_devices()))
    run_group(group, Total(NullReporter()), lambda: False, outcomes.append)
    return outcomes


def _announce(groups: list[Group], store: _Store, reporter: Reporter) -> None:
    """Says what is going to be run."""
    programs = [group for group in groups if group.tasks]
    lanes = sum(len(group.tasks) for group in programs)
    there = f"; {len(store)} are there already" if len(store) else ""
    counted = [f"{n} {what}{'' if n == 1 else 's'}" for n, what in ((lanes, "lane"), (len(programs), "program"))]
    reporter.message(f"{' in '.join(counted)}{there}")
    if len(programs) > 1:
        for group in programs:
            shape = ", ".join(f"{k} = {show(v)}" for k, v in group.tasks[0].settings.items() if k in SHAPES)
            reporter.message(f"  {group.env.name}{', ' if shape else ''}{shape}: {len(group.tasks)} lanes")
