"""Exceptions that users may catch, and text from the errors of others."""

from typing import Any


class ActorsFailed(RuntimeError):
    """An actor failed too often in a row. The message contains the last traceback, `result` the run so far."""

    result: Any = None


class TrainingDiverged(RuntimeError):
    """A loss, gradient or parameter became NaN or infinite; `result` holds the run up to the update before."""

    def __init__(self, update: int, result: Any) -> None:
        super().__init__(
            f"update {update} made a loss, gradient or parameter NaN or infinite; the policy is that of update "
            f"{update - 1}. Lower learning_rate or max_grad_norm, or check the environment's rewards and observations "
            "for NaN"
        )
        self.update, self.result = update, result


class NoLegalAction(TrainingDiverged):
    """An observation's `action_mask` marked no action as legal. `result` holds the run up to the update before."""

    def __init__(self, env_name: str, env_index: int, step: int, update: int, result: Any) -> None:
        """Describes the step.

        Args:
          env_index: number of the environment, from 0.
          step: step of the rollout, from 0.
          update: update with that rollout, from 1.
        """
        RuntimeError.__init__(
            self,
            f"{env_name}: action_mask marks no legal action in environment {env_index} at step {step} of update "
            f"{update}'s rollout; every mask must have a nonzero entry for each component of the action",
        )
        self.update, self.result = update, result


class HostFailed(RuntimeError):
    """A run in several processes ended because one of them failed; the message names it."""

    result: Any = None  # None, because such a run has no result


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or ''."""
    return (str(error).strip().splitlines() or [""])[0]


def describe_error(error: BaseException) -> str:
    """Returns the type and the first line of an error, such as "ValueError: too large"."""
    return ": ".join(filter(None, (type(error).__name__, first_line(error))))
