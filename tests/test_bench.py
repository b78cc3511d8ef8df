"""The bench: its parts are those of an update, its shares make a whole, and its advice follows from them."""

import contextlib
import io
import json
from pathlib import Path

import faulty_envs
import host_probes
import jax
import numpy as np
import probes
import pytest
from checks import SMALL, quick_jit
from lenient import lenient
from PIL import Image

import jppo
from jppo.benchmark import bench as benching
from jppo.benchmark import timing
from jppo.benchmark.report import CEILINGS, BenchResult, Speed, advise, title_of
from jppo.cli.main import main

CONFIG = SMALL(num_envs=8, num_steps=16, num_minibatches=2)
SIZES = ["--num-steps", "16", "--hidden-sizes", "8", "--num-minibatches", "2", "--seconds", "0.05"]
OF_ACTORS = {"environment", "policy", "learner", "rest", "waiting", "transfer"}


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with pytest.MonkeyPatch.context() as patch, lenient():
        host_probes.share_programs(patch)
        yield


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(*argv):
    """Exit code, standard output and standard error of the command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in argv])
    return code, out.getvalue(), err.getvalue()


def check_numbers(benched):
    assert sum(benched.shares.values()) == pytest.approx(1.0)
    assert min(benched.shares.values()) >= 0.0
    assert min(benched.seconds.values()) >= 0.0
    assert set(benched.shares) <= set(benched.seconds)
    assert tuple(benched.ceilings) == CEILINGS
    for speed in (benched.steady, *benched.ceilings.values()):
        assert 0.0 < speed.low <= speed.steps_per_second <= speed.high < np.inf
    assert 0.0 < benched.end_to_end.low <= benched.end_to_end.high < np.inf
    assert benched.compile_seconds > 0.0
    assert benched.advice.startswith(jppo.benchmark.report._SUBJECTS[benched.limit][:4])
    summary = json.loads(json.dumps(benched.summary(), allow_nan=False))
    assert set(summary) == {*BenchResult._fields, "limit", "advice"}
    assert summary["steady"] == benched.steady._asdict()
    assert summary["shares"][summary["limit"]] == max(summary["shares"].values())
    assert list(Path().iterdir()) == []


def test_a_run_over_two_devices():
    said = []
    benched = jppo.bench(probes.Counting(), config=CONFIG, num_devices=2, seconds=0.05, say=said.append)
    check_numbers(benched)
    assert (benched.env, benched.backend, benched.actors) == ("Counting", "anakin", {})
    assert (benched.num_envs, benched.num_steps, benched.num_devices) == (8, 16, 2)
    assert set(benched.shares) == set(benched.seconds) == {*CEILINGS, "rest"}
    assert [text.split()[0] for text in said] == ["compiled", "measuring"]


def test_a_run_with_environments_in_this_process():
    config = SMALL(num_envs=2, num_steps=16)
    benched = jppo.bench("host_probes:Counting", config=config, num_actors=0, seconds=0.05)
    check_numbers(benched)
    assert benched.backend == "ray"
    assert benched.actors == {"num_actors": 0, "envs_per_actor": 2, "policy_lag": 0, "local": True}
    assert set(benched.shares) == OF_ACTORS


def test_actors_by_the_command(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    options = ["--backend", "ray", "--num-actors", 1, "--num-envs", 4, "--policy-lag", 1, *SIZES]
    code, out, err = call("bench", "CartPole-v1", *options, "--json")
    assert code == 0, err
    assert "1 actor on 1 node ready" in err
    (line,) = out.splitlines()
    found = json.loads(line)
    assert (found["actors"]["num_actors"], found["actors"]["policy_lag"], found["num_envs"]) == (1, 1, 4)
    assert set(found["shares"]) == {"learner", "waiting", "transfer"}
    assert set(found["seconds"]) == OF_ACTORS
    assert sum(found["shares"].values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["CartPole-v1", "--seconds", "0"], 2, "jppo: seconds = 0.0 must be a number of more than 0"),
        (["CartPole-v1", "--seconds", "nan"], 2, "jppo: seconds = nan must be"),
        (["CartPole-v1", "--output", "a.jpg"], 2, "jppo: output a.jpg must end in .png"),
        (["CartPole-v2"], 2, "did you mean CartPole-v1"),
        (["CartPole-v1", "--num-actors", "2"], 2, "jppo: CartPole-v1 runs on the device, without actors"),
        (["CartPole-v1", "--num-devices", "99"], 2, "jppo: num_devices = 99; JAX has 8 here"),
        (["CartPole-v1", "--learning-rate", "-1"], 2, "jppo: learning_rate = -1 is outside"),
        (["host_probes:Counting", "--num-actors", "3"], 2, "cannot be spread evenly over num_actors = 3"),
        (
            ["host_probes:NaNReward", "--num-actors", "0", "--num-envs", "2", *SIZES],
            2,
            "jppo: update 2 made a loss, gradient or",
        ),
        (["host_probes:Failing", "--num-actors", "0", "--num-envs", "2", *SIZES], 3, "ArithmeticError: the simulator"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_said(argv, code, message):
    ended, out, err = call("bench", *argv)
    assert (ended, out) == (code, "")
    assert message in err
    assert list(Path().iterdir()) == []


def test_options_start_from_the_preset_and_envs_per_actor_sets_the_sizes(monkeypatch):
    calls = []

    def stop(env, **kwargs):
        calls.append(kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(benching, "bench", stop)
    assert call("bench", "Pendulum-v1", "--gamma", 0.5)[0] == 130
    assert calls[0]["config"] == jppo.PRESETS["pendulum"].config
    assert (calls[0]["hyperparams"].gamma, calls[0]["num_actors"]) == (0.5, None)
    call("bench", "Taxi-v4", "--num-actors", 4, "--envs-per-actor", 2)
    config = calls[1]["config"]
    assert (config.num_envs, config.num_steps) == (8, jppo.PRESETS["default"].config.batch_size // 8)


def test_programs_run_in_rounds_until_time_is_up_or_a_stop():
    ran = []
    programs = {name: lambda count, name=name: ran.append((name, count)) for name in "ab"}
    times = timing.time_programs(programs, 1e-9, lambda: False)
    assert times["a"].shape == times["b"].shape == (5,)
    counts = dict(ran[-2:])
    assert ran == [("a", 1)] * 2 + [("b", 1)] * 2 + [("a", counts["a"]), ("b", counts["b"])] * 5
    with pytest.raises(KeyboardInterrupt):
        timing.time_programs(programs, 1e9, lambda: len(ran) > 100)


def test_the_parts_do_the_work_of_a_rollout():
    agent = jppo.make_anakin(probes.Counting(), CONFIG)
    state, key = quick_jit(agent.init)(jax.random.key(0), jppo.Hyperparams()), jax.random.key(1)
    after = jax.jit(lambda state: timing.step_environments(agent, state, key))(state.collect)
    np.testing.assert_array_equal(after.episode.lengths, np.full(8, 16))
    obs = jax.numpy.broadcast_to(state.collect.obs, (16, *state.collect.obs.shape))
    action, log_prob, value = timing.act(agent, state.train.policy, obs, key)
    distribution, expected = agent.policy.apply(state.train.policy, obs[0])
    np.testing.assert_allclose(log_prob[3], distribution.log_prob(action[3]), rtol=1e-5)
    np.testing.assert_allclose(value[3], expected, rtol=1e-5)
    assert len(np.unique(action)) == 2


@pytest.mark.parametrize(("env", "shape"), [("Pendulum-v1", (2, 5, 1)), ("CartPole-v1", (2, 5))])
def test_random_actions_fit_the_environment(env, shape):
    action = timing.random_actions(jppo.make_host_env(env).action_spec, (2, 5), jax.random.key(0))
    assert action.shape == shape
    assert len(np.unique(action)) > 1
    assert np.abs(action).max() <= 1


def test_environments_that_wait_are_told_from_those_that_compute(tmp_path):
    def waiting():
        return faulty_envs.Healthy(notes=tmp_path, step_seconds=0.005)

    environments = timing.BareEnvironments(jppo.make_host_env(waiting), CONFIG, 2, jax.random.key(0))
    environments(1)
    environments.close()
    assert environments.cores_busy < 0.5
    assert faulty_envs.noted(tmp_path, "closed")


CLOCKS = {
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
        (0, 1.0, {"environment": 0.3, "policy": 0.1, "learner": 0.3, "rest": 0.1, "waiting": 0.1, "transfer": 0.1}),
        (1, 6.0, {"learner": 0.3, "waiting": 0.6, "transfer": 0.1}),
    ],
)
def test_shares_by_the_runs_own_clocks(policy_lag, waiting, shares):
    seconds, found = benching._of_clocks({name: np.array(column) for name, column in CLOCKS.items()}, policy_lag)
    whole = {"environment": 3.0, "policy": 1.0, "learner": 3.0, "rest": 1.0, "waiting": waiting, "transfer": 1.0}
    assert seconds == whole
    assert found == pytest.approx(shares)


def made_up(shares, end_to_end=90.0, cores_busy=1.0, **actors):
    """A result of 100 steps per second in bare updates, on two cores."""
    spread = {"num_actors": 2, "envs_per_actor": 4, "policy_lag": 0, "local": True} | actors if actors else {}
    seconds = {"environment": 3.0, "policy": 1.0, "rest": 0.5} | shares
    speeds = {"steady": Speed(100.0, 90.0, 110.0), "end_to_end": Speed(end_to_end, 80.0, 95.0)}
    speeds |= {"ceilings": dict.fromkeys(CEILINGS, Speed(1000.0, 900.0, 1100.0))}
    sizes = {"num_envs": 8, "num_steps": 16, "num_devices": 1, "cores": 2, "cores_busy": cores_busy}
    names = {"env": "Env", "backend": "", "device": "", "compile_seconds": 1.0}
    return BenchResult(**names, actors=spread, **sizes, **speeds, seconds=seconds, shares=shares)


ON_DEVICE = {"environment": 0.05, "policy": 0.1, "learner": 0.82, "rest": 0.03}


@pytest.mark.parametrize(
    ("benched", "said"),
    [
        (made_up(ON_DEVICE), "The learner takes 82% of an update: fewer num_epochs, fewer and larger minibatches"),
        (
            made_up({"environment": 0.6, "learner": 0.4}),
            "Stepping the environments takes 60% of an update: more num_envs",
        ),
        (made_up({"policy": 0.6, "learner": 0.4}), "rollouts take 60% of an update: more environments for each call"),
        (made_up({"rest": 0.6, "learner": 0.4}), "storing it, takes 60% of an update: more num_envs or num_steps"),
        (
            made_up(ON_DEVICE)._replace(device="cpu", num_envs=2048, num_steps=32),
            "With num_devices = 2 the cores share the work better; a Python program has to be started with XLA",
        ),
        (made_up(ON_DEVICE, 63.0), "A whole run is only 63% as fast as its bare updates"),
        (made_up({"environment": 0.9, "learner": 0.1, "transfer": 0.0}, num_actors=0), "num_actors; there are 2 cores"),
        (
            made_up({"environment": 0.9, "learner": 0.1, "transfer": 0.0}, num_actors=1),
            "more actors (num_actors; there",
        ),
        (made_up({"environment": 0.9, "learner": 0.1, "transfer": 0.0}, num_actors=2), "more cores than these 2"),
        (
            made_up({"environment": 0.9, "learner": 0.1, "transfer": 0.0}, local=False),
            "as far as the cluster has cores",
        ),
        (
            made_up({"environment": 0.9, "learner": 0.1, "transfer": 0.0}, cores_busy=0.1, num_actors=2),
            "more actors, even more than there are cores, since these environments wait",
        ),
        (
            made_up({"environment": 0.6, "learner": 0.3, "transfer": 0.1}, num_actors=2),
            "cheaper environments. policy_lag = 1 lets actors and learner work at once: up to 1.7 times as fast, where",
        ),
        (
            made_up({"waiting": 0.6, "learner": 0.4, "transfer": 0.0}, num_actors=1, policy_lag=1),
            "The learner waits for the actors for 60% of an update, and they mostly for their environments: more",
        ),
        (made_up({"waiting": 0.9, "learner": 0.1, "transfer": 0.0}, num_actors=2), "the slowest actor, and for its"),
        (made_up({"transfer": 0.9, "learner": 0.1}, num_actors=2, policy_lag=1), "smaller observations (uint8"),
    ],
)
def test_the_advice_names_what_limits_and_its_knobs(benched, said):
    assert said in advise(benched)
    assert advise(benched).count(".") <= 3


@pytest.mark.parametrize(
    "other",
    [{"device": "gpu"}, {"cores": 1}, {"cores": 16, "num_devices": 8}, {"num_envs": 2049}, {"num_steps": 1}],
    ids=str,
)
def test_more_devices_are_advised_only_where_they_may_help(other):
    large = {"device": "cpu", "num_envs": 2048, "num_steps": 32}
    assert "num_devices" not in advise(made_up(ON_DEVICE)._replace(**(large | other)))


def test_titles():
    assert title_of(made_up(ON_DEVICE)) == "Env, 8 x 16, 1 device"
    assert title_of(made_up(ON_DEVICE, num_actors=0)) == "Env, 8 x 16, no actors, 1 device"
    assert title_of(made_up(ON_DEVICE, policy_lag=1)) == "Env, 8 x 16, 2 actors of 4, 1 device, policy_lag = 1"


def test_the_command_prints_a_table_and_draws(monkeypatch):
    monkeypatch.setattr(benching, "bench", lambda env, **options: made_up(ON_DEVICE))
    code, out, err = call("bench", "CartPole-v1", "--output", "a.png")
    assert (code, err) == (0, "wrote a.png\n")
    rows = ("end to end", "steady", "environment only", "policy only", "learner only", "rest")
    for text in ("Env, 8 x 16, 1 device", *rows, "90 - 110", "82%", "compiling: 1.0 s", " of an update: "):
        assert text in out, text
    with Image.open("a.png") as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 10, "nothing is drawn"
    code, out, err = call("bench", "CartPole-v1", "--output", "no/a.png")
    assert (code, err) == (2, "jppo: output no/a.png cannot be written: there is no directory no\n")
    assert out == "", "it was measured before"
    Path("b.png").mkdir()
    code, out, err = call("bench", "CartPole-v1", "--output", "b.png")
    assert (code, err) == (2, "jppo: b.png cannot be written: Is a directory\n")
    assert "82%" in out, "what was measured is lost"
