"""A run in a process of its own, for tests that end it: python one_run.py RUN_DIR HOW."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import jppo
from jppo import checkpoints, loops
from jppo.progress import Silent

CONFIG = jppo.PPOConfig(num_envs=8, num_steps=8, hidden_sizes=(8,), normalize_obs=True, normalize_reward=True)
UPDATES, END = 120, 60  # updates, in all and before the process is ended


class Ending(Silent):
    """Ends the process, if `how` says so, once there are END updates and a checkpoint."""

    def __init__(self, run_dir: Path, how: str) -> None:
        self._checkpoints, self._how = run_dir / "checkpoints", how

    def message(self, text: str) -> None:
        print(text, flush=True)

    def update(self, step: int, steps_per_second: float, recent_return: float) -> None:
        if step != END * CONFIG.batch_size:
            return
        while "kill" in self._how and not any(path.name.isdigit() for path in self._checkpoints.iterdir()):
            time.sleep(0.01)
        if self._how in ("interrupt", "kill"):
            os.kill(os.getpid(), signal.SIGINT if self._how == "interrupt" else signal.SIGKILL)


def kill_while_saving() -> None:
    """SIGKILL when the second checkpoint is written, but not complete."""
    import orbax.checkpoint as ocp

    complete, saves = ocp.StandardCheckpointer._save_step_metadata, []

    def killing(self, *args, **kwargs):
        saves.append(1)
        if len(saves) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        complete(self, *args, **kwargs)

    ocp.StandardCheckpointer._save_step_metadata = killing


def main(run_dir: Path, how: str) -> None:
    loops._CHUNK_SECONDS = 0.0  # chunks of one
    if how == "kill while saving":
        kill_while_saving()
    given = {} if how == "go on" else {"config": CONFIG, "total_steps": UPDATES * CONFIG.batch_size, "seed": 3}
    reporter = Ending(run_dir, how)
    result = jppo.train("CartPole-v1", run_dir=run_dir, checkpoint_every=0, progress=reporter, **given)
    np.savez(run_dir.with_suffix(".npz"), **checkpoints.to_host(result.state))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
