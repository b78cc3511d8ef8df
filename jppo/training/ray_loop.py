"""The training loop of the Ray mode: actors collect rollouts, the learner updates the policy."""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import struct
from jax.experimental import multihost_utils

from jppo.actors.env_runner import blank_fragment, rollout_bytes
from jppo.actors.local import LocalRunner
from jppo.actors.sebulba import Sebulba
from jppo.config.ray import RayConfig
from jppo.config.run import EVAL_EPISODES, EVAL_MAX_STEPS
from jppo.devices.memory import check_host_memory
from jppo.devices.mesh import allgather_ints
from jppo.errors import ActorsFailed
from jppo.ppo.types import PolicyState, TrainState, evaluate_schedules
from jppo.runs.checkpoints import Checkpoints
from jppo.training.device_loop import POLL_SECONDS
from jppo.training.evaluator import EvaluationResult, make_host_evaluate
from jppo.training.hooks import restore_state
from jppo.training.logger import Logger, LoopResult
from jppo.training.monitor import Monitor
from jppo.training.settings import PreparedRun

_LOG_SECONDS = 0.4  # between two writes of metrics
_WAIT_SECONDS = 0.2  # for fragments, before Ctrl-C is checked again
_SHORT_SECONDS = 0.1  # Ctrl-C may wait for an update of this duration
_CONTINUE, _STOP, _FAILED = 0, 1, 2  # codes that the processes exchange before each update


class ActorState(struct.PyTreeNode, kw_only=True):
    """The saved state of a run in the Ray mode. It excludes the environments, because Gymnasium cannot save them."""

    train: TrainState
    streams: np.ndarray  # [N, ...] key data of the environments' streams
    behaviour: PolicyState | tuple[()]  # policy of the next rollout, with policy_lag 1


class RayLoop:
    """Trains with actors.

    With policy_lag 0, rollouts and updates alternate. With policy_lag 1, the actors collect the next rollout during the
    update. From the second update on, the policy of the samples is then one update old.

    If JAX runs in several processes, each has an equal share of the actors, and their fragments go to its devices.

    An evaluation runs in the first actor of each process, between two rollouts. Training waits for it.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        log: Logger,
        checkpoints: Checkpoints | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        """Starts the actors and compiles the update meanwhile.

        Raises:
          ValueError: rollouts do not fit in the free memory, and `run.force` is not set.
        """
        start, key = time.perf_counter(), jax.random.key(prepared.seed)
        agent, config = prepared.agent, prepared.ray
        assert isinstance(agent, Sebulba), "use DeviceLoop"
        self._agent, self._log, self._config = agent, log, config
        self._rows: list[dict[str, Any]] = []  # updates that are not logged
        self._hyperparams, self.monitor = prepared.hyperparams, monitor or Monitor(log)
        self.state: TrainState = agent.init(key, prepared.hyperparams)
        self._checkpoints, self._counts_before = checkpoints, dict[str, int]()
        self._streams: np.ndarray
        self._behaviour: Any = ()  # see ActorState
        spec = agent.runner_spec(key, log.updates)
        if checkpoints is not None and checkpoints.start is not None:
            streams = np.zeros((agent.config.num_envs, *spec.key_data.shape), spec.key_data.dtype)
            behaviour = jax.device_get(self.policy_state) if config.policy_lag else ()
            restored = restore_state(checkpoints, ActorState(train=self.state, streams=streams, behaviour=behaviour))
            self.state, self._streams, self._behaviour = restored.train, restored.streams, restored.behaviour
            self._hyperparams = jax.device_get(self.state.hyperparams)
            self._counts_before = checkpoints.start.counts
            spec = spec._replace(streams=self._streams)
        run = prepared.run
        if run.eval_every:
            episodes, steps = run.eval_episodes or EVAL_EPISODES, run.eval_max_steps or EVAL_MAX_STEPS
            parts = agent.env, agent.policy.network, agent.policy.action_spec, bool(run.eval_sampled)
            spec = spec._replace(
                make_evaluate=functools.partial(make_host_evaluate, *parts, episodes, steps, prepared.seed)
            )
            self._max_rollouts = episodes * steps / (agent.config.num_steps * (config.envs_per_actor or 1))
        if not run.force:
            sizes = f"num_envs = {agent.config.num_envs:,} or num_steps = {agent.config.num_steps:,}"
            copies = 2 if jax.default_backend() == "cpu" else 1  # that of the actors and that of the learner
            check_host_memory(copies * rollout_bytes(spec, agent.config.num_envs // jax.process_count()), sizes)
        self._actors = _make_actors(spec, config, log.reporter.message)
        self._counts = self._actors.counts() | self._counts_before  # of all processes, since the start of the run
        try:
            blank = blank_fragment(spec, config.envs_per_actor or 1)
            self.update = agent.update.lower(
                self.state, *agent.place([blank] * max(1, (config.num_actors or 0) // jax.process_count()))
            ).compile()
        except BaseException:
            self._actors.close()
            raise
        self.compile_seconds = time.perf_counter() - start
        log.info(f"compiled in {self.compile_seconds:.1f} s")
        self._start = start

    @property
    def policy_state(self) -> PolicyState:
        """The newest policy."""
        return self.state.policy_state

    def run(self, stop_requested: Callable[[], bool]) -> LoopResult:
        """Trains until total_steps, an interrupt, a non-finite update, or an actor that fails too often."""
        try:
            return self._run(stop_requested)
        except ActorsFailed as error:
            self._flush()
            return LoopResult("failed", error)

    def summary(self) -> dict[str, Any]:
        """Returns the entries of summary.json that are specific to this mode."""
        config = self._config
        return {
            "num_devices": len(self.state.update.sharding.device_set),
            "num_actors": config.num_actors,
            "envs_per_actor": config.envs_per_actor,
            "policy_lag": config.policy_lag,
            **self._counts,
        }

    def close(self) -> None:
        """Closes the actors."""
        self._actors.close()

    def save(self) -> None:
        """Starts to write a checkpoint of the state after the last logged update. All processes must call this."""
        if self._checkpoints is not None:
            self.monitor.save_best(self.state.policy_state)
            streams = self._streams
            if jax.process_count() > 1:
                streams = multihost_utils.process_allgather(streams, tiled=True)
            state = ActorState(train=self.state, streams=streams, behaviour=self._behaviour)
            self._log.save(self._checkpoints, state, self._counts, self.monitor.end_to_json())

    def _run(self, stop_requested: Callable[[], bool]) -> LoopResult:
        if (ready := self._await(self._actors.ready, stop_requested)) is None:
            return LoopResult("interrupted")
        self.compile_seconds = time.perf_counter() - self._start
        self._log.info(f"{ready} ready after {self.compile_seconds:.1f} s")
        self._written = time.perf_counter()
        self._start = self._written - self._log.seconds
        lag, num_updates, first = self._config.policy_lag, self._agent.num_updates, self._log.updates + 1
        behind, update_seconds = bool(self._behaviour), math.inf
        self._launch(self._behaviour or jax.device_get(self.state.policy_state), first - 1)
        for number in range(first, num_updates + 1):
            begin = time.perf_counter()
            fragments = self._await(self._actors.poll, stop_requested)
            if fragments is None:
                self._flush()
                return LoopResult("interrupted")
            arrived = time.perf_counter()
            self._streams = np.concatenate([fragment.streams for fragment in fragments])
            more = number < num_updates
            # an actor that evaluates collects no rollout meanwhile, and a callback may change the next policy
            late = self.monitor.evaluates(number) if lag else self.monitor.is_due(number)
            if lag:
                self._behaviour = jax.device_get(self.state.policy_state)
                if more and not late:
                    self._launch(self._behaviour, number)
            rollout, stats = jax.block_until_ready(self._agent.place(fragments))
            placed = time.perf_counter()
            self.state, metrics = self.update(self.state, rollout, stats)
            self._await_update(metrics["finite"], update_seconds)
            learnt = time.perf_counter()
            update_seconds = learnt - placed
            finite = bool(metrics["finite"])
            if more and finite and not (lag or late):
                self._launch(jax.device_get(self.state.policy_state), number)
            metrics = {name: value.item() for name, value in jax.device_get(metrics).items()}
            times = {
                "time/wait_rollouts": arrived - begin,
                "time/host_to_device": placed - arrived,
                "time/update": learnt - placed,
            }
            lagging = bool(lag) and (behind or number > first)
            self._rows.append(metrics | times | self._actor_metrics(fragments, lagging))
            if (ended := self._end_update(number, finite, stop_requested)) is not None:
                return ended
            if more and late:
                self._launch(self._behaviour or jax.device_get(self.state.policy_state), number)
        return LoopResult("finished")

    def _end_update(self, number: int, finite: bool, stop_requested: Callable[[], bool]) -> LoopResult | None:
        """Evaluates the policy, logs the updates, handles events and saves a checkpoint, each if it is due.

        Returns:
          the reason to end the run after update `number`, or None.
        """
        last, monitor, before = number == self._agent.num_updates, self.monitor, self.state
        event = finite and monitor.is_due(number)
        if event and monitor.evaluates(number) and not self._evaluate(number, stop_requested):
            self._flush()
            return LoopResult("interrupted")
        save = not last and self._is_checkpoint_due(number)
        due = save or last or event or not finite or monitor.target is not None
        if (due or time.perf_counter() - self._written >= _LOG_SECONDS) and not self._flush(event):
            return LoopResult("diverged")
        if self.state is not before:  # a callback may have changed the hyperparameters
            self._hyperparams = jax.device_get(self.state.hyperparams)
        ended = monitor.check_target()
        if save:
            self.save()
        return ended

    def _evaluate(self, number: int, stop_requested: Callable[[], bool]) -> bool:
        """Evaluates the policy after update `number`. Returns False if a stop request ended the evaluation."""
        policy_state = jax.device_get(self.state.policy_state)
        self._actors.start_evaluation(policy_state, number, stop_requested, self._max_rollouts)
        results = self._await(self._actors.poll, stop_requested)
        if results is not None:
            self.monitor.add_evaluation(number, EvaluationResult(results[0], policy_state))
        return results is not None

    def _is_checkpoint_due(self, update: int) -> bool:
        """Returns whether to save a checkpoint after this update. The first process decides for all."""
        return self._checkpoints is not None and bool(allgather_ints([self._checkpoints.due(update)])[0, 0])

    def _launch(self, policy_state: PolicyState, updates: int) -> None:
        """Starts the rollout of the update that follows `updates` updates."""
        hyperparams = evaluate_schedules(self._hyperparams, updates / self._agent.num_updates)
        self._actors.start(policy_state, float(hyperparams.gamma))

    def _await(self, poll: Callable[[float], Any], stop_requested: Callable[[], bool]) -> Any:
        """Returns the result of `poll`, or None if a stop was requested in any process.

        Raises:
          ActorsFailed: an actor of any process failed too often.
        """
        result, error = None, None
        try:
            while result is None and not stop_requested():
                result = poll(_WAIT_SECONDS)
                self._log.reporter.tick()
        except ActorsFailed as failure:
            error = failure
        except KeyboardInterrupt:  # of an environment in this process, which is a stop request; or a second Ctrl-C
            if stop_requested():
                raise
        own = _FAILED if error is not None else _STOP if result is None else _CONTINUE
        counts = self._actors.counts()
        rows = allgather_ints([own, *counts.values()])
        totals = zip(counts, rows[:, 1:].sum(axis=0).tolist(), strict=True)
        self._counts = {name: total + self._counts_before.get(name, 0) for name, total in totals}
        if error is not None:
            raise error
        if (rows[:, 0] == _FAILED).any():
            raise ActorsFailed(f"actors of process {int(np.argmax(rows[:, 0]))} failed; see the error of that process")
        return None if rows[:, 0].any() else result

    def _await_update(self, finished: Any, last: float) -> None:
        """Waits for the update. It polls if the last update was long, because blocking would delay Ctrl-C."""
        while last > _SHORT_SECONDS and not finished.is_ready():
            time.sleep(POLL_SECONDS)
            self._actors.check_daemons()
            self._log.reporter.tick()
        jax.block_until_ready(finished)

    def _actor_metrics(self, fragments: list[Any], behind: bool) -> dict[str, float]:
        """Returns the metrics actors/*: counts of failures, mean durations and the policy lag."""
        seconds = {name: float(np.mean([f.seconds[name] for f in fragments])) for name in fragments[0].seconds}
        counts = {f"actors/{name}": float(count) for name, count in self._counts.items()}
        times = {f"actors/{name}_seconds": value for name, value in seconds.items()}
        return counts | times | {"actors/policy_lag": float(behind)}

    def _flush(self, event: bool = False) -> bool:
        """Logs the updates since the last call. Returns False if one diverged.

        Args:
          event: whether the monitor handles events after the last one.
        """
        if not self._rows:
            return True
        rows, self._rows = self._rows, []
        self._written = time.perf_counter()
        columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        finish = functools.partial(self.monitor.finish, self) if event else None
        return self._log.add(columns, self._written - self._start, finish)


def _make_actors(spec: Any, config: RayConfig, message: Callable[[str], None]) -> Any:
    """Returns this process's share of the actors, or a LocalRunner if num_actors is 0."""
    process, envs = jax.process_index(), config.envs_per_actor or 1
    if config.num_actors:
        from jppo.actors.actor_pool import ActorPool  # ray takes a second to import

        return ActorPool(spec, config, message, process, jax.process_count())
    return LocalRunner(spec, process * envs + np.arange(envs))
