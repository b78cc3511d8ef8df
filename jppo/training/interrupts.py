"""Ctrl-C as a question that loops ask."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jppo.training.progress import Reporter


def never() -> bool:
    """For who has no wish to stop."""
    return False


@contextlib.contextmanager
def stop_on_interrupt(reporter: Reporter, stop: Callable[[], bool] = never) -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a flag, so that no state is lost in the middle of a chunk; the second one raises.

    Args:
      stop: another flag, for a caller without signals.
    """
    requested = threading.Event()

    def on_interrupt(signum: int, frame: Any) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        reporter.message("stopping: saving what was reached (Ctrl-C again to stop at once)")

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    signals = (signal.SIGINT, signal.SIGTERM)  # a cluster's scheduler sends the latter
    before = [signal.signal(number, on_interrupt) for number in signals]
    try:
        yield lambda: requested.is_set() or stop()
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
