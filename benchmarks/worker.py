"""The processes that versus_jax_peers.py starts. They compile, then train on request."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # all processes share the GPU
_ALONE = {
    name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"
}  # without the cache of this process


class Worker:
    """A process that has compiled its training program (see serving.py)."""

    def __init__(self, python: str, script: str, *words: Any, env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [python, str(HERE / script), *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_ALONE | (env or {}),
        )
        self.compile_seconds = float(self._read()["seconds"])
        self.cpu_seconds: list[float] = []  # of each run

    def train(self) -> float:
        """Trains once and returns the seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        answer = self._read()
        self.cpu_seconds.append(float(answer.get("cpu_seconds", "nan")))
        return float(answer["seconds"])

    def close(self) -> dict[str, Any]:
        """Ends the process and returns its last message."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        last = self._read() or {}
        self._process.wait()
        return last

    def kill(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self._process.args} ended early with exit code {self._process.wait()}")
