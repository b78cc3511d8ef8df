"""A run as a trial of Ray Tune, which reports every update, and saves and restores by Tune's checkpoints."""

import collections
import dataclasses
import difflib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ray import tune

from jppo.actors.sebulba import Sebulba, make_sebulba
from jppo.config.ppo import PPOConfig, RayConfig, check_hyperparams, check_seed, spread_envs
from jppo.config.presets import PRESETS, preset_for
from jppo.devices.jit import jit
from jppo.envs import make_env
from jppo.envs.backends import choose_backend
from jppo.envs.gymnasium import make_host_env
from jppo.ppo.anakin import Anakin, AnakinState, make_anakin
from jppo.ppo.losses import Loss
from jppo.ppo.networks import Network
from jppo.ppo.optimizer import Optimizer
from jppo.ppo.types import Hyperparams, TrainState
from jppo.runs import run_dir as runs
from jppo.runs.files import write_json
from jppo.training.history import RecentEpisodes
from jppo.training.logger import Logger, LoopResult
from jppo.training.progress import NullReporter
from jppo.training.ray_loop import RayLoop
from jppo.training.settings import own_parts

METRIC = "return_mean"
_MOST_RECENT = 100  # updates with episodes that return_mean can reach back to
_INSTEAD = {
    "batch_size": "a batch is num_envs*num_steps: sweep one of these",
    "minibatch_size": "a minibatch is num_envs*num_steps/num_minibatches: sweep num_minibatches",
    "lr": "did you mean learning_rate?",
}


class Given(NamedTuple):
    """What `jppo.sweeps.tune.trainable` was given; the rest comes from a trial's point in the search space."""

    env: Any
    total_steps: int | None
    config: PPOConfig | None
    hyperparams: Hyperparams | None
    seed: int
    preset: str
    network: Network | None
    optimizer: Optimizer
    loss: Loss | None
    backend: str
    actors: RayConfig
    num_devices: int
    checkpoint_every: int


def apply_space(
    space: dict[str, Any], config: PPOConfig, hyperparams: Hyperparams, seed: int
) -> tuple[PPOConfig, Hyperparams, int]:
    """What is given with a trial's point in the search space put over it.

    Raises:
      ValueError: a name that is no setting, or a value that it cannot have.
    """
    homes = {field.name: kind for kind in (PPOConfig, Hyperparams) for field in dataclasses.fields(kind)}
    structure: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    for name, value in space.items():
        if name == "seed":
            seed = check_seed(value)
        elif name not in homes:
            instead = _INSTEAD.get(name)
            hint = f"; {instead}" if instead else _did_you_mean(name, {*homes, "seed"})
            raise ValueError(f"the search space has {name!r}, which is no setting{hint}")
        elif homes[name] is PPOConfig:
            structure[name] = tuple(value) if isinstance(value, list) else value
        else:
            numbers[name] = value
    hyperparams = dataclasses.replace(hyperparams, **numbers)
    check_hyperparams(hyperparams)
    return dataclasses.replace(config, **structure), hyperparams, seed


class _Reports:
    """In the place of a run's files: every update is a report to Tune, some with a checkpoint."""

    def __init__(self, checkpoint_every: int, num_updates: int, settings: dict[str, Any]) -> None:
        self._every, self._num_updates, self._settings = checkpoint_every, num_updates, settings
        self._saved = settings["update"]
        self._recent = RecentEpisodes()
        self._episodes: collections.deque[list[float]] = collections.deque(maxlen=_MOST_RECENT)
        for episodes in settings["recent_episodes"]:
            self._remember(episodes)
        self.loop: Any = None  # its state is the one after the last of the updates written

    def write_updates(self, rows: list[dict[str, Any]]) -> None:
        """Reports consecutive updates. Ends the thread where Tune has ended the trial."""
        for row in rows:
            self._remember([row[f"episode/{name}"] for name in ("count", "return_mean", "return_std")])
            report = row | {METRIC: self._recent.mean}
            due = self._every and row["update"] - self._saved >= self._every
            if row is rows[-1] and (due or row["update"] == self._num_updates):
                self._report_with_checkpoint(report)
            else:
                tune.report(report)

    def _remember(self, episodes: list[float]) -> None:
        self._recent.add(*episodes)
        if episodes[0]:
            self._episodes.append(episodes)

    def _report_with_checkpoint(self, report: dict[str, Any]) -> None:
        self._saved = report["update"]
        settings = self._settings | {"update": self._saved, "recent_episodes": list(self._episodes)}
        with tempfile.TemporaryDirectory() as directory:
            save(Path(directory), self.loop.state, settings)
            tune.report(report, checkpoint=tune.Checkpoint.from_directory(directory))


class _UpdateByUpdate:
    """The on-device mode, one update at a time, so that the state after each can be saved. The next is computed
    meanwhile."""

    def __init__(self, agent: Anakin, seed: int, hyperparams: Hyperparams, log: Logger) -> None:
        self._log, self._num_updates = log, agent.num_updates
        self.state: AnakinState = jit(agent.init, out_shardings=agent.sharding.out_shardings)(
            jax.random.key(seed), hyperparams
        )
        self._step = jit(agent.step).lower(self.state).compile()

    def run(self, stop_requested: Callable[[], bool]) -> LoopResult:
        """Trains to the end, or to a NaN."""
        start, following = time.perf_counter(), None
        for number in range(self._log.updates + 1, self._num_updates + 1):
            self.state, metrics = following or self._step(self.state)
            following = self._step(self.state) if number < self._num_updates else None
            columns = {name: np.asarray(value)[None] for name, value in metrics.items()}
            if not self._log.add(columns, time.perf_counter() - start):
                return LoopResult("diverged")
        return LoopResult("finished")

    def close(self) -> None:
        """Nothing outlives the program."""


class PrintReporter(NullReporter):
    """Tune shows how a trial goes; what happens to its actors is printed."""

    def message(self, text: str) -> None:
        print(text, flush=True)


def save(path: Path, state: AnakinState | TrainState, settings: dict[str, Any]) -> None:
    """Writes the state of a run, and what `jppo eval` needs of it."""
    write_json(path / "config.json", settings)
    runs.save_policy(path / "policy", _learner_state(state).policy)
    runs.save_policy(path / "state" / "policy", state)  # type: ignore[arg-type]


def restore(path: Path, blank: Any) -> Any:
    """A state that `save` wrote, to go on from with the numbers, the length and the placement of another.

    Args:
      blank: the other, a run's before its first update.

    Raises:
      ValueError: the two are not of the same structure.
    """
    state = jax.tree.map(
        lambda leaf, old: jax.device_put(leaf, old.sharding), runs.load_policy_state(path / "state", blank), blank
    )
    new = _learner_state(blank)  # population-based training changes numbers on the way
    train = _learner_state(state).replace(hyperparams=new.hyperparams, num_updates=new.num_updates)
    return state.replace(train=train) if isinstance(state, AnakinState) else train


def _learner_state(state: AnakinState | TrainState) -> TrainState:
    return state.train if isinstance(state, AnakinState) else state


def train(given: Given, space: dict[str, Any], path: Path | None) -> None:
    """A trial, from its start or from the checkpoint at `path`."""
    agent, actors, hyperparams, settings = _prepare(given, space)
    before: dict[str, Any] = {} if path is None else runs.read_config(path)
    settings |= {name: before.get(name, start) for name, start in (("update", 0), ("recent_episodes", []))}
    reports = _Reports(given.checkpoint_every, agent.num_updates, settings)
    log = Logger(agent.config.batch_size, reports, PrintReporter())  # type: ignore[arg-type]
    log.updates = settings["update"]
    loop: _UpdateByUpdate | RayLoop
    if isinstance(agent, Anakin):
        loop = _UpdateByUpdate(agent, settings["seed"], hyperparams, log)
    else:
        loop = RayLoop(agent, settings["seed"], hyperparams, log, actors)
    try:
        if path is not None:
            loop.state = restore(path, loop.state)
        reports.loop = loop
        ended = loop.run(lambda: False)
    finally:
        loop.close()
    if ended.error is not None:
        raise ended.error
    if ended.status == "diverged":
        raise FloatingPointError(f"update {log.updates + 1} made a loss, gradient or parameter NaN or infinite")


def _prepare(given: Given, space: dict[str, Any]) -> tuple[Anakin | Sebulba, RayConfig, Hyperparams, dict[str, Any]]:
    """The agent of a trial, and its config.json."""
    backend = choose_backend(given.env, given.backend)
    env = make_host_env(given.env) if backend == "ray" else make_env(given.env)
    chosen = PRESETS[preset_for(env.name) if given.preset == "auto" else given.preset]
    config, hyperparams, seed = apply_space(
        space, given.config or chosen.config, given.hyperparams or chosen.hyperparams, given.seed
    )
    parts: dict[str, Any] = {
        "total_steps": given.total_steps or chosen.total_steps,
        "network": given.network,
        "optimizer": given.optimizer,
        "loss": given.loss,
    }
    actors = given.actors
    agent: Anakin | Sebulba
    if backend == "ray":
        fixed = given.config is not None or bool({"num_envs", "num_steps"} & set(space))
        config, actors = spread_envs(config, actors, 1, fixed)
        agent = make_sebulba(env, config, **parts, num_devices=given.num_devices)
    elif actors == RayConfig(num_actors=0):
        agent = make_anakin(env, config, **parts, num_devices=given.num_devices)
    else:
        raise ValueError(f"actors are for backend = 'ray'; {env.name} runs on the device")
    more: dict[str, Any] = dict.fromkeys(own_parts(given.env, parts), "custom")
    settings = runs.run_config(env.name, backend, seed, parts["total_steps"], config, hyperparams, **more)
    return agent, actors, hyperparams, settings


def _did_you_mean(name: str, names: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(names), 1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(sorted(names))}"
