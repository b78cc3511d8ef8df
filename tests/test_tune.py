"""Trials of Ray Tune: what a search space may name, what is reported, and that no interruption changes a run."""

import collections
import dataclasses
import json
import os
import shutil
import signal
import warnings
from pathlib import Path
from unittest.mock import Mock

import gymnasium
import jax
import numpy as np
import pytest
import ray
from lenient import lenient, lenient_env
from ray import tune as ray_tune

import jppo
from jppo.runs.load import load_run
from jppo.runs.run_dir import load_policy_state
from jppo.sweeps import tune, tune_trial
from jppo.training import ray_loop

CONFIG = jppo.PPOConfig(num_envs=4, num_steps=16, num_epochs=1, num_minibatches=2)
STEPS = 8 * CONFIG.batch_size
SPACE = {"learning_rate": 1e-2, "seed": 5}


def test_a_search_space_overrides_what_was_given():
    space = {"num_envs": np.int64(8), "hidden_sizes": [32], "learning_rate": np.float64(0.1), "seed": 3}
    config, hyperparams, seed = tune_trial.apply_space(space, CONFIG, jppo.Hyperparams(gamma=0.5), 0)
    assert config == dataclasses.replace(CONFIG, num_envs=8, hidden_sizes=(32,))
    assert (hyperparams.learning_rate, hyperparams.gamma, seed) == (0.1, 0.5, 3)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"batch_size": 64}, r"'batch_size', which is no setting; a batch is num_envs\*num_steps: sweep one of these"),
        ({"lr": 1e-3}, "did you mean learning_rate"),
        ({"num_minibatch": 1}, "did you mean num_minibatches"),
        ({"frobnicate": 1}, "there are action_bounds, .*, seed"),
        ({"learning_rate": -1.0}, "learning_rate = -1 is outside"),
        ({"num_minibatches": 3}, "nearest that divide it"),
        ({"seed": 0.5}, "seed = 0.5"),
    ],
)
def test_a_search_space_is_refused_in_words(space, message):
    with pytest.raises(ValueError, match=message):
        tune_trial.apply_space(space, CONFIG, jppo.Hyperparams(), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"learning_rate": 1e-3}}, "the search space goes to the Tuner"),
        ({"num_actors": -2}, "num_actors = -2"),
        ({"checkpoint_every": 0.5}, "checkpoint_every = 0.5"),
        ({"gpus": -1}, "gpus = -1"),
        ({"backend": "rllib"}, "backend = 'rllib'"),
        ({"preset": "none"}, "unknown preset"),
        ({"total_steps": 0.5}, "total_steps"),
    ],
)
def test_options_are_refused_in_words(options, message):
    with pytest.raises(ValueError, match=message):
        tune.trainable("CartPole-v1", **options)


def test_a_trial_reserves_its_actors_too():
    trial = tune.trainable("ALE/Pong-v5", cpus=2, gpus=0.5, num_actors=2, actor_cpus=0.5)
    assert trial.__name__ == "ALE_Pong-v5"
    assert trial._resources.bundles == [{"CPU": 2, "GPU": 0.5}, {"CPU": 0.5}, {"CPU": 0.5}]


def test_a_process_keeps_to_its_share(monkeypatch):
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
    """Stands in for Ray Tune in this process: keeps reports and checkpoints, ends the trial after `last` updates."""

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
        if metrics["update"] == self.last:
            raise SystemExit


def on_device(**options):
    return tune.trainable(lenient_env("CartPole-v1"), total_steps=STEPS, config=CONFIG, **options)


def state_at(path):
    """Every leaf of a checkpoint, as NumPy."""
    agent = jppo.make_anakin(lenient_env("CartPole-v1"), CONFIG, total_steps=STEPS)
    like = jax.eval_shape(agent.init, jax.random.key(0), jppo.Hyperparams())
    leaves = jax.tree.leaves(load_policy_state(path / "state", like))
    keys = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [np.asarray(jax.random.key_data(leaf) if key else leaf) for leaf, key in zip(leaves, keys, strict=True)]


def same(path, other):
    return all(np.array_equal(a, b) for a, b in zip(state_at(path), state_at(other), strict=True))


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A trial that ends after 6 of its 8 updates, with a checkpoint of the fourth."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        first = FakeTune(tmp_path_factory.mktemp("first"), monkeypatch, last=6)
        with pytest.raises(SystemExit):
            on_device(checkpoint_every=4)(SPACE)
    assert list(first.checkpoints) == [4]
    return first


def test_two_halves_are_one_whole_run_bit_for_bit(interrupted, tmp_path, monkeypatch):
    whole = FakeTune(tmp_path / "whole", monkeypatch)
    on_device(checkpoint_every=0)(SPACE)
    assert list(whole.checkpoints) == [8]
    second = FakeTune(tmp_path / "second", monkeypatch, start=interrupted.checkpoints[4])
    on_device(checkpoint_every=3)(SPACE)
    assert list(second.checkpoints) == [7, 8]
    reports = [
        [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]
        for rows in (interrupted.reports[:4] + second.reports, whole.reports)
    ]
    np.testing.assert_equal(*reports)
    assert same(second.checkpoints[8], whole.checkpoints[8])
    assert not same(second.checkpoints[7], whole.checkpoints[8])


def test_reports_are_the_metrics_of_a_run(interrupted):
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


def test_a_checkpoint_is_taken_up_with_the_numbers_of_another_trial(interrupted, tmp_path, monkeypatch):
    """As population-based training does."""
    taker = FakeTune(tmp_path, monkeypatch, start=interrupted.checkpoints[4], last=5)
    with pytest.raises(SystemExit):
        on_device()(SPACE | {"learning_rate": 3 * SPACE["learning_rate"]})
    before, after = (report["learning_rate"] for report in (interrupted.reports[3], taker.reports[0]))
    assert after == pytest.approx(3 * before * 4 / 5)  # annealed on


def test_a_trial_that_diverges_fails(tmp_path, monkeypatch):
    trial = FakeTune(tmp_path, monkeypatch)
    with pytest.raises(FloatingPointError, match=r"update \d made a loss, gradient or parameter NaN"):
        on_device(loss=lambda *args: (jax.numpy.float32(np.nan), {}))({})
    assert not trial.checkpoints


def test_the_ray_backend_goes_on_in_new_environments(tmp_path, monkeypatch):
    """Without actors. A host environment's state cannot be saved, so a second half draws anew."""
    monkeypatch.setattr(ray_loop, "_LOG_SECONDS", 0.0)
    trial = tune.trainable("CartPole-v1", total_steps=STEPS, config=CONFIG, backend="ray", checkpoint_every=4)
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
    """Two CPUs, and a GPU that there is not."""
    with warnings.catch_warnings():  # Ray forks only to become another program at once
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        ray.init("local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


class KillOnce(ray_tune.Callback):
    """Kills the process of the first trial to get that far. Notes the updates of each."""

    def __init__(self, update):
        self.update, self.killed, self.updates = update, None, collections.defaultdict(list)

    def on_trial_result(self, iteration, tune_trial, trial, result, **info):
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


def test_a_killed_trial_ends_where_its_twin_does(ray_of_two, tmp_path):
    trial = tune.trainable("CartPole-v1", total_steps=STEPS, config=CONFIG, checkpoint_every=3)
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


def test_actors_of_a_trial_live_on_what_it_reserved(ray_of_two, tmp_path):
    """Both CPUs are the trial's; the environment is made in its process once, to be looked at."""

    class Noting(gymnasium.Wrapper):
        """Leaves behind what it sees of its process."""

        def __init__(self, env, path):
            super().__init__(env)
            names = ("JAX_PLATFORMS", "NPROC", "XLA_PYTHON_CLIENT_MEM_FRACTION")
            seen = {name: os.environ.get(name) for name in names}
            path.joinpath(f"{os.getpid()}.json").write_text(json.dumps(seen))

    seen = tmp_path / "seen"
    seen.mkdir()
    trial = tune.trainable(
        lambda: Noting(gymnasium.make("CartPole-v1"), seen),
        total_steps=STEPS,
        config=CONFIG,
        num_actors=1,
        gpus=0.25,
    )
    results = fit(trial, tmp_path, {"learning_rate": 1e-3})
    assert results.num_errors == 0
    assert results[0].metrics["update"] == 8
    found = [json.loads(path.read_text()) for path in seen.glob("*.json")]
    share = {"JAX_PLATFORMS": "cpu", "NPROC": "1", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2250"}
    assert {actor["XLA_PYTHON_CLIENT_MEM_FRACTION"] for actor in found} == {None, "0.2250"}
    assert all(actor == share | {"XLA_PYTHON_CLIENT_MEM_FRACTION": None} or actor == share for actor in found)


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_population_is_one_trial_that_reports_every_lane(ray_of_two, tmp_path):
    """Two trials of four lanes each; what a trial reports at last is what a sweep of the same lanes gets."""
    options = {"config": CONFIG, "total_steps": STEPS, "seeds": 2, "ent_coef": [0.0, 0.1]}
    results = ray_tune.Tuner(
        tune.population("CartPole-v1", **options),
        param_space={"learning_rate": ray_tune.grid_search([1e-3, 1e-2])},
        run_config=ray_tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    ).fit()
    assert not results.errors
    for trial in results:
        with lenient():
            swept = jppo.sweep("CartPole-v1", **options, **trial.config, num_devices=1)
        assert trial.metrics["env_steps"] == 4 * STEPS
        lanes = [trial.metrics[f"lane/{number}"] for number in range(4)]
        np.testing.assert_allclose(lanes, swept.table["return_mean"], rtol=0.02)
        assert sorted(lanes)[1] <= trial.metrics["return_mean"] <= sorted(lanes)[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": [4, 8]}, "num_envs changes the program, and a trial is one program"),
        ({"lr": [1e-3]}, "unknown setting 'lr'; did you mean learning_rate"),
        ({"seeds": 0}, "seeds = 0 must be from 1 to"),
    ],
)
def test_a_population_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        tune.population("CartPole-v1", **options)
