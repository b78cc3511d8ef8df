"""The reaction to Ctrl-C outside training. Imports nothing, because the command installs it before other modules."""

import os
from typing import Any

EXIT_INTERRUPTED = 130


def exit_at_once(signum: int, frame: Any) -> None:
    """Handles SIGINT. An exception would show a traceback of imports, or get lost in a callback of JAX."""
    new_line = b"\n" if os.isatty(2) else b""  # the cursor is behind ^C, or in a progress line
    os.write(2, new_line + b"jppo: interrupted\n")
    os._exit(EXIT_INTERRUPTED)
