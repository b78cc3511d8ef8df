"""Exceptions that users may catch, and text from the errors of others."""

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
EMPTY_MASK = "every mask must have a nonzero entry for each component of the action"


class Refused(ValueError):
    """A mistake of the user that jppo refuses. The command line prints its message in one line, without a traceback."""


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

    def __init__(self, description: str, update: int, result: Any) -> None:
        """Args: description: the message of `describe_empty_mask`."""
        RuntimeError.__init__(self, description)
        self.update, self.result = update, result


class HostFailed(RuntimeError):
    """A run in several processes ended because one of them failed; the message names it."""

    result: Any = None  # None, because such a run has no result


def describe_empty_mask(env_name: str, index: int, num_envs: int, update: int) -> str:
    """Returns the message for a mask without legal actions.

    Args:
      index: t*N + n for step t of the rollout and environment n, from 0.
      num_envs: the number of environments N.
      update: update with that rollout, from 1.
    """
    step, env_index = divmod(index, num_envs)
    return (
        f"{env_name}: action_mask marks no legal action in environment {env_index} at step {step} of update "
        f"{update}'s rollout; {EMPTY_MASK}"
    )


def end_of_process(what: str, error: BaseException) -> RuntimeError:
    """Returns an ordinary error for an exception that would end the process, like SystemExit, raised by user code."""
    call = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raise {type(error).__name__}"
    return RuntimeError(f"{what} called {call}")


def forbid_exit(function: _Function) -> _Function:
    """Decorates a function that calls an environment. sys.exit in it, and the like, raise RuntimeError."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise end_of_process("the environment", error) from error

    return wrapper  # type: ignore[return-value]


def strip_colours(text: str) -> str:
    """Returns text without the escape sequences that colour it in a terminal."""
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or ''."""
    return (str(error).strip().splitlines() or [""])[0]


def describe_error(error: BaseException) -> str:
    """Returns the type and the first line of an error, such as "ValueError: too large"."""
    return ": ".join(filter(None, (type(error).__name__, first_line(error))))
