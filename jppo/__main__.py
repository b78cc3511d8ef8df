"""The command `jppo`, and `python -m jppo`."""

import os
import sys


def main() -> int:
    """Runs the command line and returns the exit code."""
    import signal

    from jppo.cli.interrupt import exit_at_once

    signal.signal(signal.SIGINT, exit_at_once)  # before the other imports, which take a moment
    from jppo.cli.main import main as run

    return run()


if __name__ == "__main__":
    # Python put the current directory first on the path, where its files would hide installed packages. Keep it only in
    # a checkout that is not installed, because jppo itself is there.
    if not sys.flags.safe_path and sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(__file__)):
        del sys.path[0]
    sys.exit(main())
