"""Tests how signals end a run with actors, and that no process is left."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import ray
from faulty_envs import Healthy
from processes import left_of, of_session, running

import jppo
from jppo.actors import ray_cluster
from jppo.config.ray import RayConfig
from jppo.devices.signals import defer_signals
from jppo.runs.run_dir import read_metrics
from jppo.training.interrupts import stop_on_interrupt
from jppo.training.progress import NullReporter

PATIENCE = 120.0  # time limit in seconds; a busy machine is slow
SIZES = ["--num-envs", "4", "--num-steps", "32", "--num-minibatches", "2", "--hidden-sizes", "8"]
LINES = [
    r"CartPole-v1: [\d,]+ steps, num_envs = 4, num_steps = 32, 2 actors of 2 environments, .*",
    r"metrics\.jsonl will have about .*",
    r"compiled in [\d.]+ s",
    r"2 actors on 1 node ready after [\d.]+ s",
    r"\d of 2 actors are still starting; Ray has resources for them, but the machine may be busy",
    r"[\d,]+/1,000,000,000 steps .*",
    r"actor [01] \(environments \d to \d\) failed \(ActorDiedError: .*\); a new one starts in 0.5 s",
    r"stopping; completed updates are kept \(Ctrl-C again stops at once\)",
    r"interrupted: [\d,]+ steps, .*",
    r"return .* over the last episodes; [\d.]+ s of starting",
    r"saved in run",
    r"next:",
    r"  jppo train CartPole-v1 --resume run",
    r"  jppo (eval|play|plot) run",
]


class Command:
    """Runs `jppo train` with two actors in a new process group, like a terminal."""

    def __init__(self, directory):
        self.directory = directory
        program = "import sys; from jppo.cli.main import main; sys.exit(main())"
        options = ["CartPole-v1", "--backend", "ray", "--num-actors", "2", "--total-steps", "1e9", "--run-dir", "run"]
        self.out, self.err = directory / "out", directory / "err"
        with self.out.open("w") as out, self.err.open("w") as err:
            argv = [sys.executable, "-c", program, "train", *options, *SIZES]
            self.process = subprocess.Popen(argv, stdout=out, stderr=err, cwd=directory, start_new_session=True)

    def await_(self, happened):
        end = time.monotonic() + PATIENCE
        while not happened():
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < end, self.out.read_text()
            time.sleep(0.05)

    def started(self):
        """Returns the running processes of the command."""
        return of_session(self.process.pid)

    def acting(self):
        return [process.pid for process in self.started() if process.command.startswith("ray::ActorProcess")]

    def signal(self, number):
        """Sends a signal to the process group, like a terminal or `timeout`. Ray's processes have other groups."""
        os.killpg(self.process.pid, number)

    def ended(self, everything, seconds=15.0):
        """Waits until the command and all its processes have ended. Returns the exit code."""
        code = self.process.wait(seconds)
        everything = [*everything, *self.started()]
        assert not left_of(without_agents(everything), seconds)
        assert not left_of(everything, PATIENCE)
        return code


def without_agents(processes):
    """Leaves out two of Ray's agents, which try for a minute to reach the dead driver."""
    return [process for process in processes if not process.command.endswith("Agent")]


@pytest.fixture
def command(tmp_path):
    started = Command(tmp_path)
    yield started
    end_session(started)


def end_session(command):
    for process in command.started():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    command.process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_saves_and_leaves_no_process(command, number):
    command.await_(lambda: " steps/s " in command.out.read_text())
    command.await_(lambda: not any("ray::IDLE" in process.command for process in command.started()))
    os.kill(command.acting()[0], signal.SIGKILL)  # the signal arrives while this actor is restarted
    command.await_(lambda: " failed (" in command.out.read_text())
    everything = command.started()
    daemons = [process for process in everything if re.search("/ray/.*(gcs_server|raylet|monitor)", process.command)]
    assert len(daemons) >= 3
    assert [process for process in daemons if os.getpgid(process.pid) == command.process.pid] == []
    command.signal(number)
    assert command.ended(everything) == 130, command.err.read_text()
    said = command.out.read_text().splitlines()
    assert [line for line in said if not any(re.fullmatch(pattern, line) for pattern in LINES)] == [], (
        "Ray must not print anything"
    )
    assert command.err.read_text() == ""
    summary = json.loads((command.directory / "run/summary.json").read_text())
    assert (summary["status"], summary["lost_fragments"]) == ("interrupted", 1)
    assert read_metrics(command.directory / "run")["update"].tolist() == list(range(1, summary["updates"] + 1))
    assert (command.directory / "run/policy_state.npz").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("daemon", ["raylet", "gcs_server"])
def test_a_run_whose_daemon_is_killed_is_saved_and_can_be_resumed(command, daemon):
    command.await_(lambda: " steps/s " in command.out.read_text())
    everything = command.started()
    (pid,) = (process.pid for process in everything if Path(process.command.split()[0]).name == daemon)
    os.kill(pid, signal.SIGKILL)
    assert command.process.wait(30.0) == 3
    assert not left_of(without_agents(everything), 15.0)
    error = rf"jppo: Ray's process {daemon} \([\d.]+:\d+\) stopped, .* train again with the same run_dir to resume .*\n"
    assert re.fullmatch(error, command.err.read_text())
    summary = json.loads((command.directory / "run/summary.json").read_text())
    assert (summary["status"], summary["checkpoint"]) == ("failed", summary["updates"])
    assert read_metrics(command.directory / "run")["update"].tolist() == list(range(1, summary["updates"] + 1))
    assert (command.directory / "run/policy_state.npz").is_file()
    again = Command(command.directory)
    try:
        again.await_(lambda: " steps/s " in again.out.read_text())
        again.signal(signal.SIGINT)
        assert again.process.wait(60.0) == 130
    finally:
        end_session(again)
    resumed = json.loads((command.directory / "run/summary.json").read_text())
    assert resumed["updates"] > summary["updates"]
    assert read_metrics(command.directory / "run")["update"].tolist() == list(range(1, resumed["updates"] + 1))


@pytest.mark.slow
def test_two_interrupts_while_actors_start_end_the_run_at_once(command):
    command.await_(command.acting)
    everything = command.started()
    command.signal(signal.SIGINT)
    time.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):  # on a fast machine, the first has ended the run
        command.signal(signal.SIGINT)
    assert command.ended(everything) == 130, command.err.read_text()
    assert command.err.read_text() == "jppo: interrupted\n"
    run = command.directory / "run"
    assert not run.exists() or len(read_metrics(run)["update"]), "a run without an update must leave no directory"


@pytest.mark.slow
def test_the_processes_of_a_killed_driver_end(command):
    command.await_(lambda: "ready" in command.out.read_text())
    everything = without_agents(command.started())
    assert len(command.acting()) == 2
    assert len(everything) >= 7
    os.kill(command.process.pid, signal.SIGKILL)
    assert command.process.wait(PATIENCE) == -signal.SIGKILL
    assert not left_of(everything, 10.0)


@pytest.mark.slow
def test_all_processes_of_a_killed_driver_end_after_a_minute(command):
    command.await_(lambda: "ready" in command.out.read_text())
    everything = command.started()
    os.kill(command.process.pid, signal.SIGKILL)
    assert command.process.wait(PATIENCE) == -signal.SIGKILL
    assert not left_of(everything, 90.0)


@pytest.fixture
def own_hangup():
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_stops_a_run_but_does_not_cut_it_off(own_hangup):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with stop_on_interrupt(NullReporter()) as stop_requested:
        assert not stop_requested()
        for _ in range(2):  # of the terminal and of its shell
            signal.raise_signal(signal.SIGHUP)
        assert stop_requested()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_nohup_keeps_a_run(own_hangup):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_on_interrupt(NullReporter()) as stop_requested, defer_signals():
        signal.raise_signal(signal.SIGHUP)
        assert not stop_requested()


def test_connecting_keeps_signal_handlers_and_defers_signals(monkeypatch):
    seen, calls = [], []

    def init(address, **options):
        calls.append(address)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))  # like Ray
        os.kill(os.getpid(), signal.SIGINT)
        assert seen == []

    worker = types.SimpleNamespace()
    private = types.SimpleNamespace(worker=worker)
    pretended = types.SimpleNamespace(is_initialized=lambda: False, init=init, shutdown=lambda: None, _private=private)
    pretended.job_config = ray.job_config
    monkeypatch.setattr(ray_cluster, "ray", pretended)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: seen.append(number)) for number in numbers}
    mine = signal.getsignal(signal.SIGTERM)
    try:
        assert ray_cluster.connect(RayConfig(num_actors=9))
        assert signal.getsignal(signal.SIGTERM) is mine
        assert seen == [signal.SIGINT]
        pretended.init = lambda *args, **options: os.kill(os.getpid(), signal.SIGTERM) or sys.exit(15)
        with pytest.raises(KeyboardInterrupt):
            ray_cluster.connect(RayConfig(num_actors=9))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        ray_cluster.disconnect()
    assert calls == ["local"]


def test_runs_in_several_threads_share_the_connection(monkeypatch):
    state = types.SimpleNamespace(connected=False, shutdowns=0, killed=0)

    def init(address, **options):
        state.connected = True

    def shutdown():
        state.shutdowns += state.connected
        state.connected = False

    def kill(**options):
        state.killed += 1

    node = types.SimpleNamespace(head=True, kill_all_processes=kill)
    worker = types.SimpleNamespace(_global_node=node)
    pretended = types.SimpleNamespace(is_initialized=lambda: state.connected, init=init, shutdown=shutdown)
    pretended._private = types.SimpleNamespace(worker=worker)
    pretended.job_config = ray.job_config
    monkeypatch.setattr(ray_cluster, "ray", pretended)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = RayConfig(num_actors=2)
    assert ray_cluster.connect(config)
    assert ray_cluster.connect(config)
    ray_cluster.disconnect()
    assert state.connected, "the other run needs it"
    ray_cluster.disconnect()
    assert (state.connected, state.shutdowns, state.killed) == (False, 1, 0)
    assert ray_cluster.connect(config)
    assert ray_cluster.connect(config)
    ray_cluster.disconnect(failed=True)
    assert (state.connected, state.shutdowns, state.killed) == (False, 2, 1)
    state.connected = True  # by the user
    assert not ray_cluster.connect(config)
    with pytest.raises(ValueError, match="would be another cluster"):
        ray_cluster.connect(RayConfig(num_actors=2, address="other:1"))


@pytest.mark.parametrize(
    ("error", "address", "name", "message"),
    [
        (OSError("disk full"), "local", "RAY_ADDRESS", r"^Ray cannot start on this machine: disk full$"),
        (
            OSError("refused"),
            "a:1",
            "RAY_ADDRESS",
            r"at RAY_ADDRESS = 'a:1' \(refused\);.* or leave RAY_ADDRESS out for a",
        ),
        (
            OSError("refused"),
            "a:1",
            "address",
            r"at address = 'a:1' \(refused\);.* or leave address out for a local one$",
        ),
        (
            type("AuthenticationError", (Exception,), {})("InvalidAuthToken: ..."),
            "a:1",
            "address",
            r"^the Ray cluster at address = 'a:1' needs a token .*; set RAY_AUTH_MODE=token and copy",
        ),
    ],
)
def test_failures_of_a_connection_name_their_remedy(error, address, name, message):
    assert re.search(message, ray_cluster._explain(error, address, name))


PROGRAM = """
import gymnasium, jppo, psutil

def note_addresses(event):
    listening = [c for p in psutil.Process().children(True) for c in p.net_connections("tcp") if c.status == "LISTEN"]
    addresses.update(c.laddr.ip.removeprefix("::ffff:") for c in listening)

addresses = set()
sizes = {"num_actors": 1, "num_envs": 2, "num_steps": 16, "total_steps": 64}
result = jppo.train(lambda: gymnasium.make("CartPole-v1"), **sizes, callback=note_addresses)
print(result.status, *addresses)
"""


@pytest.mark.slow
def test_ray_starts_on_this_machine_only_in_a_long_folder_and_without_stderr(tmp_path):
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    argv = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, PROGRAM]
    before = {*Path("/tmp").glob("ray-*")}
    done = subprocess.run(
        argv, timeout=PATIENCE, check=False, env=os.environ | {"TMPDIR": str(folder)}, stdout=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stdout) == (0, "finished 127.0.0.1\n")
    assert {*Path("/tmp").glob("ray-*")} <= before


THREADS = """
import threading, time, gymnasium, jppo, ray

def run(updates):
    result = jppo.train(lambda: gymnasium.make("CartPole-v1"), total_steps=64 * updates, callback=wait, **sizes)
    ended.append((result.status, result.summary["lost_fragments"]))

def wait(event):
    while event.update > 1 and not ended:  # the run that has started Ray ends first
        time.sleep(0.1)

sizes, ended = {"num_actors": 2, "num_envs": 4, "num_steps": 16}, []
threads = [threading.Thread(target=run, args=[updates]) for updates in (1, 20)]
for thread in threads:
    thread.start()
    time.sleep(1.0)
for thread in threads:
    thread.join()
print(ended, ray.is_initialized())
"""


@pytest.mark.slow
def test_the_first_of_two_runs_in_threads_leaves_ray_to_the_other():
    argv = [sys.executable, "-c", THREADS]
    done = subprocess.run(argv, check=False, timeout=PATIENCE, capture_output=True, text=True)
    assert done.stdout == f"{[('finished', 0)] * 2} False\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("daemon", ["raylet", "gcs_server"])
def test_ctrl_c_ends_a_run_whose_daemon_is_frozen(command, daemon):
    command.await_(lambda: " steps/s " in command.out.read_text())
    everything = command.started()
    (pid,) = (process.pid for process in everything if Path(process.command.split()[0]).name == daemon)
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    command.signal(signal.SIGINT)
    assert command.process.wait(PATIENCE) == 130, command.err.read_text()
    assert time.monotonic() - begin < 30.0, "Ray itself waits for 40 s and more"
    assert not left_of(without_agents(everything), 15.0)
    assert json.loads((command.directory / "run/summary.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize(
    ("address", "reason"),
    [("127.0.0.1:1", "Connection refused"), ("ray://127.0.0.1:1", "Connection refused"), ("nonsense", "Invalid addr")],
)
def test_a_missing_cluster_is_reported_at_once(tmp_path, monkeypatch, address, reason):
    config = jppo.PPOConfig(num_envs=4, num_steps=8)
    monkeypatch.setenv("RAY_ADDRESS", address)
    before, begin = {process.pid for process in running()}, time.monotonic()
    for name, options in (("address", {"ray": jppo.RayConfig(address=address)}), ("RAY_ADDRESS", {})):
        message = (
            rf"^there is no Ray cluster to join at {name} = '{re.escape(address)}' \(.*{reason}.*\); start one with"
        )
        with pytest.raises(ValueError, match=message):
            jppo.train(lambda: Healthy(tmp_path), backend="ray", num_actors=1, config=config, total_steps=1, **options)
    assert time.monotonic() - begin < 60.0, "Ray itself would try for two minutes"
    assert not ray.is_initialized()
    mine = [process for process in running() if process.pid not in before and "ray" in process.command]
    assert not [process for process in mine if process.parent == os.getpid()]
