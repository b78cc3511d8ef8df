"""Tests of jppo.sweep: runs, tables, files, successive halving, errors and interrupts."""

import contextlib
import csv
import dataclasses
import functools
import io
import itertools
import json
import os
import signal
import warnings
from unittest.mock import Mock

import gymnasium
import jax
import numpy as np
import pytest
import scipy.stats
from checks import SMALL, compiled_programs
from host_probes import Guessing
from PIL import Image
from probes import NO_LIMIT, Moving, NaNReward, ObsActionReward, Probe

import jppo
from jppo.errors import Refused
from jppo.ppo.losses import ppo_loss
from jppo.runs.load import load_run
from jppo.runs.run_dir import read_metrics
from jppo.runs.statistics import bootstrap_interval, interquartile_mean
from jppo.sweeps import sweep as sweeps
from jppo.sweeps.grid import _represent, check_settings
from jppo.sweeps.results import SweepResult, print_settings
from jppo.sweeps.store import load_sweep
from jppo.sweeps.sweep_run import SweepRun
from jppo.training.progress import NullReporter

CONFIG = SMALL(num_envs=8, num_steps=16, num_epochs=2, num_minibatches=2)
BASE = jppo.Hyperparams(learning_rate=1e-2, ent_coef=0.0)
UPDATES = 16
STEPS = UPDATES * CONFIG.batch_size


class Cued(ObsActionReward):
    """An environment with episodes of three steps that rewards the action that matches the observation."""

    length = 3


class Endless(Probe):
    """An environment without an end of episodes."""

    length = limit = NO_LIMIT


class Messages(NullReporter):
    def __init__(self, act=lambda: None):
        self.texts, self.act = [], act

    def message(self, text):
        self.texts.append(text)

    def update(self, step, steps_per_second, recent_return):
        self.act()


def sweep(env=None, **options):
    given = {"config": CONFIG, "hyperparams": BASE, "total_steps": STEPS, "num_devices": 1, "seeds": 2} | options
    return jppo.sweep(env or Cued(), **given)


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Returns a sweep over two learning rates (the first is too low to learn) and two sizes, with its messages."""
    path, messages = tmp_path_factory.mktemp("sweeps") / "new" / "grid", Messages()
    with compiled_programs("run_chunk") as names:
        result = sweep(learning_rate=[1e-9, 1e-2], num_envs=[4, 8], sweep_dir=path, progress=lambda _: messages)
    return result, messages.texts, names, path


@pytest.mark.slow
def test_runs_are_grouped_by_program_and_announced(grid):
    result, texts, names, _ = grid
    assert texts[0] == "8 runs in 2 programs"
    assert [text.strip() for text in texts[1:3]] == ["Cued, num_envs = 4: 4 runs", "Cued, num_envs = 8: 4 runs"]
    assert len(names) == 2
    assert [run.number for run in result.runs] == list(range(8))
    assert [run.settings["num_envs"] for run in result.runs] == [4] * 4 + [8] * 4
    assert [run.updates for run in result.runs] == [2 * UPDATES] * 4 + [UPDATES] * 4
    assert {run.env_steps for run in result.runs} == {STEPS}


@pytest.mark.slow
def test_table_has_one_row_per_run(grid):
    result, _, _, path = grid
    table = result.table
    assert table["seed"].tolist() == [0, 1] * 4
    assert table["learning_rate"].tolist() == [1e-9, 1e-9, 1e-2, 1e-2] * 2
    assert table["return_mean"].tolist() == [run.return_mean for run in result.runs]
    with open(path / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["finished"] * 8
    for name in ("run", "seed", "learning_rate", "num_envs", "updates", "env_steps", "episodes"):
        assert [float(row[name]) for row in rows] == table[name].tolist(), name
    np.testing.assert_allclose([float(row["return_mean"]) for row in rows], table["return_mean"], 1e-5)


def test_tidy_table_has_one_row_per_update(grid):
    tidy = grid[0].tidy()
    assert {len(column) for column in tidy.values()} == {4 * 2 * UPDATES + 4 * UPDATES}
    of_run = tidy["run"] == 6
    assert tidy["update"][of_run].tolist() == list(range(1, UPDATES + 1))
    np.testing.assert_array_equal(tidy["loss/total"][of_run], grid[0].run(6).metrics["loss/total"])
    assert set(tidy["learning_rate"][of_run]) == {1e-2}
    np.testing.assert_array_equal(tidy["metric/learning_rate"][of_run], grid[0].run(6).metrics["learning_rate"])


def test_best_setting_is_the_one_that_learns(grid):
    result = grid[0]
    best = result.best()
    assert best.settings["learning_rate"] == 1e-2
    assert best.score == max(setting.score for setting in result.settings)
    assert best.score == pytest.approx(np.mean([run.return_mean for run in best.runs]))
    assert best.interval[0] <= best.score <= best.interval[1]
    assert best.best_run.score == max(run.score for run in best.runs)
    act = best.best_run.policy.act
    assert act(np.array([[1.0], [-1.0]], np.float32)).tolist() == [1, 0], "the policy ignores the observation"


@pytest.mark.slow
def test_plots_are_drawn(grid, tmp_path):
    result, _, _, path = grid
    with Image.open(path / "curves.png") as image:
        assert min(image.size) > 150
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50
    with pytest.raises(ValueError, match=r"must end in \.png"):
        result.plot(tmp_path / "curves.jpg")
    with pytest.raises(ValueError, match="no episode ended in this sweep"):
        sweep(Endless(), seeds=1).plot(tmp_path / "curves.png")


def check_equal(result, expected):
    assert [run.number for run in result.runs] == [run.number for run in expected.runs]
    for run, other in zip(result.runs, expected.runs, strict=True):
        for name in (
            "env",
            "seed",
            "settings",
            "status",
            "updates",
            "episodes",
            "return_mean",
            "return_std",
            "custom_parts",
        ):
            assert getattr(run, name) == getattr(other, name), name
        jax.tree.map(np.testing.assert_array_equal, run.metrics, other.metrics)
        jax.tree.map(np.testing.assert_array_equal, run.policy_state, other.policy_state)


def test_saved_runs_are_not_trained_again(grid):
    result, _, _, path = grid
    messages = Messages()
    with compiled_programs("run_chunk") as names:
        again = sweep(learning_rate=[1e-9, 1e-2], num_envs=[4, 8], sweep_dir=path, progress=lambda _: messages)
    assert (names, messages.texts) == ([], ["0 runs in 0 programs; 8 runs already saved"])
    check_equal(again, result)


@pytest.mark.slow
def test_only_missing_runs_are_trained(grid, tmp_path):
    result = grid[0]
    run = result.run(5)
    assert len(sweep(seeds=[run.seed], sweep_dir=tmp_path / "some", **run.settings).runs) == 1
    messages = Messages()
    both = sweep(learning_rate=[1e-9, 1e-2], num_envs=[4, 8], sweep_dir=tmp_path / "some", progress=lambda _: messages)
    assert messages.texts[0] == "7 runs in 2 programs; 1 run already saved"
    assert [run.status for run in both.runs] == ["finished"] * 8
    np.testing.assert_allclose(both.table["return_mean"], result.table["return_mean"], rtol=0.05)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"seeds": [2]},
        {"total_steps": 2 * STEPS},
        {"learning_rate": 1e-3},
        {"num_epochs": 1},
        {"loss": ppo_loss},
        {"advantages": jppo.gae_advantages},
    ],
    ids=lambda changed: "".join(changed) or "nothing",
)
def test_different_run_has_a_different_file(grid, changed, monkeypatch):
    """A saved run is reused only if everything that identifies it is equal."""
    trained = []
    monkeypatch.setattr(
        sweeps, "GroupTrainer", lambda group, *_: trained.extend(group.runs) or Mock(train=lambda: None)
    )
    sweep(**{"learning_rate": 1e-2, "seeds": [0], "num_envs": 8, "sweep_dir": grid[3]} | changed)
    assert len(trained) == bool(changed)


def test_values_in_closures_and_defaults_of_functions_identify_a_run():
    def make(threshold, limit=1, kept=(), outer=True):
        def compare(event):
            return event.return_mean > threshold

        def function(event, limit=limit, *, names=frozenset("ab")):
            kept.append(1) if compare(event) else function(event)

        return function if outer else functools.partial(function, limit=limit)

    assert _represent(make(1.0, kept=[])) == _represent(make(1.0, kept=[]))
    different = [make(1.0), make(2.0), make(1.0, limit=2), make(1.0, outer=False), make(1.0, limit=2, outer=False)]
    assert len({_represent(function) for function in different}) == len(different)


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x

    def apply(self, x):
        return self.factor * x


def scaled_by(factor):
    def scale(x):
        return jax.tree.leaves(factor)[0] * x

    return scale


@pytest.mark.parametrize(
    "make",
    [
        Scaled,
        lambda factor: Scaled(factor).apply,
        lambda factor: jax.jit(scaled_by(factor)),
        lambda factor: scaled_by({"scale": [scaled_by(factor)]}),
        lambda factor: scaled_by(np.where(np.arange(2000) == 1000, factor, 0)),
        lambda factor: scaled_by(jax.random.key(factor)),
    ],
)
def test_content_of_objects_identifies_a_run(make):
    assert _represent(make(1)) == _represent(make(1)) != _represent(make(2))


@pytest.mark.parametrize("name", ["hidden_sizes", "actor_obs", "critic_obs"])
@pytest.mark.parametrize(
    ("value", "choices"),
    [((), [()]), (("a",), [("a",)]), (["a", "b"], [("a", "b")]), ([("a",), ["a", "b"]], [("a",), ("a", "b")])],
)
def test_a_tuple_is_one_value_of_a_setting_that_is_a_tuple(name, value, choices):
    assert check_settings({name: value}) == {name: choices}


ABOUT = {
    **{"env": "CartPole-v1", "seed": 0, "config": {"num_envs": 4}, "hyperparams": {"gamma": 0.9}, "updates": 2},
    **{"episodes": 3, "return_mean": 1.0, "return_std": None, "status": "finished", "best": [1, 2.0, "return_mean"]},
}
COLUMNS = {"update": [1, 2], "env_steps": [8, 16], "episode/count": [1, 2], "episode/return_mean": [1.0, 2.0]}


def write_sweep(path, about=ABOUT, columns=COLUMNS, **description):
    """Writes a sweep directory with one run."""
    (path / "runs").mkdir(exist_ok=True)
    content = {"runs": ["a"], "settings": {"gamma": [0.9, 0.99]}} | description
    (path / "sweep.json").write_text(json.dumps(content))
    columns = {f"metrics/{name}": np.array(column) for name, column in columns.items()}
    np.savez(path / "runs/a.npz", allow_pickle=False, about=json.dumps(about), **columns)


@pytest.mark.parametrize("wrong", [None, 7, "x", [1, [2]], {"a": 1}, 1e400], ids=repr)
@pytest.mark.parametrize("name", [*ABOUT, *COLUMNS, "about", "runs", "sweep.json/settings", "copies"])
def test_a_sweep_file_with_wrong_types_is_loaded_or_refused(tmp_path, name, wrong):
    write_sweep(tmp_path)
    assert load_sweep(tmp_path).runs[0].best == (1, 2.0, "return_mean")
    if name in COLUMNS:
        write_sweep(tmp_path, columns=COLUMNS | {name: wrong if isinstance(wrong, str | float) else ["x", "y"]})
    elif name in ("runs", "sweep.json/settings"):
        write_sweep(tmp_path, **{name.removeprefix("sweep.json/"): wrong})
    else:
        write_sweep(tmp_path, about=wrong if name == "about" else ABOUT | {name: wrong})
    with contextlib.suppress(Refused):
        result = load_sweep(tmp_path)
        result.plot(tmp_path / "a.png")
        assert result.table
        print_settings(result, io.StringIO())


@pytest.mark.slow
def test_damaged_file_is_named_in_the_error(grid, tmp_path):
    sweep(seeds=1, sweep_dir=tmp_path)
    (path,) = (tmp_path / "runs").iterdir()
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=f"{path.name} is damaged .*; delete it to train this run again"):
        sweep(seeds=1, sweep_dir=tmp_path)
    path.unlink()
    assert len(sweep(seeds=1, sweep_dir=tmp_path).runs) == 1


@pytest.mark.slow
def test_run_directories_are_written_on_demand(grid):
    result, _, _, path = grid
    result.write_run_dirs()
    assert sorted(p.name for p in (path / "run_dirs").iterdir()) == [f"{run.number}-{run.name}" for run in result.runs]
    folder = path / "run_dirs" / f"6-{result.run(6).name}"
    modified = (folder / "summary.json").stat().st_mtime_ns
    folder.rename(folder.with_name(f"3-{result.run(6).name}"))  # its number before the sweep got more runs
    result.write_run_dirs()
    assert (folder / "summary.json").stat().st_mtime_ns == modified, "renamed, not written again"
    metrics = read_metrics(folder)
    for name, column in result.run(6).metrics.items():
        np.testing.assert_allclose(metrics[name], column, err_msg=name)
    with pytest.raises(ValueError, match="trained in a custom environment"):
        load_run(folder)


@pytest.mark.slow
def test_successive_halving_stops_the_worse_half():
    """The learning rates range from useless to good; a good one survives."""
    rates, messages = [1e-9, 1e-8, 1e-7, 3e-3, 1e-2, 3e-2, 1e-6, 1e-5], Messages()
    with compiled_programs("run_chunk") as names:
        result = sweep(seeds=1, learning_rate=rates, selection="successive_halving", progress=lambda _: messages)
    updates = sorted(run.updates for run in result.runs)
    assert updates == [2, 2, 2, 2, 4, 4, 8, 16]
    assert len(names) == 4, "8, 4, 2 and 1 runs"
    statuses = {run.number: run.status for run in result.runs}
    (last,) = (index for index, status in statuses.items() if status == "finished")
    assert rates[last] in (3e-3, 1e-2, 3e-2)
    assert set(statuses.values()) == {"finished", "stopped"}
    assert result.best().runs[0].number == last
    alone = sweep(seeds=1, learning_rate=rates[last]).run(0)
    for name in ("update", "env_steps", "learning_rate", "loss/total", "episode/return_mean"):
        np.testing.assert_allclose(result.run(last).metrics[name], alone.metrics[name], 1e-3, 1e-4, err_msg=name)
    elapsed = result.run(last).metrics["time/elapsed"]
    assert (np.diff(elapsed) > 0).all()
    assert next(text for text in messages.texts if "continuing" in text).startswith(
        "after update 2: continuing 4 of 8 runs (best"
    )


@pytest.mark.slow
def test_successive_halving_stops_diverged_runs():
    result = sweep(seeds=1, learning_rate=[1e38, 1e-2, 1e-3, 1e37], selection="successive_halving")
    assert [run.status for run in result.runs] == ["diverged", "finished", "stopped", "diverged"] or [
        run.status for run in result.runs
    ] == ["diverged", "stopped", "finished", "diverged"]


@pytest.mark.slow
def test_successive_halving_without_episodes_keeps_all_runs():
    result = sweep(Endless(), seeds=4, selection="successive_halving")
    assert {run.status for run in result.runs} == {"finished"}


@pytest.mark.slow
def test_several_environments_share_one_table(tmp_path):
    result = sweep([Cued(), Probe()], seeds=2, sweep_dir=tmp_path / "two")
    assert result.table["env"].tolist() == ["Cued", "Cued", "Probe", "Probe"]
    assert result.best("Probe").score == 1.0
    assert set(result.summary()["best"]) == {"Cued", "Probe"}
    with pytest.raises(ValueError, match="name one of Cued, Probe"):
        result.best()
    with pytest.raises(ValueError, match="no run in 'Pong'; its environments are Cued, Probe"):
        result.best("Pong")
    with pytest.raises(ValueError, match="run 4 does not exist; the runs are 0, 1, 2, 3"):
        result.run(4)


@pytest.mark.slow
@pytest.mark.parametrize("selection", [None, "successive_halving"])
def test_interrupt_returns_the_results_so_far(tmp_path, selection, monkeypatch):
    monkeypatch.setattr("jppo.training.device_loop.CHUNK_CAPACITY", 1)
    told = []
    messages = Messages(lambda: told.append(1) or (len(told) == 3 and os.kill(os.getpid(), signal.SIGINT)))
    options = {"max_parallel_runs": 2, "sweep_dir": tmp_path / "s", "seeds": 4, "selection": selection}
    result = sweep(progress=lambda _: messages, **options)
    assert result.status == "interrupted"
    assert messages.texts[-1].endswith("keeps the finished runs and trains the others from the beginning")
    assert {run.status for run in result.runs} == {"interrupted"}
    assert 0 < max(run.updates for run in result.runs) < UPDATES
    assert not list((tmp_path / "s" / "runs").iterdir())
    assert (tmp_path / "s" / "runs.csv").exists()
    whole = sweep(**options)
    assert whole.status == "finished"
    assert len(whole.runs) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": [1e-3, 1e-3]}, "learning_rate = .* must be one value or a list of distinct values"),
        ({"learning_rate": []}, "learning_rate = .* must be one value or a list of distinct values"),
        ({"learning_rate": [1e-3, -1.0]}, "learning_rate = -1 is outside"),
        ({"gamma": "high"}, "gamma = 'high' is not a number"),
        ({"num_minibatches": [2, 3]}, "not divisible by num_minibatches = 3"),
        ({"seeds": 0}, "seeds = 0 must be a whole number from 1 to 100,000"),
        ({"seeds": True}, "seeds = True must be a number of seeds"),
        ({"selection": "halving"}, "selection = 'halving' must be None, .*; choose from successive_halving, pbt"),
        ({"selection": np.array(["pbt", "x"])}, "selection = array.* must be None, a name or a jppo.PBTConfig"),
        ({"seeds": 1.5}, "seeds = 1.5 must be a whole number"),
        ({"seeds": 10**9}, "seeds = 1000000000 must be a whole number from 1 to"),
        ({"learning_rate": [1, 1.0]}, "learning_rate = .* must be one value or a list of distinct values"),
        ({"hidden_sizes": 64}, "hidden_sizes = 64 must be a tuple"),
        ({"total_steps": 1e15}, "makes .* updates"),
        ({"seeds": [1, 1]}, "seeds = .* must be a number of seeds or a list of distinct seeds"),
        ({"seeds": []}, "seeds = .* must be a number of seeds"),
        ({"seeds": [0.5]}, "seed = 0.5"),
        ({"max_parallel_runs": 0}, "max_parallel_runs = 0"),
        ({"num_devices": 9}, "num_devices = 9; JAX has 8 here"),
        ({"num_devices": 0}, "num_devices = 0"),
        ({"total_steps": 0.5}, "total_steps = 0.5"),
        ({"preset": "best"}, "unknown preset 'best'"),
    ],
)
def test_invalid_arguments_raise_before_anything_is_written(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        sweep(sweep_dir=tmp_path / "sweep", **options)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("CartPole-v2", "unknown environment 'CartPole-v2'; did you mean CartPole-v1"),
        ("Taxi-v4", "Taxi-v4 is a Gymnasium environment; sweep supports JAX environments only"),
        (Guessing, "Guessing is a Gymnasium environment; sweep supports JAX environments only: .* jppo.tune.trainable"),
        (jppo.make_host_env(Guessing), "Guessing is a Gymnasium environment; sweep supports JAX"),
        (
            [Cued(), lambda: gymnasium.make("CartPole-v1")],
            "<lambda> is a function; sweep supports JAX environments only",
        ),
        ([Cued(), Cued()], "env = Cued, Cued must name each environment once"),
        ([], "must contain at least one environment"),
    ],
)
def test_invalid_environments_raise(env, message):
    with pytest.raises(ValueError, match=message):
        jppo.sweep(env, config=CONFIG)


@pytest.mark.slow
def test_an_environment_may_change_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = sweep(Moving(), seeds=1, total_steps=CONFIG.batch_size, sweep_dir="sweep")
    assert result.sweep_dir == tmp_path / "sweep"
    assert {"sweep.json", "runs.csv", "curves.png"} <= set(os.listdir(tmp_path / "sweep"))


def test_directory_with_other_files_is_not_changed(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and contains no sweep; name another"):
        sweep(sweep_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(ValueError, match="cannot be written: Not a directory"):
        sweep(sweep_dir=tmp_path / "notes.txt" / "sweep")


def test_interquartile_mean():
    assert interquartile_mean(np.array([5.0, 1.0, 3.0])) == 3.0
    assert interquartile_mean(np.array([100.0, 1.0, 2.0, -50.0])) == 1.5
    columns = np.array([[0.0, 1.0], [10.0, 1.0], [20.0, 1.0], [1000.0, 1.0]])
    np.testing.assert_array_equal(interquartile_mean(columns), [15.0, 1.0])
    assert interquartile_mean(np.array([-np.inf, 1.0, 2.0, 3.0])) == 1.5
    assert interquartile_mean(np.array([-np.inf, 1.0])) == -np.inf


def test_bootstrap_interval_covers_the_true_mean_in_about_95_percent():
    rng = np.random.default_rng(1)
    low, high = bootstrap_interval(rng.normal(size=(40, 300)))
    assert 0.85 < ((low < 0.0) & (high > 0.0)).mean() < 1.0
    low, high = bootstrap_interval(np.array([[2.0]]))
    assert low == high == 2.0


def test_diverged_run_has_the_lowest_score(grid):
    run = grid[0].run(0)
    assert dataclasses.replace(run, status="diverged").score == -np.inf
    assert dataclasses.replace(run, return_mean=np.nan).score == -np.inf
    assert isinstance(run, SweepRun)
    broken = SweepResult(
        [dataclasses.replace(run, status="diverged", return_mean=1e9), grid[0].run(2)], ["learning_rate"]
    )
    assert broken.best().settings == grid[0].run(2).settings
    assert dataclasses.is_dataclass(run.hyperparams)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert broken.summary()["runs"] == {
            "finished": 1,
            "solved": 0,
            "diverged": 1,
            "stopped": 0,
            "interrupted": 0,
            "not_started": 0,
        }


@pytest.mark.slow
def test_sweep_without_runs_is_interrupted():
    assert SweepResult([], []).status == "interrupted"
    assert sweep(NaNReward(), seeds=1, total_steps=64 * CONFIG.batch_size).run(0).status == "diverged"


@pytest.mark.parametrize("n", [2, 3, 5])
def test_intervals_of_few_seeds_count_all_resamples(n):
    x = np.random.default_rng(n).normal(size=n).round(2)
    picks = np.array(list(itertools.product(range(n), repeat=n)))
    means = scipy.stats.trim_mean(x[picks], 0.25, axis=1)
    expected = np.percentile(means, [2.5, 97.5], method="inverted_cdf")
    np.testing.assert_allclose(bootstrap_interval(x), expected, rtol=1e-12)


@pytest.mark.parametrize("n", [5, 6, 12])
def test_intervals_agree_with_scipy(n):
    x = np.random.default_rng(n).normal(size=n)
    expected = scipy.stats.bootstrap(
        (x,),
        lambda x, axis=-1: scipy.stats.trim_mean(x, 0.25, axis=axis),
        **{"method": "percentile", "n_resamples": 100_000, "rng": np.random.default_rng(0), "batch": 10_000},
    )
    np.testing.assert_allclose(bootstrap_interval(x), expected.confidence_interval, atol=0.04)
