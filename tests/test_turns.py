"""Turns: that only one of those who share a core has it, and that nobody can keep it by dying."""

import errno
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import typing
import uuid

import gymnasium
import jax
import numpy as np
import pytest
from checks import SMALL

import jppo
from jppo.actors import core_lock as turns
from jppo.actors.actor import ActorProcess, Trouble
from jppo.actors.core_lock import Turns
from jppo.actors.env_runner import Fragment

# does what it is told, line by line: `take SECONDS`, `wait`, `give`, `fork`, which answers with the child's number
TAKER = """
import os, sys, time
from jppo.actors.core_lock import Turns
turns = Turns(int(sys.argv[1]), int(sys.argv[2]))
for line in sys.stdin:
    what, *words = line.split()
    if what == "fork":
        child = os.fork()
        if not child:
            os.close(1)
            time.sleep(100)
    if what == "wait":
        print(turns._mine.wait(30.0), flush=True)
        continue
    print(turns.take(float(words[0])) if what == "take" else turns.give() if what == "give" else child, flush=True)
"""


@pytest.fixture(autouse=True)
def own_dispatch():
    """An actor's option of JAX's backend, in this process, is for its time only, and comes too late."""
    jax.devices()
    yield
    jax.config.update("jax_cpu_enable_async_dispatch", True)


NAME = f"jppo-turns-{os.getuid()}-{os.uname().nodename}"


class Taker:
    def __init__(self, group, core=0):
        words = [sys.executable, "-c", TAKER, str(group), str(core)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, line):
        print(line, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def take(self, seconds):
        return self(f"take {seconds}") == "True"


@pytest.fixture
def taker():
    """Makes processes with turns in one group."""
    group, started = uuid.uuid4().int >> 80, []

    def make(core=0):
        started.append(Taker(group, core))
        return started[-1]

    yield make
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_one_at_a_time_has_a_core(taker):
    first, second, elsewhere = taker(), taker(), taker(core=1)
    assert first.take(30.0)
    assert not second.take(0.1)
    assert elsewhere.take(30.0)
    assert not second.take(0.1), "it is asked for, and has not come"
    first("give")
    assert second.take(30.0)
    assert not first.take(0.1)
    second("give")
    second("give")
    assert first.take(30.0)
    assert not second.take(0.1)


def test_a_turn_that_comes_after_the_wait_is_not_lost(taker):
    first, second, third = taker(), taker(), taker()
    assert first.take(30.0)
    assert not second.take(0.1)
    first("give")
    assert second("wait") == "True"
    assert not third.take(0.5), "it is the second's, who has not said that it does without"
    second("give")
    assert third.take(30.0)


def test_who_does_without_does_not_keep_it(taker):
    first, second, third = taker(), taker(), taker()
    assert first.take(30.0)
    assert not second.take(0.1)
    second("give")
    first("give")
    assert third.take(30.0), "the second, who has waited longer, gives it on"
    assert not second.take(0.1)
    third("give")
    assert second.take(30.0)


@pytest.mark.parametrize("forks", [False, True])
def test_who_dies_gives_its_turn_back(taker, forks):
    first, second = taker(), taker()
    assert first.take(30.0)
    child = int(first("fork")) if forks else None
    try:
        assert not second.take(0.1)
        first.process.kill()
        assert second.take(30.0)
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


def test_a_user_has_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(turns.tempfile, "gettempdir", lambda: str(tmp_path))
    for group in range(3):
        assert Turns(group, 1).take(30.0)
    (file,) = tmp_path.iterdir()
    assert (file.name, file.stat().st_mode & 0o777, file.stat().st_size) == (NAME, 0o600, 0)


def without(monkeypatch, tmp_path, what):
    if what == "place":
        monkeypatch.setattr(turns.tempfile, "gettempdir", lambda: str(tmp_path / "nowhere"))
    elif what == "trust":
        monkeypatch.setattr(turns.tempfile, "gettempdir", lambda: str(tmp_path))
        (tmp_path / NAME).symlink_to(tmp_path / "precious")
    elif what == "locks":
        monkeypatch.setattr(turns, "fcntl", None)
    elif what == "room":
        monkeypatch.setattr(turns.fcntl, "lockf", no_locks_left)
    else:
        monkeypatch.setattr(turns.threading.Thread, "start", no_threads_left)


def no_locks_left(*_):
    raise OSError(errno.ENOLCK, "No locks available")


def no_threads_left(_):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("what", ["place", "trust", "locks", "room", "threads"])
def test_where_there_are_no_turns_all_compute_at_once(monkeypatch, tmp_path, what):
    monkeypatch.setattr(turns.tempfile, "gettempdir", lambda: str(tmp_path))
    without(monkeypatch, tmp_path, what)
    one, begin = Turns(1, 0), time.monotonic()
    for _ in range(2):
        assert one.take(60.0) == (what == "room")
        one.give()
    assert time.monotonic() - begin < 30.0
    assert not (tmp_path / "precious").exists()


class Script:
    """A runner and its turns in one: notes what is asked of it."""

    def __init__(self, *busy):
        self.notes, self.busy = [], iter(busy)

    def collect(self, policy_state, gamma):
        self.notes.append((policy_state, gamma))
        if policy_state == "broken":
            raise RuntimeError("broken")
        return Fragment(None, None, {}, None, next(self.busy))

    def take(self, seconds):
        self.notes.append(("take", seconds))

    def give(self):
        self.notes.append("give")


def scripted(*busy):
    script, actor = Script(*busy), ActorProcess()
    actor._runner = actor._turns = script
    return actor, script


def test_an_actor_takes_turns_when_its_last_rollout_only_computed():
    actor, script = scripted(0.0, 0.04, 1.0, 0.0, 0.0)
    for number in range(5):
        assert actor.collect((number, 0.5)).busy in (0.0, 0.04, 1.0)
    assert script.notes == [
        *((0, 0.5), "give", (1, 0.5), "give", (2, 0.5), "give"),
        *(("take", 20.0), (3, 0.5), "give", (4, 0.5), "give"),
    ]


def test_an_actor_whose_environment_raises_gives_its_turn_back():
    actor, script = scripted(1.0)
    actor.collect((0, 0.5))
    assert isinstance(actor.collect(("broken", 0.5)), Trouble)
    assert script.notes[-2:] == [("broken", 0.5), "give"]


class Busy(gymnasium.Env):
    """Burns a millisecond of CPU a step; notes when."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    steps: typing.ClassVar[list] = []

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.steps.append(time.monotonic())
        end = time.thread_time() + 1e-3
        while time.thread_time() < end:
            pass
        return np.zeros(3, np.float32), 0.0, False, False, {}


def collect(spec, number, group, given, barrier, results):
    """In a process of its own: when each rollout began and ended, and whether it took turns."""
    actor = ActorProcess()
    assert actor.begin(spec, np.arange(number, number + 1), group, 0) is None
    blocks, takes_turns = [], False
    for _ in range(5):
        barrier.wait()
        Busy.steps.clear()
        fragment = actor.collect(given)
        blocks.append((Busy.steps[0], Busy.steps[-1], takes_turns))
        takes_turns = fragment.patience > 0.0
    actor.close()
    results.put(blocks)


def test_actors_on_one_core_collect_one_after_the_other():
    agent = jppo.make_sebulba(Busy, SMALL(num_envs=2, num_steps=100))
    key, context = jax.random.key(0), multiprocessing.get_context("spawn")
    spec = agent.runner_spec(key)
    given = pickle.dumps((jax.device_get(agent.init(key, jppo.Hyperparams()).policy), 0.9))
    barrier, results = context.Barrier(2, timeout=60.0), context.Queue()
    common = (uuid.uuid4().int >> 80, given, barrier, results)
    actors = [context.Process(target=collect, args=(spec, number, *common), daemon=True) for number in range(2)]
    for actor in actors:
        actor.start()
    pairs = list(zip(results.get(timeout=120.0), results.get(timeout=120.0), strict=True))
    for actor in actors:
        actor.join()
    taken = [(a, b) for a, b in pairs if a[2] and b[2]]
    assert taken, "a rollout of 100 ms of CPU, and nothing else"
    for (begin, end, _), (other_begin, other_end, _) in taken:
        assert end <= other_begin or other_end <= begin
