"""Tests `jppo.bench`: the parts of an update, and shares that add up to 1."""

import contextlib
import dataclasses
import io
import json
from pathlib import Path

import host_probes
import jax
import numpy as np
import probes
import pytest
from checks import SMALL
from lenient import lenient
from PIL import Image

import jppo
from jppo.benchmark import bench as benching
from jppo.benchmark import timing
from jppo.benchmark.report import BenchResult, Speed, bench_title
from jppo.cli.main import main

CONFIG = SMALL(num_envs=8, num_steps=16, num_minibatches=2)
SIZES = ["--num-steps", "16", "--hidden-sizes", "8", "--num-minibatches", "2", "--seconds", "0.05"]
PARTS_WITH_ACTORS = ["environment", "policy", "other", "update", "waiting", "transfer"]
DEVICE = "device"


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with pytest.MonkeyPatch.context() as patch, lenient():
        host_probes.share_programs(patch)
        yield


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(*argv):
    """Runs the command line. Returns exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in argv])
    return code, out.getvalue(), err.getvalue()


def check_result(result):
    assert sum(result.shares.values()) == pytest.approx(1.0)
    assert min(result.shares.values()) >= 0.0
    assert min(result.seconds.values()) >= 0.0
    assert set(result.shares) <= set(result.seconds)
    assert set(result.alone) == {"environment", "policy", "update"}
    for speed in (result.loop, *result.alone.values()):
        assert 0.0 < speed.low <= speed.steps_per_second <= speed.high < np.inf
    assert 0.0 < result.run.low <= result.run.high < np.inf
    assert result.compile_seconds > 0.0
    assert result.memory["optimizer"] == 2 * result.memory["parameters"] + 4  # two moments and a counter
    assert 0 < sum(result.memory.values()) < result.memory_free
    summary = json.loads(json.dumps(result.summary(), allow_nan=False))
    assert set(summary) == {field.name for field in dataclasses.fields(BenchResult)}
    assert summary["loop"] == result.loop._asdict()
    assert summary["alone"]["policy"] == result.alone["policy"]._asdict()
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_a_run_on_two_devices():
    messages = []
    result = jppo.bench(probes.Counting(), config=CONFIG, num_devices=2, seconds=0.05, message=messages.append)
    check_result(result)
    assert (result.env, result.backend, result.num_actors) == ("Counting", DEVICE, None)
    assert (result.num_envs, result.num_steps, result.num_devices) == (8, 16, 2)
    assert list(result.shares) == list(result.seconds) == ["environment", "policy", "other", "update"]
    assert [text.split()[0] for text in messages] == ["compiled", "measuring"]


@pytest.mark.slow
def test_a_run_with_environments_in_this_process():
    config = SMALL(num_envs=2, num_steps=16)
    result = jppo.bench("host_probes:Counting", config=config, num_actors=0, seconds=0.05)
    check_result(result)
    assert (result.backend, result.num_actors, result.envs_per_actor, result.policy_lag) == ("ray", 0, 2, 0)
    assert list(result.shares) == PARTS_WITH_ACTORS


@pytest.mark.slow
def test_a_run_with_actors_on_the_command_line(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    options = ["--backend", "ray", "--num-actors", 1, "--num-envs", 4, "--policy-lag", 1, *SIZES]
    code, out, err = call("bench", "CartPole-v1", *options, "--json")
    assert code == 0, err
    assert "1 actor on 1 node ready" in err
    (line,) = out.splitlines()
    result = json.loads(line)
    assert (result["num_actors"], result["policy_lag"], result["num_envs"]) == (1, 1, 4)
    assert set(result["shares"]) == {"update", "waiting", "transfer"}
    assert list(result["seconds"]) == PARTS_WITH_ACTORS
    assert sum(result["shares"].values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["CartPole-v1", "--seconds", "nan"], 2, "jppo: seconds = nan must be"),
        (["CartPole-v1", "--output", "a.jpg"], 2, "jppo: output a.jpg must end in .png"),
        (
            ["host_probes:NaNReward", "--num-actors", "0", "--num-envs", "2", *SIZES],
            2,
            "jppo: update 2 made a loss, gradient or",
        ),
        (["host_probes:Failing", "--num-actors", "0", "--num-envs", "2", *SIZES], 3, "ArithmeticError: the simulator"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_input_has_an_exit_code_and_a_message(argv, code, message):
    ended, out, err = call("bench", *argv)
    assert (ended, out) == (code, "")
    assert message in err
    assert list(Path().iterdir()) == []


def test_options_start_from_the_preset_and_envs_per_actor_sets_num_envs(monkeypatch):
    calls = []

    def stop(env, **kwargs):
        calls.append(kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(benching, "bench", stop)
    assert call("bench", "Pendulum-v1", "--gamma", 0.5)[0] == 130
    assert calls[0]["config"] == jppo.PRESETS["pendulum"].config
    assert (calls[0]["hyperparams"].gamma, calls[0]["ray"]) == (0.5, jppo.RayConfig())
    call("bench", "Taxi-v4", "--num-actors", 4, "--envs-per-actor", 2)
    config = calls[1]["config"]
    assert (config.num_envs, config.num_steps) == (8, jppo.PRESETS["default"].config.num_steps)


def test_programs_run_in_rounds_until_the_time_limit_or_a_stop():
    ran = []
    programs = {name: lambda count, name=name: ran.append((name, count)) for name in "ab"}
    times = timing.time_programs(programs, 1e-9, lambda: False)
    assert times["a"].shape == times["b"].shape == (5,)
    counts = dict(ran[-2:])
    assert ran == [("a", 1)] * 2 + [("b", 1)] * 2 + [("a", counts["a"]), ("b", counts["b"])] * 5
    with pytest.raises(KeyboardInterrupt):
        timing.time_programs(programs, 1e9, lambda: len(ran) > 100)


@pytest.mark.slow
def test_environment_and_policy_programs_do_the_work_of_a_rollout():
    agent = jppo.make_anakin(probes.Counting(), CONFIG)
    state, key = jax.jit(agent.init)(jax.random.key(0), jppo.Hyperparams()), jax.random.key(1)
    after = jax.jit(lambda state: timing.step_environments(agent, state, key))(state.collect)
    np.testing.assert_array_equal(after.episode.lengths, np.full(8, 16))
    obs = jax.numpy.broadcast_to(state.collect.obs, (16, *state.collect.obs.shape))
    action, log_prob, value = timing.select_actions(agent, state.train.policy_state, obs, key)
    distribution, expected = agent.policy.step(state.train.policy_state, obs[0])[:2]
    np.testing.assert_allclose(log_prob[3], distribution.log_prob(action[3]), rtol=1e-5)
    np.testing.assert_allclose(value[3], expected, rtol=1e-5)
    assert len(np.unique(action)) == 2


@pytest.mark.parametrize(("env", "shape"), [("Pendulum-v1", (2, 5, 1)), ("CartPole-v1", (2, 5))])
def test_random_actions_fit_the_environment(env, shape):
    action = timing.random_actions(jppo.make_host_env(env).action_spec, (2, 5), jax.random.key(0))
    assert action.shape == shape
    assert len(np.unique(action)) > 1
    assert np.abs(action).max() <= 1


METRICS = {
    "actors/rollout_seconds": [5.0, 5.0, 9.0],
    "actors/env_seconds": [3.0, 3.0, 4.0],
    "actors/policy_seconds": [1.0, 1.0, 1.0],
    "time/wait_rollouts": [6.0, 6.0, 6.0],
    "time/host_to_device": [1.0, 1.0, 2.0],
    "time/update": [3.0, 3.0, 3.0],
}


@pytest.mark.parametrize(
    ("policy_lag", "waiting", "shares"),
    [
        (0, 1.0, {"environment": 0.3, "policy": 0.1, "update": 0.3, "other": 0.1, "waiting": 0.1, "transfer": 0.1}),
        (1, 6.0, {"update": 0.3, "waiting": 0.6, "transfer": 0.1}),
    ],
)
def test_parts_come_from_the_metrics_of_a_run_with_actors(policy_lag, waiting, shares):
    seconds, found = benching._read_parts({name: np.array(column) for name, column in METRICS.items()}, policy_lag)
    expected = {"environment": 3.0, "policy": 1.0, "update": 3.0, "other": 1.0, "waiting": waiting, "transfer": 1.0}
    assert seconds == expected
    assert found == pytest.approx(shares)


def make_result(**changes):
    """Returns a result with 100 steps per second, on the device unless changed."""
    parts = {"environment": 0.05, "policy": 0.1, "other": 0.03, "update": 0.82}
    result = BenchResult(
        env="Env",
        backend=DEVICE,
        device="cpu",
        num_cores=2,
        num_envs=8,
        num_steps=16,
        num_devices=1,
        num_actors=None,
        envs_per_actor=None,
        policy_lag=None,
        compile_seconds=1.0,
        run=Speed(90.0, 80.0, 95.0),
        loop=Speed(100.0, 90.0, 110.0),
        alone=dict.fromkeys(("environment", "policy", "update"), Speed(1000.0, 900.0, 1100.0)),
        seconds=parts,
        shares=parts,
        memory={"parameters": 1024, "temporaries": 2048},
        memory_free=4096,
    )
    return dataclasses.replace(result, **changes)


def test_titles_name_sizes_actors_and_devices():
    assert bench_title(make_result()) == "Env, 8 x 16, 1 device (cpu)"
    assert bench_title(make_result(num_devices=2)) == "Env, 8 x 16, 2 devices (cpu)"
    assert bench_title(make_result(num_actors=0, envs_per_actor=8)) == "Env, 8 x 16, 0 actors, 1 device (cpu)"
    assert bench_title(make_result(num_actors=2, envs_per_actor=4)) == "Env, 8 x 16, 2 actors of 4, 1 device (cpu)"


def test_the_repr_is_short():
    assert repr(make_result()) == (
        f"BenchResult(env='Env', backend={DEVICE!r}, steps_per_second='90', "
        "shares='environment 5%, policy 10%, other 3%, update 82%')"
    )


def test_the_command_prints_a_table_and_draws_a_plot(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(benching, "bench", lambda env, **options: make_result())
    code, out, err = call("bench", "CartPole-v1", "--output", "a.png")
    assert (code, err) == (0, "wrote a.png\n")
    assert max(map(len, out.splitlines())) <= 80
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in out.splitlines() if line.startswith("│")}
    rows = {name: [cell.strip() for cell in cells] for name, cells in rows.items()}
    assert rows["rollout"] == ["180.00", "18%", "", ""]
    assert rows["environment"] == ["50.00", "5%", "1,000", "900 - 1.1k"]
    assert rows["update"] == ["820.00", "82%", "1,000", "900 - 1.1k"]
    assert rows["without logging"] == ["1,280.00", "", "100", "90 - 110"]
    assert rows["whole run"] == ["1,422.22", "", "90", ""]
    for text in ("Env, 8 x 16, 1 device (cpu)", "compile time: 1.0 s", "3 KiB of 4 KiB free", "temporaries: 2 KiB"):
        assert text in out, text
    with Image.open("a.png") as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 10, "the plot is empty"


def test_rollouts_have_no_share_if_they_run_in_parallel(monkeypatch):
    seconds = dict.fromkeys(PARTS_WITH_ACTORS, 0.5)
    shares = {"update": 0.4, "waiting": 0.4, "transfer": 0.2}
    result = make_result(seconds=seconds, shares=shares, num_actors=2, envs_per_actor=4, policy_lag=1)
    monkeypatch.setattr(benching, "bench", lambda env, **options: result)
    code, out, _ = call("bench", "CartPole-v1")
    assert code == 0
    assert "start-up: 1.0 s" in out
    assert "rollouts run in parallel with the updates" in out
    assert out.count("%") == 3


def test_an_output_that_cannot_be_written_is_an_error(monkeypatch):
    monkeypatch.setattr(benching, "bench", lambda env, **options: make_result())
    code, out, err = call("bench", "CartPole-v1", "--output", "no/a.png")
    assert (code, err) == (2, "jppo: output no/a.png cannot be written: there is no directory no\n")
    assert out == "", "the path must be checked before the measurement"
    Path("b.png").mkdir()
    code, out, err = call("bench", "CartPole-v1", "--output", "b.png")
    assert (code, err) == (2, "jppo: output b.png cannot be written: it is not a regular file\n")
    assert out == "", "the path must be checked before the measurement"
    name = "c" * 252 + ".png"
    code, out, err = call("bench", "CartPole-v1", "--output", name)
    assert (code, err) == (2, f"jppo: output {name} cannot be written: File name too long\n")
    assert "82%" in out, "the measurement must be printed"
