"""Tests evaluations during training, stopping at a return, and the best policy."""

import json
import os
import shutil
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL, share_chunks
from host_probes import Counting, Guessing, share_programs
from lenient import lenient, lenient_env
from PIL import Image
from probes import Lever

import jppo
from jppo.cli.main import main
from jppo.envs.gymnasium import HostEnvironment
from jppo.runs import run_dir as runs
from jppo.runs.checkpoints import Checkpoints
from jppo.runs.leaves import copy_leaves
from jppo.training import device_loop
from jppo.training import settings as run_settings
from jppo.training.history import RecentEpisodes
from jppo.training.monitor import Monitor
from jppo.training.progress import LineReporter, NullReporter
from jppo.training.return_target import RECENT_EPISODES, ReturnTarget, count_needed_episodes

CONFIG = SMALL(num_envs=8, num_steps=16, num_epochs=4, num_minibatches=2, normalize_obs=True)
RATE = jppo.Hyperparams(learning_rate=0.02, gamma=0.9)
BATCH, UPDATES = 128, 12


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    with pytest.MonkeyPatch.context() as patch:
        share_programs(patch)
        share_chunks(patch)
        yield


def train(total=UPDATES, **given):
    given = {"config": CONFIG, "hyperparams": RATE, "total_steps": total * BATCH} | given
    return jppo.train(Lever(), **given)


def train_host(total=UPDATES, **given):
    given = {"config": CONFIG, "hyperparams": RATE, "total_steps": total * BATCH, "num_actors": 0} | given
    return jppo.train(Guessing, **given)


MODES = pytest.mark.parametrize("run", [train, train_host])
EVALS = {"eval_every": 4, "eval_episodes": 3}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    return train(**EVALS, run_dir=tmp_path_factory.mktemp("runs") / "evaluated")


def finite(column):
    return column[np.isfinite(column)]


@pytest.mark.slow
@MODES
def test_evaluation_does_not_change_training(run):
    plain, with_evaluation = run(), run(**EVALS)
    assert plain.summary["policy_sha256"] == with_evaluation.summary["policy_sha256"]
    assert not any(name.startswith("eval/") for name in plain.metrics)
    rows = np.isfinite(with_evaluation.metrics["eval/return_mean"])
    assert with_evaluation.metrics["update"][rows].tolist() == [4, 8, 12]
    for name in ("eval/return_std", "eval/length_mean"):
        assert (np.isfinite(with_evaluation.metrics[name]) == rows).all()


@pytest.mark.slow
def test_evaluation_measures_the_policy_of_the_update(evaluated):
    assert finite(evaluated.metrics["eval/length_mean"]).tolist() == [5.0, 5.0, 5.0]
    expected = jppo.evaluate(evaluated, num_episodes=50).summary()["return_mean"]
    assert finite(evaluated.metrics["eval/return_mean"])[-1] == pytest.approx(expected, abs=0.1)
    lines = [json.loads(line) for line in (evaluated.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if "eval/return_mean" in line] == [4, 8, 12]
    assert lines[3]["eval/return_mean"] == pytest.approx(float(finite(evaluated.metrics["eval/return_mean"])[0]))


@pytest.mark.slow
def test_evaluations_do_not_depend_on_the_number_of_devices(evaluated):
    two = train(**EVALS, num_devices=2)
    for name in ("eval/return_mean", "eval/return_std"):
        np.testing.assert_allclose(finite(two.metrics[name]), finite(evaluated.metrics[name]), rtol=1e-5)


@pytest.mark.slow
def test_greedy_and_sampled_evaluations_differ():
    given = {"total": 1, "eval_every": 1, "eval_episodes": 64, "hyperparams": jppo.Hyperparams(learning_rate=0.0)}
    greedy = train(**given).metrics["eval/return_mean"][0]
    sampled = train(**given, eval_sampled=True).metrics["eval/return_mean"][0]
    assert sampled == pytest.approx(2.5, abs=1.0)
    assert greedy != sampled


@pytest.mark.slow
def test_recurrent_policy_is_evaluated():
    config = CONFIG.replace(recurrent="gru", recurrent_size=4)
    result = train(total=2, config=config, eval_every=2, eval_episodes=3)
    assert finite(result.metrics["eval/length_mean"]).tolist() == [5.0]


def test_failing_environment_of_an_evaluation_ends_the_run_with_everything_saved(tmp_path, monkeypatch):
    make = HostEnvironment.make

    def fail(self, seeds, render=False):
        if len(seeds) == 3:
            raise ArithmeticError("the simulator")
        return make(self, seeds, render)

    monkeypatch.setattr(HostEnvironment, "make", fail)
    with pytest.raises(jppo.ActorsFailed, match="ArithmeticError: the simulator") as error:
        train_host(**EVALS, run_dir=tmp_path / "run")
    assert error.value.result.summary["updates"] == 4
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_interrupt_ends_an_evaluation_on_the_host(tmp_path, monkeypatch):
    """The episodes of the evaluation would not end."""
    steps = []

    class Slow(Guessing):
        def step(self, action):
            after = super().step(action)
            if not evaluating:
                return after
            steps.append(1)
            if len(steps) == 5:
                os.kill(os.getpid(), signal.SIGINT)
            return after[0], after[1], False, False, after[4]

    evaluating, make = [], HostEnvironment.make

    def make_envs(self, seeds, render=False):
        evaluating.extend([1] if len(seeds) == 3 else [])
        return make(self, seeds, render)

    monkeypatch.setattr(HostEnvironment, "make", make_envs)
    given = {"config": CONFIG, "hyperparams": RATE, "total_steps": UPDATES * BATCH, "num_actors": 0, **EVALS}
    result = jppo.train(Slow, **(given | {"run_dir": tmp_path / "run"}))
    assert (result.summary["status"], result.summary["updates"], result.summary["checkpoint"]) == ("interrupted", 4, 4)
    assert not any(name.startswith("eval/") for name in result.metrics)
    assert 5 <= len(steps) < 10
    evaluating.clear()
    monkeypatch.undo()
    share_programs(monkeypatch)
    resumed = jppo.train(Slow, **(given | {"run_dir": tmp_path / "run"}))
    assert resumed.summary["status"] == "finished"


@MODES
def test_callback_sees_the_evaluation_of_its_update(run):
    seen = []
    run(**EVALS, callback=lambda event: seen.append((event.update, "eval/return_mean" in event.metrics)))
    assert seen == [(i, i % 4 == 0) for i in range(1, UPDATES + 1)]


@pytest.mark.slow
def test_failing_evaluation_on_the_device_saves_a_state_of_its_update(tmp_path, monkeypatch):
    monkeypatch.setattr(Monitor, "_read_evaluation", fail_to_read)
    with pytest.raises(ArithmeticError, match="mask") as error:
        train(**EVALS, run_dir=tmp_path / "run")
    result = error.value.result
    assert int(result.state.train.update) == result.summary["updates"] == result.summary["checkpoint"]


def fail_to_read(self, result):
    raise ArithmeticError("mask")


def test_evaluations_that_never_happen_are_refused():
    with pytest.raises(ValueError, match="eval_every = 13 is more than the 12 updates of the run; lower it"):
        train(eval_every=13)


def test_return_target_equals_the_recent_episodes():
    """The mean on the device and on the host, over updates with few, many and no episodes."""
    rng, recent = np.random.default_rng(0), RecentEpisodes()
    zeros = jnp.zeros(RECENT_EPISODES)
    false = jnp.zeros((), bool)
    target = ReturnTarget(
        finite=~false, reached=false, value=jnp.zeros(()), counts=zeros, means=zeros, total=jnp.zeros(())
    )
    config = jppo.PPOConfig(num_envs=130)
    after = jax.jit(ReturnTarget.after, static_argnums=2)
    reached = []
    for _ in range(60):
        count = float(rng.choice([0, 1, 7, 130], p=[0.3, 0.3, 0.35, 0.05]))
        mean = float(np.float32(rng.normal())) if count else float("nan")
        recent.add(count, mean, 0.0)
        metrics = {"episode/count": jnp.float32(count), "episode/return_mean": jnp.float32(mean), "finite": ~false}
        target = after(target, metrics, config)
        assert bool(target.reached) == (recent.total >= count_needed_episodes(config) and recent.mean >= 0.0)
        reached.append(bool(target.reached))
    assert any(reached)
    assert not all(reached)


@pytest.mark.slow
@MODES
def test_run_stops_at_the_recent_return(run, tmp_path):
    target = 4.0 if run is train else 0.9
    result = run(total=100, stop_at_return=target, run_dir=tmp_path / "run")
    updates = result.summary["updates"]
    assert result.summary["status"] == "solved"
    assert result.summary["return_mean"] >= target
    assert updates < 100
    train_state = result.state.train if run is train else result.state
    assert len(result.metrics["update"]) == updates == train_state.update
    before = run(total=updates - 1)
    assert before.summary["return_mean"] < target
    again = run(total=100, run_dir=tmp_path / "run", progress=(reporter := Recorder()))
    assert any("already finished" in text for text in reporter.messages)
    assert again.summary["updates"] == updates
    longer = run(total=100, stop_at_return=4.9 if run is train else 0.99, run_dir=tmp_path / "run")
    assert longer.summary["updates"] > updates


ENDS = {
    "evaluation": {"stop_at_return": -100.0, "eval_every": 3, "eval_episodes": 2},
    "callback": {"callback": lambda event: event.stop("enough"), "callback_every": 3},
    "recent return": {"stop_at_return": -100.0},
}


@pytest.mark.slow
@MODES
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("seconds", [0.0, 60.0])  # with 0, the loop itself may save the checkpoint of the end
def test_run_that_ended_by_itself_does_not_continue_without_its_summary(run, end, seconds, tmp_path):
    given = ENDS[end] | {"run_dir": tmp_path, "checkpoint_seconds": seconds}
    first = run(**given)
    assert first.status in ("solved", "stopped")
    assert first.summary["updates"] < UPDATES
    for name in ("summary.json", runs.POLICY):
        (tmp_path / name).unlink()
    again = run(**given)
    for name in ("status", "updates", "policy_sha256"):
        assert again.summary[name] == first.summary[name], name
    assert again.summary.get("stop_reason") == first.summary.get("stop_reason")
    (tmp_path / "summary.json").unlink()
    if "stop_at_return" in ENDS[end]:
        assert run(**given | {"stop_at_return": 1e6}).summary["updates"] == UPDATES
    else:
        assert run(**given, total=UPDATES + 1).summary["updates"] > first.summary["updates"]


class Recorder(NullReporter):
    def __init__(self):
        self.messages, self.evaluations, self.steps = [], [], []

    def message(self, text):
        self.messages.append(text)

    def update(self, env_steps, steps_per_second, recent_return):
        self.steps.append(env_steps)

    def evaluated(self, env_steps, return_mean):
        self.evaluations.append((env_steps, return_mean))


@MODES
def test_run_stops_at_the_return_of_an_evaluation(run):
    target = 4.5 if run is train else 1.0
    result = run(total=100, stop_at_return=target, eval_every=2, progress=(reporter := Recorder()))
    means = finite(result.metrics["eval/return_mean"])
    assert result.summary["status"] == "solved"
    assert result.summary["updates"] == 2 * len(means) < 100
    assert means[-1] >= target
    assert (means[:-1] < target).all()
    assert [steps for steps, _ in reporter.evaluations] == [2 * BATCH * (i + 1) for i in range(len(means))]
    assert (result.state.train if run is train else result.state).update == result.summary["updates"]


@pytest.mark.slow
def test_target_that_is_not_reached_changes_nothing():
    result = train(stop_at_return=100.0)
    assert result.summary["status"] == "finished"
    assert result.summary["policy_sha256"] == train().summary["policy_sha256"]


def test_few_episodes_do_not_reach_a_target():
    assert train(total=3, stop_at_return=-100.0).summary["status"] == "finished"  # 76 episodes


def test_program_without_a_target_has_no_counters():
    agent = jppo.make_anakin(Lever(), CONFIG)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    flags = jax.ShapeDtypeStruct((), bool)
    jaxpr = jax.make_jaxpr(lambda *args: device_loop.run_chunk(agent, *args))(state, flags, np.int32(1))
    loops = [equation for equation in jaxpr.eqns if equation.primitive.name == "while"]
    num_metrics = len(jax.eval_shape(agent.step, state)[1])
    assert len(loops[-1].outvars) == 2 + len(jax.tree.leaves(state)) + num_metrics


def test_best_policy_is_that_of_the_best_evaluation(evaluated):
    means, best = finite(evaluated.metrics["eval/return_mean"]), runs.read_best(evaluated.run_dir)
    assert best.update == 4 * (int(np.argmax(means)) + 1) == evaluated.summary["best_update"]
    assert best.score == pytest.approx(means.max()) == evaluated.summary["best_return"]
    assert evaluated.summary["eval_return_mean"] == pytest.approx(means[-1])
    policy = jppo.load_policy(evaluated.run_dir, env=Lever(), best=True)
    assert_same(policy.state, train(total=best.update).policy.state)


def assert_same(state, other):
    other = copy_leaves(other)
    for name, leaf in copy_leaves(state).items():
        np.testing.assert_array_equal(leaf, other[name], name)


@pytest.mark.slow
@MODES
def test_best_policy_without_evaluations_is_that_of_the_highest_recent_return(run, tmp_path, monkeypatch):
    monkeypatch.setattr(device_loop, "_CHUNK_SECONDS", 0.0)  # chunks of one update
    save = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda self, *args: (save(self, *args), self.wait()))

    def callback(event):  # the policy is random from update 8 on
        if event.update == 8:
            state = getattr(event.state, "train", event.state)
            policy = state.policy_state.replace(params=jax.tree.map(jnp.zeros_like, state.policy_state.params))
            state = state.replace(policy_state=policy, hyperparams=state.hyperparams.replace(learning_rate=0.0))
            event.state = event.state.replace(train=state) if run is train else state

    path = tmp_path / "run"
    result = run(total=16, callback=callback, callback_every=8, checkpoint_seconds=0, run_dir=path)
    best = runs.read_best(path)
    assert 0 < best.update < 16
    assert best.score > result.summary["return_mean"]
    assert best == runs.BestPolicy(result.summary["best_update"], result.summary["best_return"], "recent return")


@pytest.mark.slow
def test_best_policy_survives_a_resume(evaluated, tmp_path):
    part = train(total=6, **EVALS, run_dir=tmp_path / "run")
    assert runs.read_best(tmp_path / "run").update == part.summary["best_update"] == 4
    resumed = train(**EVALS, run_dir=tmp_path / "run")
    assert resumed.summary["best_return"] == evaluated.summary["best_return"]
    assert resumed.summary["best_update"] == evaluated.summary["best_update"]
    names = ("eval/return_mean", "eval/return_std")
    for name in names:
        np.testing.assert_array_equal(finite(resumed.metrics[name]), finite(evaluated.metrics[name]))


@pytest.mark.slow
def test_settings_of_evaluations_come_from_the_previous_run(tmp_path):
    train(total=4, **EVALS, run_dir=tmp_path / "run")
    resumed = train(total=8, run_dir=tmp_path / "run")
    assert resumed.metrics["update"][np.isfinite(resumed.metrics["eval/return_mean"])].tolist() == [4, 8]


@pytest.mark.slow
def test_damaged_best_policy_is_reported(evaluated, tmp_path):
    path = tmp_path / "run"
    train(total=4, **EVALS, run_dir=path)
    (path / runs.BEST).write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"best_policy.npz does not hold the policy"):
        jppo.load_policy(path, env=Lever(), best=True)
    train(total=8, **EVALS, run_dir=path, progress=(reporter := Recorder()))
    assert any("the run selects a new best policy" in text for text in reporter.messages)
    assert runs.read_best(path).update == 8


def test_run_without_a_best_policy_is_reported(tmp_path):
    train(total=2, run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match=r"has no best policy yet; omit best=True \(--best\)"):
        jppo.load_policy(tmp_path / "run", env=Lever(), best=True)
    (tmp_path / "run" / runs.POLICY).unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints", ignore_errors=True)
    for best in (True, False):
        with pytest.raises(ValueError, match=r"has no policy: its run did not finish and has no checkpoint$"):
            jppo.load_policy(tmp_path / "run", env=Lever(), best=best)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eval_every": -1}, "eval_every = -1 must be a whole number of at least 0"),
        ({"eval_episodes": 0}, "eval_episodes = 0 must be a whole number of at least 1"),
        ({"eval_sampled": 1}, "eval_sampled = 1 must be True or False"),
        ({"video": "yes"}, "video = 'yes' must be True or False"),
        ({"stop_at_return": "high"}, "stop_at_return = 'high' must be a number"),
        ({"stop_at_return": float("nan")}, "stop_at_return = nan must be a number"),
    ],
)
def test_invalid_settings_raise(given, message):
    with pytest.raises(ValueError, match=message):
        jppo.RunConfig(**given)


@pytest.mark.parametrize("given", [{"eval_episodes": 8}, {"eval_sampled": True, "eval_every": 0}])
def test_settings_of_evaluations_need_evaluations(given):
    (name, value) = next(iter(given.items()))
    message = f"^{name} = {value} without evaluations has no effect; set eval_every or leave out {name}$"
    with pytest.raises(ValueError, match=message):
        train(total=2, **given)
    with pytest.raises(ValueError, match=message):
        jppo.sweep(Lever(), learning_rate=[1e-3, 1e-2], run=given)
    with pytest.raises(ValueError, match=message):
        jppo.tune.trainable("CartPole-v1", run=given)


@pytest.mark.slow
def test_resumed_run_may_end_its_evaluations(tmp_path):
    """The number of episodes of the previous run is then of no use."""
    train(total=2, run_dir=tmp_path, eval_every=1, eval_episodes=2)
    result = train(total=4, run_dir=tmp_path, eval_every=0)
    assert np.isnan(result.metrics["eval/return_mean"][2:]).all()


def test_progress_shows_the_last_evaluation(capsys):
    reporter = LineReporter(sys.stdout, 100)
    reporter.evaluated(50, 12.34)
    reporter.update(100, 10.0, 1.0)
    assert capsys.readouterr().out.endswith("return 1.0  eval 12.3\n")


@pytest.mark.slow
def test_command_line(tmp_path, capsys, monkeypatch):
    run = str(tmp_path / "run")
    monkeypatch.setattr(run_settings, "make_env", lenient_env)
    sizes = ["--num-envs", "8", "--num-steps", "16", "--hidden-sizes", "8", "--num-devices", "1"]
    options = ["--total-steps", "2e5", "--eval-every", "2", "--eval-episodes", "3", "--stop-at-return", "12"]
    assert main(["train", "CartPole-v1", *sizes, *options, "--run-dir", run]) == 0
    assert "solved: " in capsys.readouterr().out
    assert main(["train", "CartPole-v1", "--run-dir", run]) == 0
    assert "is already finished" in capsys.readouterr().out
    with lenient():
        assert main(["eval", run, "--best", "--num-episodes", "2"]) == 0
    assert "2 episodes" in capsys.readouterr().out


@pytest.mark.slow
def test_video_of_the_final_policy(tmp_path):
    result = jppo.train(
        Counting,
        config=CONFIG,
        total_steps=BATCH,
        num_actors=0,
        run_dir=tmp_path / "run",
        run=jppo.RunConfig(video=True),
        progress=(reporter := Recorder()),
    )
    with Image.open(tmp_path / "run/video.gif") as image:
        assert image.n_frames in (1, 2, 3, 4)
    assert f"wrote {tmp_path}/run/video.gif: " in reporter.messages[-1]
    assert result.summary["status"] == "finished"


def test_environment_that_cannot_be_drawn_is_reported_before_training(tmp_path):
    train(total=1, run_dir=tmp_path / "run", video=True, progress=(reporter := Recorder()))
    assert "no video: Lever cannot be drawn" in reporter.messages[0]
    assert not (tmp_path / "run/video.gif").exists()


def test_video_needs_a_run_directory():
    with pytest.raises(ValueError, match="video needs a run_dir"):
        train(video=True)
