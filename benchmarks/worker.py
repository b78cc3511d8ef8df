"""What population.py, trials.py and versus_jax_peers.py start: processes that compile, and train once per line that
they are sent.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # a GPU is shared by all of them, and by who starts them
_ALONE = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}  # the caller's


class Worker:
    """A process that has compiled (see serving.py)."""

    def __init__(self, python: str, script: str, *words: Any, env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [python, str(HERE / script), *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_ALONE | (env or {}),
        )
        self.compile_seconds = float(self._read()["seconds"])

    def train(self) -> float:
        """Seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def close(self) -> dict[str, Any]:
        """What it says in the end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        last = self._read() or {}
        self._process.wait()
        return last

    def kill(self) -> None:
        """Ends it without a word."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self._process.args} ended early, with {self._process.wait()}")
