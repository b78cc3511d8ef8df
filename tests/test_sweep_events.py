"""Tests evaluations, stopping at a return and best policies in sweeps."""

import csv
import io
import json
import os
import signal
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from checks import SMALL
from lenient import lenient_env
from probes import Lever

import jppo
from jppo.cli.main import main
from jppo.runs import run_dir as run_files
from jppo.sweeps import population
from jppo.sweeps.results import print_settings
from jppo.training import settings as run_settings
from jppo.training.progress import NullReporter

CONFIG = SMALL(num_envs=8, num_steps=16, num_epochs=4, num_minibatches=2, normalize_obs=True)
BASE = jppo.Hyperparams(gamma=0.9)
RATES = [1e-9, 0.02]  # runs 0 and 1 do not learn, runs 2 and 3 do
BATCH, UPDATES = 128, 12
EVALS = {"eval_every": 4, "eval_episodes": 3}
TARGET = 3.5
PBT = jppo.PBTConfig(every=4, resample_probability=0.0)


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    """Sweeps with the same program share its compiled form."""
    compile_population, programs = population.compile_population, {}

    def compile_once(agent, size, num_devices, hyperparams, run):
        key = agent.config, agent.num_updates, size, num_devices, run
        if key not in programs:
            programs[key] = compile_population(agent, size, num_devices, hyperparams, run)
        return programs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(population, "compile_population", compile_once)
        yield


def sweep(total=UPDATES, **options):
    given = {"config": CONFIG, "hyperparams": BASE, "total_steps": total * BATCH, "num_devices": 1, "seeds": 2}
    return jppo.sweep(Lever(), **(given | {"learning_rate": RATES} | options))


@pytest.fixture(scope="module")
def plain():
    return sweep()


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    return sweep(**EVALS, sweep_dir=tmp_path_factory.mktemp("sweeps") / "evaluated")


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    return sweep(stop_at_return=TARGET, sweep_dir=tmp_path_factory.mktemp("sweeps") / "solved")


def finite(column):
    return column[np.isfinite(column)]


def assert_same(run, other, until=None):
    """Compares runs bit by bit: metrics, and the policy if both have the same number of updates."""
    if until is None:
        jax.tree.map(np.testing.assert_array_equal, run.policy_state, other.policy_state)
    for name in set(run.metrics) & set(other.metrics) - {"time/elapsed"}:
        np.testing.assert_array_equal(run.metrics[name][:until], other.metrics[name][:until], name)


def assert_same_events(result, other):
    for run, expected in zip(result.runs, other.runs, strict=True):
        assert_same(run, expected)
        for name in ("status", "stop_reason", "updates", "best", "score", "eval_return_mean", "copies"):
            assert getattr(run, name) == getattr(expected, name), name
        assert set(run.metrics) == set(expected.metrics)
        jax.tree.map(np.testing.assert_array_equal, run.best_policy_state, expected.best_policy_state)


@pytest.mark.slow
def test_evaluations_do_not_change_the_runs(plain, evaluated):
    for run, expected in zip(evaluated.runs, plain.runs, strict=True):
        assert_same(run, expected)
        rows = np.isfinite(run.metrics["eval/return_mean"])
        assert run.metrics["update"][rows].tolist() == [4, 8, 12]


@pytest.mark.slow
def test_evaluations_equal_those_of_a_single_run(evaluated):
    run = evaluated.run(3)
    alone = jppo.train(
        Lever(),
        config=CONFIG,
        hyperparams=run.hyperparams,
        seed=run.seed,
        total_steps=UPDATES * BATCH,
        run=jppo.RunConfig(**EVALS),
    )
    for name in ("eval/return_mean", "eval/return_std", "eval/length_mean"):
        np.testing.assert_allclose(run.metrics[name], alone.metrics[name], rtol=1e-3)
    assert run.eval_return_mean == pytest.approx(alone.summary["eval_return_mean"], rel=1e-3)


@pytest.mark.slow
def test_best_policy_is_that_of_the_best_evaluation(evaluated):
    for run in evaluated.runs:
        means = finite(run.metrics["eval/return_mean"])
        assert run.best.update == 4 * (int(np.argmax(means)) + 1)
        assert run.best.score == means.max()
    early = min(evaluated.runs, key=lambda run: run.best.update)
    part = sweep(total=early.best.update)
    jax.tree.map(np.testing.assert_array_equal, early.best_policy_state, part.run(early.number).policy_state)
    assert early.best_policy.act(np.zeros(1, np.float32)) in (0, 1)
    assert early.best_policy.env is early.policy.env


def test_last_evaluation_is_reported_if_memory_holds_few_updates(evaluated, monkeypatch):
    monkeypatch.setattr("jppo.sweeps.log._HISTORY_ROWS", 2 * 4)
    result = sweep(**EVALS)
    for run, expected in zip(result.runs, evaluated.runs, strict=True):
        assert run.metrics["update"].tolist() == [1, 8]
        assert run.metrics["eval/return_mean"][1] == expected.metrics["eval/return_mean"][7]
        assert run.eval_return_mean == expected.metrics["eval/return_mean"][11]


def test_printed_table_contains_the_last_evaluations(evaluated, plain):
    for result, is_evaluated in ((evaluated, True), (plain, False)):
        stream = io.StringIO()
        print_settings(result, stream)
        assert ("evaluation" in stream.getvalue()) == is_evaluated
        for setting in result.settings if is_evaluated else ():
            assert f" {np.mean([run.eval_return_mean for run in setting.runs]):.1f} " in stream.getvalue()


def test_files_contain_the_evaluations_and_the_best_policy(evaluated):
    path = evaluated.sweep_dir
    assert_same_events(sweep(**EVALS, eval_sampled=False, sweep_dir=path), evaluated)
    assert len(list((path / "runs").iterdir())) == 4, "the default names the same runs"
    with open(path / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["eval_return_mean"]) for row in rows] == pytest.approx(
        [run.eval_return_mean for run in evaluated.runs], rel=1e-4
    )
    assert [int(row["best_update"]) for row in rows] == [run.best.update for run in evaluated.runs]
    evaluated.write_run_dirs()
    run = evaluated.run(2)
    folder = path / "run_dirs" / f"2-{run.name}"
    best = jppo.load_policy(folder, env=Lever(), best=True)
    jax.tree.map(np.testing.assert_array_equal, best.state, run.best_policy_state)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["best_update"], summary["eval_return_mean"]) == (
        run.best.update,
        pytest.approx(run.eval_return_mean),
    )
    assert run_files.read_best(folder) == run.best


@pytest.mark.slow
def test_runs_stop_at_the_return_without_an_effect_on_the_others(plain, solved):
    assert [run.status for run in solved.runs] == ["finished", "finished", "solved", "solved"]
    for run, expected in zip(solved.runs, plain.runs, strict=True):
        assert_same(run, expected, until=run.updates)
        assert len(run.metrics["update"]) == run.updates
        if run.status == "solved":
            assert run.updates < UPDATES
            assert run.return_mean >= TARGET
            before = sweep(total=run.updates - 1).run(run.number)
            assert before.return_mean < TARGET
            at_end = sweep(total=run.updates).run(run.number)
            assert_same(run, at_end)
        else:
            assert_same(run, expected)
    assert solved.best().settings == {"learning_rate": 0.02}
    assert solved.status == "finished"


@pytest.mark.slow
def test_solved_runs_are_loaded_and_drawn(solved, tmp_path):
    assert_same_events(sweep(stop_at_return=TARGET, sweep_dir=solved.sweep_dir), solved)
    assert (solved.sweep_dir / "curves.png").exists()
    assert [run.best is not None for run in solved.runs] == [True] * 4
    assert solved.run(2).best.update == solved.run(2).updates
    tidy = solved.tidy()
    assert {len(column) for column in tidy.values()} == {sum(run.updates for run in solved.runs)}


def test_sweep_ends_early_when_all_runs_have_stopped(monkeypatch):
    monkeypatch.setattr("jppo.training.device_loop._CHUNK_SECONDS", 0.0)  # chunks of one update
    steps = []

    class Counting(NullReporter):
        def update(self, env_steps, steps_per_second, recent_return):
            steps.append(env_steps)

    result = sweep(stop_at_return=TARGET, learning_rate=[0.02, 0.03], progress=lambda _: Counting())
    assert {run.status for run in result.runs} == {"solved"}
    assert steps[-1] == sum(run.env_steps for run in result.runs)
    assert len(steps) == max(run.updates for run in result.runs) < UPDATES


@pytest.mark.slow
def test_runs_stop_at_the_return_of_an_evaluation(plain):
    result = sweep(eval_every=2, eval_episodes=3, stop_at_return=4.5)
    assert [run.status for run in result.runs] == ["finished", "finished", "solved", "solved"]
    for run, expected in zip(result.runs, plain.runs, strict=True):
        means = finite(run.metrics["eval/return_mean"])
        assert (means[:-1] < 4.5).all()
        assert_same(run, expected, until=run.updates)
        if run.status == "solved":
            assert means[-1] >= 4.5
            assert run.updates == 2 * len(means) < UPDATES
            assert_same(run, sweep(total=run.updates).run(run.number))


@pytest.mark.slow
def test_best_policy_without_evaluations_is_that_of_the_highest_recent_return(plain):
    run = sweep(total=16, stop_at_return=100.0).run(0)  # its return varies at random
    assert run.best.measure == "recent return"
    assert 4 <= run.best.update < 16
    assert run.best.score > run.return_mean
    same = sweep(total=run.best.update).run(0)
    assert run.best.score == same.return_mean
    assert_policy(run.best_policy_state, same.policy_state)


def assert_policy(policy, other):
    jax.tree.map(np.testing.assert_array_equal, policy, other)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{**EVALS, "stop_at_return": 4.5}, {"stop_at_return": TARGET}])
def test_interrupted_sweep_gives_the_same_result_after_a_resume(tmp_path, options, monkeypatch):
    monkeypatch.setattr("jppo.training.device_loop._CHUNK_SECONDS", 0.0)
    whole = sweep(**options, max_parallel_runs=2)

    class Interrupting(NullReporter):
        calls = 0

        def update(self, env_steps, steps_per_second, recent_return):
            self.calls += 1
            if self.calls == UPDATES + 2:  # in the second half of the runs
                os.kill(os.getpid(), signal.SIGINT)

    given = options | {"max_parallel_runs": 2, "sweep_dir": tmp_path / "s"}
    part = sweep(**given, progress=lambda _: Interrupting())
    assert [run.status for run in part.runs] == ["finished", "finished", "interrupted", "interrupted"]
    assert_same_events(sweep(**given), whole)


@pytest.mark.slow
def test_result_is_the_same_on_two_devices(evaluated):
    two = sweep(**EVALS, num_devices=2)
    for run, other in zip(evaluated.runs, two.runs, strict=True):
        assert (run.status, run.updates, run.best.update) == (other.status, other.updates, other.best.update)
        for name in ("eval/return_mean", "loss/total", "learning_rate"):
            np.testing.assert_allclose(run.metrics[name], other.metrics[name], rtol=1e-3, atol=1e-4)
    assert sweep(stop_at_return=TARGET, num_devices=2, seeds=3).run(4).status == "solved"  # with padding


def test_halving_counts_solved_runs_among_the_better_half():
    result = sweep(total=48, stop_at_return=TARGET, selection="successive_halving")  # the first rung is update 12
    assert [run.status for run in result.runs] == ["stopped", "stopped", "solved", "solved"]
    assert [(run.updates, run.stop_reason) for run in result.runs[:2]] == [(12, "successive halving")] * 2
    assert [run.is_complete for run in result.runs] == [False, False, True, True]


def pbt(**options):
    return sweep(selection=PBT, **options)


@pytest.mark.slow
def test_population_orders_runs_by_their_evaluations():
    result = pbt(**EVALS, seeds=4)
    for update in (4, 8):
        means = np.array([run.metrics["eval/return_mean"][update - 1] for run in result.runs])
        sources = {copy["source"] for copy in result.copies if copy["update"] == update}
        replaced = {copy["run"] for copy in result.copies if copy["update"] == update}
        best = set(np.argsort(-means, kind="stable")[:2].tolist())
        assert sources <= best | {i for i in range(8) if means[i] == means.max()}
        assert all(means[list(replaced)] <= np.median(means))
    assert {run.best.measure for run in result.runs} == {"evaluation"}


def test_population_ends_when_a_run_reaches_the_return():
    result = pbt(eval_every=2, eval_episodes=3, stop_at_return=4.5)
    assert {run.status for run in result.runs} == {"solved", "stopped"}
    updates = {run.updates for run in result.runs}
    assert len(updates) == 1
    assert updates.pop() < UPDATES
    reasons = {run.stop_reason for run in result.runs if run.status == "stopped"}
    assert reasons == {"another run reached stop_at_return"}
    assert result.best().best_run.is_complete


@pytest.mark.slow
def test_population_that_ended_does_not_continue_after_a_crash(tmp_path, monkeypatch):
    given = {"eval_every": 2, "eval_episodes": 3, "stop_at_return": 4.5}
    with monkeypatch.context() as patch:
        patch.setattr("jppo.sweeps.store.write_outcome", Mock(side_effect=RuntimeError("crash")))
        with pytest.raises(RuntimeError, match="crash"):
            pbt(**given, sweep_dir=tmp_path)
    whole = pbt(**given)
    monkeypatch.setattr("jppo.sweeps.pbt_trainer.GroupLoop", Mock(side_effect=RuntimeError("trains again")))
    assert_same_events(pbt(**given, sweep_dir=tmp_path), whole)


@pytest.mark.slow
def test_population_with_events_resumes_bit_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr("jppo.training.device_loop._CHUNK_SECONDS", 0.0)
    given = {**EVALS, "seeds": 2}
    whole = pbt(**given)
    for after in (5, 8):  # between two evaluations, and at an evaluation and an exchange

        class Interrupting(NullReporter):
            calls = 0

            def update(self, env_steps, steps_per_second, recent_return, after=after):
                self.calls += 1
                if self.calls == after:
                    os.kill(os.getpid(), signal.SIGINT)

        path = tmp_path / f"s{after}"
        part = pbt(**given, sweep_dir=path, progress=lambda _: Interrupting())
        assert part.status == "interrupted"
        assert_same_events(pbt(**given, sweep_dir=path), whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_every": 13}, "eval_every = 13 is more than the 12 updates of the run; lower it"),
        ({"callback": print}, "run.callback = .* has no effect in jppo.sweep, which supports eval_every,"),
        ({"progress": "bar"}, "progress = 'bar' must be 'auto', 'none' or a jppo.Reporter"),
        ({"progress": jppo.Reporter}, r"progress = Reporter is a class; pass an instance, Reporter\(...\)"),
        ({"run": 3}, "run = 3 must be a jppo.RunConfig or a mapping of its fields"),
        (
            {"video": True},
            "run.video = True has no effect in jppo.sweep, which supports eval_every, eval_episodes, eval_sampled, "
            "eval_max_steps, stop_at_return, progress; leave it out",
        ),
        ({"checkpoint_seconds": 5.0}, "run.checkpoint_seconds = 5.0 has no effect in jppo.sweep"),
        ({"stop_at_return": 4.0, "selection": PBT}, "pbt needs evaluations for stop_at_return = 4; set eval_every"),
    ],
)
def test_invalid_arguments_raise_before_anything_is_written(tmp_path, options, message):
    with pytest.raises(ValueError, match=message) as error:
        sweep(sweep_dir=tmp_path / "s", **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_other_settings_of_events_are_other_runs(solved):
    result = sweep(stop_at_return=9.0, sweep_dir=solved.sweep_dir)
    assert {run.status for run in result.runs} == {"finished"}


@pytest.mark.slow
def test_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_settings, "make_env", lenient_env)
    sizes = ["--num-envs", "8", "--num-steps", "16", "--hidden-sizes", "8", "--seeds", "1", "--num-devices", "1"]
    options = ["--total-steps", "6400", "--eval-every", "2", "--eval-episodes", "3", "--stop-at-return", "9"]
    command = ["sweep", "CartPole-v1", *sizes, *options, "--sweep-dir", str(tmp_path / "s"), "--run-dirs"]
    assert main(command) == 0
    assert "1 solved" in capsys.readouterr().out
    (folder,) = (tmp_path / "s/run_dirs").iterdir()
    assert run_files.read_best(folder).measure == "evaluation"
    population = ["--selection", "pbt", "--learning-rate", "1e-4", "1e-3", "--sweep-dir", str(tmp_path / "p")]
    assert main(["sweep", "CartPole-v1", *population, "--stop-at-return", "9"]) == 2
    assert "pbt needs evaluations for stop_at_return = 9; set eval_every" in capsys.readouterr().err
    assert main(["sweep", "CartPole-v1", "--eval-every", "-1"]) == 2
    assert "eval_every = -1 must be a whole number of at least 0" in capsys.readouterr().err
    assert main(["sweep", "CartPole-v1", "--eval-episodes", "0"]) == 2
    assert "eval_episodes = 0 must be a whole number of at least 1" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()
