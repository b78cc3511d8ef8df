"""Lets a signal end the process while a call of XLA blocks."""

import contextlib
import signal
import threading
from collections.abc import Iterator


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
