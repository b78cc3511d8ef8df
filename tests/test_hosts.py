"""Tests runs in several processes: they equal runs in one process, also if they are interrupted or resumed."""

import dataclasses
import functools
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from checks import SMALL
from lenient import lenient

import jppo
from jppo.config.ppo import PPOConfig
from jppo.config.ray import RayConfig, spread_envs
from jppo.runs.run_dir import load_policy_state, read_metrics

CONFIG = SMALL(num_envs=8, num_steps=16, num_epochs=2, num_minibatches=4, normalize_obs=True, normalize_reward=True)
RATE = jppo.Hyperparams(learning_rate=jppo.schedules.linear(3e-3, 0.0), gamma=0.9)
STEPS = 6 * CONFIG.batch_size
IN_PROCESS = {"backend": "ray", "num_actors": 0}
PATIENCE = 240.0
RUNS = {
    "device": {"total_steps": STEPS, "num_devices": 4},
    "ray": IN_PROCESS | {"total_steps": STEPS, "policy_lag": 1, "num_devices": 4},
    "interrupted": {"total_steps": 1_000_000_000, "num_devices": 2, "interrupted": True},
    "actors interrupted": IN_PROCESS | {"total_steps": 1_000_000_000, "num_devices": 2, "interrupted": True},
    "interrupted twice": {"total_steps": 1_000_000_000, "num_devices": 2, "interrupted_twice": True},
    "actors interrupted twice": IN_PROCESS | {"total_steps": 10**9, "num_devices": 2, "interrupted_twice": True},
    "evaluation interrupted twice": IN_PROCESS
    | {"total_steps": STEPS, "env": "interrupting", "eval_every": 1, "eval_episodes": 96},
    "video interrupted": {"total_steps": STEPS, "num_devices": 2, "video_interrupted": True},
    "tired": IN_PROCESS | {"total_steps": STEPS, "env": "tired"},
    "tired evaluation": IN_PROCESS | {"total_steps": STEPS, "env": "tired", "eval_every": 1, "eval_episodes": 96},
    "generous": IN_PROCESS | {"total_steps": STEPS, "env": "generous", "eval_every": 2, "stop_at_return": 600.0},
    "device again": {"run_dir_of": "device"},
    "stopped": {"rate": 3e-3, "total_steps": STEPS // 2, "num_devices": 4},
    "resumed": {"rate": 3e-3, "run_dir_of": "stopped", "total_steps": STEPS, "num_devices": 4},
    "actors stopped": IN_PROCESS | {"rate": 3e-3, "total_steps": STEPS // 2, "policy_lag": 1, "num_devices": 4},
    "actors resumed": IN_PROCESS
    | {"rate": 3e-3, "run_dir_of": "actors stopped", "total_steps": STEPS, "policy_lag": 1, "num_devices": 4},
    "seeds": {"total_steps": STEPS, "seeds": [1, 2]},
    "odd": {"total_steps": STEPS, "num_devices": 1},
}


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with pytest.MonkeyPatch.context() as patch, lenient():
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


def train(rate=RATE, **arguments):
    """Trains in this process."""
    return jppo.train("CartPole-v1", config=CONFIG, hyperparams=rate, seed=7, **arguments)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Starts two processes with two devices each that train RUNS. Yields their directory and the processes."""
    directory, started = tmp_path_factory.mktemp("processes"), []
    (directory / "runs.json").write_text(json.dumps(RUNS))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    environ = os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"}
    for number in ("0", "1"):
        argv = [sys.executable, str(Path(__file__).parent / "one_of_several.py"), coordinator, "2", number, directory]
        with (directory / f"out-{number}").open("w") as out:
            started.append(subprocess.Popen(argv, stdout=out, stderr=out, env=environ))
    yield directory, started
    for process in started:
        process.kill()
        process.wait()


def outcomes(processes, name):
    """Waits for the results of a run and returns them, one per process."""
    directory, started = processes
    end, found = time.monotonic() + PATIENCE, []
    for number in (0, 1):
        while not (directory / f"{name}-{number}.json").exists():
            assert started[number].poll() is None, (directory / f"out-{number}").read_text()
            assert time.monotonic() < end, (directory / f"out-{number}").read_text()
            time.sleep(0.05)
        found.append(json.loads((directory / f"{name}-{number}.json").read_text()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["device", "ray"])
def test_a_run_in_two_processes_equals_a_run_in_one(processes, name):
    """Both runs have the same number of devices."""
    expected = train(**RUNS[name])
    first, second = outcomes(processes, name)
    for number, outcome in enumerate((first, second)):
        summary = outcome["summary"]
        assert (summary["status"], summary["num_processes"]) == ("finished", 2)
        assert summary["num_devices"] == expected.summary["num_devices"]
        check_result(np.load(processes[0] / f"{name}-{number}.npz"), expected)
    assert (first["run_dir"], second["run_dir"]) == (str(processes[0] / name), "None")
    check_saved(processes[0] / name, expected)


def check_result(given, expected):
    """Checks that parameters and metrics agree up to rounding."""
    for i, leaf in enumerate(jax.tree.leaves(expected.policy.state)):
        np.testing.assert_allclose(given[f"leaf{i}"], leaf, rtol=1e-4, atol=1e-5)
    check_metrics(given, expected.metrics)


def check_metrics(given, expected):
    timed = ("time/", "actors/")
    for name, column in expected.items():
        if not name.startswith(timed):
            np.testing.assert_allclose(given[name], column, rtol=2e-3, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(given["episode/count"], expected["episode/count"])


def check_saved(run_dir, expected):
    metrics = read_metrics(run_dir)
    assert metrics["update"].tolist() == expected.metrics["update"].tolist(), "only one process writes the metrics"
    check_metrics(metrics, expected.metrics)
    saved = load_policy_state(run_dir, expected.policy.state)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), saved, expected.policy.state)
    assert json.loads((run_dir / "config.json").read_text())["num_processes"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interrupted", "actors interrupted"])
def test_ctrl_c_in_one_process_ends_both(processes, name):
    """The second process gets the signal. The first, which writes, ends after the same update."""
    first, second = (outcome["summary"] for outcome in outcomes(processes, name))
    assert first["status"] == second["status"] == "interrupted"
    assert first["updates"] == second["updates"] > 0
    assert len(read_metrics(processes[0] / name)["update"]) == first["updates"]
    assert (processes[0] / name / "policy_state.npz").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interrupted twice", "actors interrupted twice", "evaluation interrupted twice"])
def test_second_ctrl_c_in_one_process_ends_both_at_once(processes, name):
    first, second = (outcome["error"] for outcome in outcomes(processes, name))
    assert (first, second) == ("OtherProcessInterrupted: another process was interrupted", "KeyboardInterrupt: ")
    assert not (processes[0] / name / "policy_state.npz").exists()


@pytest.mark.slow
def test_ctrl_c_while_one_process_draws_a_video_ends_it_at_once(processes):
    first, second = outcomes(processes, "video interrupted")
    assert first == {"error": "KeyboardInterrupt: "}
    assert second["summary"]["status"] == "finished"
    assert (processes[0] / "video interrupted" / "policy_state.npz").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "messages"),
    [
        *(
            (
                name,
                (
                    "ActorsFailed: actors of process 1 failed; see the error of that process",
                    "ActorsFailed: the environments failed with:\nTraceback .*the pole is too heavy",
                ),
            )
            for name in ("tired", "tired evaluation")
        ),
        ("seeds", ("Refused: the settings of process 1 differ from those of process 0;",) * 2),
        ("odd", ("Refused: num_devices = 1 cannot be spread evenly over 2 processes",) * 2),
    ],
)
def test_invalid_arguments_end_both_processes_with_a_message(processes, name, messages):
    for outcome, message in zip(outcomes(processes, name), messages, strict=True):
        assert re.match(message, outcome["error"], re.DOTALL)


@pytest.mark.slow
def test_a_finished_run_returns_its_result_in_both_processes(processes):
    for outcome, again in zip(outcomes(processes, "device"), outcomes(processes, "device again"), strict=True):
        assert again["summary"]["policy_sha256"] == outcome["summary"]["policy_sha256"]


@pytest.mark.slow
def test_a_resumed_run_in_two_processes_equals_an_uninterrupted_run(processes):
    expected = train(dataclasses.replace(RATE, learning_rate=3e-3), **RUNS["device"])
    for number, outcome in enumerate(outcomes(processes, "resumed")):
        assert (outcome["summary"]["status"], outcome["summary"]["updates"]) == ("finished", 6)
        check_result(np.load(processes[0] / f"resumed-{number}.npz"), expected)
    check_saved(processes[0] / "stopped", expected)


@pytest.mark.slow
def test_a_run_with_actors_in_two_processes_resumes(processes):
    first, second = (
        np.load(processes[0] / f"actors resumed-{n}.npz") for n, _ in enumerate(outcomes(processes, "actors resumed"))
    )
    assert first["update"].tolist() == [1, 2, 3, 4, 5, 6]
    assert first["actors/policy_lag"].tolist() == [0, 1, 1, 1, 1, 1], (
        "the policy lag must be 1 also after the checkpoint"
    )
    for name in first.files:
        if not name.startswith(("time/", "actors/")):
            np.testing.assert_array_equal(first[name], second[name], name)


@pytest.mark.slow
def test_an_evaluation_that_reaches_the_target_in_one_process_ends_both(processes):
    """The evaluation of the first process is far below the target."""
    first, second = (outcome["summary"] for outcome in outcomes(processes, "generous"))
    assert first["eval_return_mean"] < 600.0 < second["eval_return_mean"]
    assert first["status"] == second["status"] == "solved"
    assert first["updates"] == second["updates"] == 2


@pytest.mark.slow
def test_the_result_is_saved_if_actors_of_another_process_fail(processes):
    outcomes(processes, "tired")
    summary = json.loads((processes[0] / "tired" / "summary.json").read_text())
    assert (summary["status"], summary["updates"]) == ("failed", 2)
    assert (processes[0] / "tired" / "policy_state.npz").is_file()


def test_actors_are_divided_evenly_among_hosts():
    def spread(num_envs, cores, **actors):
        config, actors = spread_envs(PPOConfig(num_envs=num_envs), RayConfig(**actors), cores, False, 2)
        return actors.num_actors, actors.envs_per_actor, config.num_envs

    assert spread(64, 8) == (8, 8, 64)
    assert spread(64, 7) == (4, 16, 64)
    assert spread(12, 8) == (6, 2, 12)
    assert spread(64, 1) == (2, 32, 64)
    assert spread(64, 8, num_actors=0) == (0, 32, 64)
    assert spread(64, 8, num_actors=0, envs_per_actor=4) == (0, 4, 8)
    assert spread(64, 7, envs_per_actor=4) == (6, 4, 24)
    for num_envs, actors, message in (
        (64, {"num_actors": 3}, "num_actors = 3 cannot be spread evenly over 2 hosts"),
        (
            7,
            {"num_actors": 0},
            "num_envs = 7 cannot be spread evenly over 2 hosts; nearest numbers that divide it: 1, 7",
        ),
        (7, {}, "num_envs = 7 cannot be spread evenly over num_actors = 2; nearest"),
    ):
        with pytest.raises(ValueError, match=message):
            spread(num_envs, 8, **actors)
