"""Tests evaluations, callbacks, stopping at a return and best policies in sweeps."""

import csv
import io
import json
import os
import signal
from unittest.mock import Mock

import jax
import jax.numpy as jnp
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
def test_callback_sees_each_run_and_may_log_stop_and_change_it(plain):
    seen = []

    def callback(event):
        run = event.run
        seen.append((event.update, run.number, run.seed, run.settings, run.env))
        event.log("my/number", 10 * run.number + event.update)
        if run.number == 1 and event.update == 6:
            event.stop("enough")
        if run.number == 2 and event.update == 6:
            train = event.state.train
            event.state = event.state.replace(
                train=train.replace(hyperparams=train.hyperparams.replace(learning_rate=0.0))
            )

    result = sweep(callback=callback, callback_every=3)
    expected = [(update, number) for update in (3, 6, 9, 12) for number in range(4) if (update, number) < (7, 0)]
    expected += [(update, number) for update in (9, 12) for number in (0, 2, 3)]
    assert [entry[:2] for entry in seen] == expected
    assert seen[1][2:] == (1, {"learning_rate": 1e-9}, "Lever")
    assert [run.status for run in result.runs] == ["finished", "stopped", "finished", "finished"]
    stopped = result.run(1)
    assert (stopped.updates, stopped.stop_reason) == (6, "enough")
    for run, other in zip(result.runs, plain.runs, strict=True):
        assert_same(run, other, until=6 if run.number == 2 else run.updates)
    assert_same(stopped, sweep(total=6).run(1))
    assert finite(result.run(3).metrics["my/number"]).tolist() == [33.0, 36.0, 39.0, 42.0]
    changed = result.run(2).metrics["learning_rate"]
    assert (changed[:6] == np.float32(0.02)).all()
    assert (changed[6:] == 0.0).all()
    assert_same(result.run(3), plain.run(3))


def test_metrics_of_a_callback_are_those_since_its_last_call():
    counts = []

    def callback(event):
        if event.run.number == 3:
            counts.append((event.metrics["episode/count"], event.return_mean))

    result = sweep(callback=callback, callback_every=6)
    column = result.run(3).metrics["episode/count"]
    assert [count for count, _ in counts] == [column[:6].sum(), column[6:].sum()]
    assert counts[-1][1] == result.run(3).return_mean


@pytest.mark.slow
def test_best_policy_without_evaluations_is_that_of_the_highest_recent_return():
    def callback(event):
        if event.update == 8:  # the policies of all runs are random from here on
            train = event.state.train
            policy = train.policy_state.replace(params=jax.tree.map(jnp.zeros_like, train.policy_state.params))
            train = train.replace(policy_state=policy, hyperparams=train.hyperparams.replace(learning_rate=0.0))
            event.state = event.state.replace(train=train)

    run = sweep(total=16, callback=callback, callback_every=8).run(2)
    assert run.best.measure == "recent return"
    assert 4 <= run.best.update < 16
    assert run.best.score > run.return_mean
    assert_policy(run.best_policy_state, sweep(total=run.best.update).run(2).policy_state)


def assert_policy(policy, other):
    jax.tree.map(np.testing.assert_array_equal, policy, other)


@pytest.mark.slow
def test_exception_of_a_callback_ends_the_sweep_with_its_finished_runs(tmp_path):
    def fail(event):
        if event.run.number == 2:
            raise ArithmeticError("curriculum")

    given = {"callback": fail, "callback_every": 12, "max_parallel_runs": 2, "sweep_dir": tmp_path / "s"}
    with pytest.raises(ArithmeticError, match="curriculum") as error:
        sweep(**given)
    result = error.value.result
    assert [(run.number, run.status) for run in result.runs] == [
        (0, "finished"),
        (1, "finished"),
        (2, "interrupted"),
        (3, "interrupted"),
    ]
    (note,) = error.value.__notes__
    assert note == "in the callback of run 2 of the sweep (Lever, seed 0, learning_rate = 0.02), update 12"
    assert len(list((tmp_path / "s/runs").iterdir())) == 2


@pytest.mark.slow
def test_callback_cannot_change_the_settings_of_a_run():
    def change(event):
        event.run.settings["learning_rate"] = 7.0

    with pytest.raises(TypeError, match="does not support item assignment"):
        sweep(callback=change, callback_every=12)


def test_run_is_not_solved_if_its_last_callback_fails():
    def fail(event):
        if event.run.number == 2 and event.update >= 4 and event.return_mean >= TARGET:
            raise ArithmeticError("curriculum")

    with pytest.raises(ArithmeticError) as error:
        sweep(stop_at_return=TARGET, callback=fail)
    assert [run.status for run in error.value.result.runs[:3]] == ["interrupted"] * 3


def test_parameters_that_are_not_finite_are_an_error_of_the_callback():
    def broken(event):
        if event.run.number == 1:
            params = jax.tree.map(lambda x: x * jnp.nan, event.state.train.policy_state.params)
            policy = event.state.train.policy_state.replace(params=params)
            event.state = event.state.replace(train=event.state.train.replace(policy_state=policy))

    message = r"the callback broken set event\.state\.train\.policy_state\.params.* to NaN or infinity after update 3;"
    with pytest.raises(ValueError, match=message):
        sweep(callback=broken, callback_every=3)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{**EVALS, "stop_at_return": 4.5}, {"stop_at_return": TARGET}])
def test_interrupted_sweep_gives_the_same_result_after_a_resume(tmp_path, options, monkeypatch):
    monkeypatch.setattr("jppo.training.device_loop._CHUNK_SECONDS", 0.0)
    options = options | {"callback": lambda event: event.log("my/seed", event.run.seed), "callback_every": 3}
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
    def callback(event):
        if event.run.number == 3 and event.update == 6:
            event.stop("enough")
        if event.run.number == 2 and event.update == 6:
            train = event.state.train
            event.state = event.state.replace(
                train=train.replace(hyperparams=train.hyperparams.replace(learning_rate=0.01))
            )

    one, two = (sweep(**EVALS, callback=callback, callback_every=6, num_devices=n) for n in (1, 2))
    for run, other in zip(one.runs, two.runs, strict=True):
        assert (run.status, run.updates, run.best.update) == (other.status, other.updates, other.best.update)
        for name in ("eval/return_mean", "loss/total", "learning_rate"):
            np.testing.assert_allclose(run.metrics[name], other.metrics[name], rtol=1e-3, atol=1e-4)
    assert [run.updates for run in two.runs] == [12, 12, 12, 6]
    assert two.run(2).metrics["learning_rate"].tolist() == pytest.approx([0.02] * 6 + [0.01] * 6)
    assert_same(one.run(0), evaluated.run(0))
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


def test_a_copy_continues_the_means_of_its_source():
    """Exchanges happen after updates 4 and 8, calls after updates 6 and 12."""
    seen = {}
    result = pbt(
        callback=lambda event: seen.update({(event.run.number, event.update): event.metrics}), callback_every=6
    )
    sources = {run.number: dict(run.copies).get(4, run.number) for run in result.runs}
    assert any(number != source for number, source in sources.items())
    loss = {run.number: run.metrics["loss/total"] for run in result.runs}
    for number, source in sources.items():
        expected = np.mean([*loss[source][:4], *loss[number][4:6]])
        np.testing.assert_allclose(seen[number, 6]["loss/total"], expected, rtol=1e-6)


def test_population_ends_when_a_callback_stops_a_run():
    result = pbt(callback=lambda event: event.stop("enough") if event.run.number == 2 else None, callback_every=6)
    assert {(run.status, run.stop_reason, run.updates) for run in result.runs} == {("stopped", "enough", 6)}


STOPS = []  # a list in the closure would be part of the run's identity


def stop_and_record(event):
    STOPS.append(event.run.number)
    event.stop("enough")


@pytest.mark.slow
def test_population_that_ended_does_not_continue_after_a_crash(tmp_path, monkeypatch):
    given = {"callback": stop_and_record, "callback_every": 6, "sweep_dir": tmp_path}
    with monkeypatch.context() as patch:
        patch.setattr("jppo.sweeps.store.write_outcome", Mock(side_effect=RuntimeError("crash")))
        with pytest.raises(RuntimeError, match="crash"):
            pbt(**given)
    result = pbt(**given)
    assert sorted(STOPS) == [0, 1, 2, 3], "the resumed sweep must not call it again"
    assert {(run.status, run.stop_reason, run.updates) for run in result.runs} == {("stopped", "enough", 6)}


@pytest.mark.slow
def test_population_with_events_resumes_bit_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr("jppo.training.device_loop._CHUNK_SECONDS", 0.0)

    def callback(event):
        train = event.state.train
        rate = 0.9 * train.hyperparams.learning_rate
        event.state = event.state.replace(
            train=train.replace(hyperparams=train.hyperparams.replace(learning_rate=rate))
        )
        event.log("my/count", event.metrics["episode/count"])

    given = {**EVALS, "callback": callback, "callback_every": 3, "seeds": 2}
    whole = pbt(**given)
    for after in (5, 6):  # between two events, and at a callback

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
    rates = whole.run(3).metrics["hyperparams/learning_rate"]
    assert rates[3] == pytest.approx(0.9 * rates[2])


@pytest.mark.slow
def test_a_population_resumes_bit_exactly_after_an_exception_of_a_callback(tmp_path):
    """The exception of run 1 comes at an evaluation and an exchange of all runs."""
    messages = []

    def callback(event):
        if event.run.number == 1 and event.update == 8:
            if not messages:
                raise ArithmeticError("curriculum")
        else:
            event.log("my/update", event.update)

    class Recording(NullReporter):
        message = messages.append

    given = {**EVALS, "callback": callback, "callback_every": 4, "seeds": 2}
    with pytest.raises(ArithmeticError, match="curriculum") as error:
        pbt(**given, sweep_dir=tmp_path / "s")
    assert {(run.status, run.updates) for run in error.value.result.runs} == {("interrupted", 8)}
    result = pbt(**given, sweep_dir=tmp_path / "s", progress=lambda _: Recording())
    assert "Lever: resuming at update 8" in messages
    whole = pbt(**given)
    assert {update for run in whole.runs for update, _ in run.copies} == {4, 8}
    assert_same_events(result, whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_every": 13}, "eval_every = 13 is more than the 12 updates of the run; lower it"),
        ({"callback": print, "callback_every": 13}, "callback_every = 13 is more than the 12 updates"),
        ({"callback": print, "callback_every": 0}, "callback_every = 0 must be a whole number of at least 1"),
        ({"callback": 3}, r"callback = 3 must be a function of \(event\)"),
        ({"progress": "bar"}, "progress = 'bar' must be 'auto', 'none' or a jppo.Reporter"),
        ({"progress": jppo.Reporter}, r"progress = Reporter is a class; pass an instance, Reporter\(...\)"),
        ({"run": 3}, "run = 3 must be a jppo.RunConfig or a mapping of its fields"),
        (
            {"video": True},
            "run.video = True has no effect in jppo.sweep, which supports eval_every, eval_episodes, eval_sampled, "
            "eval_max_steps, stop_at_return, callback, callback_every, progress; leave it out",
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
