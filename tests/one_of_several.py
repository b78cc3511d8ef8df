"""A program for tests/test_hosts.py: one of several processes that train together.

Arguments: the coordinator's address, the number of processes, the index of this process, and a directory with
runs.json, which maps the names of runs to arguments of `jppo.train`. The results are written to that directory.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import gymnasium
import jax
import numpy as np
from checks import SMALL
from gymnasium.envs.classic_control import CartPoleEnv

import jppo
from jppo.training import run, video
from jppo.training.progress import WorkerReporter


class Tired(gymnasium.Wrapper):
    """Fails in the third rollout of the second process, or in an evaluation of several episodes."""

    def __init__(self):
        super().__init__(CartPoleEnv())
        self.steps = 0

    def step(self, action):
        self.steps += 1
        if jax.process_index() == 1 and self.steps > 40:
            self.fail()
        return super().step(action)

    def fail(self):
        raise RuntimeError("the pole is too heavy")


class Interrupting(Tired):
    """Sends Ctrl-C twice instead."""

    def fail(self):
        interrupt_twice()


class Generous(gymnasium.Wrapper):
    """The second process gets a hundred times the reward."""

    def __init__(self):
        super().__init__(CartPoleEnv())

    def step(self, action):
        obs, reward, *others = super().step(action)
        return obs, reward * (100.0 if jax.process_index() == 1 else 1.0), *others


class TwiceInterrupted(WorkerReporter):
    """Sends Ctrl-C twice while the loop waits after the first update, or after the third."""

    updates = 0

    def update(self, *_):
        self.updates += 1
        if self.updates == 3:
            interrupt_twice()

    def tick(self):
        if self.updates:
            interrupt_twice()


ENVS = {"CartPole-v1": "CartPole-v1", "tired": Tired, "interrupting": Interrupting, "generous": Generous}


def main(coordinator, count, number, directory):
    jax.distributed.initialize(coordinator, count, number, heartbeat_timeout_seconds=20)
    for name, arguments in json.loads((directory / "runs.json").read_text()).items():
        outcome = {}
        try:
            result = train(number, directory / arguments.pop("run_dir_of", name), **arguments)
            outcome = {"summary": result.summary, "run_dir": str(result.run_dir)}
            leaves = jax.tree.leaves(result.policy.state)
            assert all(leaf.is_fully_addressable for leaf in leaves)
            arrays = {f"leaf{i}": leaf for i, leaf in enumerate(leaves)} | result.metrics
            np.savez(directory / f"{name}-{number}.npz", **arrays)
        except (ValueError, RuntimeError, KeyboardInterrupt) as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        path = directory / f"{name}-{number}.json"
        path.with_suffix(".tmp").write_text(json.dumps(outcome))
        path.with_suffix(".tmp").rename(path)


def train(
    number,
    run_dir,
    interrupted=False,
    interrupted_twice=False,
    video_interrupted=False,
    env="CartPole-v1",
    seeds=(7, 7),
    rate=jppo.schedules.linear(3e-3, 0.0),
    **arguments,
):
    if interrupted and number == 1:
        threading.Thread(target=interrupt_once_logged, args=(run_dir / "metrics.jsonl",)).start()
    run.WorkerReporter = TwiceInterrupted if interrupted_twice else WorkerReporter
    if video_interrupted:  # only the first process draws
        arguments["video"], video.play_gif = True, interrupted_drawing
    rate = jppo.Hyperparams(learning_rate=rate, gamma=0.9)
    config = SMALL(num_envs=8, num_steps=16, num_epochs=2, num_minibatches=4, normalize_obs=True, normalize_reward=True)
    arguments |= {"config": config, "hyperparams": rate, "seed": seeds[number], "run_dir": run_dir}
    return jppo.train(ENVS[env], **arguments)


def interrupted_drawing(*_, **__):
    raise KeyboardInterrupt


def interrupt_twice():
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)


def interrupt_once_logged(metrics):
    while not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
