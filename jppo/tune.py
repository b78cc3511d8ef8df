"""The door to Ray Tune: a run as a trial that reports every update, and saves and restores by Tune's checkpoints."""

import collections
import dataclasses
import difflib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import ray
from ray import tune

from jppo import runs
from jppo.actor_loop import ActorLoop
from jppo.anakin import Anakin, AnakinState, make_anakin
from jppo.compiling import jit
from jppo.config import PPOConfig, RayConfig, check_hyperparams, check_total_steps, spread_envs
from jppo.envs import make_env
from jppo.envs.gymnasium import make_host_env
from jppo.given import BACKENDS, check_preset, choose_backend, own_parts
from jppo.groups import run_group
from jppo.history import RecentEpisodes
from jppo.lanes import check_seeds, check_settings, lay_out
from jppo.learner import Loss, Optimizer, adam
from jppo.logbook import Ended, Logbook
from jppo.networks import Network
from jppo.plots import interquartile_mean
from jppo.population import Total
from jppo.presets import PRESETS, preset_for
from jppo.progress import Silent
from jppo.sebulba import Sebulba, make_sebulba
from jppo.tasks import limit_process
from jppo.types import Hyperparams, TrainState

METRIC = "return_mean"
_MOST_RECENT = 100  # updates with episodes that return_mean can reach back to
_INSTEAD = {
    "batch_size": "a batch is num_envs*num_steps: sweep one of these",
    "minibatch_size": "a minibatch is num_envs*num_steps/num_minibatches: sweep num_minibatches",
    "lr": "did you mean learning_rate?",
}


class _Given(NamedTuple):
    """What `trainable` was given; the rest comes from a trial's point in the search space."""

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


def trainable(
    env: Any,
    *,
    total_steps: int | float | None = None,
    config: PPOConfig | None = None,
    hyperparams: Hyperparams | None = None,
    seed: int = 0,
    preset: str = "auto",
    network: Network | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | None = None,
    checkpoint_every: int = 100,
    cpus: float = 1.0,
    gpus: float = 0.0,
    backend: str = "auto",
    num_devices: int = 1,
    num_actors: int = 0,
    envs_per_actor: int | None = None,
    policy_lag: Literal[0, 1] = 0,
    actor_cpus: float = 1.0,
    actor_gpus: float = 0.0,
    actor_timeout: float | None = None,
    max_restarts: int = 3,
) -> Callable[[dict[str, Any]], None]:
    """A trainable for `ray.tune.Tuner`: each trial is a run.

    A search space names fields of `jppo.Hyperparams` and `jppo.PPOConfig`, and `seed`; they override what is given
    here. Every update is reported: docs/metrics.md, and "return_mean", of the last hundred episodes or so (NaN before
    the first one has ended). A checkpoint holds the whole state, and is a run directory to `jppo eval` and `jppo play`.

    Args:
      env, total_steps, config, hyperparams, seed, preset, network, optimizer, loss, backend, num_devices: as for
        `jppo.train`. An object that holds JAX arrays puts them on this process's GPU; names and functions do not.
      checkpoint_every: updates between two checkpoints; the last update always makes one. 0: no other.
      cpus, gpus: what a trial reserves for itself, the GPUs as a fraction or whole. A fraction is its share of the
        memory too; without any, the trial stays on the CPU, with as many threads as CPUs.
      num_actors, envs_per_actor, policy_lag, actor_cpus, actor_gpus, actor_timeout, max_restarts: of the Ray backend,
        see `jppo.RayConfig`. Each actor reserves actor_cpus and actor_gpus besides; without actors, a trial steps its
        environments itself.

    Raises:
      ValueError: anything given that cannot be. What only a trial can see (an unknown environment, say) fails there.
    """
    if config is not None and not isinstance(config, PPOConfig):
        raise ValueError(f"config = {config!r} must be a PPOConfig; the search space goes to the Tuner, as param_space")
    if hyperparams is not None:
        check_hyperparams(hyperparams)
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r} is not one of {', '.join(BACKENDS)}")
    if preset != "auto":
        check_preset(preset)
    if isinstance(checkpoint_every, bool) or not isinstance(checkpoint_every, int) or checkpoint_every < 0:
        raise ValueError(f"checkpoint_every = {checkpoint_every!r} must be a whole number of at least 0")
    if not (cpus >= 0.0 and gpus >= 0.0):
        raise ValueError(f"cpus = {cpus!r} and gpus = {gpus!r} must be numbers of at least 0")
    actors = RayConfig(
        num_actors, envs_per_actor, policy_lag, actor_cpus, actor_gpus, None, actor_timeout, max_restarts
    )
    steps = None if total_steps is None else check_total_steps(total_steps)
    given = _Given(
        *(env, steps, config, hyperparams, runs.check_seed(seed), preset, network, optimizer, loss),
        *(backend, actors, num_devices, checkpoint_every),
    )
    packed = ray.cloudpickle.dumps(given)  # to be opened when JAX may start: gymnax starts it when imported

    def trial(space: dict[str, Any]) -> None:
        limit_process(ray.get_runtime_context().get_assigned_resources())
        if gpus and jax.default_backend() == "cpu":
            print(f"gpus = {gpus:g} are reserved, but JAX finds none: this trial stays on the CPU", flush=True)
        given = ray.cloudpickle.loads(packed)
        if (checkpoint := tune.get_checkpoint()) is None:
            _train(given, space, None)
        else:
            with checkpoint.as_directory() as directory:
                _train(given, space, Path(directory))

    name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    trial.__name__ = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    bundles = [{"CPU": cpus, "GPU": gpus}] + [{"CPU": actor_cpus, "GPU": actor_gpus}] * num_actors
    return tune.with_resources(trial, tune.PlacementGroupFactory(bundles))


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
            seed = runs.check_seed(value)
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


def population(
    env: Any,
    *,
    seeds: int | Sequence[int] = 8,
    total_steps: int | float | None = None,
    config: PPOConfig | None = None,
    hyperparams: Hyperparams | None = None,
    preset: str = "auto",
    network: Network | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    **settings: Any,
) -> Callable[[dict[str, Any]], None]:
    """A trainable for `ray.tune.Tuner` of which each trial is a whole population, one compiled program.

    Reported are, some times a second: "step", of all lanes together; "lane/0", "lane/1", ..., the mean return of each
    over its last hundred episodes or so; and "return_mean", the interquartile mean of those. There are no checkpoints.

    Args:
      seeds, settings: the lanes of every trial are their product, see `jppo.sweep`. The search space names fields of
        `jppo.Hyperparams` and `jppo.PPOConfig`, and overrides settings.
      env, total_steps, config, hyperparams, preset, network, optimizer, loss, cpus, gpus: see `trainable`.

    Raises:
      ValueError: anything given that cannot be. What only a trial can see fails there.
    """
    structure = {field.name for field in dataclasses.fields(PPOConfig)}
    for name, values in check_settings(settings).items():
        if name in structure and len(values) > 1:
            raise ValueError(f"{name} changes the program, and a trial is one program: sweep it in Tune's search space")
    given = {"env": env, "seeds": check_seeds(seeds), "total_steps": total_steps, "config": config}
    given |= {"hyperparams": hyperparams, "preset": preset}
    options = {"parts": {"network": network, "optimizer": optimizer, "loss": loss}, "halving": False}
    packed = ray.cloudpickle.dumps((given, options, settings))

    def trial(space: dict[str, Any]) -> None:
        limit_process(ray.get_runtime_context().get_assigned_resources())
        given, options, settings = ray.cloudpickle.loads(packed)
        devices = len(jax.local_devices())
        groups = lay_out(
            values=check_settings(settings | space), **given, **options, lanes_at_once=None, num_devices=devices
        )
        if len(groups) > 1:
            raise ValueError(
                f"{len(groups)} programs; a trial is one: several shapes or environments are Tune's to sweep"
            )
        run_group(groups[0], _ToTune(), lambda: False, lambda outcome: None)

    return tune.with_resources(trial, {"CPU": cpus, "GPU": gpus})


class _ToTune(Total):
    """Reports the lanes of a population."""

    def __init__(self) -> None:
        super().__init__(_Printed())
        self._returns: dict[int, float] = {}

    def add(self, steps: int, seconds: float, returns: dict[int, float]) -> None:
        self.steps += steps
        self._returns |= returns
        known = np.array([x for x in self._returns.values() if not np.isnan(x)])
        middle = float(interquartile_mean(known)) if len(known) else float("nan")
        lanes = {f"lane/{number}": value for number, value in sorted(self._returns.items())}
        tune.report({METRIC: middle, "step": self.steps, "steps_per_second": steps / max(seconds, 1e-9)} | lanes)


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

    def __init__(self, agent: Anakin, seed: int, hyperparams: Hyperparams, log: Logbook) -> None:
        self._log, self._num_updates = log, agent.num_updates
        self.state: AnakinState = jit(agent.init, out_shardings=agent.sharding)(jax.random.key(seed), hyperparams)
        self._step = jit(agent.step).lower(self.state).compile()

    def run(self, stop_requested: Callable[[], bool]) -> Ended:
        """Trains to the end, or to a NaN."""
        start, following = time.perf_counter(), None
        for number in range(self._log.updates + 1, self._num_updates + 1):
            self.state, metrics = following or self._step(self.state)
            following = self._step(self.state) if number < self._num_updates else None
            columns = {name: np.asarray(value)[None] for name, value in metrics.items()}
            if not self._log.add(columns, time.perf_counter() - start):
                return Ended("diverged")
        return Ended("finished")

    def close(self) -> None:
        """Nothing outlives the program."""


class _Printed(Silent):
    """Tune shows how a trial goes; what happens to its actors is printed."""

    def message(self, text: str) -> None:
        print(text, flush=True)


def save(path: Path, state: AnakinState | TrainState, settings: dict[str, Any]) -> None:
    """Writes the state of a run, and what `jppo eval` needs of it."""
    runs.write_json(path / "config.json", settings)
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


def _train(given: _Given, space: dict[str, Any], path: Path | None) -> None:
    """A trial, from its start or from the checkpoint at `path`."""
    agent, actors, hyperparams, settings = _prepare(given, space)
    before: dict[str, Any] = {} if path is None else runs.read_config(path)
    settings |= {name: before.get(name, start) for name, start in (("update", 0), ("recent_episodes", []))}
    reports = _Reports(given.checkpoint_every, agent.num_updates, settings)
    log = Logbook(agent.config.batch_size, reports, _Printed())  # type: ignore[arg-type]
    log.updates = settings["update"]
    loop: _UpdateByUpdate | ActorLoop
    if isinstance(agent, Anakin):
        loop = _UpdateByUpdate(agent, settings["seed"], hyperparams, log)
    else:
        loop = ActorLoop(agent, settings["seed"], hyperparams, log, actors)
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
        raise FloatingPointError(f"update {log.updates + 1} made a loss or parameter NaN or infinite")


def _prepare(given: _Given, space: dict[str, Any]) -> tuple[Anakin | Sebulba, RayConfig, Hyperparams, dict[str, Any]]:
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
