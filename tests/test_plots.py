"""Tests learning curves: which runs share a curve, and the values of the curves."""

import struct

import numpy as np
import pytest
from run_files import with_hyperparams, write_run

from jppo.runs import plots
from jppo.runs.plots import learning_curves, plot


def test_runs_that_differ_only_in_seed_and_versions_share_a_curve(tmp_path):
    a = write_run(tmp_path / "a", [1.0] * 20, seed=0)
    b = write_run(tmp_path / "b", [3.0] * 20, seed=1, versions={"jax": "0"})
    (curve,) = learning_curves([a, b])
    assert (curve.label, curve.runs) == ("CartPole-v1", 2)
    for axis in ("steps", "seconds"):
        np.testing.assert_allclose(curve.mean[axis], 2.0)
        np.testing.assert_allclose(curve.spread[axis], 1.0)


@pytest.mark.parametrize(
    ("changed", "labels"),
    [
        (with_hyperparams(gamma=0.5), ["CartPole-v1 (gamma=0.99)", "CartPole-v1 (gamma=0.5)"]),
        ({"total_steps": 7}, ["CartPole-v1 (total_steps=1000)", "CartPole-v1 (total_steps=7)"]),
        ({"env": "Pong-misc"}, ["CartPole-v1", "Pong-misc"]),
        ({"network": "custom"}, ["CartPole-v1 (network=mlp)", "CartPole-v1 (network=custom)"]),
        ({"optimizer": "custom"}, ["CartPole-v1", "CartPole-v1 (optimizer=custom)"]),
    ],
)
def test_labels_contain_the_settings_that_differ(tmp_path, changed, labels):
    paths = [write_run(tmp_path / f"{i}", [1.0] * 5, seed=i, **changed if i % 2 else {}) for i in range(4)]
    curves = learning_curves(paths)
    assert [(curve.label, curve.runs) for curve in curves] == [(label, 2) for label in labels]


def test_a_curve_covers_the_steps_that_all_its_runs_have(tmp_path):
    long = write_run(tmp_path / "long", np.arange(1.0, 41.0), pace=2.0)
    short = write_run(tmp_path / "short", np.arange(1.0, 21.0), counts=[0] * 4 + [1] * 16, seed=1)
    (curve,) = learning_curves([long, short])
    assert (curve.x["steps"][0], curve.x["steps"][-1]) == (50, 200)
    assert (curve.x["seconds"][0], curve.x["seconds"][-1]) == (5, 20)
    np.testing.assert_allclose(curve.mean["steps"], curve.x["steps"] / 10)
    np.testing.assert_allclose(curve.spread["steps"], 0.0, atol=1e-12)
    np.testing.assert_allclose(curve.mean["seconds"], (curve.x["seconds"] + curve.x["seconds"] / 2) / 2)


def test_one_run_shows_the_spread_of_its_episodes(tmp_path):
    (curve,) = learning_curves([write_run(tmp_path / "a", [1.0] * 8, stds=[0.25] * 8)])
    assert curve.runs == 1
    np.testing.assert_allclose(curve.mean["steps"], 1.0)
    np.testing.assert_allclose(curve.spread["steps"], 0.25)


@pytest.mark.parametrize("updates", [60, 150, 500])
def test_smoothing_averages_the_episodes_of_a_fiftieth_of_the_run(tmp_path, updates):
    rng = np.random.default_rng(0)
    returns, counts = rng.normal(size=updates), rng.integers(0, 4, size=updates).astype(float)
    (curve,) = learning_curves([write_run(tmp_path / "a", returns, counts)])
    kept = np.flatnonzero(counts)
    window, smooth = max(1, len(kept) // 50), []
    for i in range(len(kept)):
        inside = kept[max(0, i - window // 2) : i + (window + 1) // 2]
        smooth.append(np.average(returns[inside], weights=counts[inside]))
    expected = np.interp(curve.x["steps"], 10 * (kept + 1), smooth)
    np.testing.assert_allclose(curve.mean["steps"], expected, rtol=1e-6, atol=1e-9)


def test_an_unfinished_run_is_drawn(tmp_path):
    path = write_run(tmp_path / "a", [1.0, 2.0])
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"update": 3, "st')
    (curve,) = learning_curves([path])
    np.testing.assert_allclose([curve.mean["steps"][0], curve.mean["steps"][-1]], [1.0, 2.0])


def test_runs_without_episodes_and_other_directories_are_refused(tmp_path):
    path = write_run(tmp_path / "a", [1.0, 2.0], counts=[0, 0])
    with pytest.raises(ValueError, match=f"{path}: no episode ended in this run"):
        learning_curves([path])
    with pytest.raises(ValueError, match="nowhere is not a run directory"):
        learning_curves([tmp_path / "nowhere"])


def test_the_plot_is_a_png_file(tmp_path):
    paths = [write_run(tmp_path / f"{i}", [1.0, 2.0, 3.0], seed=i) for i in range(2)]
    plot([*paths, write_run(tmp_path / "c", [2.0], env="Pong-misc")], tmp_path / "x.png")
    data = (tmp_path / "x.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", data[16:24]) == (1320, 540)
    assert len(data) > 10_000, "the plot is empty"


def test_bars_start_at_zero_on_a_linear_axis(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, output: figures.append(figure))
    plots.draw_bars("title", {"a": 1.0, "b": 100.0}, {"a": "1 ms", "b": "100 ms"}, "milliseconds", tmp_path / "x.png")
    (axes,) = figures[0].axes
    assert (axes.get_xscale(), axes.get_xlim()) == ("linear", (0.0, 130.0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.jpg", r"must end in \.png"),
        ("x", r"must end in \.png"),
        ("file/x.png", "cannot be written: there is no directory"),
    ],
)
def test_invalid_output_paths_are_refused(tmp_path, name, message):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=message):
        plot([write_run(tmp_path / "run", [1.0])], tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "run"}
