"""A program for tests of checkpoints: trains and ends early: python one_run.py RUN_DIR HOW."""

import os
import signal
import sys
import time
from pathlib import Path

from checks import SMALL
from probes import NO_LIMIT, ObsActionReward

import jppo
from jppo.training import device_loop
from jppo.training.progress import NullReporter

CONFIG = SMALL(num_envs=8, num_steps=4, num_epochs=2, num_minibatches=2, normalize_obs=True, normalize_reward=True)
BATCH, UPDATES = CONFIG.batch_size, 12
END = 5  # updates until the process is ended


class Cued(ObsActionReward):
    """Has episodes of five steps, which are not aligned with updates of four steps."""

    length = NO_LIMIT
    limit = 5


class Ending(NullReporter):
    """Ends the process after update END and the first checkpoint."""

    def __init__(self, run_dir: Path, number: int | None) -> None:
        self._checkpoints, self._number = run_dir / "checkpoints", number

    def update(self, step: int, steps_per_second: float, recent_return: float) -> None:
        if step != END * BATCH:
            return
        while not any(path.name.isdigit() for path in self._checkpoints.iterdir()):
            time.sleep(0.01)
        if self._number is not None:
            os.kill(os.getpid(), self._number)


def kill_while_saving() -> None:
    """Kills the process while the second checkpoint is incomplete."""
    from orbax.checkpoint._src.path.atomicity import AtomicRenameTemporaryPath

    finalize, saves = AtomicRenameTemporaryPath.finalize, []

    def killing(self, *args, **kwargs):
        saves.append(1)
        if len(saves) > 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return finalize(self, *args, **kwargs)

    AtomicRenameTemporaryPath.finalize = killing


def main(run_dir: Path, how: str) -> None:
    device_loop._CHUNK_SECONDS = 0.0  # chunks of one update
    if how == "kill while saving":
        kill_while_saving()
    reporter = Ending(run_dir, {"interrupt": signal.SIGINT, "kill": signal.SIGKILL}.get(how))
    arguments = {"config": CONFIG, "total_steps": UPDATES * BATCH, "num_devices": 1}
    jppo.train(Cued(), run_dir=run_dir, run=jppo.RunConfig(checkpoint_seconds=0), progress=reporter, **arguments)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
