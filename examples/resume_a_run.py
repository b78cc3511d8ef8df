"""Interrupts a run, resumes it, and compares it with an uninterrupted run."""

import os
import signal
import tempfile
from pathlib import Path

import jax
import numpy as np

import jppo


class Impatient(jppo.Reporter):
    """Presses Ctrl-C, once, when a run is under way."""

    pressed = False

    def update(self, step: int, steps_per_second: float, recent_return: float) -> None:
        if not self.pressed:
            self.pressed = True
            os.kill(os.getpid(), signal.SIGINT)


def main(total_steps: int = 200_000) -> tuple[jppo.Result, jppo.Result]:
    """The run that was not stopped, and the one that was."""
    config = jppo.PPOConfig(num_envs=64, num_steps=32)
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        whole = jppo.train("CartPole-v1", config=config, total_steps=total_steps)

        part = jppo.train("CartPole-v1", config=config, total_steps=total_steps, run_dir=run_dir, progress=Impatient())
        print(f"{part.summary['status']} after {part.summary['updates']} updates")

        early = jppo.load_policy(run_dir)  # of what there is
        print(f"its policy pushes {'left' if early.act([0.0, 0.0, 0.1, 0.5]) == 0 else 'right'}")

        resumed = jppo.train("CartPole-v1", run_dir=run_dir)  # with the arguments of the first part
        print(f"{resumed.summary['status']} after {resumed.summary['updates']} updates")

    same = jax.tree.map(np.array_equal, resumed.policy.state, whole.policy.state)
    print(f"bit for bit the same policy: {all(jax.tree.leaves(same))}")
    return whole, resumed


if __name__ == "__main__":
    main()
