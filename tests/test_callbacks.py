"""Tests callbacks: their calls, their effects on the run, and resumed runs."""

import copy
import json
import os
import shutil
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL, share_chunks
from flax import struct
from gymnax.environments.environment import EnvParams
from host_probes import Guessing, share_programs
from probes import NO_LIMIT, ObsActionReward, ProbeState

import jppo
from jppo.runs.checkpoints import Checkpoints
from jppo.runs.leaves import copy_leaves
from jppo.training import device_loop
from jppo.training.progress import NullReporter

CONFIG = SMALL(num_envs=8, num_steps=4, num_epochs=1, num_minibatches=2)
CONSTANT = jppo.Hyperparams(learning_rate=1e-3)
BATCH, UPDATES = 32, 12


class Cued(ObsActionReward):
    """Episodes of five steps."""

    length = NO_LIMIT
    limit = 5


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    with pytest.MonkeyPatch.context() as patch:
        share_programs(patch)
        share_chunks(patch)
        yield


def train(callback=None, env=None, total=UPDATES, **given):
    given = {"config": CONFIG, "total_steps": total * BATCH, "hyperparams": CONSTANT} | given
    return jppo.train(env or Cued(), callback=callback, **given)


def train_host(callback, **given):
    return train(callback, Guessing, num_actors=0, **given)


MODES = pytest.mark.parametrize("run", [train, train_host])


@pytest.mark.slow
@MODES
def test_callback_receives_the_metrics_since_the_last_call(run):
    events = []
    result = run(events.append, callback_every=6)
    assert [event.update for event in events] == [6, 12]
    assert [event.steps for event in events] == [6 * BATCH, 12 * BATCH]
    counts = result.metrics["episode/count"]
    assert [event.metrics["episode/count"] for event in events] == [counts[:6].sum(), counts[6:].sum()]
    assert events[1].metrics["loss/value"] == pytest.approx(result.metrics["loss/value"][6:].mean(), rel=1e-6)
    assert events[1].return_mean == result.summary["return_mean"]


@pytest.mark.slow
@MODES
def test_callback_without_effects_changes_nothing(run):
    assert run(lambda event: None, callback_every=3).summary["policy_sha256"] == run(None).summary["policy_sha256"]


def test_no_update_starts_before_the_callback_returns():
    updates = []
    train(lambda event: updates.append(int(event.state.train.update)), callback_every=5)
    assert updates == [5, 10]


@MODES
def test_logged_numbers_are_metrics_of_the_update(run, tmp_path):
    def log(event):
        event.log("my/number", jnp.float32(2.5))
        if event.update == 6:
            event.log("my/other", event.update)

    result = run(log, callback_every=3, run_dir=tmp_path / "run")
    number = np.isfinite(result.metrics["my/number"])
    assert result.metrics["update"][number].tolist() == [3, 6, 9, 12]
    assert result.metrics["update"][np.isfinite(result.metrics["my/other"])].tolist() == [6]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(1, UPDATES + 1))
    assert {line["update"]: line["my/number"] for line in lines if "my/number" in line} == dict.fromkeys(
        (3, 6, 9, 12), 2.5
    )


def test_logged_numbers_are_part_of_lines_of_several_updates(tmp_path):
    result = train(lambda event: event.log("my/number", event.update), callback_every=2, log_every=4)
    assert result.metrics["update"].tolist() == [4, 8, 12]
    assert result.metrics["my/number"].tolist() == [3.0, 7.0, 11.0]


@MODES
def test_callback_stops_the_run(run, tmp_path):
    def stop(event):
        if event.update >= 6:
            event.stop("good enough")

    result = run(stop, callback_every=3, run_dir=tmp_path / "run")
    assert result.summary["status"] == "stopped"
    assert result.summary["stop_reason"] == "good enough"
    assert result.summary["updates"] == result.metrics["update"][-1] == 6
    again = run(stop, callback_every=3, run_dir=tmp_path / "run")
    assert again.summary["updates"] == 6
    longer = run(stop, callback_every=3, run_dir=tmp_path / "run", total=UPDATES + 3)
    assert longer.summary["updates"] == 9


@MODES
def test_training_continues_with_a_changed_state(run):
    def without_learning(event):
        state = event.state
        learner = getattr(state, "train", state)
        learner = learner.replace(hyperparams=learner.hyperparams.replace(learning_rate=0.0))
        event.state = state.replace(train=learner) if hasattr(state, "train") else learner

    result = run(without_learning, callback_every=4)
    assert (result.metrics["learning_rate"][:4] > 0.0).all()
    assert (result.metrics["learning_rate"][4:] == 0.0).all()


@pytest.mark.parametrize(
    "rate", [jnp.float32(0.0), np.float64(0.0), np.int64(0), 0], ids=["jax", "float64", "int64", "int"]
)
def test_scalar_of_a_callback_replaces_a_hyperparameter_and_stays_valid(rate):
    def set_rate(event):
        learner = event.state.train
        learner = learner.replace(hyperparams=learner.hyperparams.replace(learning_rate=rate))
        event.state = event.state.replace(train=learner)

    assert train(set_rate, callback_every=4).summary["status"] == "finished"
    assert float(rate) == 0.0


def test_invalid_change_in_place_ends_the_run_with_everything_saved(tmp_path):
    def shrink(event):
        event.state.train.policy_state.params["params"].clear()

    with pytest.raises(ValueError, match="is missing, but the run needs") as error:
        train(shrink, callback_every=4, run_dir=tmp_path / "run")
    assert error.value.result.summary["updates"] == 4
    assert (tmp_path / "run/policy_state.npz").is_file()


def test_checkpoint_contains_the_means_of_its_update(tmp_path, monkeypatch):
    """A thread writes them while the next updates are logged."""
    saved, save = [], Checkpoints.save

    def record(self, update, seconds, counts, state, log):
        saved.append((log, copy.deepcopy(log)))
        save(self, update, seconds, counts, state, log)

    monkeypatch.setattr(Checkpoints, "save", record)
    monkeypatch.setattr(device_loop, "_CHUNK_SECONDS", 0.0)  # chunks of one update
    train(print, callback_every=12, checkpoint_seconds=0, log_every=12, run_dir=tmp_path / "run")
    assert len(saved) > 1
    assert all(log == before for log, before in saved)


@pytest.mark.slow
def test_state_keeps_its_sharding_on_several_devices():
    def double(event):
        obs = jax.device_get(event.state.collect.obs)
        event.state = event.state.replace(collect=event.state.collect.replace(obs=2.0 * obs))

    result = train(double, callback_every=4, num_devices=2)
    assert result.summary["status"] == "finished"
    assert len(result.state.collect.obs.sharding.device_set) == 2


def replaced(change):
    def callback(event):
        event.state = change(event.state)

    return callback


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            replaced(lambda state: state.replace(train=state.train.replace(update=1.5))),
            r"event.state.train.update is a Python float, but the run needs int32\[\]; a callback may change",
        ),
        (
            replaced(lambda state: state.replace(collect=state.collect.replace(obs=jnp.zeros((3, 1))))),
            r"event.state.collect.obs is float32\[3,1\], but the run needs float32\[8,1\]",
        ),
        (
            replaced(lambda state: state.replace(train=state.train.replace(key=()))),
            r"event.state.train.key is missing, but the run needs a key\[\] of threefry2x32",
        ),
        (
            replaced(lambda state: state.replace(train=state.train.replace(key=jax.random.key_data(state.train.key)))),
            r"event.state.train.key is uint32\[2\], but the run needs a key\[\] of threefry2x32",
        ),
        (
            replaced(lambda state: state.replace(train=state.train.replace(hyperparams=CONSTANT.replace(gamma=2.0)))),
            r"gamma = 2 is outside \[0, 1\]",
        ),
        (
            replaced(
                lambda state: state.replace(
                    train=state.train.replace(hyperparams=CONSTANT.replace(gamma=jppo.schedules.linear(0.9, 0.99)))
                )
            ),
            "hyperparams.gamma is missing, but .* numbers and schedules cannot replace each other; pass a number to",
        ),
        (lambda event: False, "the callback returned a value of type bool, but it must return None; use event.stop"),
        (
            replaced(lambda state: state.train),
            r"event.state.train.policy_state.* is missing, but the run needs float32",
        ),
        (lambda event: event.log("loss/total", 1.0), "the metric 'loss/total' is one of jppo's; choose another name"),
        (lambda event: event.log("my/x", "high"), "the metric 'my/x' must be a number, not 'high'"),
        (lambda event: event.log("my/x", np.ones(2)), r"the metric 'my/x' must be a number, not array\(\[1., 1.\]\)"),
        (lambda event: event.log("", 1.0), "the name of a metric must be a text, not ''"),
    ],
)
def test_invalid_results_raise(callback, message):
    with pytest.raises(ValueError, match=message) as error:
        train(callback, total=1)
    assert "\n" not in str(error.value)


@MODES
@pytest.mark.slow
def test_parameters_that_are_not_finite_are_an_error_of_the_callback(run, tmp_path):
    def broken(event):
        state = getattr(event.state, "train", event.state)
        params = jax.tree.map(lambda x: x + jnp.inf, state.policy_state.params)
        state = state.replace(policy_state=state.policy_state.replace(params=params))
        event.state = event.state.replace(train=state) if run is train else state

    message = (
        r"^the callback broken set event\.state.*\.policy_state\.params.* to NaN or infinity after update 4; it must"
    )
    with pytest.raises(ValueError, match=message) as error:
        run(broken, callback_every=4, run_dir=tmp_path / "run")
    assert error.value.result.summary["checkpoint"] == 4
    assert run(lambda event: None, callback_every=4, run_dir=tmp_path / "run").summary["status"] == "finished"


def test_state_is_readable_until_the_callback_returns():
    events = []
    train(events.append, callback_every=UPDATES)
    (event,) = events
    uses = {"state": lambda: event.state, "stop": event.stop, "log": lambda: event.log("my/x", 1.0)}
    for name, use in uses.items():
        with pytest.raises(RuntimeError, match=rf"^event\.{name} must be used before the callback returns$"):
            use()
    assert event.run == ("Cued", 0)


@MODES
def test_exception_ends_the_run_with_everything_saved(run, tmp_path):
    def fail(event):
        event.log("my/number", 1.0)
        raise ArithmeticError("curriculum")

    with pytest.raises(ArithmeticError, match="curriculum") as error:
        run(fail, callback_every=4, run_dir=tmp_path / "run")
    assert error.value.result.summary["status"] == "failed"
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["updates"], summary["checkpoint"]) == ("failed", 4, 4)
    assert jppo.load_policy(tmp_path / "run", env=Guessing if run is train_host else Cued()).act(np.zeros(1)) in (0, 1)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["my/number"] == 1.0
    resumed = run(lambda event: None, callback_every=4, run_dir=tmp_path / "run")
    assert resumed.summary["status"] == "finished"


def test_exit_in_a_callback_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"^the callback called sys\.exit\(0\)$") as error:
        train(lambda event: sys.exit(0), total=2, callback_every=2, run_dir=tmp_path / "run")
    assert error.value.result.summary["status"] == "failed"
    assert (tmp_path / "run/policy_state.npz").is_file()


@struct.dataclass
class ScaledParams(EnvParams):
    scale: float = 1.0


@struct.dataclass
class ScaledState(ProbeState):
    scale: float


class Scaled(Cued):
    """Its rewards have a scale that is a leaf of the state; an episode starts with the scale of the one before."""

    default_params = ScaledParams(max_steps_in_episode=5)

    def reset_env(self, key, params):
        obs, state = super().reset_env(key, params)
        return obs, ScaledState(time=state.time, cue=state.cue, scale=params.scale)

    def step(self, key, state, action, params):
        return super().step(key, state, action, params.replace(scale=state.scale))

    def reward(self, state, action):
        return state.scale


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_parameters_in_the_state_of_environments_survive_resets(num_devices):
    def change(event):
        env_state = event.state.collect.env_state
        scale = env_state.scale + jnp.arange(1.0, 9.0)
        event.state = event.state.replace(collect=event.state.collect.replace(env_state=env_state.replace(scale=scale)))

    result = train(change, Scaled(), callback_every=6, num_devices=num_devices, total=18)
    assert result.state.collect.env_state.scale.tolist() == [4.0, 7.0, 10.0, 13.0, 16.0, 19.0, 22.0, 25.0]
    returns = result.metrics["episode/return_mean"]
    assert returns[4] == 5.0
    assert returns[[9, 11]] == pytest.approx(5.0 * 5.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"callback_every": 0}, "callback_every = 0 must be a whole number of at least 1"),
        ({"callback_every": 13}, "callback_every = 13 is more than the 12 updates of the run; lower it"),
        ({"callback": 3}, r"callback = 3 must be a function of \(event\)"),
    ],
)
def test_invalid_arguments_raise(given, message):
    with pytest.raises(ValueError, match=message):
        train(**({"callback": print} | given))


def test_callback_of_another_library_raises_before_the_run(tmp_path):
    def two(local_names, global_names):
        pass

    message = r"^callback = two must accept the arguments \(event\): missing a required argument: 'global_names'$"
    with pytest.raises(TypeError, match=message):
        train(two, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_second_ctrl_c_in_a_callback_raises_keyboard_interrupt():
    def interrupt(event):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(interrupt)


class Interrupting(NullReporter):
    """Sends Ctrl-C after a number of updates."""

    def __init__(self, after):
        self._after = after

    def update(self, env_steps, steps_per_second, recent_return):
        if env_steps == self._after * BATCH:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_resumed_run_calls_the_callback_at_the_same_updates(tmp_path, monkeypatch):
    monkeypatch.setattr(device_loop, "_CHUNK_SECONDS", 0.0)  # chunks of one update

    def make_callback():
        seen = []

        def callback(event):
            learner = event.state.train
            rate = learner.hyperparams.learning_rate * 0.5
            learner = learner.replace(hyperparams=learner.hyperparams.replace(learning_rate=rate))
            event.state = event.state.replace(train=learner)
            event.log("my/number", rate)
            seen.append((event.update, event.return_mean, *(v for n, v in event.metrics.items() if "time/" not in n)))

        return callback, seen

    given = {"callback_every": 3, "checkpoint_seconds": 0}
    whole, expected = make_callback()
    full = train(whole, run_dir=tmp_path / "whole", **given)
    for last in (6, 7):  # an update with a callback, and one between two
        part, seen = make_callback()
        path = tmp_path / f"part{last}"
        interrupted = train(part, run_dir=path, progress=Interrupting(last), **given)
        assert interrupted.summary["status"] == "interrupted"
        resumed = train(part, run_dir=path, **given)
        assert seen == expected
        for name, leaf in copy_leaves(full.state).items():
            np.testing.assert_array_equal(leaf, copy_leaves(resumed.state)[name], name)
        shutil.rmtree(path)
    with pytest.raises(ValueError, match="callback_every is 3 in the run, but not set now"):
        train(run_dir=tmp_path / "whole")
