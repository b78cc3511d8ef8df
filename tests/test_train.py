"""Tests `jppo.train`: logging, saving, reproducibility, argument errors and interrupts."""

import json
import math
import os
import re
import signal
import struct
import subprocess
import sys

import jax
import numpy as np
import pytest
from checks import SMALL
from host_probes import Counting
from probes import NO_LIMIT, DictCounting, NaNReward, ObsActionReward, Probe
from tensorboardX.proto.event_pb2 import Event

import jppo
from jppo.devices import memory
from jppo.envs import make_env
from jppo.errors import TrainingDiverged
from jppo.networks.actor_critic import make_network
from jppo.ppo.policy import make_policy
from jppo.ppo.types import PolicyState
from jppo.runs.load import load_run
from jppo.runs.policy import TrainedPolicy
from jppo.runs.run_dir import config_of, load_policy_state, read_config, read_metrics
from jppo.training import device_loop
from jppo.training import run as run_module
from jppo.training import settings as run_settings
from jppo.training.progress import NullReporter

CONFIG = SMALL(num_envs=8, num_steps=4, num_epochs=2, num_minibatches=2)
RATE = jppo.Hyperparams(learning_rate=jppo.schedules.linear(3e-3, 0.0))
BATCH, UPDATES = 32, 40
METRICS = {
    *("update", "env_steps", "time/elapsed", "time/steps_per_second", "learning_rate", "grad/norm"),
    *("loss/total", "loss/policy", "loss/value", "value/mean", "value/explained_variance"),
    *("policy/entropy", "policy/approx_kl", "policy/clip_fraction"),
    *("episode/return_mean", "episode/return_std", "episode/length_mean", "episode/count"),
}


class Cued(ObsActionReward):
    """Episodes of five steps that start together, so that in some updates of four steps no episode ends."""

    length = NO_LIMIT
    limit = 5


class Recorder(NullReporter):
    """Calls `act` at every update and records all messages."""

    def __init__(self, act=lambda: None):
        self.act, self.steps, self.messages, self.closed = act, [], [], 0

    def message(self, text):
        self.messages.append(text)

    def update(self, step, steps_per_second, recent_return):
        self.steps.append(step)
        self.act()

    def close(self):
        self.closed += 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return jppo.train(
        Cued(),
        total_steps=BATCH * UPDATES - 5,
        seed=np.int64(7),
        config=CONFIG,
        hyperparams=RATE,
        run_dir=tmp_path_factory.mktemp("runs") / "new" / "run",
    )


@pytest.fixture(scope="module")
def repeated(run):
    """Repeats the run from its config.json in chunks of at most three updates. Also returns how often step was traced
    before the first update and at the end."""
    saved = read_config(run.run_dir)
    config, hyperparams = config_of(saved, run.run_dir)
    traces, make = [], run_settings.make_anakin

    def counting(*args, **kwargs):
        agent = make(*args, **kwargs)
        return agent._replace(step=lambda state: (traces.append(1), agent.step(state))[1])

    recorder = Recorder(lambda: traced.append(len(traces)))
    traced = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jppo.training.device_loop.CHUNK_CAPACITY", 3)
        patch.setattr(run_settings, "make_anakin", counting)
        result = jppo.train(
            Cued(),
            total_steps=saved["total_steps"],
            seed=saved["seed"],
            config=config,
            hyperparams=hyperparams,
            progress=recorder,
        )
    return result, recorder, traced


def assert_trees_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_trees_agree(a, b):
    """Compares trees up to rounding, which is about a hundredth of the change by an update."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def plain_loop(agent, seed):
    """Yields the policy and the metrics after each update."""
    step = jax.jit(agent.step)
    state = jax.jit(agent.init)(jax.random.key(seed), RATE)
    for _ in range(agent.num_updates):
        state, metrics = step(state)
        yield state.train.policy_state, metrics


def test_each_update_is_one_line_of_metrics(run):
    rows = lines(run.run_dir)
    assert [row["update"] for row in rows] == list(range(1, UPDATES + 1))
    assert [row["env_steps"] for row in rows] == [BATCH * n for n in range(1, UPDATES + 1)]
    assert all(set(row) == METRICS for row in rows)
    assert set(run.metrics) == METRICS
    assert_trees_equal(read_metrics(run.run_dir), run.metrics)


def test_episode_metrics_are_nan_without_episodes(run):
    ended = run.metrics["episode/count"] > 0
    assert ended.sum() == UPDATES - UPDATES // 5, "no episode ends in the first of every five updates"
    for name in METRICS:
        expected = ended if name.startswith("episode/") and name != "episode/count" else np.full(UPDATES, True)
        np.testing.assert_array_equal(np.isfinite(run.metrics[name]), expected, name)
    nulls = [row["episode/return_mean"] is None for row in lines(run.run_dir)]
    np.testing.assert_array_equal(nulls, ~ended)


def test_metrics_have_the_documented_values(run):
    metrics = run.metrics
    np.testing.assert_allclose(metrics["learning_rate"], 3e-3 * (1 - np.arange(UPDATES) / UPDATES), rtol=1e-5)
    np.testing.assert_allclose(metrics["policy/entropy"][0], math.log(2), atol=1e-3)
    assert np.nanmax(np.abs(metrics["episode/return_mean"])) <= 5.0
    np.testing.assert_array_equal(metrics["episode/length_mean"][metrics["episode/count"] > 0], 5.0)
    assert np.diff(metrics["time/elapsed"]).min() > 0.0
    np.testing.assert_allclose(metrics["time/elapsed"][-1], run.summary["seconds"])


def test_run_directory_content(run):
    names = {".lock", "config.json", "metrics.jsonl", "summary.json", "policy_state.npz", "tensorboard", "checkpoints"}
    assert {path.name for path in run.run_dir.iterdir()} == names | {"best_policy.npz"}
    saved = json.loads((run.run_dir / "config.json").read_text())
    assert saved["env"] == "Cued"
    assert saved["environment"] == "custom"
    assert (saved["seed"], saved["total_steps"]) == (7, BATCH * UPDATES - 5)
    assert saved["versions"]["jax"] == jax.__version__
    assert json.loads((run.run_dir / "summary.json").read_text()) == run.summary
    assert_trees_equal(load_policy_state(run.run_dir, run.policy.state), run.policy.state)


def test_summary_content(run):
    summary = run.summary
    assert (summary["status"], summary["env"], summary["backend"]) == ("finished", "Cued", "device")
    assert (summary["updates"], summary["steps"]) == (UPDATES, UPDATES * BATCH)
    assert summary["episodes"] == run.metrics["episode/count"].sum() == 8 * (4 * UPDATES // 5)
    last = np.flatnonzero(run.metrics["episode/count"])[
        -13:
    ]  # of 8 episodes each: the smallest number of updates with 100 episodes
    np.testing.assert_allclose(summary["return_mean"], run.metrics["episode/return_mean"][last].mean())
    np.testing.assert_allclose(summary["steps_per_second"], summary["steps"] / summary["seconds"])
    assert summary["run_dir"] == str(run.run_dir)


def test_tensorboard_has_every_metric(run):
    (path,) = (run.run_dir / "tensorboard").iterdir()
    data, offset, seen = path.read_bytes(), 0, {}
    while offset < len(data):  # a record: length, its checksum, an event, its checksum
        (length,) = struct.unpack_from("<Q", data, offset)
        event = Event.FromString(data[offset + 12 : offset + 12 + length])
        offset += 16 + length
        seen |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
    assert set(seen) == METRICS - {"update", "env_steps"}
    assert seen["loss/value"][0] == UPDATES * BATCH


def test_config_json_reproduces_the_run_with_other_chunks(run, repeated):
    again = repeated[0]
    assert_trees_equal(again.policy.state, run.policy.state)
    assert_trees_equal(again.state.collect.obs, run.state.collect.obs)
    for name in METRICS - {"time/elapsed", "time/steps_per_second"}:
        np.testing.assert_array_equal(again.metrics[name], run.metrics[name], name)
    assert again.run_dir is None
    assert again.summary["run_dir"] is None


def test_chunks_compile_one_program(repeated):
    _, recorder, traced = repeated
    assert len(traced) >= UPDATES / 3, "the run must have several chunks"
    assert max(np.diff([0, *recorder.steps])) <= 3 * BATCH
    assert 1 <= traced[0] == traced[-1]
    assert [message.split(" in ")[0] for message in recorder.messages[1:]] == ["compiled"]
    assert recorder.closed == 1
    assert recorder.steps[-1] == UPDATES * BATCH


def test_run_equals_a_plain_loop_of_step(run):
    *_, (policy, _) = plain_loop(run.agent, 7)
    assert_trees_agree(policy, run.policy.state)


@pytest.mark.slow
def test_nan_ends_the_run_with_the_last_good_policy(tmp_path, monkeypatch):
    monkeypatch.setattr(device_loop, "_CHUNK_SECONDS", 0.0)  # chunks of one, so that one more is under way at the NaN
    with pytest.raises(TrainingDiverged, match=r"^update 6 made .* that of update 5") as caught:
        jppo.train(NaNReward(), total_steps=20 * BATCH, config=CONFIG, hyperparams=RATE, run_dir=tmp_path / "run")
    result = caught.value.result
    assert caught.value.update == 6
    assert result.metrics["update"].tolist() == [row["update"] for row in lines(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert result.summary["status"] == "diverged"
    assert json.loads((tmp_path / "run/summary.json").read_text())["updates"] == 5
    saved = load_policy_state(tmp_path / "run", result.policy.state)
    good = [policy for policy, metrics in plain_loop(result.agent, 0) if metrics["finite"]]
    assert len(good) > 5, "later updates would have changed the policy"
    assert_trees_agree(saved, good[4])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(saved))


def test_second_ctrl_c_during_cleanup_leaves_no_run(tmp_path, monkeypatch):
    def fail(*args):
        raise KeyboardInterrupt

    def close(checkpoints, closing=run_module.Checkpoints.close):
        closing(checkpoints)
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "make_loop", fail)
    monkeypatch.setattr(run_module.Checkpoints, "close", close)
    with pytest.raises(KeyboardInterrupt):
        jppo.train(ObsActionReward(), total_steps=BATCH, config=CONFIG, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def interrupt():
    """Sends Ctrl-C and checks that the previous signal handlers are restored afterwards."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    left = signal.signal(signal.SIGINT, before)
    assert left is before


def test_interrupt_saves_the_result_so_far(tmp_path, run, interrupt):
    recorder = Recorder(lambda: len(recorder.steps) == 1 and interrupt())
    result = jppo.train(Cued(), total_steps=1e9, config=CONFIG, run_dir=tmp_path / "run", progress=recorder)
    updates = len(result.metrics["update"])
    assert result.summary["status"] == "interrupted"
    assert 1 <= updates == result.summary["updates"] == len(lines(tmp_path / "run")) <= 2
    assert result.state.train.update == updates
    assert any("stopping" in message for message in recorder.messages)
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "interrupted"
    assert_trees_equal(load_policy_state(tmp_path / "run", result.policy.state), result.policy.state)
    assert result.metrics["loss/value"][0] != run.metrics["loss/value"][0], "runs with different seeds must differ"


def test_interrupt_during_the_first_update_returns_its_result(monkeypatch, interrupt):
    launch = device_loop.DeviceLoop.launch
    monkeypatch.setattr(device_loop.DeviceLoop, "launch", lambda *args: (interrupt(), launch(*args))[1])
    result = jppo.train(Probe(), total_steps=1e9, config=CONFIG)
    assert (result.status, result.summary["updates"]) == ("interrupted", 1)


def test_second_interrupt_stops_at_once(tmp_path, interrupt):
    recorder = Recorder(lambda: (interrupt(), interrupt()))
    with pytest.raises(KeyboardInterrupt):
        jppo.train(Cued(), total_steps=1e9, config=CONFIG, run_dir=tmp_path / "run", progress=recorder)
    assert recorder.closed == 1
    assert not (tmp_path / "run/summary.json").exists()
    assert read_metrics(tmp_path / "run")["update"].tolist() == [1]
    with pytest.raises(ValueError, match="has no policy: its run did not finish"):
        load_policy_state(tmp_path / "run", None)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), RuntimeError("no")])
def test_failure_before_the_first_update_leaves_no_files(tmp_path, monkeypatch, error):
    def fail(*args):
        assert (tmp_path / "run/config.json").exists()
        raise error

    recorder = Recorder()
    monkeypatch.setattr(run_module, "DeviceLoop", fail)
    with pytest.raises(type(error)):
        jppo.train(Probe(), config=CONFIG, run_dir=tmp_path / "run", progress=recorder)
    assert list(tmp_path.iterdir()) == []
    assert recorder.closed == 1


def test_interrupt_during_compilation_leaves_no_files(tmp_path, monkeypatch, interrupt):
    closed = []

    class Loop:
        def __init__(self, *args):
            interrupt()

        def run(self, stop_requested):
            pytest.fail("it trains")

        def close(self):
            closed.append(1)

    recorder = Recorder()
    monkeypatch.setattr(run_module, "DeviceLoop", Loop)
    with pytest.raises(KeyboardInterrupt):
        jppo.train(Probe(), config=CONFIG, run_dir=tmp_path / "run", progress=recorder)
    assert list(tmp_path.iterdir()) == []
    assert "stopping" in recorder.messages[1]
    assert closed == [1]


def test_out_of_memory_error_names_the_sizes(tmp_path, monkeypatch):
    def fail(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.")

    monkeypatch.setattr(run_module, "DeviceLoop", fail)
    with pytest.raises(ValueError, match="not have enough memory; lower num_envs = 8 or num_steps = 4"):
        jppo.train(Probe(), config=CONFIG, run_dir=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_needs_more_memory_than_is_free_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "bytes_free", lambda num_devices: 1000)
    with pytest.raises(
        ValueError, match=r"needs .* KiB of memory per device, but only 1000 bytes are free; lower num_e"
    ):
        jppo.train(Probe(), config=CONFIG, run_dir=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    result = jppo.train(Probe(), config=CONFIG, total_steps=BATCH, run=jppo.RunConfig(force=True))
    assert result.summary["status"] == "finished"


@pytest.mark.parametrize("num_actors", [0, 2])
def test_a_host_rollout_that_needs_more_memory_than_is_free_is_refused(num_actors, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "host_bytes_free", lambda: 1_000.0)
    message = r"needs .* of memory for rollouts, but only .* free; lower num_envs = 8 or num_steps = 4"
    with pytest.raises(ValueError, match=message):
        jppo.train(Counting, config=CONFIG, total_steps=BATCH, num_actors=num_actors, run_dir=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_host_rollout_is_started_anyway_with_force(monkeypatch):
    monkeypatch.setattr(memory, "host_bytes_free", lambda: 1_000.0)
    result = jppo.train(Counting, config=CONFIG, num_actors=0, total_steps=BATCH, run=jppo.RunConfig(force=True))
    assert result.status == "finished"


@pytest.mark.slow
def test_the_limit_of_the_process_counts_as_memory():
    code = "from jppo.devices.memory import host_bytes_free; print(host_bytes_free())"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -v {2**20}; {sys.executable} -c '{code}'"], check=True, capture_output=True
    )
    assert 0 < float(done.stdout) < 2**30


@pytest.mark.slow
def test_evaluations_count_as_memory_of_a_run(monkeypatch):
    arguments = {"config": CONFIG, "total_steps": BATCH, "eval_every": 1}
    many = jppo.train(Probe(), **arguments, eval_episodes=10_000).summary["eval_return_mean"]
    assert np.isfinite(many)
    monkeypatch.setattr(memory, "bytes_free", lambda num_devices: 200_000)
    jppo.train(Probe(), **arguments, eval_episodes=10)
    message = (
        r"needs .* of memory per device, .* of it for evaluations, but only .* are free; lower .* or eval_episodes"
    )
    with pytest.raises(ValueError, match=message):
        jppo.train(Probe(), **arguments, eval_episodes=10_000)


def test_second_ctrl_c_before_the_first_line_of_metrics_keeps_the_checkpoints(tmp_path):
    def interrupt(event):
        if event.update == 3:
            raise KeyboardInterrupt

    arguments = {"config": CONFIG, "total_steps": 4 * BATCH, "log_every": 1000, "checkpoint_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        jppo.train(Probe(), **arguments, callback=interrupt, callback_every=1, run_dir=tmp_path / "run")
    assert (tmp_path / "run/metrics.jsonl").stat().st_size == 0
    resumed = jppo.train(Probe(), **arguments, callback=lambda event: None, callback_every=1, run_dir=tmp_path / "run")
    assert resumed.summary["status"] == "finished"
    assert resumed.metrics["update"].tolist() == [4]


def test_the_limit_of_a_container_bounds_the_free_memory(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\nfile 500000\nshmem 100000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.bytes_free(2) == 270_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.bytes_free(2) > 600_000


def test_sigterm_ends_the_process_at_once_while_it_compiles(monkeypatch):
    handlers, compile_chunk = [], device_loop.compile_chunk

    def record(*args):
        handlers.append(signal.getsignal(signal.SIGTERM))
        return compile_chunk(*args)

    monkeypatch.setattr(device_loop, "compile_chunk", record)
    recorder = Recorder(lambda: handlers.append(signal.getsignal(signal.SIGTERM)))
    jppo.train(Probe(), config=CONFIG, total_steps=BATCH, progress=recorder)
    assert handlers[0] == signal.SIG_DFL
    assert callable(handlers[1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": -1}, "seed = -1 must be a whole number from 0"),
        ({"seed": 2**32}, "seed = 4294967296 must be"),
        ({"seed": 1.5}, "seed = 1.5 must be"),
        ({"seed": True}, "seed = True must be"),
        ({"seed": "1"}, "seed = '1' must be"),
        ({"total_steps": 0}, "total_steps = 0 must be"),
        ({"total_steps": 1e5 + 0.5}, "total_steps = 100000.5 must be"),
        ({"total_steps": math.nan}, "total_steps = nan must be"),
        ({"total_steps": 1e30}, r"total_steps = 1,000,.* updates; there must be less than 2\*\*31"),
        ({"preset": "cartpole"}, "unknown preset 'cartpole'; choose from default, "),
        ({"preset": None}, "unknown preset None; choose from default, "),
        ({"preset": jppo.PRESETS["default"]}, r"unknown preset Preset\(.*; choose from default, "),
        ({"hyperparams": jppo.Hyperparams(gamma=2.0)}, r"gamma = 2 is outside \[0, 1\]"),
        ({"config": SMALL(network="cnn")}, 'network = "cnn" needs an image'),
        ({"progress": "bar"}, "progress = 'bar' must be"),
        ({"wandb": True, "run_dir": None}, "wandb needs a run_dir"),
        ({"env": "CartPole"}, "unknown environment 'CartPole'; did you mean CartPole-v1"),
        ({"env": object()}, "object is not a gymnax environment"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_arguments_write_no_files(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        jppo.train(**({"env": Probe(), "config": CONFIG, "run_dir": tmp_path / "run"} | given))
    assert list(tmp_path.iterdir()) == []


def test_repr_of_a_result_is_short(run):
    assert repr(run).startswith("Result(env='Cued', status='finished', steps=1280, updates=40, return_mean=")
    assert len(repr(run)) < 250


def test_run_dir_with_other_content_is_refused(run, tmp_path):
    before = (run.run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"with other settings: env is Cued in the run, but Probe now"):
        jppo.train(Probe(), config=CONFIG, run_dir=run.run_dir)
    assert (run.run_dir / "metrics.jsonl").read_bytes() == before
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is not empty; use another"):
        jppo.train(Probe(), config=CONFIG, run_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("below", [".", "run", "a/run"])
def test_run_dir_that_cannot_be_written_is_refused(tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"run_dir .*file.* cannot be written: "):
        jppo.train(Probe(), config=CONFIG, run_dir=tmp_path / "file" / below)


def test_a_run_dir_with_a_name_that_is_too_long_is_refused(tmp_path):
    run_dir = tmp_path / ("x" * 256)
    with pytest.raises(ValueError, match=r"run_dir .*x cannot be written: File name too long"):
        jppo.train(Probe(), config=CONFIG, run_dir=run_dir)
    with pytest.raises(ValueError, match=r"x/config\.json cannot be read: File name too long"):
        jppo.load_policy(run_dir)


def test_loading_a_custom_environment_needs_the_environment(run):
    with pytest.raises(ValueError, match="in a custom environment"):
        load_run(run.run_dir)


def test_policy_acts_on_numpy_observations(run):
    policy, cues = run.policy, np.array([[1.0], [-1.0], [0.5]], np.float32)
    actions = policy.act(cues)
    assert actions.shape == (3,)
    assert actions.dtype == np.int32
    assert [int(policy.act(cue)) for cue in cues] == actions.tolist()
    assert policy.act(cues.tolist()).tolist() == actions.tolist()
    assert policy.act([1.0]) == policy.act(np.float64([1.0])) == actions[0]
    assert policy.act([1.0]).shape == ()
    distribution, value = run.agent.policy.step(policy.state, cues)[:2]
    assert actions.tolist() == np.argmax(distribution.logits, axis=1).tolist()
    np.testing.assert_allclose(policy.value(cues), value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(policy.value(cues[1]), value[1], rtol=1e-5, atol=1e-6)


def test_samples_follow_the_seed_and_the_policy(run):
    cues = np.zeros((2000, 1), np.float32)
    draw = run.policy.act(cues, sampled=True, seed=3)
    np.testing.assert_array_equal(draw, run.policy.act(cues, sampled=True, seed=3))
    assert (draw != run.policy.act(cues, sampled=True, seed=4)).any()
    assert (run.policy.act(cues, sampled=True) != run.policy.act(cues, sampled=True)).any()
    probability = jax.nn.softmax(run.agent.policy.step(run.policy.state, cues[:1])[0].logits)[0, 1]
    assert abs(draw.mean() - probability) < 4 * 0.5 / math.sqrt(2000)


@pytest.mark.parametrize("obs", [1.0, [1.0, 2.0], np.zeros((3, 2)), np.zeros((2, 3, 1)), {"cue": [1.0]}])
def test_observations_of_another_shape_are_refused(run, obs):
    with pytest.raises(ValueError, match=r"observation (has shape|consists of)"):
        run.policy.act(obs)


def test_policy_with_pytree_observations():
    env = make_env(DictCounting())
    policy = make_policy(make_network(CONFIG, env.obs_spec, env.action_spec), env.obs_spec, env.action_spec)
    obs, _ = env.reset(jax.random.key(0))
    batch = jax.tree.map(lambda x: np.stack([x, x]), obs)
    state = PolicyState(params=policy.init(jax.random.key(1), batch), obs_stats=())
    trained = TrainedPolicy(policy, state)
    assert trained.act(batch).tolist() == [int(trained.act(obs))] * 2
    assert trained.act({name: leaf.tolist() for name, leaf in obs.items()}) == trained.act(obs)
    assert trained.value({name: leaf.tolist() for name, leaf in batch.items()}).shape == (2,)
    for wrong, found in (
        ({"cue": obs["cue"]}, "obs['cue']"),
        (obs | {"cue": {"x": [0.5]}}, "obs['cue']['x'], obs['time']"),
        (obs | {"cue": None}, "obs['time']"),
        ([1.0, 2.0], "one array"),
        ((), "nothing"),
    ):
        message = f"the observation consists of {found}; the policy takes obs['cue'], obs['time']"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            trained.act(wrong)
    for wrong in ("left", [[1.0], [2.0, 3.0]], object()):
        with pytest.raises(ValueError, match=r"^observation\['cue'\] cannot be converted to float32: "):
            trained.act(obs | {"cue": wrong})
    with pytest.raises(ValueError, match=r"observation has shape \(3, 2\); the policy takes \(2, 2\)"):
        trained.act(obs | {"time": np.zeros((3, 2))})
    with pytest.raises(ValueError, match=r"an observation has shape \(3, "):
        trained.act(batch | {"time": np.zeros((3, 2, 2))})
