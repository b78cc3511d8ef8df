"""Tests the data of a run: metrics in memory, which does not grow, and run directories, also damaged ones."""

import json
import math
import os
import platform
import shutil
import tracemalloc
from importlib.metadata import PackageNotFoundError

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lenient import lenient
from saved import save_run

import jppo
from jppo.config.checks import check_seed
from jppo.runs import run_dir
from jppo.runs.files import jsonable, write_json
from jppo.runs.load import load_run, read_summary
from jppo.runs.run_dir import (
    default_run_dir,
    load_policy_state,
    read_config,
    read_metrics,
    run_config,
    save_policy,
)
from jppo.runs.writer import RunWriter
from jppo.training.history import History, RecentEpisodes

CHUNK = 1000
HOUR = 130_000  # updates, with 36 per second


def chunk(start, length=CHUNK):
    number = np.arange(start, start + length)
    return {
        "update": number,
        "env_steps": 64 * number,
        "loss": np.sin(number),
        "return": np.where(number % 3, 0.5, np.nan),
    }


def test_memory_does_not_grow_with_the_number_of_updates():
    history, peaks = History(capacity=2048), []
    tracemalloc.start()
    try:
        for quarter in range(4):
            tracemalloc.reset_peak()
            for start in range(quarter * HOUR // 4, (quarter + 1) * HOUR // 4, CHUNK):
                history.add(chunk(start + 1))
                assert len(history.arrays()["update"]) <= 2048
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert max(peaks) < 1.1 * peaks[0]


@pytest.mark.parametrize("length", [1, 7, 100, 1024])
@pytest.mark.parametrize("updates", [1, 64, 65, 5000])
def test_history_has_evenly_spaced_rows_for_any_chunks(length, updates):
    history = History(capacity=64)
    for start in range(1, updates + 1, length):
        history.add(chunk(start, min(length, updates + 1 - start)))
    kept = history.arrays()
    stride = 1
    while -(-updates // stride) > 64:
        stride *= 2
    rows = [row for row in range(updates) if row == 0 or (row + 1) % stride == 0]
    np.testing.assert_array_equal(kept["update"], np.array(rows) + 1)
    for name, column in chunk(1, updates).items():
        np.testing.assert_array_equal(kept[name], column[rows], name)


@pytest.mark.parametrize("every", [2, 3, 10])
def test_history_contains_evaluations_as_often_as_other_updates(every):
    history = History(capacity=64)
    for update in range(1, 501):
        evaluation = {"eval/return_mean": np.array([float(update)])} if update % every == 0 else {}
        history.add(chunk(update, 1) | evaluation)
    values = history.arrays()["eval/return_mean"]
    expected = [update for update in range(1, 501) if update % every == 0 and update % 8 == 0]
    assert values[np.isfinite(values)].tolist() == expected
    assert len(expected) >= 12


@pytest.mark.parametrize("first", [1, 6, 8])
def test_history_starts_at_any_update(first):
    history = History(capacity=5)
    for update in range(first, first + 40):
        history.add(chunk(update, 1))
        assert len(history.arrays()["update"]) <= 5
    kept = history.arrays()["update"]
    assert kept[0] == first
    assert set(kept[1:] % 8) == {0}


@pytest.mark.parametrize("last", range(1, 41))
def test_history_can_be_restored_after_any_update(last):
    history, resumed = History(capacity=5), History(capacity=5)
    for update in range(1, 61):
        history.add(chunk(update, 1))
        if update == last:
            resumed.restore(history.arrays(), last)
        elif update > last:
            resumed.add(chunk(update, 1))
    np.testing.assert_array_equal(resumed.arrays()["update"], history.arrays()["update"])


def test_single_updates_need_little_more_memory_than_their_values():
    history = History()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for update in range(1, 5001):
            history.add(chunk(update, 1))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    held = sum(column.nbytes for column in history.arrays().values())
    assert taken < 2.5 * held


def test_missing_values_of_a_metric_are_nan():
    history = History(capacity=4)
    history.add({"update": np.array([1, 2]), "old": np.array([1, 2])})
    history.add({"update": np.array([3]), "new": np.array([7.0], np.float32)})
    history.add({"update": np.array([4]), "old": np.array([8])})
    kept = history.arrays()
    np.testing.assert_array_equal(kept["update"], [1, 2, 3, 4])
    np.testing.assert_array_equal(kept["old"], [1, 2, np.nan, 8])
    np.testing.assert_array_equal(kept["new"], [np.nan, np.nan, 7, np.nan])
    assert kept["update"].dtype == int
    history.add({"update": np.array([5])})
    np.testing.assert_array_equal(history.arrays()["update"], [1, 2, 4])
    np.testing.assert_array_equal(history.arrays()["old"], [1, 2, 8])


def test_an_empty_history():
    assert History().arrays() == {}


def test_recent_return_covers_the_fewest_updates_with_100_episodes():
    rng = np.random.default_rng(0)
    recent, updates = RecentEpisodes(), []
    assert math.isnan(recent.mean)
    assert math.isnan(recent.std)
    for _ in range(300):
        returns = rng.normal(rng.uniform(-100, 100), 20, size=int(rng.choice([0, 0, 1, 3, 30, 99, 100, 250])))
        updates.append(returns)
        empty = not len(returns)
        recent.add(len(returns), math.nan if empty else returns.mean(), math.nan if empty else returns.std())
        last = next((n for n in range(1, len(updates)) if sum(map(len, updates[-n:])) >= 100), len(updates))
        window = np.concatenate(updates[-last:])
        assert recent.total == sum(map(len, updates))
        if len(window):
            np.testing.assert_allclose([recent.mean, recent.std], [window.mean(), window.std()], rtol=1e-6)


def test_json_has_null_for_nan_and_numbers_for_numpy_scalars():
    value = {"a": math.nan, "b": [math.inf, (1.5, -math.inf)], "c": np.float32(0.5), "d": np.int64(3), "e": None}
    assert jsonable(value) == {"a": None, "b": [None, [1.5, None]], "c": 0.5, "d": 3, "e": None}
    json.dumps(jsonable(value), allow_nan=False)
    assert jsonable(np.float32("nan")) is None


def test_a_config_of_numpy_numbers_is_saved(tmp_path):
    config = jppo.PPOConfig(num_envs=np.int64(8), hidden_sizes=(np.int32(16),))
    settings = run_config("CartPole-v1", "device", 0, 10, config, jppo.Hyperparams(gamma=np.float32(0.5)))
    write_json(tmp_path / "config.json", settings)
    saved = read_config(tmp_path)
    assert saved["hyperparams"]["gamma"] == 0.5
    assert jppo.PPOConfig(**saved["config"] | {"hidden_sizes": tuple(saved["config"]["hidden_sizes"])}) == config


def test_a_json_file_is_replaced_atomically(tmp_path, monkeypatch):
    def refuse(source, destination):
        raise PermissionError(13, "Permission denied")

    write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": 2, "b": object()})
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError):
        write_json(tmp_path / "x.json", {"a": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}


@pytest.mark.parametrize(("seed", "whole"), [(0, 0), (2**32 - 1, 2**32 - 1), (np.uint32(7), 7)])
def test_seeds_are_32_bit_integers(seed, whole):
    assert check_seed(seed) == whole
    assert type(check_seed(seed)) is int
    jax.random.key(check_seed(seed))


@pytest.mark.parametrize("env", ["CartPole-v1", "../../etc", "a/b", "..", "x y"])
def test_default_run_directories_are_new_and_stay_below_runs(tmp_path, monkeypatch, env):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    (tmp_path / "runs").mkdir()
    paths = []
    for _ in range(3):
        path = default_run_dir(env, 4)
        assert path.resolve().is_relative_to(tmp_path / "runs")
        path.mkdir(parents=True)
        paths.append(path.name)
    assert paths == [f"20260101-000000-4{more}" for more in ("", ".1", ".2")]


def metrics_file(path, text):
    path.mkdir()
    (path / "metrics.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_an_incomplete_last_line_is_ignored(tmp_path):
    rows = [{"update": n, "loss": None if n == 2 else n / 2} for n in (1, 2, 3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    whole = read_metrics(metrics_file(tmp_path / "whole", text))
    np.testing.assert_array_equal(whole["loss"], [0.5, np.nan, 1.5])
    for cut in range(1, len(json.dumps(rows[2])) + 2):
        torn = read_metrics(metrics_file(tmp_path / str(cut), text[:-cut]))
        assert torn["update"].tolist() == [1, 2], text[:-cut]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no updates yet"),
        ('{"update": 1', "has no updates yet"),
        ('{"update": 1}\n{"upd\n{"update": 3}\n', "is damaged: "),
        ('{"update": 1}\n{"env_steps": 2}\n', "is damaged: line 2"),
        ("1\n2\n", "is damaged: line 1"),
        ("[" * 100_000 + "\n", "is damaged: line 1"),
        (b"\x98\xff\n\x00\n", "is damaged: line 1"),
    ],
)
def test_damaged_metrics_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=f"{tmp_path / 'run'}/metrics.jsonl {message}"):
        read_metrics(metrics_file(tmp_path / "run", text))


def test_metrics_of_a_missing_run_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run directory: it has no metrics\.jsonl"):
        read_metrics(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    config = jppo.PPOConfig(num_envs=4, num_steps=8, hidden_sizes=(8,), normalize_obs=True)
    return path, config, save_run(path, config=config)


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "run")


def change(path, **fields):
    """Changes fields of config.json; a dict updates a field, None removes it."""
    settings = json.loads((path / "config.json").read_text())
    for name, value in fields.items():
        settings[name] = settings[name] | value if isinstance(value, dict) else value
    (path / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))


def test_a_loaded_run_equals_the_saved_run(saved):
    path, config, policy = saved
    with lenient():
        agent, loaded, settings = load_run(str(path))
    assert agent.config == config
    assert agent.env.name == settings["env"] == "CartPole-v1"
    assert jax.tree.structure(loaded) == jax.tree.structure(policy)
    jax.tree.map(np.testing.assert_array_equal, loaded, policy)
    assert loaded.obs_stats.mean.shape == (4,)
    assert read_summary(path) == {"status": "finished"}


def test_the_writer_refuses_a_directory_in_use(saved, tmp_path):
    with pytest.raises(ValueError, match="already contains a run"):
        RunWriter(saved[0], {})
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="is not empty"):
        RunWriter(tmp_path, {})
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_an_unfinished_run_has_no_summary(tmp_path):
    assert read_summary(tmp_path) == {}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, r"is not a run directory: it has no config\.json"),
        (lambda path: (path / "config.json").write_text('{"env": "Cart'), r"config\.json is damaged: Unterminated"),
        (lambda path: (path / "config.json").write_bytes(b"\xff\xfe"), r"config\.json is damaged: 'utf-8'"),
        (
            lambda path: (path / "config.json").write_text("[" * 100_000),
            r"config\.json is damaged: .* nested too deeply",
        ),
        (lambda path: (path / "config.json").write_text("[1]"), r"config\.json is damaged: it has no backend, config"),
        (lambda path: change(path, hyperparams=None), "is damaged: it has no hyperparams"),
        (lambda path: change(path, network="custom"), "with a custom network; pass it"),
        (lambda path: change(path, environment="custom"), "in a custom environment, CartPole-v1; name it with --env"),
        (lambda path: change(path, config={"num_towers": 3}), "of another version of jppo: .*'num_towers'"),
        (lambda path: change(path, config={"num_envs": 0}), r"config\.json .* num_envs = 0 must be"),
        (lambda path: change(path, config={"hidden_sizes": 8}), r"config\.json .* another version of jppo"),
        (lambda path: change(path, env="CartPole-v7"), "unknown environment 'CartPole-v7'; did you mean"),
        (lambda path: (path / "policy_state.npz").unlink(), "has no policy: its run did not finish"),
        (
            lambda path: change(path, config={"hidden_sizes": [9]}),
            r"does not hold the policy that .*config\.json",
        ),
        (lambda path: change(path, config={"normalize_obs": False}), "does not hold the policy"),
        (lambda path: os.truncate(path / "policy_state.npz", 99), "does not hold the policy"),
    ],
)
def test_damaged_runs_are_refused(copied, damage, message):
    damage(copied)
    with lenient(), pytest.raises(ValueError, match=message) as caught:
        load_run(copied)
    assert str(copied) in str(caught.value) or "unknown environment" in str(caught.value)


def test_a_policy_of_another_structure_is_refused(saved):
    with pytest.raises(ValueError, match="does not hold the policy"):
        load_policy_state(saved[0], {"weights": np.zeros(3)})


def test_no_flipped_bit_gives_another_policy_or_a_traceback(copied, saved):
    path, policy = copied / "policy_state.npz", saved[2]
    content = path.read_bytes()
    refused = 0
    for position in np.random.default_rng(0).integers(8 * len(content), size=300):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        try:
            loaded = load_policy_state(copied, policy)
        except ValueError:
            refused += 1
        else:
            jax.tree.map(np.testing.assert_array_equal, loaded, policy)
    assert refused > 200


def test_a_policy_of_bfloat16_is_loaded(tmp_path):
    policy = {"weights": jnp.arange(3, dtype=jnp.bfloat16), "empty": jnp.zeros((0, 2))}
    save_policy(tmp_path, policy)
    loaded = load_policy_state(tmp_path, policy)
    assert loaded["weights"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(loaded["weights"], policy["weights"])
    assert loaded["empty"].shape == (0, 2)


def test_versions_contain_jppo_without_an_installation(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(run_dir, "version", missing)
    assert run_dir.versions() == {"python": platform.python_version(), "jppo": jppo.__version__}
