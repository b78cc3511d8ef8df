"""Runs a group of lanes: piece by piece where memory does not hold them all, rung by rung where they are halved."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jppo.devices.memory import bytes_free, show_bytes
from jppo.ppo.anakin import Anakin
from jppo.ppo.types import PyTree
from jppo.sweeps.grid import Group, Task, agent_of
from jppo.sweeps.population import (
    Population,
    PopulationLog,
    Total,
    begin,
    fitting_population,
    park,
    resume,
    shares,
)
from jppo.sweeps.results import DIVERGED, FINISHED, INTERRUPTED, STOPPED
from jppo.training.device_loop import ChunkLoop
from jppo.training.history import RecentEpisodes
from jppo.training.progress import Reporter


class _Lane:
    """A lane on its way."""

    def __init__(self, task: Task) -> None:
        self.task, self.recent, self.status, self.updates = task, RecentEpisodes(), "", 0
        self.metrics: list[dict[str, np.ndarray]] = []

    def outcome(self, policy_state: PyTree) -> dict[str, Any]:
        """What is known of it at its end."""
        parts = [part for part in self.metrics if part]
        return {
            "number": self.task.number,
            "status": self.status,
            "updates": self.updates,
            "episodes": self.recent.total,
            "return_mean": self.recent.mean,
            "return_std": self.recent.std,
            "metrics": {name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
            "policy_state": policy_state,
        }


def run_group(
    group: Group, total: Total, stop_requested: Callable[[], bool], keep: Callable[[dict[str, Any]], None]
) -> None:
    """Runs a group's lanes; `keep` gets each one's outcome when it ends."""
    agent, lanes = agent_of(group), [_Lane(task) for task in group.tasks]
    population: Population | None = None
    parked: PyTree = None  # states [lanes, ...] between two rungs
    begun = 0
    for rung in group.rungs:
        if stop_requested() and parked is None:
            return
        if population is None or population.lanes > math.prod(shares(len(lanes), group.num_devices)):
            population = _compile(agent, group, len(lanes), total.reporter)
        going: list[_Lane] = []
        parts = []
        for first in range(0, len(lanes), population.lanes):
            piece = lanes[first : first + population.lanes]
            if stop_requested() and parked is None:
                break
            state = _run_piece(population, group, parked, first, piece, begun, rung, total, stop_requested)
            parts.append(_hand_over(piece, state, keep, INTERRUPTED if stop_requested() else ""))
            going += [lane for lane in piece if not lane.status]
        if not going:
            return
        parked, begun = jax.tree.map(lambda *x: np.concatenate(x), *parts), rung
        if stop_requested():
            _hand_over(going, parked, keep, INTERRUPTED)
            return
        staying = _better_half(going, math.ceil(len(lanes) / 2))
        best = max((lane.recent.mean for lane in staying if lane.recent.total), default=math.nan)
        total.reporter.message(f"after update {rung}: {len(staying)} of {len(lanes)} lanes go on (best {best:.1f})")
        for lane in going:
            lane.status = STOPPED
        for lane in staying:
            lane.status = ""
        parked = _hand_over(going, parked, keep)
        lanes = staying


def _hand_over(lanes: list[_Lane], state: PyTree, keep: Callable[[dict[str, Any]], None], status: str = "") -> PyTree:
    """Hands over the lanes that have ended, and with a status all others too; returns the states of the rest."""
    rest = []
    for number, lane in enumerate(lanes):
        lane.status = lane.status or status
        if lane.status and any(lane.metrics):  # else it never ran
            keep(lane.outcome(jax.tree.map(lambda x, number=number: x[number], state.train.policy)))
        if not lane.status:
            rest.append(number)
    return jax.tree.map(lambda x: x[np.array(rest, int)], state)


def _better_half(lanes: list[_Lane], count: int) -> list[_Lane]:
    """So many of the lanes, by recent return, in order; all of them where none has seen an episode end."""
    if not any(lane.recent.total for lane in lanes):
        return lanes
    best = sorted(lanes, key=lambda lane: -lane.recent.mean if lane.recent.total else math.inf)[:count]
    chosen = {lane.task.number for lane in best}
    return [lane for lane in lanes if lane.task.number in chosen]


def _compile(agent: Anakin, group: Group, lanes: int, reporter: Reporter) -> Population:
    population = fitting_population(agent, lanes, group.num_devices, group.lanes_at_once)
    many = f"{lanes} lanes" if population.lanes >= lanes else f"{population.lanes} of {lanes} lanes at a time"
    reporter.message(
        f"{group.env.name}, {many}: compiled in {population.compile_seconds:.1f} s; needs "
        f"{show_bytes(population.bytes)} of {show_bytes(bytes_free(group.num_devices))}"
    )
    return population


def _run_piece(
    population: Population,
    group: Group,
    parked: PyTree,
    first: int,
    piece: list[_Lane],
    begun: int,
    rung: int,
    total: Total,
    stop_requested: Callable[[], bool],
) -> PyTree:
    """Takes a piece, whose first lane has number `first`, from update `begun` to update `rung`; notes how they did, and
    returns their states."""
    if parked is None:
        state = begin(population, [lane.task.seed for lane in piece], [lane.task.hyperparams for lane in piece])
    else:
        state = resume(population, parked, first)
    finite = jax.device_put(np.ones(population.lanes, bool), population.sharding)
    seconds = max(
        (float(part["time/elapsed"][-1]) for lane in piece for part in lane.metrics[-1:] if part), default=0.0
    )
    recent = {lane.task.number: lane.recent for lane in piece}
    log = PopulationLog(recent, group.config.batch_size, begun, seconds, total)
    loop = ChunkLoop(population.chunk, state, finite, rung - begun, log)
    loop.run(stop_requested)
    for number, lane in enumerate(piece):
        lane.metrics.append(log.of_lane(number))
        lane.updates = int(log.updates[number])
        diverged = not log.finite[number]
        lane.status = DIVERGED if diverged else FINISHED if lane.updates == group.num_updates else ""
    return park(loop.state, len(piece))
