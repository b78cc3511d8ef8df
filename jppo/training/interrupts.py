"""Turns Ctrl-C into a flag that the training loops check."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jppo.devices.signals import end_signals
from jppo.training.progress import Reporter


@contextlib.contextmanager
def stop_on_interrupt(reporter: Reporter) -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether Ctrl-C, SIGTERM or SIGHUP has arrived, so that a chunk is never cut off.

    A second Ctrl-C or SIGTERM raises KeyboardInterrupt. A SIGHUP that is ignored, as by nohup, has no effect. Outside
    the main thread, Python delivers no signals and the function always returns False. The function also restores the
    handlers, because an environment may replace them.
    """
    requested = threading.Event()

    def on_interrupt(signum: int, frame: Any) -> None:
        if requested.is_set():
            if signum == signal.SIGHUP:  # sent by the terminal and by its shell
                return
            raise KeyboardInterrupt
        requested.set()
        reporter.message("stopping; completed updates are kept (Ctrl-C again stops at once)")

    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return
    signals = end_signals()
    before = [signal.signal(number, on_interrupt) for number in signals]

    def is_requested() -> bool:
        for number in signals:
            if signal.getsignal(number) is not on_interrupt:
                signal.signal(number, on_interrupt)
        return requested.is_set()

    try:
        yield is_requested
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
