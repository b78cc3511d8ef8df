"""Controls when Ctrl-C, SIGTERM and SIGHUP take effect."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


def end_signals() -> list[signal.Signals]:
    """Returns Ctrl-C, SIGTERM of a scheduler, and SIGHUP of a closed terminal unless nohup ignores it."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *(() if is_ignored else (signal.SIGHUP,))]


@contextlib.contextmanager
def end_process_at(number: signal.Signals) -> Iterator[None]:
    """Lets a signal end the process at once.

    Python's handlers wait until a call of XLA returns, which may take minutes while it compiles, allocates or waits for
    another process. Does nothing outside the main thread, where Python does not set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def defer_signals(interruptible: bool = False) -> Iterator[None]:
    """Defers Ctrl-C, SIGTERM and SIGHUP to the end of the block.

    Also restores the handler of SIGTERM, which `ray.init` replaces by one that does not save the run. Does nothing
    outside the main thread.

    Args:
      interruptible: do not defer Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = end_signals()[int(interruptible) :]
    held: list[int] = []
    before: dict[signal.Signals, Any] = {}
    try:
        for number in signals:
            before[number] = signal.signal(number, lambda number, _: held.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for held_number in held:
            signal.raise_signal(held_number)
