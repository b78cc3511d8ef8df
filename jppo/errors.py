"""Exceptions that users may catch, and text from the errors of others."""

import functools
import os
import re
import sys
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

    def __init__(self, update: int, result: Any, has_mask: bool = False) -> None:
        masks = ", and its masks for rows without a legal action" if has_mask else ""
        super().__init__(
            f"update {update} made a loss, gradient or parameter NaN or infinite; the policy is that of update "
            f"{update - 1}. Lower learning_rate or max_grad_norm, or check the environment's rewards and observations "
            f"for NaN{masks}"
        )
        self.update, self.result = update, result


class HostFailed(RuntimeError):
    """A run in several processes ended because one of them failed; the message names it."""

    result: Any = None  # None, because such a run has no result


def end_of_process(what: str, error: BaseException) -> RuntimeError:
    """Returns an ordinary error for an exception that would end the process, like SystemExit, raised by user code."""
    call = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raise {type(error).__name__}"
    return RuntimeError(f"{what} called {call}")


def forbid_exit(function: _Function) -> _Function:
    """Decorates a function that calls an environment. sys.exit in it, and the like, raise RuntimeError."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        process = os.getpid()
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise end_of_process("the environment", error) from error
        finally:
            end_forked_process(process)

    return wrapper  # type: ignore[return-value]


def end_forked_process(process: int) -> None:
    """Ends this process if user code forked it from a process of this number: it would write its parent's run."""
    if os.getpid() != process:
        os._exit(sys.exc_info()[0] is not None)


def strip_colours(text: str) -> str:
    """Returns text without the escape sequences that colour it in a terminal."""
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or ''."""
    return (str(error).strip().splitlines() or [""])[0]


def describe_error(error: BaseException) -> str:
    """Returns the type and the first line of an error, such as "ValueError: too large"."""
    return ": ".join(filter(None, (type(error).__name__, first_line(error))))
