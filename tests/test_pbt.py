"""Tests of population-based training: exchanges, results, files, resume and errors."""

import csv
import dataclasses
import functools
import json
import os
import shutil
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL, compiled_programs
from PIL import Image
from probes import NO_LIMIT, ObsActionReward, Probe

import jppo
from jppo.config.ppo import check_hyperparams
from jppo.runs import plots
from jppo.sweeps import pbt_trainer
from jppo.sweeps.log import RunLog
from jppo.sweeps.pbt import FACTORS, choose_sources, exchange, perturb
from jppo.sweeps.population import to_host
from jppo.sweeps.store import load_sweep
from jppo.training.history import RecentEpisodes
from jppo.training.progress import NullReporter

CONFIG = SMALL(num_envs=4, num_steps=8, num_epochs=1, num_minibatches=1, normalize_obs=True, normalize_reward=True)
BASE = jppo.Hyperparams(learning_rate=1e-3)
UPDATES, EVERY = 14, 4
STEPS = UPDATES * CONFIG.batch_size
RATES = [1e-9, 1e-4, 1e-2, 1e38]  # runs with the last one diverge
PBT = jppo.PBTConfig(every=EVERY, resample_probability=0.0)  # not from a range that contains 1e38


class Short(ObsActionReward):
    """Episodes of three steps, so that some end in every update."""

    length = 3


class Endless(Probe):
    """An environment without an end of episodes."""

    length = limit = NO_LIMIT


class Acting(NullReporter):
    """Calls a function at the n-th progress report."""

    def __init__(self, number, act):
        self.remaining, self.act = number, act

    def update(self, step, steps_per_second, recent_return):
        self.remaining -= 1
        if not self.remaining:
            self.act()


def sweep(env=None, **options):
    given = {"config": CONFIG, "total_steps": STEPS, "num_devices": 1, "seeds": 2, "learning_rate": RATES}
    return jppo.sweep(env or Short(), **(given | {"selection": PBT} | options))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a sweep with population-based training, and the programs that it compiled."""
    with compiled_programs("") as names:
        result = sweep(sweep_dir=tmp_path_factory.mktemp("pbt") / "sweep")
    return result, names


PROGRAMS = []
compile_group = pbt_trainer.compile_group


@pytest.fixture
def shared_program(monkeypatch):
    """Trains the sweeps of several tests with the program of the first one, update by update."""

    def compile_once(*arguments):
        PROGRAMS.append(PROGRAMS[0] if PROGRAMS else compile_group(*arguments))
        return PROGRAMS[0]

    monkeypatch.setattr(pbt_trainer, "compile_group", compile_once)
    monkeypatch.setattr("jppo.training.device_loop.CHUNK_CAPACITY", 1)


choose = jax.jit(choose_sources, static_argnames="fraction")


def sources(returns, finite=None, fraction=0.25, seed=0):
    finite = np.ones(len(returns), bool) if finite is None else np.array(finite)
    return choose(np.array(returns, np.float32), finite, jax.random.key(seed), fraction=fraction).tolist()


@pytest.mark.slow
def test_the_worst_runs_copy_random_runs_of_the_best():
    returns = [5.0, 1.0, 7.0, 3.0, 8.0, 2.0, 6.0, 4.0]
    drawn = np.array([sources(returns, seed=seed) for seed in range(20)])
    kept = [0, 2, 3, 4, 6, 7]
    assert (drawn[:, kept] == kept).all()
    assert set(drawn[:, 1]) == set(drawn[:, 5]) == {2, 4}
    assert (drawn[:, 1] != drawn[:, 5]).any(), "both copies use the same draw"
    assert np.sum(np.array(sources(returns, fraction=0.5)) != np.arange(8)) == 4
    assert np.sum(np.array(sources(returns, fraction=0.01)) != np.arange(8)) == 1


def test_diverged_runs_and_runs_without_episodes_are_the_worst():
    nan = float("nan")
    assert sources([5.0, nan, 3.0, 4.0]) == [0, 0, 2, 3]
    assert sources([9.0, 2.0, 3.0, 8.0], [False, True, True, True]) == [3, 1, 2, 3], "also with the highest return"
    assert sources([1.0, 2.0, 3.0, 4.0], [False, False, True, True]) == [3, 3, 2, 3], "also more than the fraction"
    assert sources([1.0, nan, nan, nan], fraction=0.5) in ([0, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 3])
    assert sources([nan] * 4) == [0, 1, 2, 3]
    assert sources([nan, 1.0, 2.0, 3.0], [False] * 4) == [0, 1, 2, 3]


RANGES = {"learning_rate": (1e-5, 1e-2), "gamma": (0.9, 0.999), "ent_coef": (0.0, 0.02), "clip_eps": (0.1, 0.3)}


@pytest.mark.slow
def test_perturbed_values_are_valid_and_near_their_source():
    runs, rounds = 64, 30
    start = jppo.Hyperparams(learning_rate=1e-3, gamma=0.99, ent_coef=0.01, clip_eps=0.2, vf_coef=0.5)
    state = jax.tree.map(lambda x: jnp.full(runs + 1, x, jnp.float32), start)
    replaced = np.arange(runs) % 2 == 0
    once = jax.jit(lambda state, key: perturb(state, replaced, key, RANGES, 0.25))
    first = once(state, jax.random.key(0))
    for name, limits in RANGES.items():
        before, after = (np.asarray(getattr(x, name), np.float64) for x in (state, first))
        np.testing.assert_array_equal(after[1::2], before[1::2])
        assert after[-1] == before[-1], "padding changed"
        if name == "gamma":
            before, after, limits = 1 - before, 1 - after, (1 - limits[1], 1 - limits[0])  # noqa: PLW2901
        factor = (after / before)[:-1][replaced]
        is_factor = np.isclose(factor[:, None], FACTORS, rtol=1e-4).any(axis=1)
        assert 0.5 < is_factor.mean() < 0.95, name
        assert all(np.isclose(factor, one, rtol=1e-4).any() for one in FACTORS)
        drawn = (after[:-1][replaced])[~is_factor]
        assert ((drawn >= 0.999 * limits[0]) & (drawn <= 1.001 * limits[1])).all(), name
        assert len(set(drawn)) == len(drawn)
    assert len({float(x) for x in jax.tree.leaves(jax.tree.map(lambda x, y: (x != y).sum(), first, state))}) <= 2
    for number in range(rounds):
        state = once(state, jax.random.key(number))
    for index in range(0, runs, 7):
        check_hyperparams(jax.tree.map(lambda x, index=index: float(x[index]), state))


def test_values_at_the_limits_remain_valid():
    limits = {"gamma": 1.0, "gae_lambda": 0.0, "clip_eps": 1e-38, "learning_rate": 3e38, "vf_coef": 0.0}
    state = jppo.Hyperparams(**{name: jnp.full(8, value, jnp.float32) for name, value in limits.items()})
    ranges = {name: (value, value) for name, value in limits.items()}
    for number in range(5):
        state = perturb(state, np.ones(8, bool), jax.random.key(number), ranges, 0.0)
    for index in range(8):
        check_hyperparams(jppo.Hyperparams(**{name: float(getattr(state, name)[index]) for name in limits}))


def test_exchange_copies_everything_but_keys_and_hyperparameters():
    """Each leaf of a run is a different number, so that a swap of runs or leaves fails."""
    agent = jppo.make_anakin(Short(), CONFIG, total_steps=STEPS)
    shapes = jax.eval_shape(jax.vmap(agent.init, in_axes=(0, None)), jax.random.split(jax.random.key(0), 5), BASE)
    numbers = jax.tree.unflatten(jax.tree.structure(shapes), range(len(jax.tree.leaves(shapes))))

    def fill(like, number):
        rows = 1000 * np.arange(5) + number
        if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):  # runs 2 and 3 have the same seed
            keys = jax.vmap(jax.random.key)(np.where(np.arange(5) == 3, rows[2], rows))
            return keys if like.ndim == 1 else jax.vmap(lambda key: jax.random.split(key, like.shape[1]))(keys)
        return jnp.array(np.broadcast_to(rows.reshape(5, *[1] * (like.ndim - 1)), like.shape), like.dtype)

    before = jax.tree.map(fill, shapes, numbers)
    returns, finite = np.array([3.0, 2.0, 9.0, 1.0], np.float32), np.ones(4, bool)
    copy = jax.jit(functools.partial(exchange, ranges={"gae_lambda": (0.9, 0.95)}, config=PBT))
    after, source = copy(before, returns, finite, jax.random.key(1))
    assert source.tolist() == [0, 1, 2, 2]
    expected = jax.tree.map(lambda x: x[np.array([0, 1, 2, 2, 4])], before)
    changed = np.asarray(after.train.hyperparams.gae_lambda)
    assert (changed != np.asarray(expected.train.hyperparams.gae_lambda)).tolist() == [False, False, False, True, False]
    hyperparams = expected.train.hyperparams.replace(gae_lambda=after.train.hyperparams.gae_lambda)
    train = expected.train.replace(key=after.train.key, hyperparams=hyperparams)
    expected = expected.replace(train=train, collect=expected.collect.replace(key=after.collect.key))
    jax.tree.map(np.testing.assert_array_equal, to_host(after, 5), to_host(expected, 5))
    keys = ((after.train.key, before.train.key), (after.collect.key, before.collect.key))
    for new, old in jax.tree.map(jax.random.key_data, keys):
        assert (new == old).reshape(5, -1).all(axis=1).tolist() == [True, True, True, False, True]
        assert len(np.unique(new[:4].reshape(-1, 2), axis=0)) == new[:4].size // 2


@pytest.mark.slow
def test_the_sweep_replaces_bad_runs_and_records_it(trained):
    result, names = trained
    assert sum("run_chunk" in name for name in names) == 1
    assert sum("exchange" in name for name in names) == 1
    assert {run.status for run in result.runs} == {"finished"}
    assert {run.updates for run in result.runs} == {UPDATES}
    assert {copy["update"] for copy in result.copies} <= {4, 8, 12}
    first = [copy for copy in result.copies if copy["update"] == 4]
    assert {6, 7} <= {copy["run"] for copy in first}, "the diverged runs are not replaced"
    for copy in result.copies:
        rates = {run.number: run.metrics["hyperparams/learning_rate"] for run in result.runs}
        before, after = rates[copy["source"]][copy["update"] - 1], rates[copy["run"]][copy["update"]]
        assert copy["learning_rate"] == after
        assert np.isclose(after / before, FACTORS, rtol=1e-5).any()
    diverged = result.run(6)
    assert diverged.metrics["update"].tolist() == list(range(1, UPDATES + 1))
    assert np.isnan(diverged.metrics["loss/total"][1:4]).all()
    best = result.best()
    assert best.runs == (max(result.runs, key=lambda run: run.score),)
    assert best.settings == {"learning_rate": best.runs[0].metrics["hyperparams/learning_rate"][-1]}
    assert best.score > 0.7, "the best run has learned"


def history(result, number, until):
    """Returns (count, mean, std) of the episodes in each update of a run and, before it was replaced, of its source."""
    run = result.run(number)
    columns = (run.metrics[f"episode/{name}"] for name in ("count", "return_mean", "return_std"))
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    copies = [copy for copy in run.copies if copy[0] < until]
    if not copies:
        return rows[:until]
    update, source = copies[-1]
    return history(result, source, update) + rows[update:until]


def test_a_copy_has_the_recent_returns_of_its_source(trained):
    result, _ = trained
    for run in result.runs:
        recent = RecentEpisodes()
        for row in history(result, run.number, UPDATES):
            recent.add(*row)
        assert run.return_mean == recent.mean
        assert run.episodes == np.nansum(run.metrics["episode/count"]), "episodes of the source are counted"


def test_files_contain_the_history(trained):
    result, _ = trained
    with open(result.sweep_dir / "copies.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(int(r["update"]), int(r["run"]), int(r["source"])) for r in rows] == [
        (c["update"], c["run"], c["source"]) for c in result.copies
    ]
    assert sorted(path.name for path in result.sweep_dir.iterdir()) == [
        "copies.csv",
        "curves.png",
        "runs",
        "runs.csv",
        "sweep.json",
    ]
    with compiled_programs("run_chunk") as names:
        again = sweep(sweep_dir=result.sweep_dir)
    assert not names
    assert_same(again, result)
    loaded = load_sweep(result.sweep_dir)
    assert loaded.copies == result.copies
    assert [run.row for run in loaded.runs] == [run.row for run in result.runs]


def assert_same(result, other):
    for run, expected in zip(result.runs, other.runs, strict=True):
        for name in ("number", "seed", "settings", "status", "updates", "episodes", "return_mean", "copies", "row"):
            assert getattr(run, name) == getattr(expected, name), name
        metrics, others = ({k: v for k, v in x.metrics.items() if k != "time/elapsed"} for x in (run, expected))
        jax.tree.map(np.testing.assert_array_equal, metrics, others)
        jax.tree.map(np.testing.assert_array_equal, run.policy_state, expected.policy_state)


@pytest.mark.slow
def test_a_run_that_is_never_replaced_equals_the_run_without_exchanges(trained, tmp_path):
    result, _ = trained
    shutil.copytree(result.sweep_dir, tmp_path / "plain")
    plain = sweep(selection=None, sweep_dir=tmp_path / "plain")
    assert not (tmp_path / "plain/copies.csv").exists()
    untouched = 0
    for run, expected in zip(result.runs, plain.runs, strict=True):
        until = run.copies[0][0] if run.copies else UPDATES
        until = min(until, expected.updates)
        for name in ("loss/total", "episode/return_mean", "learning_rate"):
            np.testing.assert_array_equal(run.metrics[name][:until], expected.metrics[name][:until])
        if not run.copies:
            untouched += 1
            jax.tree.map(np.testing.assert_array_equal, run.policy_state, expected.policy_state)
    assert untouched
    assert "hyperparams/learning_rate" not in plain.run(0).metrics


def test_a_copy_that_diverges_at_once_has_no_values(trained):
    run = next(run for run in trained[0].runs if run.copies)
    update = run.copies[0][0]
    metrics = {name: column[run.metrics["update"] <= update] for name, column in run.metrics.items()}
    rows = jppo.SweepResult([dataclasses.replace(run, metrics=metrics)], trained[0].swept).copies
    assert all(np.isnan(rows[-1][name]) for name in run.last_values)


def test_a_schedule_that_is_not_searched_stays_a_schedule(trained):
    run, schedule = trained[0].runs[0], jppo.schedules.linear(0.01, 0.0)
    metrics = run.metrics | {"hyperparams/ent_coef": np.linspace(0.01, 0.0, len(run.metrics["update"]))}
    run = dataclasses.replace(run, settings=run.settings | {"ent_coef": schedule}, metrics=metrics)
    assert run.last_values.keys() == trained[0].runs[0].last_values.keys()


def test_an_interrupted_sweep_resumes_bit_exactly(trained, tmp_path, shared_program):
    """The first interrupt comes at an exchange, the second one between two exchanges."""
    done, texts = [], []
    for reports in (4, 6, 0):
        reporter = Acting(reports, lambda: os.kill(os.getpid(), signal.SIGINT))
        reporter.message = texts.append
        result = sweep(sweep_dir=tmp_path / "s", progress=lambda _, reporter=reporter: reporter)
        done.append(result.run(2).updates)
        assert result.status == ("interrupted" if reports else "finished")
    assert done[0] == EVERY
    assert 2 * EVERY < done[1] < 3 * EVERY
    assert [text for text in texts if "resuming" in text] == [f"Short: resuming at update {x}" for x in done[:2]]
    assert_same(result, trained[0])
    assert not list((tmp_path / "s").glob("population-*"))


@pytest.mark.slow
def test_a_sweep_resumes_after_a_crash(trained, tmp_path, shared_program, monkeypatch):
    monkeypatch.setattr(pbt_trainer, "CHECKPOINT_SECONDS", 0.0)

    def crash():
        raise RuntimeError("no power")

    with pytest.raises(RuntimeError, match="no power"):
        sweep(sweep_dir=tmp_path / "s", progress=lambda _: Acting(8, crash))
    assert_same(sweep(sweep_dir=tmp_path / "s"), trained[0])


def test_a_checkpoint_contains_the_reason_why_a_run_ended():
    group = types.SimpleNamespace(
        agent=types.SimpleNamespace(config=CONFIG),
        settings=types.SimpleNamespace(run=jppo.RunConfig()),
    )
    run, resumed = (RunLog(types.SimpleNamespace(number=1), group) for _ in range(2))
    run.end("stopped", "enough", "no legal action")
    resumed.restore(json.loads(json.dumps(run.to_json())))
    assert (resumed.status, resumed.stop_reason, resumed.error) == ("stopped", "enough", "no legal action")


@pytest.mark.slow
def test_result_is_the_same_on_several_devices(trained):
    """The runs are distributed over three devices with one padding run."""
    result = sweep(num_devices=3)
    for run, expected in zip(result.runs, trained[0].runs, strict=True):
        assert run.copies == expected.copies
        np.testing.assert_allclose(run.metrics["loss/total"], expected.metrics["loss/total"], 1e-3, 1e-4)
        rates = (x.metrics["hyperparams/learning_rate"] for x in (run, expected))
        np.testing.assert_allclose(*rates, rtol=1e-6)


@pytest.mark.slow
def test_without_episodes_no_run_is_replaced():
    result = sweep(Endless(), seeds=4, learning_rate=[1e-3, 2e-3])
    assert result.copies == []
    assert {run.status for run in result.runs} == {"finished"}


def test_plot_shows_returns_and_hyperparameters(trained, tmp_path, monkeypatch):
    result, _ = trained
    with Image.open(result.sweep_dir / "curves.png") as image:
        assert image.width > 2 * image.height
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, output: figures.append(figure))
    result.plot(tmp_path / "x.png")
    returns, rates, _ = figures[0].axes
    assert (returns.get_title(), rates.get_title(), rates.get_yscale()) == ("episode return", "learning_rate", "log")
    assert len(returns.lines) == 8
    assert len({line.get_color() for line in rates.lines}) > 1
    drawn = [line.get_ydata().tolist() for line in rates.lines]
    assert all(run.metrics["hyperparams/learning_rate"].tolist() in drawn for run in result.runs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"selection": True},
            "selection = True must be None, a name or a jppo.PBTConfig; choose from successive_halving, pbt",
        ),
        ({"selection": "pbd"}, "selection = 'pbd' must be None, .*; did you mean pbt"),
        ({"selection": "pbt", "seeds": 1, "learning_rate": [1e-3, 1e-2]}, "pbt needs at least 4 runs"),
        ({"num_envs": [4, 8]}, r"num_envs = \[4, 8\]: pbt changes fields of jppo.Hyperparams only"),
        ({"learning_rate": 1e-3, "seeds": 8}, "pbt needs a hyperparameter with several values"),
        ({"learning_rate": [1e-3, 1e-2], "seeds": 1}, "pbt needs at least 4 runs, this sweep has 2"),
        ({"selection": jppo.PBTConfig(every=UPDATES)}, "pbt.every = 14 must be less than the number of updates, 14"),
        ({"total_steps": 1, "selection": jppo.PBTConfig()}, "pbt.every = 1 must be less than the number of updates, 1"),
        ({"max_parallel_runs": 4}, "max_parallel_runs = 4: pbt trains all 8 runs of a program at once"),
        ({"max_grad_norm": [0.5, float("inf")]}, "max_grad_norm = inf: pbt changes finite numbers only"),
        (
            {"ent_coef": [0.1, jppo.schedules.linear(0.1, 0)]},
            r"ent_coef = linear\(0.1, 0\): pbt changes finite numbers",
        ),
    ],
)
def test_invalid_arguments_raise(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        sweep(sweep_dir=tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"every": 0}, "every = 0 must be a whole number of at least 1"),
        ({"fraction": 0.6}, "fraction = 0.6 must be a number from 0 to 0.5"),
        ({"fraction": 0.0}, "fraction = 0 would never replace a run"),
        ({"fraction": "half"}, "fraction = 'half' must be a number"),
        ({"resample_probability": -0.1}, "resample_probability = -0.1 must be a number from 0 to 1"),
    ],
)
def test_invalid_config_raises(fields, message):
    with pytest.raises(ValueError, match=message):
        jppo.PBTConfig(**fields)


def test_default_interval_is_a_twentieth_of_the_run():
    assert [jppo.PBTConfig().updates_between_exchanges(updates) for updates in (1, 39, 40, 1000)] == [1, 1, 2, 50]


def test_error_states_the_memory_of_all_runs(shared_program, monkeypatch):
    monkeypatch.setattr(pbt_trainer, "bytes_free", lambda devices: 1000)
    with pytest.raises(ValueError, match=r"pbt trains all 8 runs at once and needs .* but 1000 bytes are free"):
        sweep()
