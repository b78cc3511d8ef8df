"""Interrupts a run, resumes it, and compares it with an uninterrupted run."""

import os
import signal
import tempfile
from pathlib import Path

import jax
import numpy as np

import jppo


class Impatient(jppo.Reporter):
    """Presses Ctrl-C once during the run."""

    pressed = False

    def update(self, step: int, steps_per_second: float, recent_return: float) -> None:
        if not self.pressed:
            self.pressed = True
            os.kill(os.getpid(), signal.SIGINT)


def main(total_steps: int = 200_000) -> tuple[jppo.Result, jppo.Result]:
    """Returns the results of the uninterrupted and of the resumed run."""
    config = jppo.PPOConfig(num_envs=64, num_steps=32)
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        whole = jppo.train("CartPole-v1", config=config, total_steps=total_steps)

        part = jppo.train("CartPole-v1", config=config, total_steps=total_steps, run_dir=run_dir, progress=Impatient())
        print(f"{part.status} after {part.summary['updates']} updates")

        early = jppo.load_policy(run_dir)  # the policy of the newest checkpoint
        print(f"its policy pushes {'left' if early.act([0.0, 0.0, 0.1, 0.5]) == 0 else 'right'}")

        resumed = jppo.train("CartPole-v1", run_dir=run_dir)  # the other arguments come from the run directory
        print(f"{resumed.status} after {resumed.summary['updates']} updates")

    same = jax.tree.map(np.array_equal, resumed.policy.state, whole.policy.state)
    print(f"bit-identical policies: {all(jax.tree.leaves(same))}")
    return whole, resumed


if __name__ == "__main__":
    main()
