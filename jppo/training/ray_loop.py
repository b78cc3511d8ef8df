"""The Ray mode's loop: actors beside a learner."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jppo.actors.env_runner import RunnerSpec, blank_fragment
from jppo.actors.local import LocalRunner
from jppo.actors.sebulba import Sebulba
from jppo.config.ppo import Hyperparams, RayConfig
from jppo.devices.mesh import allgather_ints
from jppo.errors import ActorsFailed
from jppo.ppo.types import PolicyState, TrainState
from jppo.runs.checkpoints import Checkpoint, Checkpoints
from jppo.training.device_loop import POLL_SECONDS
from jppo.training.logger import Logger, LoopResult

_LOG_SECONDS = 0.4  # between two writes
_WAIT_SECONDS = 0.2  # for fragments, between two looks at Ctrl-C
_SHORT_SECONDS = 0.1  # an update that Ctrl-C may wait for
_ONWARD, _STOP, _FAILED = 0, 1, 2  # what a process says to the others before each update


class ActorState(NamedTuple):
    """Of a run in the Ray mode, all that can be had: Gymnasium's environments keep their states to themselves."""

    train: TrainState
    streams: np.ndarray  # [N, ...] key data of what the environments draw from next
    behaviour: PolicyState | tuple[()]  # that collects the next rollout, where it is not the newest: with policy_lag 1


class RayLoop:
    """The Ray mode: with policy_lag 0, collect and learn in turn; with 1, the actors collect the next rollout while
    the learner learns from the last, so that from the second update on the samples' policy is one update old.

    Where several processes learn together, each has its own share of the actors, whose fragments go to its devices."""

    def __init__(
        self,
        agent: Sebulba,
        seed: int,
        hyperparams: Hyperparams,
        log: Logger,
        config: RayConfig,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """Starts the actors and compiles beside them.

        Args:
          config: with num_actors and envs_per_actor filled in.
        """
        start, key = time.perf_counter(), jax.random.key(seed)
        self._agent, self._log, self._config = agent, log, config
        self._rows: list[dict[str, Any]] = []
        self._gamma = float(hyperparams.gamma)
        self.state: TrainState = agent.init(key, hyperparams)
        self._checkpoints, self._counts_before = checkpoints, dict[str, int]()
        self._streams: np.ndarray
        self._behaviour: Any = ()  # see ActorState
        # Where a run goes on, its environments are new ones, and must not begin as the first ones did.
        spec = agent.runner_spec(jax.random.fold_in(key, log.updates) if log.updates else key)
        if checkpoints is not None and checkpoints.start is not None:
            spec = self._go_on_from(checkpoints.start, spec)
        processes = max(config.num_actors or 0, jax.process_count())
        log.info(
            f"num_envs = {agent.config.num_envs}: {processes} x {config.envs_per_actor}; num_steps = "
            f"{agent.config.num_steps}: batches of {agent.config.batch_size:,}"
        )
        self._actors = _make_actors(spec, config, log.reporter.message)
        self._counts = self._actors.counts() | self._counts_before  # of all processes, and of the whole run
        try:
            blank = blank_fragment(spec, config.envs_per_actor or 1)
            self.update = agent.update.lower(
                self.state, *agent.place([blank] * (processes // jax.process_count()))
            ).compile()
        except BaseException:
            self._actors.close()
            raise
        self.compile_seconds = time.perf_counter() - start
        log.info(f"compiled in {self.compile_seconds:.1f} s")
        self._start = start

    @property
    def policy_state(self) -> PolicyState:
        """The policy as it is now."""
        return self.state.policy

    def run(self, stop_requested: Callable[[], bool]) -> LoopResult:
        """Trains to the end, or to an interrupt, a NaN, or an actor that fails too often."""
        try:
            status = self._run(stop_requested)
        except ActorsFailed as error:
            self._flush()
            return LoopResult("failed", error)
        return LoopResult(status)

    def summary(self) -> dict[str, Any]:
        """What this mode adds to summary.json."""
        config = self._config
        return {
            "num_devices": len(self.state.update.sharding.device_set),
            "num_actors": config.num_actors,
            "envs_per_actor": config.envs_per_actor,
            "policy_lag": config.policy_lag,
            **self._counts,
        }

    def close(self) -> None:
        """Ends the actors."""
        self._actors.close()

    def save(self) -> None:
        """Has the state saved as it is after the last update logged."""
        if self._checkpoints is not None:
            state = ActorState(self.state, self._streams, self._behaviour)
            self._checkpoints.save(self._log.updates, self._log.seconds, self._counts, state)

    def _go_on_from(self, checkpoint: Checkpoint, spec: RunnerSpec) -> RunnerSpec:
        streams = np.zeros((self._agent.config.num_envs, *spec.key_data.shape), spec.key_data.dtype)
        behaviour = jax.device_get(self.state.policy) if self._config.policy_lag else ()
        numbers = {"num_updates": self.state.num_updates, "hyperparams": self.state.hyperparams}
        restored = checkpoint.restore(ActorState(self.state, streams, behaviour))
        self.state, self._streams, self._behaviour = restored
        self.state = self.state.replace(**numbers)  # a trial of Ray Tune may change them
        self._counts_before = checkpoint.counts
        return spec._replace(streams=self._streams)

    def _run(self, stop_requested: Callable[[], bool]) -> str:
        if (ready := self._await(self._actors.ready, stop_requested)) is None:
            return "interrupted"
        self.compile_seconds = time.perf_counter() - self._start
        self._log.info(f"{ready} ready after {self.compile_seconds:.1f} s")
        self._written = time.perf_counter()
        self._start = self._written - self._log.seconds
        lag, num_updates, first = self._config.policy_lag, self._agent.num_updates, self._log.updates + 1
        behind, update_seconds = bool(self._behaviour), math.inf
        self._launch(self._behaviour or jax.device_get(self.state.policy))
        for number in range(first, num_updates + 1):
            begin = time.perf_counter()
            fragments = self._await(self._actors.poll, stop_requested)
            if fragments is None:
                return "interrupted" if self._flush() else "diverged"
            arrived = time.perf_counter()
            self._streams = np.concatenate([fragment.streams for fragment in fragments])
            if lag:
                self._behaviour = jax.device_get(self.state.policy)
                if number < num_updates:
                    self._launch(self._behaviour)
            rollout, stats = jax.block_until_ready(self._agent.place(fragments))
            placed = time.perf_counter()
            self.state, metrics = self.update(self.state, rollout, stats)
            self._await_update(metrics["finite"], update_seconds)
            learnt = time.perf_counter()
            update_seconds = learnt - placed
            if not lag and number < num_updates and metrics["finite"]:
                self._launch(jax.device_get(self.state.policy))
            metrics = {name: value.item() for name, value in jax.device_get(metrics).items()}
            times = {
                "time/wait_rollouts": arrived - begin,
                "time/host_to_device": placed - arrived,
                "time/update": learnt - placed,
            }
            self._rows.append(metrics | times | self._of_actors(fragments, bool(lag) and (behind or number > first)))
            save = number < num_updates and self._checkpoints is not None and self._checkpoints.due(number)
            due = save or number == num_updates or time.perf_counter() - self._written >= _LOG_SECONDS
            if (due or not metrics["finite"]) and not self._flush():
                return "diverged"
            if save:
                self.save()
        return "finished"

    def _launch(self, policy_state: PolicyState) -> None:
        self._actors.start(policy_state, self._gamma)

    def _await(self, poll: Callable[[float], Any], stop_requested: Callable[[], bool]) -> Any:
        """What poll returns in the end; None when a stop comes first, here or in another process."""
        result, error = None, None
        try:
            while result is None and not stop_requested():
                result = poll(_WAIT_SECONDS)
                self._log.reporter.tick()
        except ActorsFailed as failure:
            error = failure
        own = _FAILED if error is not None else _STOP if result is None else _ONWARD
        counts = self._actors.counts()
        rows = allgather_ints([own, *counts.values()])
        totals = zip(counts, rows[:, 1:].sum(axis=0).tolist(), strict=True)
        self._counts = {name: total + self._counts_before.get(name, 0) for name, total in totals}
        if error is not None:
            raise error
        if (rows[:, 0] == _FAILED).any():
            raise ActorsFailed(f"actors of process {int(np.argmax(rows[:, 0]))} failed; its own error says why")
        return None if rows[:, 0].any() else result

    def _await_update(self, finished: Any, last: float) -> None:
        """By looking, since a blocking fetch would keep Ctrl-C waiting, unless the last one was short."""
        while last > _SHORT_SECONDS and not finished.is_ready():
            time.sleep(POLL_SECONDS)
            self._log.reporter.tick()
        jax.block_until_ready(finished)

    def _of_actors(self, fragments: list[Any], behind: bool) -> dict[str, float]:
        seconds = {name: float(np.mean([f.seconds[name] for f in fragments])) for name in fragments[0].seconds}
        counts = {f"actors/{name}": float(count) for name, count in self._counts.items()}
        times = {f"actors/{name}_seconds": value for name, value in seconds.items()}
        return counts | times | {"actors/policy_lag": float(behind)}

    def _flush(self) -> bool:
        """Logs what has come up since the last time; False when an update diverged."""
        if not self._rows:
            return True
        columns = {name: np.array([row[name] for row in self._rows]) for name in self._rows[0]}
        self._rows, self._written = [], time.perf_counter()
        return self._log.add(columns, self._written - self._start)


def _make_actors(spec: Any, config: RayConfig, message: Callable[[str], None]) -> Any:
    """This process's share."""
    host, envs = jax.process_index(), config.envs_per_actor or 1
    if config.num_actors:
        from jppo.actors.actor_pool import ActorPool  # ray takes a second to import

        return ActorPool(spec, config, message, host, jax.process_count())
    return LocalRunner(spec, host * envs + np.arange(envs))
