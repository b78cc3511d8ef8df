"""Tests of trials of Ray Tune: search space, reports, checkpoints and restored trials."""

import collections
import dataclasses
import json
import os
import shutil
import signal
import threading
import warnings
from pathlib import Path
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
import ray
from lenient import lenient, lenient_env
from probes import TimeLimit
from ray import tune as ray_tune

import jppo
from jppo.runs.checkpoints import latest_checkpoint
from jppo.runs.load import load_run
from jppo.sweeps import tune, tune_trial
from jppo.training import ray_loop
from jppo.training.settings import RunSettings, prepare_run

CONFIG = jppo.PPOConfig(num_envs=4, num_steps=16, num_epochs=1, num_minibatches=2)
STEPS = 8 * CONFIG.batch_size
SPACE = {"learning_rate": jppo.schedules.linear(1e-2, 0.0), "seed": 5}


def test_search_space_replaces_arguments():
    space = {"num_envs": np.int64(8), "hidden_sizes": [32], "learning_rate": np.float64(0.1), "seed": 3}
    settings = RunSettings(env=TimeLimit(), config=CONFIG, hyperparams=jppo.Hyperparams(gamma=0.5))
    prepared = prepare_run(tune_trial.apply_space(space, settings))
    assert prepared.agent.config == dataclasses.replace(CONFIG, num_envs=8, hidden_sizes=(32,))
    assert (prepared.hyperparams.learning_rate, prepared.hyperparams.gamma, prepared.seed) == (0.1, 0.5, 3)


@pytest.mark.parametrize(
    ("fixed", "space", "sizes"),
    [
        ({"scale_envs": 3}, {"num_envs": 15}, (15, 6)),
        ({"scale_envs": 3}, {"num_minibatches": 4}, (12, 4)),
        ({"scale_envs": 3}, {"num_envs": 16, "num_minibatches": 4}, (16, 4)),
        ({"scale_envs": 3}, {"scale_envs": 2}, (8, 4)),
        ({"num_envs": 6}, {"scale_envs": 3}, (18, 6)),
        ({"num_minibatches": 1}, {"scale_envs": 3}, (12, 3)),
        ({"num_envs": 3, "num_steps": 5}, {"num_minibatches": 5}, (3, 5)),  # the arguments alone are invalid
    ],
)
def test_scale_envs_multiplies_the_sizes_that_are_not_searched(fixed, space, sizes):
    settings = RunSettings(env=TimeLimit(), config=CONFIG, overrides=fixed)
    config = prepare_run(tune_trial.apply_space(space, settings)).agent.config
    assert (config.num_envs, config.num_minibatches) == sizes


@pytest.mark.parametrize(
    ("fixed", "space"), [({"scale_envs": 3, "num_envs": 8}, {}), ({}, {"scale_envs": 3, "num_envs": 8})]
)
def test_scale_envs_and_num_envs_in_the_same_place_raise(fixed, space):
    with pytest.raises(ValueError, match="leave out num_envs or scale_envs"):
        prepare_run(tune_trial.apply_space(space, RunSettings(env=TimeLimit(), config=CONFIG, overrides=fixed)))


def test_config_of_a_trial_names_scale_envs_only_if_it_multiplies_both_sizes():
    settings = RunSettings(env=TimeLimit(), config=CONFIG, overrides={"scale_envs": 2})
    assert prepare_run(tune_trial.apply_space({}, settings)).config_json["scale_envs"] == 2
    assert "scale_envs" not in prepare_run(tune_trial.apply_space({"num_envs": 10}, settings)).config_json


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            {"batch_size": 64},
            r"the search space has an unknown setting 'batch_size'; num_minibatches = num_envs\*num_steps/batch_size",
        ),
        ({"lr": 1e-3}, "did you mean learning_rate"),
        ({"num_minibatch": 1}, "did you mean num_minibatches"),
        ({"frobnicate": 1}, "unknown setting 'frobnicate'"),
        ({"num_minibatches": 3}, "nearest numbers that divide it"),
        ({"seed": 0.5}, "seed = 0.5"),
    ],
)
def test_invalid_search_space_raises(space, message):
    with pytest.raises(ValueError, match=message):
        prepare_run(tune_trial.apply_space(space, RunSettings(env=TimeLimit(), config=CONFIG)))


class Lock:
    """A callback with a lock, which pickle refuses."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, event):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"learning_rate": 1e-3}}, "it is a field of hyperparams"),
        ({"callback": Lock()}, r"processes of Ray Tune: cannot pickle '_thread.lock' object; pass objects that can be"),
        ({"ray": jppo.RayConfig()}, "ray.num_actors must be a number"),
        ({"checkpoint_updates": 0.5}, "checkpoint_updates = 0.5"),
        ({"backend": "rllib"}, "backend = 'rllib'"),
        ({"preset": "none"}, "unknown preset"),
        ({"total_steps": 0.5}, "total_steps"),
        ({"callback": 3}, r"callback = 3 must be a function of \(event\)"),
        ({"callback_every": 0}, "callback_every = 0 must be a whole number"),
        (
            {"run": {"resume": True}},
            "run.resume = True has no effect in jppo.tune.trainable, which supports eval_every",
        ),
    ],
)
def test_invalid_arguments_raise(options, message):
    with pytest.raises(ValueError, match=message):
        tune.trainable("CartPole-v1", **options)


def test_invalid_resources_raise():
    with pytest.raises(ValueError, match="gpus = -1 must be a number of at least 0"):
        jppo.Resources(gpus=-1)
    with pytest.raises(ValueError, match=r"resources = 2 must be a jppo\.Resources or a mapping of its fields"):
        tune.trainable("CartPole-v1", resources=2)


def test_trial_reserves_resources_for_its_actors():
    ray_config = jppo.RayConfig(num_actors=2, actor_cpus=0.5)
    trial = tune.trainable("ALE/Pong-v5", resources={"cpus": 2, "gpus": 0.5}, ray=ray_config)
    assert trial.__name__ == "ALE_Pong-v5"
    assert trial._resources.bundles == [{"CPU": 2, "GPU": 0.5}, {"CPU": 0.5}, {"CPU": 0.5}]


def test_process_is_limited_to_its_resources(monkeypatch):
    def variables(resources, **before):
        monkeypatch.setattr(os, "environ", before)
        tune.limit_process(resources)
        return os.environ

    assert variables({"CPU": 3.0}) == {"NPROC": "3", "JAX_PLATFORMS": "cpu"}
    alone = variables({"CPU": 1.0, "GPU": 0.25}, XLA_FLAGS="--a")
    assert alone["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.2250"
    assert alone["XLA_FLAGS"] == "--a --xla_cpu_multi_thread_eigen=false"
    assert "JAX_PLATFORMS" not in alone
    assert variables({"CPU": 2.0, "GPU": 2.0}) == {"NPROC": "2"}
    chosen = variables({"CPU": 2.0, "GPU": 0.5}, XLA_CLIENT_MEM_FRACTION="0.1")
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in chosen


class FakeTune:
    """Replaces Ray Tune in this process: stores reports and checkpoints, and ends the trial after `last` updates."""

    def __init__(self, path, monkeypatch, start=None, last=None):
        self.path, self.last, self.reports, self.checkpoints = path, last, [], {}
        monkeypatch.setattr(ray, "get_runtime_context", Mock())
        monkeypatch.setattr(tune, "limit_process", lambda resources: None)
        monkeypatch.setattr(ray_tune, "report", self.report)
        monkeypatch.setattr(ray_tune, "get_checkpoint", lambda: start and ray_tune.Checkpoint.from_directory(start))

    def report(self, metrics, checkpoint=None):
        self.reports.append(metrics)
        if checkpoint is not None:
            self.checkpoints[metrics["update"]] = self.path / str(metrics["update"])
            shutil.copytree(checkpoint.path, self.checkpoints[metrics["update"]])
        if metrics.get("update", -1) == self.last:
            raise SystemExit


def on_device(**options):
    return tune.trainable(lenient_env("CartPole-v1"), total_steps=STEPS, config=CONFIG, **options)


def state_at(path):
    """Returns every leaf of a checkpoint as a NumPy array, by name."""
    return latest_checkpoint(path, warnings.warn).leaves


def same(path, other):
    one, two = state_at(path), state_at(other)
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Returns a trial that ends after 6 of its 8 updates, with a checkpoint of update 4."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        first = FakeTune(tmp_path_factory.mktemp("first"), monkeypatch, last=6)
        with pytest.raises(SystemExit):
            on_device(checkpoint_updates=4)(SPACE)
    assert list(first.checkpoints) == [4]
    return first


@pytest.mark.slow
def test_restored_trial_equals_an_uninterrupted_trial(interrupted, tmp_path, monkeypatch):
    whole = FakeTune(tmp_path / "whole", monkeypatch)
    on_device(checkpoint_updates=0)(SPACE)
    assert list(whole.checkpoints) == [8]
    second = FakeTune(tmp_path / "second", monkeypatch, start=interrupted.checkpoints[4])
    on_device(checkpoint_updates=3)(SPACE)
    assert list(second.checkpoints) == [6, 8]
    reports = [
        [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]
        for rows in (interrupted.reports[:4] + second.reports, whole.reports)
    ]
    np.testing.assert_equal(*reports)
    assert same(second.checkpoints[8], whole.checkpoints[8])
    assert not same(second.checkpoints[6], whole.checkpoints[8])


@pytest.mark.slow
def test_reports_contain_the_metrics_of_the_run(interrupted):
    env, hyperparams = lenient_env("CartPole-v1"), jppo.Hyperparams(learning_rate=SPACE["learning_rate"])
    result = jppo.train(env, total_steps=STEPS, config=CONFIG, hyperparams=hyperparams, seed=SPACE["seed"])
    reported = {name: [row[name] for row in interrupted.reports] for name in interrupted.reports[0]}
    assert set(reported) == {*result.metrics, "return_mean"}
    for name, values in result.metrics.items():
        if not name.startswith("time/"):
            np.testing.assert_allclose(reported[name], values[:6], rtol=1e-4, atol=1e-6, err_msg=name)
    counts, means = (result.metrics[f"episode/{name}"][:6] for name in ("count", "return_mean"))
    assert reported["return_mean"][-1] == pytest.approx(np.nansum(counts * means) / counts.sum(), rel=1e-4)
    np.testing.assert_equal(np.isnan(reported["return_mean"]), np.cumsum(counts) == 0)


@pytest.mark.slow
def test_restored_trial_may_change_hyperparameters(interrupted, tmp_path, monkeypatch):
    """Population-based training does this."""
    taker = FakeTune(tmp_path, monkeypatch, start=interrupted.checkpoints[4], last=5)
    with pytest.raises(SystemExit):
        on_device(checkpoint_updates=5)(SPACE | {"learning_rate": jppo.schedules.linear(3e-2, 0.0)})
    before, after = (report["learning_rate"] for report in (interrupted.reports[3], taker.reports[0]))
    assert after == pytest.approx(3 * before * 4 / 5)  # the annealing continues
    for path in (interrupted.checkpoints[4], taker.checkpoints[5]):  # also usable before the end of a run
        with lenient():
            action = jppo.load_policy(path, env=lenient_env("CartPole-v1")).act(np.zeros(4, np.float32))
        assert action in (0, 1)


EVENTS = {
    "run": jppo.RunConfig(eval_every=3, eval_episodes=2),
    "callback": lambda event: event.log("my/update", event.update),
    "callback_every": 4,
}


@pytest.mark.slow
def test_reports_contain_the_newest_evaluation_and_number_of_the_callback_also_after_a_restore(tmp_path, monkeypatch):
    whole = FakeTune(tmp_path / "whole", monkeypatch)
    on_device(checkpoint_updates=5, **EVENTS)(SPACE)
    means = [row["eval/return_mean"] for row in whole.reports]
    assert np.isnan(means[:2]).all()
    assert means[2] == means[3] == means[4] > 0.0
    assert means[5] == means[7] != means[2]
    updates = [row["my/update"] for row in whole.reports]  # of the callback
    assert np.isnan(updates[:3]).all()
    assert updates[3:] == [4.0, 4.0, 4.0, 4.0, 8.0]
    second = FakeTune(tmp_path / "second", monkeypatch, start=whole.checkpoints[5])
    on_device(checkpoint_updates=5, **EVENTS)(SPACE)
    assert [row["eval/return_mean"] for row in second.reports] == means[5:]
    assert [row["my/update"] for row in second.reports] == updates[5:]


@pytest.mark.slow
def test_trial_stops_at_a_return_and_with_its_callback(tmp_path, monkeypatch):
    given = {"run": {"stop_at_return": 1.0, "eval_every": 3, "eval_episodes": 2}}
    solved = FakeTune(tmp_path / "solved", monkeypatch)
    on_device(**given)(SPACE)
    assert list(solved.checkpoints) == [3]
    stopped = FakeTune(tmp_path / "stopped", monkeypatch)
    on_device(callback=lambda event: event.stop("enough"), callback_every=2)(SPACE)
    assert list(stopped.checkpoints) == [2]
    restored = FakeTune(tmp_path / "restored", monkeypatch, start=stopped.checkpoints[2])
    on_device(callback=lambda event: event.stop("enough"), callback_every=2)(SPACE)
    assert not restored.reports
    on_device(callback=lambda event: event.stop("enough"), callback_every=2)(
        SPACE | {"learning_rate": jppo.schedules.linear(1e-3, 0.0)}
    )
    assert list(restored.checkpoints) == [4]


@pytest.mark.slow
def test_exception_of_a_callback_fails_the_trial(tmp_path, monkeypatch):
    def fail(event):
        raise ArithmeticError("curriculum")

    trial = FakeTune(tmp_path, monkeypatch)
    with pytest.raises(ArithmeticError, match="curriculum") as error:
        on_device(callback=fail, callback_every=4)(SPACE)
    assert error.value.result is None, "Ray cannot pickle the result of a run"
    assert trial.reports[-1]["update"] == 4


def test_diverging_trial_fails(tmp_path, monkeypatch):
    trial = FakeTune(tmp_path, monkeypatch)
    with pytest.raises(FloatingPointError, match=r"update \d made a loss, gradient or parameter NaN"):
        on_device(loss=lambda apply, batch, *rest: (np.nan * apply(batch.obs)[1].mean(), {}))({})
    assert not trial.checkpoints


@pytest.mark.slow
def test_restored_ray_trial_starts_new_environments(tmp_path, monkeypatch):
    """The trial has no actors. The state of a Gymnasium environment cannot be saved."""
    monkeypatch.setattr(ray_loop, "_LOG_SECONDS", 0.0)
    trial = tune.trainable("CartPole-v1", total_steps=STEPS, config=CONFIG, backend="ray", checkpoint_updates=4)
    with lenient():
        whole = FakeTune(tmp_path / "whole", monkeypatch)
        trial(SPACE)
        second = FakeTune(tmp_path / "second", monkeypatch, start=whole.checkpoints[4])
        trial(SPACE)
    assert list(whole.checkpoints) == [4, 8]
    assert [row["env_steps"] for row in second.reports] == [number * CONFIG.batch_size for number in (5, 6, 7, 8)]
    assert second.reports[0]["value/mean"] != whole.reports[4]["value/mean"]
    assert second.reports[0]["learning_rate"] == whole.reports[4]["learning_rate"]


@pytest.fixture(scope="module")
def ray_of_two():
    """Starts Ray with two CPUs and a GPU that does not exist."""
    with warnings.catch_warnings():  # Ray forks and then executes another program
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        ray.init("local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


class KillOnce(ray_tune.Callback):
    """Kills the process of the first trial that reports the given update. Records the updates of each trial."""

    def __init__(self, update):
        self.update, self.killed, self.updates = update, None, collections.defaultdict(list)

    def on_trial_result(self, iteration, trials, trial, result, **info):
        self.updates[trial.trial_id].append(result["update"])
        if self.killed is None and result["update"] == self.update:
            self.killed = trial.trial_id
            os.kill(result["pid"], signal.SIGKILL)


def fit(trainable, path, space, callbacks=(), max_failures=0):
    return ray_tune.Tuner(
        trainable,
        param_space=space,
        tune_config=ray_tune.TuneConfig(metric="return_mean", mode="max", time_budget_s=300),
        run_config=ray_tune.RunConfig(
            name="sweep",
            storage_path=str(path),
            verbose=0,
            callbacks=list(callbacks),
            failure_config=ray_tune.FailureConfig(max_failures=max_failures),
        ),
    ).fit()


@pytest.mark.slow
def test_killed_trial_ends_with_the_state_of_an_uninterrupted_trial(ray_of_two, tmp_path):
    trial = tune.trainable("CartPole-v1", total_steps=STEPS, config=CONFIG, checkpoint_updates=3)
    kill = KillOnce(update=5)
    results = fit(trial, tmp_path, {"seed": ray_tune.grid_search([1, 1])}, [kill], max_failures=1)
    assert results.num_errors == 0
    assert kill.killed
    for trial_id, updates in kill.updates.items():
        assert updates == ([1, 2, 3, 4, 5, 4, 5, 6, 7, 8] if trial_id == kill.killed else list(range(1, 9)))
    assert [result.metrics["training_iteration"] for result in results] == [8, 8]
    one, other = (result.checkpoint.path for result in results)
    assert same(Path(one), Path(other))
    with lenient():
        assert load_run(one).settings["seed"] == 1


@pytest.mark.slow
def test_actors_use_the_resources_of_their_trial(ray_of_two, tmp_path):
    """The trial reserves both CPUs; its own process makes the environment once, for the spaces."""

    class RecordProcess(gymnasium.Wrapper):
        """Writes the limits of its process to a file."""

        def __init__(self, env, path):
            super().__init__(env)
            names = ("JAX_PLATFORMS", "NPROC", "XLA_PYTHON_CLIENT_MEM_FRACTION")
            seen = {name: os.environ.get(name) for name in names}
            path.joinpath(f"{os.getpid()}.json").write_text(json.dumps(seen))

    seen = tmp_path / "seen"
    seen.mkdir()
    trial = tune.trainable(
        lambda: RecordProcess(gymnasium.make("CartPole-v1"), seen),
        total_steps=STEPS,
        config=CONFIG,
        ray=jppo.RayConfig(num_actors=1),
        resources=jppo.Resources(gpus=0.25),
    )
    results = fit(trial, tmp_path, {"learning_rate": 1e-3})
    assert results.num_errors == 0
    assert results[0].metrics["update"] == 8
    found = [json.loads(path.read_text()) for path in seen.glob("*.json")]
    share = {"JAX_PLATFORMS": "cpu", "NPROC": "1", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2250"}
    assert {actor["XLA_PYTHON_CLIENT_MEM_FRACTION"] for actor in found} == {None, "0.2250"}
    assert all(actor == share | {"XLA_PYTHON_CLIENT_MEM_FRACTION": None} or actor == share for actor in found)
