"""Gymnasium environments that fail at a chosen step, for tests of actors.

They leave notes in a directory: an empty file per process ("pid-<pid>"), per process that closed its environment
("closed-<pid>"), and per seed of a reset. The directory is an argument, or the value of the environment variable NOTES.
"""

import ctypes
import itertools
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import gymnasium
import jax
import numpy as np
import ray

NOTES = "JPPO_TEST_NOTES"


class Unpicklable(Exception):
    """An exception that fails to unpickle, as in many libraries."""

    def __init__(self, code, text):
        super().__init__(f"{text} (code {code})")


def hang():
    while True:
        time.sleep(1.0)


def hang_in_c():
    """Sleeps in C while it holds the GIL."""
    ctypes.PyDLL(None).sleep(10_000)


def fail():
    raise Unpicklable(7, "the simulator is gone")


FAULTS = {
    "raise": fail,
    "exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": hang,
    "hang in C": hang_in_c,
}


class Healthy(gymnasium.Env):
    """Episodes of `length` steps; the action is the reward."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, notes=None, length=16, step_seconds=0.0):
        self.notes, self.length, self.step_seconds = Path(notes or os.environ[NOTES]), length, step_seconds
        self.time = 0
        note(self.notes, f"pid-{os.getpid()}")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            note(self.notes, f"seed-{seed}-{os.getpid()}")
        self.time = 0
        return self.see(), {}

    def step(self, action):
        self.time += 1
        if self.step_seconds:
            time.sleep(self.step_seconds)
        return self.see(), float(action), False, self.time >= self.length, {}

    def see(self):
        return self.np_random.uniform(-1.0, 1.0, 3).astype(np.float32)

    def close(self):
        note(self.notes, f"closed-{os.getpid()}")


class Faulty(Healthy):
    """The first instances fail in step `at`, each with another one of `faults`. Later instances are healthy."""

    def __init__(self, faults, at, **kwargs):
        super().__init__(**kwargs)
        self.at, self.steps = at, 0
        self.fault = next((fault for fault in faults if in_actor() and note(self.notes, f"fault-{fault}")), None)

    def step(self, action):
        self.steps += 1
        if self.fault is not None and self.steps == self.at:
            FAULTS[self.fault]()
        return super().step(action)


class Broken(Healthy):
    """Always fails in actors, but not in the driver: in the constructor, reset or step."""

    def __init__(self, where, **kwargs):
        super().__init__(**kwargs)
        self.where = where
        self.break_in("making")

    def reset(self, **kwargs):
        self.break_in("reset")
        return super().reset(**kwargs)

    def step(self, action):
        self.break_in("step")
        return super().step(action)

    def break_in(self, where):
        if where == self.where and in_actor():
            raise RuntimeError(f"no licence in {where}")


class WearsOut(Healthy):
    """Fails in all processes after its 100th step."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 100:
            note(self.notes, "worn-out")
        if (self.notes / "worn-out").exists():
            raise RuntimeError("the gear is worn out")
        return super().step(action)


_NUMBERS = itertools.count()


class FaultyEvaluation(Healthy):
    """Fails as in FAULTS in each environment of an evaluation, which an actor makes after its rollout's environments.

    Later ones are healthy after `times` failures.
    """

    def __init__(self, fault, times=1, rollout_envs=4, **kwargs):
        super().__init__(**kwargs)
        self.fault, self.times, self.evaluates = fault, times, in_actor() and next(_NUMBERS) >= rollout_envs

    def step(self, action):
        if self.evaluates and any(note(self.notes, f"evaluating-{i}") for i in range(self.times)):
            FAULTS[self.fault]()
        return super().step(action)


class Telling(Healthy):
    """Writes facts about its process to a file, and starts a child process."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if in_actor():
            self.child = subprocess.Popen(["sleep", "600"])
            product, ones = jax.jit(lambda x: x @ x), jax.numpy.ones((1000, 1000))
            product(ones).block_until_ready()
            self.at_once = product(ones).is_ready()  # 10 ms of work

    def step(self, action):
        if in_actor():
            threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
            cpus = ray.get_runtime_context().get_assigned_resources()["CPU"]
            facts = {"environ": dict(os.environ), "threads": threads, "child": self.child.pid, "cpus": cpus}
            facts["at_once"] = self.at_once
            (self.notes / f"facts-{os.getpid()}").write_text(json.dumps(facts))
        return super().step(action)


class Placed(Healthy):
    """Notes the id of its node."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if in_actor():
            note(self.notes, f"node-{ray.get_runtime_context().get_node_id()}")


def in_actor():
    """Returns whether this is a process of Ray."""
    return "RAY_RAYLET_PID" in os.environ


def note(directory, name):
    """Leaves a note. Returns whether it is new."""
    try:
        (directory / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def noted(directory, kind):
    """Returns the texts of the notes of a kind."""
    return [path.name.removeprefix(f"{kind}-") for path in Path(directory).glob(f"{kind}-*")]
