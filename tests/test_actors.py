"""Tests actors: they do not change the results, and their failures do not stop a run."""

import concurrent.futures
import functools
import json
import os
import pickle
import random
import re
import signal
import socket
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import jax
import numpy as np
import pytest
import ray
import threadpoolctl
from checks import SMALL
from faulty_envs import NOTES, Broken, Faulty, FaultyEvaluation, Healthy, Telling, noted
from processes import descendants, left_of, running

import jppo
from jppo.actors import actor, daemon_monitor, ray_cluster
from jppo.actors import actor_pool as actors
from jppo.actors.actor_pool import ActorPool
from jppo.cli.main import main
from jppo.config.ray import RayConfig
from jppo.envs.host_families import pickle_registrations, restore_registrations
from jppo.errors import ActorsFailed
from jppo.networks.actor_critic import make_network
from jppo.runs.run_dir import load_policy_state, read_metrics
from jppo.training.progress import NullReporter

CONFIG = SMALL(num_envs=8, num_steps=16, num_minibatches=2, normalize_obs=True)
UPDATES = 6
NO_ROW = ("time/", "actors/")  # metrics that measure time


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory):
    """Starts Ray, which runs must not stop. Returns the directory for notes of environments without one."""
    notes = tmp_path_factory.mktemp("notes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        patch.setenv("RAY_worker_niceness", "0")  # the time limits of these tests are short
        patch.setenv(NOTES, str(notes))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield notes
        assert ray.is_initialized()
        mine = descendants()
        ray.shutdown()
    left = left_of(mine, 20.0)
    assert not left


class Recorder(NullReporter):
    """Records messages, and calls `act` with the number of updates."""

    def __init__(self, act=lambda update: None):
        self.act, self.messages, self.started = act, [], time.monotonic()

    def message(self, text):
        self.messages.append(text)

    def update(self, step, steps_per_second, recent_return):
        self.act(step // CONFIG.batch_size)


def train(env, notes, updates=UPDATES, **options):
    """Trains with 2 actors of 4 environments and checks that the actors end with the run."""
    config = options.pop("config", CONFIG)
    given = {"backend": "ray", "num_actors": 2, "seed": 3} | options
    try:
        return jppo.train(env, total_steps=updates * config.batch_size, config=config, **given)
    finally:
        pids = {int(pid) for pid in noted(notes, "pid")} - {os.getpid()}
        left = left_of([process for process in running() if process.pid in pids], 10.0)
        assert not left, "actors still run after the end of the run"


def assert_full_batches(result, updates=UPDATES, num_envs=8):
    """Checks that an episode of each environment ends in each update. Episodes have the length of a rollout."""
    assert result.metrics["update"].tolist() == list(range(1, updates + 1))
    np.testing.assert_array_equal(result.metrics["episode/count"], num_envs)
    np.testing.assert_array_equal(result.metrics["episode/length_mean"], CONFIG.num_steps)


def assert_same_run(a, b):
    for name in a.metrics:
        if name.startswith(NO_ROW):
            continue
        if name.startswith(("episode/", "update", "env_steps")):
            np.testing.assert_array_equal(a.metrics[name], b.metrics[name], name)
        else:
            np.testing.assert_allclose(a.metrics[name], b.metrics[name], 1e-3, 1e-6, err_msg=name)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), a.policy.state, b.policy.state)


@pytest.fixture(scope="module")
def told(local_ray, tmp_path_factory):
    """Trains with environments that write facts about their process. Returns the result, the notes and the messages."""
    notes, recorder = tmp_path_factory.mktemp("told"), Recorder()
    result = train(functools.partial(Telling, notes=notes), notes, actor_cpus=0.5, progress=recorder)
    return result, notes, recorder


def test_a_run_with_actors_equals_a_run_in_this_process(told, tmp_path):
    alone = jppo.train(
        functools.partial(Healthy, notes=tmp_path),
        total_steps=UPDATES * CONFIG.batch_size,
        config=CONFIG,
        backend="ray",
        num_actors=0,
        seed=3,
    )
    assert set(told[0].metrics) == set(alone.metrics)
    assert_same_run(told[0], alone)
    assert_full_batches(told[0])
    assert told[0].summary["num_actors"] == 2
    assert told[0].summary["envs_per_actor"] == 4
    assert told[0].summary["lost_fragments"] == told[0].summary["restarts"] == 0
    assert alone.summary["num_actors"] == 0


def test_a_run_in_this_process_limits_the_threads_of_numpy(tmp_path):
    def blas_threads():
        return {pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"}

    class Noting(Healthy):
        def step(self, action):
            seen.append(blas_threads())
            return super().step(action)

    seen = []
    with threadpoolctl.threadpool_limits(limits=2, user_api="blas"):
        jppo.train(lambda: Noting(tmp_path), total_steps=1, config=CONFIG, backend="ray", num_actors=0)
        assert blas_threads() == {2}, "the limit ends with the rollout"
    assert {1} == set().union(*seen[-CONFIG.batch_size :])


def test_an_actor_has_one_thread_on_the_cpu_and_half_a_core(told):
    facts = [json.loads(path.read_text()) for path in told[1].glob("facts-*")]
    assert len(facts) == 2
    for fact in facts:
        assert fact["environ"]["JAX_PLATFORMS"] == "cpu"
        assert fact["environ"]["OMP_NUM_THREADS"] == fact["environ"]["NPROC"] == "1"
        assert {*os.environ["XLA_FLAGS"].split()} <= {*fact["environ"]["XLA_FLAGS"].split()}, "flags of the user"
        assert fact["threads"].count("tf_XLAEigen") <= 1, "XLA may have one thread"
        assert fact["at_once"], "computations must run in the calling thread"
        assert fact["cpus"] == 0.5


def test_actors_close_their_environments_and_end_their_child_processes(told):
    _, notes, recorder = told
    acted = {path.name.removeprefix("facts-") for path in notes.glob("facts-*")}
    assert acted <= set(noted(notes, "closed"))
    children = [json.loads(path.read_text())["child"] for path in notes.glob("facts-*")]
    assert not {process.pid for process in running()} & set(children)
    assert [message.split(" after ")[0] for message in recorder.messages[2:]] == ["2 actors on 1 node ready"]


@pytest.mark.slow
def test_a_run_with_policy_lag_1_is_deterministic(local_ray, tmp_path):
    env = functools.partial(Healthy, notes=tmp_path)
    lagging = train(env, tmp_path, policy_lag=1)
    alone = train(env, tmp_path, policy_lag=1, num_actors=0)
    assert_same_run(lagging, alone)
    assert lagging.metrics["actors/policy_lag"].tolist() == [0.0, *[1.0] * (UPDATES - 1)]


@pytest.fixture
def evaluated(tmp_path):
    """Returns a function that trains with evaluations by `FaultyEvaluation` after every fourth update."""
    given = {"eval_every": 4, "eval_episodes": 3, "run_dir": tmp_path / "run"}

    def run(fault="raise", times=1, **options):
        env = functools.partial(FaultyEvaluation, fault=fault, times=times, notes=tmp_path)
        return train(env, tmp_path, **given | options)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "options"),
    [("raise", {}), ("raise", {"policy_lag": 1}), ("exit", {"eval_every": 6}), ("hang", {"actor_timeout": 0.02})],
)
def test_evaluation_whose_actor_fails_is_repeated(local_ray, evaluated, tmp_path, fault, options):
    result = evaluated(fault, progress=(recorder := Recorder()), eval_max_steps=1000, **options)
    assert_full_batches(result)
    alone = evaluated(num_actors=0, run_dir=tmp_path / "alone", **options)
    rows = [options.get("eval_every", 4) - 1]
    for name in ("eval/return_mean", "eval/return_std", "eval/length_mean"):
        assert np.flatnonzero(np.isfinite(result.metrics[name])).tolist() == rows
        assert result.metrics[name][rows] == alone.metrics[name][rows], name
    failures = [text[:40] for text in recorder.messages if "failed" in text]
    assert failures[0] == "actor 0 (environments 0 to 3) failed (" + {"raise": "Un", "exit": "Ac", "hang": "no"}[fault]
    assert (result.summary["restarts"], result.summary["lost_fragments"], result.status) == (
        len(failures),
        0,
        "finished",
    )
    assert len(failures) == 1 or fault == "hang", "only a busy machine exceeds the short time limit again"
    best = jppo.load_policy(tmp_path / "run", env=functools.partial(Healthy, notes=tmp_path), best=True)
    assert result.summary["best_update"] == rows[0] + 1
    assert isinstance(best, jppo.TrainedPolicy)


@pytest.mark.slow
def test_evaluation_that_always_fails_ends_the_run_with_everything_saved(local_ray, evaluated):
    message = (
        r"^actor 0 .* failed 2 times in a row, .*:\nTraceback (.*\n)*faulty_envs.Unpicklable: the simulator is gone"
    )
    with pytest.raises(ActorsFailed, match=message) as caught:
        evaluated(times=99, max_restarts=1)
    summary = caught.value.result.summary
    assert (summary["status"], summary["updates"], summary["checkpoint"]) == ("failed", 4, 4)


@pytest.mark.slow
def test_ctrl_c_ends_an_evaluation(local_ray, evaluated, tmp_path):
    def interrupt():
        while not noted(tmp_path, "evaluating"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    result = evaluated("hang")
    summary = result.summary
    assert (summary["status"], summary["updates"], summary["checkpoint"]) == ("interrupted", 4, 4)
    assert not any(name.startswith("eval/") for name in result.metrics)


@pytest.mark.slow
def test_parameters_may_be_of_a_class_that_actors_cannot_import(local_ray, tmp_path):
    class Params(NamedTuple):
        inner: Any

    class Wrapped:
        def __init__(self, network):
            self.network = network

        def init(self, key, obs):
            return Params(self.network.init(key, obs))

        def apply(self, params, obs):
            return self.network.apply(params.inner, obs)

    env = functools.partial(Healthy, notes=tmp_path)
    host_env = jppo.make_host_env(env)
    network = Wrapped(make_network(CONFIG, host_env.obs_spec, host_env.action_spec))
    assert isinstance(train(env, tmp_path, network=network).policy.state.params, Params)


def test_any_failure_of_an_actor_loses_one_fragment(local_ray, tmp_path):
    faults = ["raise", "exit", "kill", "hang"]
    recorder = Recorder()
    env = functools.partial(Faulty, faults=faults, at=40, notes=tmp_path)
    config = SMALL(num_envs=4, num_steps=16, num_minibatches=2)
    options = {"config": config, "num_actors": 4, "actor_cpus": 0.5, "actor_timeout": 5.0, "progress": recorder}
    result = train(env, tmp_path, **options)
    assert_full_batches(result, num_envs=4)
    assert set(noted(tmp_path, "fault")) == set(faults)
    lost = [0, 0, *[4] * (UPDATES - 2)]  # step 40 is in the third fragment
    assert result.metrics["actors/lost_fragments"].tolist() == result.metrics["actors/restarts"].tolist() == lost
    assert result.summary["status"] == "finished"
    assert (result.summary["lost_fragments"], result.summary["restarts"]) == (4, 4)
    said = "\n".join(sorted(message for message in recorder.messages if "failed" in message))
    assert said.count("a new one starts in 0.5 s") == 4
    for number in range(4):
        assert f"actor {number} (environments {number} to {number}) failed (" in said
    assert "(Unpicklable: the simulator is gone (code 7));" in said
    assert "(no answer within 5 s);" in said
    assert said.count("(ActorDiedError: ") == 2
    notes = [name.split("-") for name in noted(tmp_path, "seed")]
    seeds = [seed for seed, pid in notes if int(pid) != os.getpid()]  # the driver only checks the environment
    assert len(set(seeds)) == len(seeds) == 8, "environments of a new actor must have new seeds"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stop", "hang in C"])
def test_processes_that_do_not_respond_are_killed(local_ray, tmp_path, fault):
    env = functools.partial(Faulty, faults=[fault], at=40, notes=tmp_path)
    result = train(env, tmp_path, actor_timeout=5.0)
    assert_full_batches(result)
    assert result.summary["restarts"] == 1


@pytest.mark.slow
def test_an_environment_that_always_raises_ends_the_run_with_its_traceback(local_ray, tmp_path):
    recorder = Recorder()
    with pytest.raises(ActorsFailed) as caught:
        train(
            functools.partial(Broken, where="step", notes=tmp_path),
            tmp_path,
            progress=recorder,
            run_dir=tmp_path / "run",
        )
    text = str(caught.value)
    assert " failed 2 times in a row, the last time with:\nTraceback (most recent call last):" in text
    assert 'tests/faulty_envs.py", line ' in text
    assert text.endswith("RuntimeError: no licence in step")
    assert "\x1b" not in text
    assert caught.value.result is None
    assert not (tmp_path / "run").exists()
    assert time.monotonic() - recorder.started < 60.0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["making", "reset"])
def test_an_environment_that_raises_in_actors_only_ends_the_run(local_ray, tmp_path, where):
    env = functools.partial(Broken, where=where, notes=tmp_path)
    with pytest.raises(ActorsFailed, match=f"(?s) failed once, the last time with:.*: no licence in {where}$"):
        train(env, tmp_path, max_restarts=0, num_actors=1)


@pytest.mark.slow
def test_a_run_that_fails_is_saved(local_ray, tmp_path, capsys):
    sizes = ["--num-envs", "8", "--num-steps", "16", "--num-minibatches", "2", "--hidden-sizes", "8"]
    options = ["--num-actors", "2", "--max-restarts", "1", "--run-dir", str(tmp_path / "run"), "--json", *sizes]
    code = main(["train", "faulty_envs:WearsOut", "--total-steps", "1e6", *options])
    out, err = capsys.readouterr()
    assert code == 3
    assert "failed 2 times in a row" in err
    assert 'faulty_envs.py", line' in err
    assert "RuntimeError: the gear is worn out" in err
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary == json.loads(out)
    updates = 99 // 16
    assert (summary["status"], summary["updates"], summary["restarts"]) == ("failed", updates, 2)
    assert read_metrics(tmp_path / "run")["update"].tolist() == list(range(1, updates + 1))
    healthy = functools.partial(Healthy, notes=tmp_path)  # has the same spaces
    agent = jppo.make_sebulba(healthy, SMALL(num_envs=8, num_steps=16, num_minibatches=2))
    state = jax.eval_shape(agent.init, jax.random.key(0)).policy_state
    assert load_policy_state(tmp_path / "run", state).params


def kill_at_random(notes, over):
    """Kills three actors that have environments, at random times. Returns the number of killed actors."""
    chance, killed = random.Random(0), []
    while len(killed) < 3 and not over.wait(chance.uniform(0.5, 1.5)):
        theirs = {int(pid) for pid in noted(notes, "pid")} - set(killed)
        pids = sorted(process.pid for process in descendants() if process.pid in theirs)
        if pids:  # other actors have not made their environments yet
            killed.append(chance.choice(pids))
            os.kill(killed[-1], signal.SIGKILL)
    return len(killed)


@pytest.mark.slow
def test_a_run_survives_actors_killed_at_random_times(local_ray, tmp_path):
    updates = 8
    started, over = threading.Event(), threading.Event()
    recorder = Recorder(lambda update: over.set() if update >= updates - 3 else None)
    recorder.message = lambda text: started.set() if "ready" in text else None
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        kills = pool.submit(lambda: started.wait() and kill_at_random(tmp_path, over))
        try:
            env = functools.partial(Healthy, step_seconds=0.01, notes=tmp_path)  # 0.64 s per fragment
            result = train(env, tmp_path, updates, max_restarts=10, progress=recorder)
        finally:
            started.set()
            over.set()
    assert_full_batches(result, updates)
    assert 3 <= kills.result() == result.summary["restarts"]
    assert 1 <= result.summary["lost_fragments"] <= kills.result()
    assert result.metrics["actors/lost_fragments"][-1] == result.summary["lost_fragments"]


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        (Healthy, {"actor_gpus": 0.5}, r"^2 actors of actor_gpus = 0\.5 need 1 GPUs; Ray has 0$"),
        (
            lambda lock=threading.Lock(): Healthy(),
            {},
            r"<lambda>, or the network, cannot be sent to another process \(cannot pickle '_thread\.lock' object\);",
        ),
    ],
)
def test_invalid_resources_and_environments_are_refused(local_ray, tmp_path, env, options, message):
    with pytest.raises(ValueError, match=message):
        train(env, tmp_path, **options)
    assert ray.is_initialized()


class PretendCall:
    def __init__(self, due, answer):
        self.due, self.answer = due, answer


class PretendRay:
    """Replaces Ray and time. `behaviour` defines the duration and the result of each call of an actor."""

    exceptions = ray.exceptions
    util = types.SimpleNamespace(get_current_placement_group=lambda: None)
    free = 0.0  # CPUs
    stopped = None  # the message of the pretended DaemonMonitor
    head_answers = True

    def __init__(self, behaviour):
        self.behaviour, self.now = behaviour | {"close": lambda: (0.0, None), "call": None}, 0.0
        self.began, self.killed = [], []  # (time, environments), time

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def is_initialized(self):
        return True

    cloudpickle = ray.cloudpickle

    def cluster_resources(self):
        return {"CPU": 99.0}

    def available_resources(self):
        return {"CPU": self.free}

    def find_failure(self, at_once, closing):
        return self.stopped

    def put(self, value):
        return value

    def remote(self, cls):
        return types.SimpleNamespace(options=lambda **options: types.SimpleNamespace(remote=self.actor))

    def actor(self, import_path, registrations):
        methods = {name: types.SimpleNamespace(remote=functools.partial(self.call, name)) for name in self.behaviour}
        return types.SimpleNamespace(**methods)

    def call(self, name, *args):
        if name == "begin":
            self.began.append((self.now, args[1].tolist()))
        seconds, answer = self.behaviour[args[0] if name == "call" else name]()
        return PretendCall(self.now + seconds, answer)

    def wait(self, calls, num_returns, timeout):
        due = sorted(call.due for call in calls)[num_returns - 1]
        self.now = min(self.now + timeout, max(self.now, due))
        done = [call for call in calls if call.due <= self.now]
        return done, [call for call in calls if call not in done]

    def get(self, call, timeout):
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    def kill(self, actor):
        self.killed.append(self.now)


def fragment(seconds):
    return types.SimpleNamespace(seconds={"rollout": seconds})


DIED = ray.exceptions.RayError("gone")


@pytest.fixture
def pretend(monkeypatch):
    """Returns a function that makes a ready pool of two actors, the replaced Ray, and the list of messages."""

    def make(*collects, begin=(3.0, None), **config):
        rest = iter(collects)
        behaviour = {"collect": lambda: next(rest), "place": lambda: (0.0, "node"), "begin": lambda: begin}
        pretended, said = PretendRay(behaviour), []
        for module in (actors, actor, ray_cluster):
            monkeypatch.setattr(module, "ray", pretended)
        monkeypatch.setattr(actors, "DaemonMonitor", lambda own_cluster: pretended)
        monkeypatch.setattr(actors, "time", pretended)
        spec: Any = types.SimpleNamespace(env=types.SimpleNamespace(source=None))
        fleet = ActorPool(spec, RayConfig(**{"num_actors": 2, "envs_per_actor": 2} | config), said.append)
        while fleet.ready(0.2) is None:
            pass
        return fleet, pretended, said

    return make


def rollout(fleet, pretended):
    """Collects one rollout. Returns its duration."""
    fleet.start(None, 0.9)
    begin = pretended.now
    while True:
        before = pretended.now
        fragments = fleet.poll(0.2)
        assert pretended.now - before <= 0.2 + 1e-9, "poll exceeds its timeout"
        if fragments is not None:
            assert len(fragments) == 2
            return pretended.now - begin


NEVER = (1e9, None)


def test_an_evaluation_is_repeated_while_an_actor_has_tries(pretend):
    fine, answers = (1.0, fragment(1.0)), iter([(0.5, DIED), NEVER, (9.0, "metrics"), *[(0.5, DIED)] * 4])
    fleet, pretended, said = pretend(*[fine] * 5)
    pretended.behaviour["evaluate"] = lambda: next(answers)
    rollout(fleet, pretended)

    def evaluate():
        fleet.start_evaluation(None, 4, lambda: False, max_rollouts=20.0)
        while (results := fleet.poll(0.2)) is None:
            pass
        return results

    assert evaluate() == ["metrics"]
    assert [text.partition(" (environments 0 to 1) failed ")[::2] for text in said] == [
        ("actor 0", "(RayError: gone); a new one starts in 0.5 s"),
        ("actor 0", "(no answer within 200 s); a new one starts in 1.0 s"),
    ]
    assert fleet.counts() == {"lost_fragments": 0, "restarts": 2}
    rollout(fleet, pretended)
    with pytest.raises(ActorsFailed, match=r"^actor 0 .* failed 4 times in a row"):
        evaluate()


def test_the_time_limit_follows_the_longest_rollout(pretend):
    slow, quick = (1700.0, fragment(1700.0)), (3.0, fragment(3.0))
    fleet, pretended, said = pretend(slow, slow, NEVER, slow, slow)
    assert rollout(fleet, pretended) == pytest.approx(1700.0, abs=0.3)
    assert said == []
    assert rollout(fleet, pretended) == pytest.approx(17000.0 + 0.5 + 3.0 + 1700.0, abs=1.0), (
        "the limit is ten times the longest rollout"
    )
    fleet, pretended, said = pretend(quick, quick, NEVER, quick, quick)
    rollout(fleet, pretended)
    assert rollout(fleet, pretended) == pytest.approx(60.0 + 0.5 + 3.0 + 3.0, abs=1.0), "the limit is at least a minute"
    assert said == ["actor 0 (environments 0 to 1) failed (no answer within 60 s); a new one starts in 0.5 s"]


def test_the_first_rollout_determines_the_time_limit(pretend):
    quick = (3.0, fragment(3.0))
    fleet, pretended, _ = pretend(NEVER, quick, quick)
    assert rollout(fleet, pretended) == pytest.approx(60.0 + 0.5 + 3.0 + 3.0, abs=1.0)


def test_time_limits_count_only_time_spent_waiting(pretend):
    fleet, pretended, said = pretend((105.0, fragment(105.0)), (1.0, fragment(1.0)), NEVER, *[(1.0, fragment(1.0))] * 2)
    fleet._config = RayConfig(num_actors=2, envs_per_actor=2, actor_timeout=10.0)
    fleet.start(None, 0.9)
    pretended.now += 100.0  # for example, a long update
    while fleet.poll(0.2) is None:
        pass
    assert said == []
    assert rollout(fleet, pretended) == pytest.approx(10.0 + 0.5 + 3.0 + 1.0, abs=1.0)


def test_consecutive_failures_double_the_wait_and_end_the_run(pretend):
    fine, died = (1.0, fragment(1.0)), (0.5, DIED)
    fleet, pretended, said = pretend(fine, fine, fine, died, died, died, died)
    rollout(fleet, pretended)
    with pytest.raises(ActorsFailed, match=r"^actor 1 \(environments 2 to 3\) failed 4 times in a row, the last time "):
        rollout(fleet, pretended)
    assert [message.rpartition(" in ")[2] for message in said] == ["0.5 s", "1.0 s", "2.0 s"]
    assert [numbers for _, numbers in pretended.began] == [[0, 1], [2, 3], [6, 7], [10, 11], [14, 15]]
    waits = np.subtract([when for when, _ in pretended.began[2:]], pretended.killed[:3])
    np.testing.assert_allclose(waits, [0.5, 1.0, 2.0], atol=0.01)
    assert fleet.counts() == {"lost_fragments": 4, "restarts": 3}


def test_a_success_resets_the_count_of_failures(pretend):
    fine, died = (1.0, fragment(1.0)), (0.5, DIED)
    fleet, pretended, said = pretend(*[fine, fine], *[fine, died, fine] * 9, max_restarts=1)
    for _ in range(10):
        rollout(fleet, pretended)
    assert {message.rpartition(" in ")[2] for message in said} == {"0.5 s"}
    assert fleet.counts() == {"lost_fragments": 9, "restarts": 9}


def test_a_failure_during_the_start_loses_no_fragment(pretend):
    fine = (1.0, fragment(1.0))
    fleet, pretended, _ = pretend(fine, fine, (0.5, DIED), fine, fine)
    rollout(fleet, pretended)
    starts = iter([(2.0, DIED), (1e9, None), (3.0, None)])
    pretended.behaviour["begin"] = lambda: next(starts)
    assert rollout(fleet, pretended) == pytest.approx(0.5 + 0.5 + 2.0 + 1.0 + 300.0 + 2.0 + 3.0 + 1.0, abs=2.0)
    assert fleet.counts() == {"lost_fragments": 1, "restarts": 3}


def test_before_the_first_rollout_one_restart_is_allowed(pretend):
    died = (0.5, DIED)
    fleet, pretended, _ = pretend(died, died, died, died)
    with pytest.raises(ActorsFailed, match=r"failed 2 times in a row, the last time with:\ngone$"):
        rollout(fleet, pretended)


def test_an_actor_without_resources_waits_without_limit(pretend):
    fine = (1.0, fragment(1.0))
    fleet, pretended, said = pretend(fine, fine, (0.5, DIED), fine, fine)
    rollout(fleet, pretended)
    pretended.behaviour["place"] = lambda: (3600.0, "node")
    assert rollout(fleet, pretended) == pytest.approx(0.5 + 0.5 + 3600.0 + 3.0 + 1.0, abs=2.0)
    reason = "waiting for resources: each needs 1 CPUs, and 0 of 99 CPUs are free (see `ray status`)"
    assert said[1:] == [f"1 of 2 actors are {reason}"] * 60
    assert fleet.counts() == {"lost_fragments": 1, "restarts": 1}


def test_actors_that_start_slowly_are_not_reported_as_waiting_for_resources(pretend):
    fine = (1.0, fragment(1.0))
    fleet, pretended, said = pretend(fine, fine, (0.5, DIED), fine, fine)
    rollout(fleet, pretended)
    pretended.free = 1.0
    pretended.behaviour["place"] = lambda: (30.0, "node")
    rollout(fleet, pretended)
    reason = "still starting; Ray has resources for them, but the machine may be busy"
    assert said[1:] == [f"1 of 2 actors are {reason}"]


def test_the_first_start_has_the_longest_time_limit(pretend):
    fine = (1.0, fragment(1.0))
    fleet, pretended, said = pretend(fine, fine, (0.5, DIED), fine, fine, begin=(1500.0, None))
    rollout(fleet, pretended)
    assert said == []
    assert fleet.counts() == {"lost_fragments": 0, "restarts": 0}


def test_time_limits_exclude_the_time_for_which_the_driver_was_stopped(pretend):
    fine = (1.0, fragment(1.0))
    fleet, pretended, said = pretend(fine, fine, (70.0, fragment(1.0)), (70.0, fragment(1.0)))
    rollout(fleet, pretended)
    fleet.start(None, 0.9)
    wait = pretended.wait

    def wait_while_stopped(calls, num_returns, timeout):
        result = wait(calls, num_returns, timeout)
        pretended.now += 65.0  # for example SIGSTOP and SIGCONT for the whole run
        pretended.wait = wait
        return result

    pretended.wait = wait_while_stopped
    while fleet.poll(0.2) is None:
        pass
    assert said == []
    assert fleet.counts() == {"lost_fragments": 0, "restarts": 0}


def test_a_daemon_that_stops_ends_the_run_and_the_connection(pretend, monkeypatch):
    fine, disconnected = (1.0, fragment(1.0)), []

    def disconnect(failed):
        disconnected.append(failed)

    monkeypatch.setattr(actors, "disconnect", disconnect)
    fleet, pretended, said = pretend(fine, fine)
    rollout(fleet, pretended)
    pretended.stopped = "the raylet stopped"
    assert not fleet.check_daemons()
    fleet.start(None, 0.9)  # makes no call
    with pytest.raises(ActorsFailed, match=r"^the raylet stopped$"):
        fleet.poll(0.2)
    assert (disconnected, said) == ([True], [])


def test_a_dead_actor_is_not_restarted_without_daemons(pretend, monkeypatch):
    fine = (1.0, fragment(1.0))
    monkeypatch.setattr(actors, "disconnect", lambda failed: None)
    fleet, pretended, said = pretend(fine, fine, (0.5, DIED), (0.5, DIED))
    rollout(fleet, pretended)
    pretended.find_failure = lambda at_once, closing: "the raylet stopped" if at_once else None
    with pytest.raises(ActorsFailed, match=r"^the raylet stopped$"):
        rollout(fleet, pretended)
    assert said == []


def test_the_daemon_monitor_checks_ports(monkeypatch):
    head, raylet = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    context = types.SimpleNamespace(
        gcs_address=f"127.0.0.1:{head.getsockname()[1]}",
        get_node_id=lambda: "own",
        get_temp_dir=lambda: "/tmp/ray",
        get_session_name=lambda: "session_1",
    )
    node = {"NodeID": "own", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": raylet.getsockname()[1]}
    client = types.SimpleNamespace(ray=types.SimpleNamespace(is_connected=lambda: False))
    pretended = types.SimpleNamespace(
        get_runtime_context=lambda: context,
        nodes=lambda: [{"NodeID": "other"}, node],
        util=types.SimpleNamespace(client=client),
    )
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(daemon_monitor, "ray", pretended)
    monkeypatch.setattr(daemon_monitor, "time", clock)
    own, joined = (daemon_monitor.DaemonMonitor(own_cluster) for own_cluster in (True, False))
    assert own.find_failure() is None
    assert joined.find_failure() is None
    head.close()
    clock.now = 1.0
    assert own.find_failure() is None, "the last check is one second old"
    assert re.match(r"Ray's process gcs_server \(127.0.0.1:\d+\) stopped,", own.find_failure(at_once=True))
    assert joined.find_failure(at_once=True) is None, "the head of a cluster may be restarted"
    assert not joined.head_answers
    clock.now = 31.0
    assert "gcs_server" in joined.find_failure()
    raylet.close()
    for monitor in (own, joined):
        assert re.search(r"raylet \(127.0.0.1:\d+\) stopped, .* /tmp/ray/session_1/logs$", monitor.find_failure(True))


def test_the_daemon_monitor_reports_silent_daemons(monkeypatch):
    problems = {"raylet:1": "", "head:2": ""}
    context = types.SimpleNamespace(
        gcs_address="head:2", get_node_id=lambda: 7, get_temp_dir=lambda: "/tmp", get_session_name=lambda: "session"
    )
    pretended = types.SimpleNamespace(
        get_runtime_context=lambda: context,
        nodes=lambda: [{"NodeID": 7, "NodeManagerAddress": "raylet", "NodeManagerPort": 1}],
        util=types.SimpleNamespace(client=types.SimpleNamespace(ray=types.SimpleNamespace(is_connected=lambda: False))),
    )
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(daemon_monitor, "ray", pretended)
    monkeypatch.setattr(daemon_monitor, "time", clock)
    monkeypatch.setattr(daemon_monitor, "_find_problem", lambda address, speaks, timeout: problems[address])
    for silent, name in (("raylet:1", "raylet"), ("head:2", "gcs_server")):
        clock.now = 0.0
        monitor = daemon_monitor.DaemonMonitor(True)
        problems[silent] = "does not respond"
        clock.now = 10.0
        assert monitor.find_failure() is None, "a busy daemon may be silent for a while"
        assert f"{name} ({silent}) does not respond, " in monitor.find_failure(closing=True)
        clock.now = 16.0
        assert f"{name} ({silent}) does not respond, " in monitor.find_failure()
        problems[silent] = ""
        assert monitor.find_failure(closing=True) is None


def test_a_daemon_that_accepts_connections_but_says_nothing_is_silent():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        assert daemon_monitor._find_problem(address, True, 0.1) == "does not respond"
        assert daemon_monitor._find_problem(address, False, 0.1) == ""
    assert daemon_monitor._find_problem(address, True, 0.1) == "stopped"


class Registered(Healthy):
    """A class that tests register with Gymnasium."""


@pytest.fixture
def registry(monkeypatch):
    """Returns a copy of Gymnasium's registry that replaces it during the test."""
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium, "registry", gymnasium.envs.registration.registry)
    return gymnasium.registry


def test_registered_environments_are_sent_to_other_processes(registry):
    class Local(Healthy):
        pass

    gymnasium.register("Own/Local-v0", Local, max_episode_steps=7, kwargs={"notes": None})
    gymnasium.register("Own/Named-v0", f"{__name__}:Registered")
    gymnasium.register("Own/Locked-v0", lambda lock=threading.Lock(): Healthy())
    gymnasium.register("Own/Kept-v0", Local)
    sent = pickle_registrations(ray.cloudpickle.dumps)
    for name in [name for name in registry if name.startswith("Own/")]:
        del registry[name]
    gymnasium.register("Own/Kept-v0", Registered)
    restore_registrations([b"not a pickle", *sent])
    assert {name for name in registry if name.startswith("Own/")} == {"Own/Local-v0", "Own/Named-v0", "Own/Kept-v0"}
    assert registry["Own/Kept-v0"].entry_point is Registered, "the other process has its own"
    assert registry["Own/Local-v0"].max_episode_steps == 7
    assert not {name for name in map(pickle.loads, sent) if name.id.startswith(("ALE/", "CartPole"))}


@pytest.mark.slow
def test_actors_know_environments_that_only_this_process_has_registered(local_ray, registry, tmp_path):
    gymnasium.register("Own/Local-v0", lambda: Healthy(tmp_path), max_episode_steps=CONFIG.num_steps)
    assert_full_batches(train("Own/Local-v0", tmp_path))
    assert_full_batches(train(lambda: gymnasium.make("Own/Local-v0"), tmp_path))
    gymnasium.register("Own/Locked-v0", lambda lock=threading.Lock(): Healthy(tmp_path))
    with pytest.raises(ValueError, match=r"^Own/Locked-v0, or the network, cannot be sent to another process \(cannot"):
        train("Own/Locked-v0", tmp_path)


@pytest.mark.parametrize("options", [{"num_actors": 0}, {"num_actors": 0, "eval_every": 3}], ids=str)
def test_an_environment_whose_close_raises_does_not_lose_the_run(tmp_path, options):
    class Stubborn(Healthy):
        steps = 0

        def step(self, action):
            self.steps += 1
            return super().step(action)

        def close(self):
            if self.steps > 1:  # not the instance that `make_host_env` checks
                raise OSError("no answer")

    given = {"config": CONFIG, "total_steps": 6 * CONFIG.batch_size, "run_dir": tmp_path / "run"} | options
    with pytest.warns(RuntimeWarning, match=r"Stubborn: close\(\) raised OSError: no answer$"):
        result = jppo.train(functools.partial(Stubborn, tmp_path), backend="ray", **given)
    assert (result.status, (tmp_path / "run/summary.json").is_file()) == ("finished", True)


def test_actors_without_resources_wait_and_report_it(local_ray, tmp_path, monkeypatch):
    monkeypatch.setattr(actors, "_UNPLACED_SECONDS", 1.0)
    recorder = Recorder()

    def message(text):
        recorder.messages.append(text)
        if "waiting for resources" in text:
            raise KeyboardInterrupt

    recorder.message = message
    with pytest.raises(KeyboardInterrupt):
        train(functools.partial(Healthy, notes=tmp_path), tmp_path, actor_cpus=3.0, progress=recorder)
    said = "2 actors of actor_cpus = 3 need 6 CPUs; the cluster has 4: waiting for it to grow"
    assert recorder.messages[1] == said
    reason = r"waiting for resources: each needs 3 CPUs, and [14] of 4 CPUs are free \(see `ray status`\)"
    assert re.fullmatch(f"[12] of 2 actors are {reason}", recorder.messages[-1])


def test_too_few_cpus_are_reported(pretend):
    _, _, said = pretend(actor_cpus=60.0)
    assert said == ["2 actors of actor_cpus = 60 need 120 CPUs; the cluster has 99: waiting for it to grow"]


def test_more_actors_than_cores_are_a_hint_for_environments_that_wait(pretend, monkeypatch):
    monkeypatch.setattr(actors, "connect", lambda config: True)
    monkeypatch.setattr(actors, "cluster_address", lambda config: "local")
    monkeypatch.setattr(actors, "num_cores", lambda: 1)
    _, _, said = pretend()
    assert said == ["num_actors = 2 exceeds 1 CPU cores, which helps only if environments wait"]
