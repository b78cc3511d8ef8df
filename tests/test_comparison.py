"""Tests the list of runs and the comparison of their returns."""

import contextlib
import fcntl
import io
import json
import os
import time

import numpy as np
import pytest
from run_files import finished, with_hyperparams, write_run

from jppo.cli.main import main
from jppo.runs.comparison import _letters, compare
from jppo.runs.groups import format_value
from jppo.runs.listing import find_runs, format_age, read_run
from jppo.runs.load import read_summary


def call(*argv):
    """Returns the exit code, the lines of standard output, and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in argv])
    return code, out.getvalue().splitlines(), err.getvalue()


@pytest.fixture(autouse=True)
def in_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def write_group(folder, values, **settings):
    """Writes one finished run per value, with seeds 0, 1, ..."""
    return [
        write_run(folder / str(seed), [value], seed=seed, summary=finished(value), **settings)
        for seed, value in enumerate(values)
    ]


def test_status_of_a_run(tmp_path):
    done = read_run(write_run(tmp_path / "a", [1.0, 2.0], summary=finished(1.5)))
    assert (done.status, done.steps, done.return_mean) == ("finished", 1000, 1.5)
    diverged = {"status": "diverged", "return_mean": None, "steps": 10}
    assert read_run(write_run(tmp_path / "b", [1.0], summary=diverged)).status == "diverged"
    path = write_run(tmp_path / "c", [1.0, 50.0, 3.0, 2.0], counts=[100, 0, 60, 50])
    killed = read_run(path)
    assert (killed.status, killed.steps, killed.total_steps) == ("killed", 40, 1000)
    assert killed.return_mean == pytest.approx((60 * 3.0 + 50 * 2.0) / 110), "of about the last 100 episodes"
    with open(path / ".lock", "w") as lock:
        assert read_run(path).status == "killed"
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(path).status == "running"
    assert read_run(path).status == "killed"
    new = read_run(write_run(tmp_path / "d", []))
    assert (new.steps, np.isnan(new.return_mean)) == (0, True)


def test_only_the_end_of_long_metrics_is_read(tmp_path):
    path = write_run(tmp_path / "a", [float(i) for i in range(2000)], counts=[50] * 2000)
    with open(path / "metrics.jsonl", "r+") as file:
        file.write("damaged")
    state = read_run(path)
    assert (state.steps, state.return_mean) == (20_000, 1998.5)


@pytest.mark.parametrize("wrong", ["x", [1], {}, True, None], ids=repr)
@pytest.mark.parametrize("name", ["status", "steps", "updates", "return_mean", "seconds", "steps_per_second"])
def test_a_summary_with_wrong_types_is_left_out(tmp_path, name, wrong):
    path = write_run(
        tmp_path / "runs/a", [1.0], summary=finished(2.0, **{"updates": 1, "seconds": 1.0} | {name: wrong})
    )
    allowed = {"status": ["x"], "steps": [True], "updates": [True]}.get(name, [True, None])  # a bool is a number
    is_valid = any(wrong is value for value in allowed)
    assert bool(read_summary(path)) == is_valid
    assert read_run(path).status in ("finished" if is_valid else "killed", "x")
    for command in (["runs", "runs"], ["compare", path]):
        assert call(*command)[0] == 0


def test_runs_lists_runs(tmp_path):
    write_run(tmp_path / "runs/CartPole-v1/20261124-220425-0", [1.0], summary=finished(476.2))
    changed = with_hyperparams(learning_rate={"linear": [0.001, 0.0]}, gamma=0.9)
    config = {"config": json.loads(json.dumps(read_config(tmp_path))) | {"num_envs": 16, "hidden_sizes": [8, 8]}}
    write_run(tmp_path / "runs/CartPole-v1/20261124-220425-1", [1.0], seed=1, **changed, **config)
    write_run(tmp_path / "runs/other", [2.5], env="Pong-misc")
    (tmp_path / "runs/broken").mkdir()
    (tmp_path / "runs/broken/config.json").write_text("{")
    (tmp_path / "runs/empty").mkdir()
    code, lines, _ = call("runs")
    assert code == 0
    assert {"Pong-misc in runs", "CartPole-v1 in runs/CartPole-v1"} <= set(lines)
    rows = [line.split() for line in lines]
    assert ["run", "seed", "status", "steps", "return", "age"] in rows
    assert ["20261124-220425-0", "0", "finished", "1k", "476.2", "0", "s"] in rows
    assert ["20261124-220425-1", "1", "killed", "10/1k", "1.0", "0", "s"] in rows
    text = " ".join(" ".join(lines).split())
    for setting in ("num_envs = 16", "hidden_sizes = 8x8", "gamma = 0.9", "learning_rate = linear(0.001, 0)"):
        assert setting in text
    assert "damaged: runs/broken/config.json is damaged: " in text
    assert lines[-1] == "3 runs"
    code, (line,), _ = call("runs", "--json")
    result = json.loads(line)
    assert result["runs"][0]["path"] == "runs/CartPole-v1/20261124-220425-0"
    assert [run["return_mean"] for run in result["runs"]] == [476.2, 1.0, 2.5]
    assert len(result["damaged"]) == 1


def read_config(tmp_path):
    return json.loads((tmp_path / "runs/CartPole-v1/20261124-220425-0/config.json").read_text())["config"]


def test_runs_of_an_empty_and_a_missing_folder(tmp_path):
    (tmp_path / "runs").mkdir()
    assert call("runs") == (0, ["there is no run in runs"], "")
    code, _, err = call("runs", "nowhere")
    assert (code, err.strip()) == (
        2,
        "jppo: there is no folder nowhere; name the folder of your runs: jppo runs FOLDER",
    )


@pytest.mark.parametrize("text", ["{", '{"env": 3}', '{"update": 1}\nnonsense\n'])
def test_damaged_runs_are_listed(tmp_path, text):
    path = write_run(tmp_path / "a", [1.0])
    name = "metrics.jsonl" if "update" in text else "config.json"
    (path / name).write_text(text)
    (error,) = find_runs(tmp_path)
    assert isinstance(error, ValueError)
    assert f"{name} is damaged" in str(error)


def test_format_age():
    now = time.time()
    assert [format_age(now - age) for age in (-5, 59.5, 61, 7_300, 200_000)] == ["0 s", "59 s", "1 min", "2 h", "2 d"]


def test_compare_shows_settings_and_scores(tmp_path):
    a = write_group(tmp_path / "a", [10.0, 11.0, 12.0, 11.0, 10.0])
    b = write_group(tmp_path / "b", [20.0, 22.0, 21.0, 20.0, 23.0], **with_hyperparams(gamma=0.5))
    result = compare([*a, *b])
    assert [score.group.settings for score in result.scores] == [{"gamma": 0.99}, {"gamma": 0.5}]
    assert [score.score for score in result.scores] == pytest.approx([32 / 3, 21.0])
    low, high = result.scores[1].interval
    assert 20.0 <= low < 21.0 < high <= 23.0
    code, lines, _ = call("compare", *a, *b)
    assert code == 0
    text = " ".join(" ".join(lines).split())
    for said in ("CartPole-v1", "gamma", "5 finished", "21.0"):
        assert said in text
    summary = json.loads(call("compare", *a, *b, "--json")[1][0])
    assert summary["settings"][1]["settings"] == {"gamma": 0.5}


def test_compare_uses_each_seed_once_and_names_unfinished_runs(tmp_path):
    old = write_run(tmp_path / "old", [1.0], summary=finished(1.0))
    new = write_run(tmp_path / "new", [2.0], summary=finished(2.0))
    killed = write_run(tmp_path / "killed", [5.0], seed=1)
    silent = write_run(tmp_path / "silent", [5.0], counts=[0], seed=2, summary=finished(None))
    for name in ("config.json", "metrics.jsonl"):
        os.utime(old / name, (0, 0))
    result = compare([old, new, new, killed, silent])
    (score,) = result.scores
    assert score.returns.tolist() == [2.0, 5.0]
    assert score.statuses == {"finished": 2, "killed": 1}
    assert sorted(result.notes) == [
        f"{killed} is killed after 10 of 1,000 steps",
        f"{old} is left out: {new} has the same settings and seed",
    ]
    assert "All runs have the same settings; there is nothing to compare." in call("compare", old, new)[1]


def test_compare_shows_only_the_settings_that_differ_within_an_environment(tmp_path):
    paths = [write_run(tmp_path / "cart", [1.0], summary=finished(1.0), total_steps=7)]
    for actors in (2, 8):
        settings = {"env": "Pong-misc", "actors": {"num_actors": actors, "envs_per_actor": 4}}
        paths += write_group(tmp_path / str(actors), [1.0, 2.0], **settings)
    text = " ".join(call("compare", *paths)[1])
    assert "num_actors" in text
    assert not {"total_steps", "envs_per_actor", "{"} & set(text.replace("│", " ").split())


def test_compare_fits_80_columns(tmp_path):
    schedule = {"linear": [0.00025, 0.0]}
    long = {"total_steps": 123_456_789, "actors": {"num_actors": 16, "address": "ray://gpu-node-17.example.org:10001"}}
    a = write_group(tmp_path / "a", [123456.5] * 6)
    b = write_group(tmp_path / "b", [-98765.4] * 6, **long, **with_hyperparams(learning_rate=schedule, gamma=0.12345))
    for paths in ([*a, *b], [*a[:2], *b[:1]], [*a, *a, *b]):
        code, lines, _ = call("compare", *paths)
        assert code == 0
        assert max(map(len, lines)) <= 80, max(lines, key=len)
        assert lines[-1].strip()


def test_evaluations_are_settings_only_if_they_can_end_the_run(tmp_path):
    for stop, settings in {"no": {"stop_at_return": None}, "yes": {"stop_at_return": 90.0}}.items():
        paths = write_group(tmp_path / stop / "a", [1.0], eval_every=5, **settings)
        paths += write_group(tmp_path / stop / "b", [2.0], eval_every=9, eval_episodes=3, **settings)
        assert len(compare(paths).scores) == (1 if stop == "no" else 2)
    code, lines, _ = call("compare", paths[0])
    assert (code, lines[-1]) == (0, "There is one run; there is nothing to compare.")


def test_the_parent_of_runs_and_a_sweep_are_not_run_directories(tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    assert f"it has no config.json; `jppo runs {tmp_path}` lists the runs in it" in call("compare", tmp_path)[2]
    assert "`jppo sweep --run-dirs` writes run directories" in call("compare", tmp_path / "sweep")[2]


def test_compare_refuses_invalid_arguments(tmp_path):
    code, _, err = call("compare")
    assert (code, err.startswith("jppo: no run directory; name at least two")) == (2, True)
    damaged = write_run(tmp_path / "a", [1.0], **with_hyperparams(gamma=[1, "x"]))
    code, _, err = call("compare", damaged)
    assert (code, f"{damaged}/config.json is damaged" in err) == (2, True)


def test_format_value():
    values = ((64, 64), (), ("position", "speed"), 0.1234567, "gru")
    assert [format_value(value) for value in values] == ["64x64", "()", "position,speed", "0.123457", "gru"]


def test_letters():
    assert [_letters(i) for i in (0, 25, 26, 27, 52)] == ["A", "Z", "AA", "AB", "BA"]
