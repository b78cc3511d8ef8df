"""What happens between two updates of a run: evaluation, the user's callback, and the choice of the best policy."""

import math
from typing import Any

from jppo.config.run import EVAL_MAX_STEPS, RunConfig
from jppo.devices.mesh import allgather_ints
from jppo.errors import HostFailed, end_of_process
from jppo.ppo.types import PolicyState
from jppo.runs.run_dir import BestPolicy
from jppo.training.callback import CallbackEvent, RunInfo, call
from jppo.training.evaluator import EvaluationResult, Evaluator
from jppo.training.logger import LoopResult
from jppo.training.progress import warn_with

_CONTINUE, _STOPPED, _FAILED = 0, 1, 2  # codes that the processes exchange after an evaluation or a callback
SOLVED = LoopResult("solved")


class Monitor:
    """Evaluates the policy, calls the callback and keeps the best policy of a run. The loops of both modes use it.

    A loop calls `check_target` before its first update. A chunk of updates ends after `updates_until_event` updates, or
    where `is_due`. Then the loop calls `start` and may start the next chunk unless the update `holds` it; or, if it
    `evaluates` the policy itself, `add_evaluation`. When the metrics of the chunk have arrived and the evaluation
    `is_ready`, the logger calls `finish`: the evaluation first, then the callback. If `ended` is set, the run ends.

    Attributes:
      ended: the reason to end the run, or None.
      target: recent return at which the loop ends the run, or None.
      best: update and return of the best policy so far, or None.
      last_eval: mean return of the last evaluation since the start or the resume, or None.
    """

    def __init__(
        self,
        log: Any,
        run: RunConfig = RunConfig(),
        *,
        min_episodes: int = 0,
        evaluate: Evaluator | None = None,
        info: RunInfo | None = None,
        best: BestPolicy | None = None,
        best_every: int = 0,
        identity: Any = None,
        ended: LoopResult | None = None,
    ) -> None:
        """
        Args:
          log: the `Logger` of the run.
          min_episodes: number of episodes that must end before the recent return counts; 0: it never counts.
          evaluate: starts an evaluation; None if the loop passes the results to `add_evaluation`.
          info: the run, for the callback.
          best: the best policy before a resume.
          best_every: number of updates between two calls of `finish` without evaluations and callbacks; 0: none.
          identity: the settings, as JSON, with which a run that ended by itself does not continue on resume.
          ended: why the run ended by itself before a resume.
        """
        self._log, self._min_episodes, self._evaluate, self._callback = log, min_episodes, evaluate, run.callback
        self._eval_every = run.eval_every or 0
        self._callback_every = run.callback_every if run.callback is not None else 0
        self._info = info or RunInfo(env="", seed=0)
        self.target = None if self._eval_every else run.stop_at_return
        self._eval_target = run.stop_at_return if self._eval_every and run.stop_at_return is not None else math.inf
        held = [self._callback_every, 0 if self._eval_every else best_every]
        self._held = [every for every in [*held, self._eval_every * (self._eval_target < math.inf)] if every]
        self._periods = [every for every in [*held, self._eval_every] if every]
        self._running: dict[int, EvaluationResult] = {}  # by update
        self._measure = "evaluation" if self._eval_every else "recent return"
        self.best = best if best is not None and best.measure == self._measure else None
        self._best_policy: PolicyState | None = None  # not written yet
        self._identity, self.ended = identity, ended
        self.last_eval: float | None = None
        self._max_steps, self._told_cut = run.eval_max_steps or EVAL_MAX_STEPS, False

    def updates_until_event(self, update: int) -> int:
        """Returns how many updates after `update` the next call of `finish` is due; 2**31 if there is none."""
        return min((every - update % every for every in self._periods), default=2**31)

    def is_due(self, update: int) -> bool:
        """Returns whether `finish` must be called after `update` updates."""
        return any(update % every == 0 for every in self._periods)

    def holds(self, update: int) -> bool:
        """Returns whether no update after `update` may start before `finish` was called."""
        return any(update % every == 0 for every in self._held)

    def evaluates(self, update: int) -> bool:
        """Returns whether the policy after `update` updates is evaluated."""
        return bool(self._eval_every) and update % self._eval_every == 0

    def start(self, update: int, policy_state: PolicyState) -> None:
        """Starts the evaluation after `update` updates, if it is due."""
        if self._evaluate is not None and self.evaluates(update):
            self._running[update] = self._evaluate(policy_state, update)

    def add_evaluation(self, update: int, result: EvaluationResult) -> None:
        """Adds the result of the evaluation after `update` updates."""
        self._running[update] = result

    def is_ready(self, update: int) -> bool:
        """Returns whether the result of the evaluation after `update` updates can be read without waiting."""
        result = self._running.get(update)
        return result is None or all(x.is_ready() for x in result.metrics.values())

    def finish(self, loop: Any) -> dict[str, Any]:
        """Handles the events after the last update of the log, and returns metrics to add to those of the update.

        Args:
          loop: the training loop; its attribute `state` is the state after this update.
        """
        update, metrics = self._log.updates, dict[str, float]()
        if self.evaluates(update):
            result, ended = self._running.pop(update, None), None
            try:
                if result is not None:
                    metrics = self._read_evaluation(result)
                    ended = SOLVED if metrics["eval/return_mean"] >= self._eval_target else None
            except Exception as error:
                ended = LoopResult("failed", error)
            self.ended = _agree("the evaluation", ended, SOLVED)
            if self.ended is not None and self.ended.error is not None:
                return metrics
        if self._callback_every and update % self._callback_every == 0:
            metrics |= self._call_back(loop, metrics)
        return metrics

    def _read_evaluation(self, result: EvaluationResult) -> dict[str, float]:
        """Returns the metrics of an evaluation. Raises its error."""
        metrics = {f"eval/{name}": float(value) for name, value in result.metrics.items()}
        result.check()
        mean = self.last_eval = metrics["eval/return_mean"]
        if (cut := int(metrics["eval/unfinished"])) and not self._told_cut:
            self._told_cut = True
            text = (
                f"an evaluation cut {cut} episodes at eval_max_steps = {self._max_steps:,}; their returns are partial"
            )
            warn_with(self._log.reporter)(text)
        self._log.reporter.evaluated(self._log.steps, mean)
        self._offer(mean, result.policy_state)
        return metrics

    @property
    def evaluation_bytes(self) -> int:
        """Memory in bytes that an evaluation needs on each device while training runs."""
        return getattr(self._evaluate, "bytes", 0)

    def check_target(self) -> LoopResult | None:
        """Returns the reason to end the run, also if the recent return has reached the target, or None."""
        if self.ended is None and self.target is not None and self._recent_return >= self.target:
            self.ended = SOLVED
        return self.ended

    def end_to_json(self) -> dict[str, Any] | None:
        """Returns why the run ended by itself, for its checkpoint; None if it did not end or failed."""
        if self.ended is None or self.ended.error is not None:
            return None
        return {"status": self.ended.status, "reason": self.ended.reason, "identity": self._identity}

    def save_best(self, policy_state: PolicyState | None = None) -> None:
        """Writes the best policy to the run directory, if it is not written yet.

        Args:
          policy_state: the newest policy, which becomes the best one if its recent return is the highest. With
            evaluations, only evaluated policies count.
        """
        if not self._eval_every and self._min_episodes and policy_state is not None:
            self._offer(self._recent_return, policy_state)
        if self._best_policy is not None and self.best is not None:
            if self._log.writer is not None:
                self._log.writer.save_best(self._best_policy, self.best)
            self._best_policy = None

    @property
    def _recent_return(self) -> float:
        """Mean return of about the last 100 episodes; NaN before enough episodes have ended."""
        recent = self._log.recent
        return recent.mean if recent.total >= self._min_episodes else math.nan

    def _offer(self, score: float, policy_state: PolicyState) -> None:
        """Makes a policy the best one if its score is the highest; a NaN is not."""
        if score > (-math.inf if self.best is None else self.best.score):
            self.best = BestPolicy(self._log.updates, score, self._measure)
            self._best_policy = policy_state

    def _call_back(self, loop: Any, metrics: dict[str, float]) -> dict[str, float]:
        """Calls the callback and returns the numbers that it logs."""
        assert self._callback is not None
        log, error = self._log, None
        event = CallbackEvent(
            run=self._info,
            update=log.updates,
            steps=log.steps,
            read_state=lambda: loop.state,
            metrics=log.event_means | metrics,
            return_mean=log.recent.mean,
        )
        try:
            if (changed := call(self._callback, event)) is not None:
                loop.state = changed
        except Exception as failure:
            error = failure  # raised when the run is saved
        except KeyboardInterrupt:
            raise  # a second Ctrl-C
        except BaseException as failure:
            error = end_of_process("the callback", failure)
        ended = None if event.stop_reason is None else LoopResult("stopped", reason=event.stop_reason)
        ended = ended if error is None else LoopResult("failed", error)
        other = LoopResult("stopped", reason="stopped by another process")
        self.ended = _agree("the callback", ended, other) or self.ended
        return event.logged


def _agree(what: str, own: LoopResult | None, other: LoopResult) -> LoopResult | None:
    """Returns why this process ends the run, or None. If one process ends it, all processes do.

    Args:
      own: the reason of this process.
      other: the reason if only other processes have one, and none of them failed.
    """
    code = _CONTINUE if own is None else _STOPPED if own.error is None else _FAILED
    worst = allgather_ints([code]).max()
    if worst == _FAILED and code != _FAILED:
        return LoopResult("failed", HostFailed(f"{what} raised an exception in another process"))
    return own if code or worst == _CONTINUE else other
