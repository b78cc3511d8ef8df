"""Sweeps: what is run, what is said and kept, what is refused, and what an interruption costs."""

import csv
import dataclasses
import os
import signal
import warnings

import jax
import numpy as np
import pytest
from checks import SMALL, compiled_programs
from lenient import lenient
from PIL import Image
from probes import NO_LIMIT, NaNReward, ObsActionReward, Probe

import jppo
from jppo.ppo.learner import ppo_loss
from jppo.runs.load import load_run
from jppo.runs.plots import bootstrap_interval, interquartile_mean
from jppo.runs.run_dir import read_metrics
from jppo.sweeps import sweep as sweeps
from jppo.sweeps.results import Lane, SweepResult
from jppo.training import device_loop
from jppo.training.progress import NullReporter

CONFIG = SMALL(num_envs=8, num_steps=16, num_epochs=2, num_minibatches=2)
BASE = jppo.Hyperparams(learning_rate=1e-2, ent_coef=0.0)
UPDATES = 16
STEPS = UPDATES * CONFIG.batch_size


class Cued(ObsActionReward):
    """Episodes of three steps: the action that matches the cue is rewarded."""

    length = 3


class Endless(Probe):
    """No episode ever ends."""

    length = limit = NO_LIMIT


class Messages(NullReporter):
    def __init__(self, act=lambda: None):
        self.texts, self.act = [], act

    def message(self, text):
        self.texts.append(text)

    def update(self, step, steps_per_second, recent_return):
        self.act()


def run(env=None, **options):
    given = {"config": CONFIG, "hyperparams": BASE, "total_steps": STEPS, "num_devices": 1, "seeds": 2} | options
    return jppo.sweep(env or Cued(), **given)


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Two learning rates, of which the first is too low to learn anything, and two sizes; and what was said."""
    path, messages = tmp_path_factory.mktemp("sweeps") / "new" / "grid", Messages()
    with compiled_programs("run_chunk") as names:
        result = run(learning_rate=[1e-9, 1e-2], num_envs=[4, 8], sweep_dir=path, progress=lambda _: messages)
    return result, messages.texts, names, path


def test_shapes_are_grouped_and_said_beforehand(grid):
    result, texts, names, _ = grid
    assert texts[0] == "8 lanes in 2 programs"
    assert [text.strip() for text in texts[1:3]] == ["Cued, num_envs = 4: 4 lanes", "Cued, num_envs = 8: 4 lanes"]
    assert len(names) == 2
    assert [lane.number for lane in result.lanes] == list(range(8))
    assert [lane.settings["num_envs"] for lane in result.lanes] == [4] * 4 + [8] * 4
    assert [lane.updates for lane in result.lanes] == [2 * UPDATES] * 4 + [UPDATES] * 4
    assert {lane.steps for lane in result.lanes} == {STEPS}


def test_the_table_has_a_row_per_lane(grid):
    result, _, _, path = grid
    table = result.table
    assert table["seed"].tolist() == [0, 1] * 4
    assert table["learning_rate"].tolist() == [1e-9, 1e-9, 1e-2, 1e-2] * 2
    assert table["return_mean"].tolist() == [lane.return_mean for lane in result.lanes]
    with open(path / "lanes.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["finished"] * 8
    for name in ("lane", "seed", "learning_rate", "num_envs", "updates", "steps", "episodes"):
        assert [float(row[name]) for row in rows] == table[name].tolist(), name
    np.testing.assert_allclose([float(row["return_mean"]) for row in rows], table["return_mean"], 1e-5)


def test_the_tidy_table_has_a_row_per_update(grid):
    tidy = grid[0].tidy()
    assert {len(column) for column in tidy.values()} == {4 * 2 * UPDATES + 4 * UPDATES}
    of_lane = tidy["lane"] == 6
    assert tidy["update"][of_lane].tolist() == list(range(1, UPDATES + 1))
    np.testing.assert_array_equal(tidy["loss/total"][of_lane], grid[0].lane(6).metrics["loss/total"])
    assert set(tidy["learning_rate"][of_lane]) == {1e-2}
    np.testing.assert_array_equal(tidy["metric/learning_rate"][of_lane], grid[0].lane(6).metrics["learning_rate"])


def test_the_best_setting_is_the_one_that_learns(grid):
    result = grid[0]
    best = result.best()
    assert best.settings["learning_rate"] == 1e-2
    assert best.score == max(setting.score for setting in result.settings)
    assert best.score == pytest.approx(np.mean([lane.return_mean for lane in best.lanes]))
    assert best.interval[0] <= best.score <= best.interval[1]
    assert best.best_lane.score == max(lane.score for lane in best.lanes)
    act = best.best_lane.policy.act
    assert act(np.array([[1.0], [-1.0]], np.float32)).tolist() == [1, 0], "it does not follow the cue"


def test_pictures_are_drawn(grid, tmp_path):
    result, _, _, path = grid
    for name in ("curves.png", "heat_map.png"):
        with Image.open(path / name) as image:
            assert min(image.size) > 150
            assert len(image.convert("RGB").getcolors(1 << 24)) > 50
    with pytest.raises(ValueError, match=r"must end in \.png"):
        result.plot(tmp_path / "curves.jpg")
    with pytest.raises(ValueError, match="a heat map is of two settings; swept were 0"):
        SweepResult(result.lanes, []).plot_heat_map(tmp_path / "map.png")
    with pytest.raises(ValueError, match="no episode ended in this sweep"):
        run(Endless(), seeds=1).plot(tmp_path / "curves.png")


def check_equal(result, expected):
    assert [lane.number for lane in result.lanes] == [lane.number for lane in expected.lanes]
    for lane, other in zip(result.lanes, expected.lanes, strict=True):
        for name in ("env", "seed", "settings", "status", "updates", "episodes", "return_mean", "return_std", "own"):
            assert getattr(lane, name) == getattr(other, name), name
        jax.tree.map(np.testing.assert_array_equal, lane.metrics, other.metrics)
        jax.tree.map(np.testing.assert_array_equal, lane.policy_state, other.policy_state)


def test_what_is_there_is_not_run_again(grid):
    result, _, _, path = grid
    messages = Messages()
    with compiled_programs("run_chunk") as names:
        again = run(learning_rate=[1e-9, 1e-2], num_envs=[4, 8], sweep_dir=path, progress=lambda _: messages)
    assert (names, messages.texts) == ([], ["0 lanes in 0 programs; 8 are there already"])
    check_equal(again, result)


def test_only_what_is_missing_is_run(grid, tmp_path):
    result = grid[0]
    for lane in (result.lane(2), result.lane(5)):
        assert len(run(seeds=[lane.seed], sweep_dir=tmp_path / "some", **lane.settings).lanes) == 1
    messages = Messages()
    both = run(learning_rate=[1e-9, 1e-2], num_envs=[4, 8], sweep_dir=tmp_path / "some", progress=lambda _: messages)
    assert messages.texts[0] == "6 lanes in 2 programs; 2 are there already"
    assert [lane.status for lane in both.lanes] == ["finished"] * 8
    np.testing.assert_allclose(both.table["return_mean"], result.table["return_mean"], rtol=0.05)


@pytest.mark.parametrize(
    "changed",
    [{}, {"seeds": [2]}, {"total_steps": 2 * STEPS}, {"learning_rate": 1e-3}, {"num_epochs": 1}, {"loss": ppo_loss}],
    ids=lambda changed: "".join(changed) or "nothing",
)
def test_another_lane_is_another_file(grid, changed, monkeypatch):
    """A lane that differs in anything is not taken for one that is there."""
    asked = []
    monkeypatch.setattr(sweeps, "run_group", lambda group, *_: asked.extend(group.tasks))
    run(**{"learning_rate": 1e-2, "seeds": [0], "num_envs": 8, "sweep_dir": grid[3]} | changed)
    assert len(asked) == bool(changed)


def test_a_damaged_lane_is_named(grid, tmp_path):
    run(seeds=1, sweep_dir=tmp_path)
    (path,) = (tmp_path / "lanes").iterdir()
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=f"{path.name} is damaged .*; delete it to run this lane again"):
        run(seeds=1, sweep_dir=tmp_path)
    path.unlink()
    assert len(run(seeds=1, sweep_dir=tmp_path).lanes) == 1


def test_a_run_directory_of_each_lane_on_demand(grid):
    result, _, _, path = grid
    result.write_run_dirs()
    assert sorted(p.name for p in (path / "runs").iterdir()) == sorted(lane.name for lane in result.lanes)
    metrics = read_metrics(path / "runs" / result.lane(6).name)
    for name, column in result.lane(6).metrics.items():
        np.testing.assert_allclose(metrics[name], column, err_msg=name)
    with pytest.raises(ValueError, match="trained in an environment of its own"):
        load_run(path / "runs" / result.lane(6).name)


@pytest.mark.parametrize("halve", [True, False])
def test_halving_ends_the_worse_half_in_smaller_programs(halve):
    """Rates from useless to good: the good ones stay."""
    rates, messages = [1e-9, 1e-8, 1e-7, 3e-3, 1e-2, 3e-2, 1e-6, 1e-5], Messages()
    with compiled_programs("run_chunk") as names:
        result = run(seeds=1, learning_rate=rates, halving=halve, progress=lambda _: messages)
    if not halve:
        assert {lane.updates for lane in result.lanes} == {UPDATES}
        return
    updates = sorted(lane.updates for lane in result.lanes)
    assert updates == [2, 2, 2, 2, 4, 4, 8, 16]
    assert len(names) == 4, "8, 4, 2 and 1 lanes"
    statuses = {lane.number: lane.status for lane in result.lanes}
    (last,) = (index for index, status in statuses.items() if status == "finished")
    assert rates[last] in (3e-3, 1e-2, 3e-2)
    assert set(statuses.values()) == {"finished", "stopped"}
    assert result.best().lanes[0].number == last
    alone = run(seeds=1, learning_rate=rates[last]).lane(0)
    for name in ("update", "step", "learning_rate", "loss/total", "episode/return_mean"):
        np.testing.assert_allclose(result.lane(last).metrics[name], alone.metrics[name], 1e-3, 1e-4, err_msg=name)
    elapsed = result.lane(last).metrics["time/elapsed"]
    assert (np.diff(elapsed) > 0).all()
    assert next(text for text in messages.texts if "go on" in text).startswith(
        "after update 2: 4 of 8 lanes go on (best"
    )


def test_halving_goes_on_with_what_has_not_diverged():
    result = run(seeds=1, learning_rate=[1e38, 1e-2, 1e-3, 1e37], halving=True)
    assert [lane.status for lane in result.lanes] == ["diverged", "finished", "stopped", "diverged"] or [
        lane.status for lane in result.lanes
    ] == ["diverged", "stopped", "finished", "diverged"]


def test_halving_without_any_episode_keeps_all():
    result = run(Endless(), seeds=4, halving=True)
    assert {lane.status for lane in result.lanes} == {"finished"}


def test_several_environments_make_one_table(tmp_path):
    result = run([Cued(), Probe()], seeds=2, sweep_dir=tmp_path / "two")
    assert result.table["env"].tolist() == ["Cued", "Cued", "Probe", "Probe"]
    assert result.best("Probe").score == 1.0
    assert set(result.summary()["best"]) == {"Cued", "Probe"}
    with pytest.raises(ValueError, match="name the environment: Cued, Probe"):
        result.best()
    with pytest.raises(ValueError, match="no lane was run in 'Pong'; there are Cued, Probe"):
        result.best("Pong")
    with pytest.raises(ValueError, match="there is no lane 4; there are 0, 1, 2, 3"):
        result.lane(4)


@pytest.mark.parametrize("halving", [False, True])
def test_an_interrupt_keeps_what_was_reached(tmp_path, halving, monkeypatch):
    monkeypatch.setattr(device_loop, "CHUNK_CAPACITY", 1)
    told = []
    messages = Messages(lambda: told.append(1) or (len(told) == 3 and os.kill(os.getpid(), signal.SIGINT)))
    options = {"lanes_at_once": 2, "sweep_dir": tmp_path / "s", "seeds": 4, "halving": halving}
    result = run(progress=lambda _: messages, **options)
    assert result.status == "interrupted"
    assert {lane.status for lane in result.lanes} == {"interrupted"}
    assert 0 < max(lane.updates for lane in result.lanes) < UPDATES
    assert not list((tmp_path / "s" / "lanes").iterdir())
    assert (tmp_path / "s" / "lanes.csv").exists()
    whole = run(**options)
    assert whole.status == "finished"
    assert len(whole.lanes) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": [1e-3]}, "unknown setting 'lr'; did you mean learning_rate"),
        ({"frobnicate": 1}, "unknown setting 'frobnicate'; there are learning_rate"),
        ({"learning_rate": [1e-3, 1e-3]}, "learning_rate = .* must be a value or several that differ"),
        ({"learning_rate": []}, "learning_rate = .* must be a value or several that differ"),
        ({"learning_rate": [1e-3, -1.0]}, "learning_rate = -1 is outside"),
        ({"gamma": "high"}, "gamma = 'high' is not a number"),
        ({"num_minibatches": [2, 3]}, "not divisible by num_minibatches = 3"),
        ({"seeds": 0}, "seeds = 0 must be from 1 to 100,000"),
        ({"seeds": True}, "seeds = True must be a number of seeds"),
        ({"seeds": 1.5}, "seeds = 1.5 must be a number of seeds"),
        ({"seeds": 10**9}, "seeds = 1000000000 must be from 1 to"),
        ({"learning_rate": [1, 1.0]}, "learning_rate = .* must be a value or several that differ"),
        ({"hidden_sizes": 64}, "hidden_sizes = 64 must be a tuple"),
        ({"hidden_sizes": [64, 64]}, r"hidden_sizes = \[64, 64\] must be a tuple"),
        ({"config": {}}, "config = {} must be of type PPOConfig"),
        ({"hyperparams": {}}, "hyperparams = {} must be of type Hyperparams"),
        ({"total_steps": 1e15}, "makes .* updates"),
        ({"seeds": [1, 1]}, "seeds = .* must be a number of seeds, or several that differ"),
        ({"seeds": []}, "seeds = .* must be a number of seeds"),
        ({"seeds": [0.5]}, "seed = 0.5"),
        ({"lanes_at_once": 0}, "lanes_at_once = 0"),
        ({"num_devices": 9}, "num_devices = 9; JAX has 8 here"),
        ({"num_devices": 0}, "num_devices = 0"),
        ({"total_steps": 0.5}, "total_steps = 0.5"),
        ({"preset": "best"}, "unknown preset 'best'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_run(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run(sweep_dir=tmp_path / "sweep", **options)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("CartPole-v2", "unknown environment 'CartPole-v2'; did you mean CartPole-v1"),
        ("Taxi-v4", "Taxi-v4 is an environment of Gymnasium's, and a sweep runs on the device"),
        ([Cued(), Cued()], "env names Cued, Cued: each once"),
        ([], "env names nothing"),
    ],
)
def test_environments_that_cannot_be(env, message):
    with pytest.raises(ValueError, match=message):
        jppo.sweep(env, config=CONFIG)


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty, and no sweep's; name another"):
        run(sweep_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(ValueError, match="cannot be written: Not a directory"):
        run(sweep_dir=tmp_path / "notes.txt" / "sweep")


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_programs_are_run_as_ray_tasks(tmp_path):
    """Side by side in processes of their own: same lanes, same files, and a failure leaves the others to end."""
    options = {"seeds": 2, "num_envs": [4, 8], "total_steps": 4 * CONFIG.batch_size, "env": "CartPole-v1"}
    messages, path = Messages(), tmp_path / "sweep"
    with lenient():
        expected = run(**options)
        result = run(**options, address="local", sweep_dir=path, progress=lambda _: messages)
    assert messages.texts[0] == "4 lanes in 2 programs"
    assert [lane.status for lane in result.lanes] == ["finished"] * 4
    for lane, other in zip(result.lanes, expected.lanes, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-3, 1e-4), lane.policy_state, other.policy_state)
    assert len(list((tmp_path / "sweep" / "lanes").iterdir())) == 4


def test_the_interquartile_mean():
    assert interquartile_mean(np.array([5.0, 1.0, 3.0])) == 3.0
    assert interquartile_mean(np.array([100.0, 1.0, 2.0, -50.0])) == 1.5
    columns = np.array([[0.0, 1.0], [10.0, 1.0], [20.0, 1.0], [1000.0, 1.0]])
    np.testing.assert_array_equal(interquartile_mean(columns), [15.0, 1.0])
    assert interquartile_mean(np.array([-np.inf, 1.0, 2.0, 3.0])) == 1.5
    assert interquartile_mean(np.array([-np.inf, 1.0])) == -np.inf


def test_the_bootstrap_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    low, high = bootstrap_interval(rng.normal(size=(40, 300)))
    assert 0.85 < ((low < 0.0) & (high > 0.0)).mean() < 1.0
    low, high = bootstrap_interval(np.array([[2.0]]))
    assert low == high == 2.0


def test_a_diverged_lane_scores_nothing(grid):
    lane = grid[0].lane(0)
    assert lane._replace(status="diverged").score == -np.inf
    assert lane._replace(return_mean=np.nan).score == -np.inf
    assert isinstance(lane, Lane)
    broken = SweepResult([lane._replace(status="diverged", return_mean=1e9), grid[0].lane(2)], ["learning_rate"])
    assert broken.best().settings == grid[0].lane(2).settings
    assert dataclasses.is_dataclass(lane.hyperparams)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert broken.summary()["lanes"] == {"finished": 1, "diverged": 1, "stopped": 0, "interrupted": 0, "missing": 0}


def test_no_lane_at_all_is_interrupted():
    assert SweepResult([], []).status == "interrupted"
    assert run(NaNReward(), seeds=1, total_steps=64 * CONFIG.batch_size).lane(0).status == "diverged"
