"""Tests learning curves: which runs share a curve, and the values of the curves."""

import struct

import numpy as np
import pytest
from run_files import with_hyperparams, write_run

from jppo.runs import plots
from jppo.runs.curves import make_curve, read_groups
from jppo.runs.files import write_atomically
from jppo.runs.plots import draw_metrics, plot
from jppo.runs.run_dir import write_output


def learning_curves(paths, **options):
    return [make_curve(group, **options) for group in read_groups(paths)]


def test_runs_that_differ_only_in_seed_and_versions_share_a_curve(tmp_path):
    a = write_run(tmp_path / "a", [1.0] * 20, seed=0)
    b = write_run(tmp_path / "b", [3.0] * 20, seed=1, versions={"jax": "0"})
    assert [group.label for group in read_groups([a, b])] == ["CartPole-v1"]
    for axis in ("steps", "minutes"):
        (curve,) = learning_curves([a, b], x=axis)
        assert curve.num_runs == 2
        np.testing.assert_allclose(curve.mean, 2.0)
        np.testing.assert_allclose(curve.spread, 1.0)


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
    assert [(group.label, len(group.runs)) for group in read_groups(paths)] == [(label, 2) for label in labels]


def test_a_curve_covers_the_steps_that_all_its_runs_have(tmp_path):
    long = write_run(tmp_path / "long", np.arange(1.0, 41.0), pace=2.0)
    short = write_run(tmp_path / "short", np.arange(1.0, 21.0), counts=[0] * 4 + [1] * 16, seed=1)
    (curve,) = learning_curves([long, short])
    assert (curve.x[0], curve.x[-1]) == (50, 200)
    np.testing.assert_allclose(curve.mean, curve.x / 10)
    np.testing.assert_allclose(curve.spread, 0.0, atol=1e-12)
    (curve,) = learning_curves([long, short], x="minutes")
    assert (60 * curve.x[0], 60 * curve.x[-1]) == pytest.approx((5, 20))
    np.testing.assert_allclose(curve.mean, (60 * curve.x + 30 * curve.x) / 2)


def test_one_run_shows_the_spread_of_its_episodes(tmp_path):
    (curve,) = learning_curves([write_run(tmp_path / "a", [1.0] * 8, stds=[0.25] * 8)])
    assert curve.num_runs == 1
    np.testing.assert_allclose(curve.mean, 1.0)
    np.testing.assert_allclose(curve.spread, 0.25)


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
    expected = np.interp(curve.x, 10 * (kept + 1), smooth)
    np.testing.assert_allclose(curve.mean, expected, rtol=1e-6, atol=1e-9)


def test_an_unfinished_run_is_drawn(tmp_path):
    path = write_run(tmp_path / "a", [1.0, 2.0])
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"update": 3, "st')
    (curve,) = learning_curves([path])
    np.testing.assert_allclose([curve.mean[0], curve.mean[-1]], [1.0, 2.0])


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
    assert struct.unpack(">II", data[16:24])[0] == 792
    assert len(data) > 10_000, "the plot is empty"


def test_other_metrics_are_means_over_updates(tmp_path):
    columns = {"loss/policy": [1.0, 2.0, 3.0, 4.0], "eval/return_mean": [None, 5.0, None, 7.0]}
    path = write_run(tmp_path / "a", [1.0] * 4, counts=[0, 9, 1, 1], metrics=columns)
    (curve,) = learning_curves([path], metric="loss/policy")
    np.testing.assert_allclose((curve.x[0], curve.x[-1]), (10, 40))
    np.testing.assert_allclose(curve.mean, curve.x / 10)
    np.testing.assert_allclose(curve.spread, 0.0)
    (curve,) = learning_curves([path], metric="eval/return_mean")
    np.testing.assert_allclose((curve.x[0], curve.x[-1], *curve.mean[[0, -1]]), (20, 40, 5.0, 7.0))


def test_unknown_and_empty_metrics_are_refused(tmp_path):
    path = write_run(tmp_path / "a", [1.0], metrics={"loss/value": [None]})
    with pytest.raises(ValueError, match=f"{path} has no metric 'loss/valu'; did you mean loss/value"):
        learning_curves([path], metric="loss/valu")
    with pytest.raises(ValueError, match=f"{path}: this metric has no value"):
        learning_curves([path], metric="loss/value")
    with pytest.raises(ValueError, match="x = 'hours' is not one of steps, minutes"):
        draw_metrics(read_groups([path]), x="hours")
    with pytest.raises(ValueError, match=r"metrics = 'loss/value' must be a list of names, such as \['loss/value'\]"):
        draw_metrics(read_groups([path]), "loss/value")
    with pytest.raises(ValueError, match="metrics is empty"):
        draw_metrics(read_groups([path]), [])


def test_names_are_drawn_as_they_are(tmp_path, monkeypatch):
    """Matplotlib reads dollar signs as formulas and hides labels that start with an underscore."""
    figures, to_png = [], plots._to_png
    monkeypatch.setattr(plots, "_to_png", lambda figure: figures.append(figure) or to_png(figure))
    env, metric = "_my$env^$:Make", "loss/$x^$"
    draw_metrics(read_groups([write_run(tmp_path / "a", [1.0], env=env, metrics={metric: [1.0]})]), [metric])
    (figure,) = figures
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"{env}: 1 run"]
    assert (figure.get_suptitle(), figure.axes[0].get_ylabel()) == (env, metric)


def test_a_plot_has_a_panel_per_metric_and_a_line_per_setting(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "_to_png", lambda figure: figures.append(figure) or b"")
    paths = [
        write_run(tmp_path / f"{i}", [1.0, 2.0], metrics={"loss/value": [1.0, 2.0]}, **with_hyperparams(gamma=i / 20))
        for i in range(12)
    ]
    draw_metrics(read_groups(paths), ["episode/return_mean", "loss/value", "env_steps"], x="minutes")
    (figure,) = figures
    assert [axes.get_ylabel() for axes in figure.axes] == ["episode return", "loss/value", "env_steps"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"minutes without compiling"}
    assert all(len(axes.lines) == 12 for axes in figure.axes)
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(looks) == 12, "every line looks different"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][:2] == ["gamma=0: 1 run", "gamma=0.05: 1 run"]
    assert figure.get_suptitle() == "CartPole-v1"


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


def test_an_output_may_be_a_symbolic_link(tmp_path):
    (tmp_path / "link.png").symlink_to("picture.png")
    write_output(tmp_path / "link.png", b"new", ".png")
    assert (tmp_path / "link.png").is_symlink()
    assert (tmp_path / "picture.png").read_bytes() == b"new"


def test_an_interrupted_write_keeps_the_previous_file(tmp_path):
    def parts():
        yield b"new"
        raise KeyboardInterrupt

    path = tmp_path / "picture.png"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, parts())
    assert [file.name for file in tmp_path.iterdir()] == ["picture.png"]
    assert path.read_bytes() == b"old"
