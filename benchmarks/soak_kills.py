"""Kills runs, actors and Ray's daemons, and checks what is left (Linux). Started by `soak.py kills`."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ACTORS = ("--backend", "ray", "--num-actors", "2")
SHORT = ("--num-envs", "16", "--num-steps", "32", "--checkpoint-seconds", "0.5", "--seed", "3")
_TIMEOUT = 300.0  # seconds; the machine may be busy
_CHANCE = random.Random(0)


class Run:
    """A `jppo train` command in its own session, with a run directory."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        argv = [
            sys.executable,
            "-m",
            "jppo",
            "train",
            "CartPole-v1",
            *options,
            "--run-dir",
            str(self.run_dir),
            "--quiet",
        ]
        self.process = subprocess.Popen(argv, cwd=folder, start_new_session=True, stderr=(folder / "err").open("w"))

    def updates(self) -> int:
        """Returns the number of logged updates."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for(self, happened: Callable[[], bool]) -> bool:
        """Waits for an event. Returns False if the run ended before. Raises TimeoutError."""
        end = time.monotonic() + _TIMEOUT
        while not happened():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > end:
                raise TimeoutError((self.folder / "err").read_text())
            time.sleep(0.02)
        return True

    def processes(self, name: str) -> list[int]:
        """Returns the ids of the processes in this POSIX session whose command is a name or path/name."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                session = int((path / "stat").read_text().rpartition(")")[2].split()[3])
                command = (path / "cmdline").read_bytes().split(b"\0")[0].decode()
            except OSError:  # it has ended
                continue
            if session == self.process.pid and command.rpartition("/")[2].startswith(name):
                found.append(int(path.name))
        return sorted(found)

    def end(self) -> int:
        """Stops the run with Ctrl-C if it is still running. Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(_TIMEOUT)

    def summary(self) -> dict[str, Any]:
        """Returns the content of summary.json, or {} if the run did not write it."""
        path = self.run_dir / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def losses(self) -> list[Any]:
        """Returns the number and the loss of each logged update."""
        lines = (self.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [(row["update"], row["loss/policy"]) for row in map(json.loads, lines)]


def kill_runs(num_kills: int, total_steps: int, *options: str, is_exact: bool = False) -> dict[str, Any]:
    """Kills a run at random times and repeats its command each time, until it finishes.

    Args:
      is_exact: compare the result with that of a run that was not killed.
    """
    options = (*SHORT, *options, "--total-steps", str(total_steps))
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        kills, resumes = 0, 0
        if is_exact:
            expected = Run(Path(first), *options)
            expected.process.wait(_TIMEOUT)
        while True:
            run = Run(Path(second), *options)
            before = run.updates()
            if kills == num_kills:
                code = run.process.wait(_TIMEOUT)
                break
            if run.wait_for(lambda run=run, before=before: run.updates() > before):
                run.wait_for(lambda end=time.monotonic() + _CHANCE.uniform(0.0, 2.0): time.monotonic() > end)
            if run.process.poll() is not None:
                code = run.process.returncode
                break
            os.kill(run.process.pid, signal.SIGKILL)
            run.process.wait()
            kills, resumes = kills + 1, resumes + bool(list((run.run_dir / "checkpoints").glob("[0-9]*")))
        updates = [update for update, _ in run.losses()]
        result = {
            "kills": kills,
            "kills_after_a_checkpoint": resumes,
            "exit_code": code,
            "updates": len(updates),
            "updates_missing_or_double": int(updates != list(range(1, len(updates) + 1))),
        }
        if is_exact:
            hashes = [each.summary().get("policy_sha256") for each in (expected, run)]
            result |= {"same_policy": hashes[0] == hashes[1], "same_metrics": expected.losses() == run.losses()}
        return result


def kill_actors(num_kills: int) -> dict[str, Any]:
    """Kills the actors of one run at random times."""
    with tempfile.TemporaryDirectory() as folder:
        run, kills = Run(Path(folder), *ACTORS, "--max-restarts", "10", "--total-steps", "1e12"), 0
        while kills < num_kills:
            before = run.updates()
            if not run.wait_for(lambda before=before: run.updates() > before + 5):
                break
            time.sleep(_CHANCE.uniform(0.0, 0.5))
            actors = run.processes("ray::ActorProcess")
            os.kill(_CHANCE.choice(actors), signal.SIGKILL)
            kills += 1
        before = run.updates()
        run.wait_for(lambda: run.updates() > before + 5)
        code, summary = run.end(), run.summary()
        updates = [update for update, _ in run.losses()]
    return {
        "kills": kills,
        "restarts": summary.get("restarts"),
        "lost_fragments": summary.get("lost_fragments"),
        "exit_code": code,
        "updates": len(updates),
        "updates_missing_or_double": int(updates != list(range(1, len(updates) + 1))),
    }


def kill_daemon(name: str) -> dict[str, Any]:
    """Kills a daemon of Ray during a run, and resumes the run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), *ACTORS, "--total-steps", "1e12")
        run.wait_for(lambda: run.updates() > 20)
        (pid,) = run.processes(name)
        begin = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        code, seconds = run.process.wait(_TIMEOUT), time.monotonic() - begin
        message, saved, summary = (run.folder / "err").read_text(), (run.run_dir / "policy").is_dir(), run.summary()
        again = Run(Path(folder), *ACTORS, "--total-steps", "1e12")
        before = again.updates()
        again.wait_for(lambda: again.updates() > before + 20)
        resumed_code = again.end()
        updates = [update for update, _ in again.losses()]
    return {
        "kills": 1,
        "exit_code": code,
        "seconds": seconds,
        "has_message": f"Ray's process {name} " in message,
        "policy_saved": saved,
        "checkpoint_of_last_update": summary.get("checkpoint") == summary.get("updates"),
        "exit_code_of_resumed_run": resumed_code,
        "updates_missing_or_double": int(updates != list(range(1, len(updates) + 1))),
        "updates": len(updates),
    }
