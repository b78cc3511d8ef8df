"""Tests of checkpoints and of resumed runs."""

import errno
import gc
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import one_run
import pytest
from checks import SMALL
from host_probes import Guessing, share_programs
from lenient import lenient
from one_run import BATCH, CONFIG, UPDATES, Cued
from probes import Moving, ObsActionReward

import jppo
from jppo.cli.main import main
from jppo.networks.actor_critic import make_network
from jppo.runs import checkpoints
from jppo.runs.checkpoints import FORMAT, Checkpoints, delete_checkpoints, latest_checkpoint
from jppo.runs.files import jsonable
from jppo.runs.leaves import copy_leaves
from jppo.runs.load import load_run
from jppo.runs.run_dir import read_config, read_metrics
from jppo.runs.writer import RunWriter, delete_run
from jppo.training import device_loop, ray_loop
from jppo.training import run as training_run
from jppo.training.line_means import LineMeans
from jppo.training.progress import NullReporter

RESUME, ALWAYS = jppo.RunConfig(resume=True), jppo.RunConfig(checkpoint_seconds=0)


class Stopping(NullReporter):
    """Sends Ctrl-C after a number of updates; collects messages."""

    def __init__(self, after=None):
        self.after, self.messages = after, []

    def message(self, text):
        self.messages.append(text)

    def update(self, step, steps_per_second, recent_return):
        if self.after is not None and step >= self.after * BATCH:
            self.after = None
            os.kill(os.getpid(), signal.SIGINT)


start_to_save = checkpoints.Checkpoints.save


def save_and_wait(self, *args):
    """Saves synchronously, so that each due checkpoint is written."""
    start_to_save(self, *args)
    self.wait()


@pytest.fixture(scope="module", autouse=True)
def one_update_per_chunk():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_loop, "_CHUNK_SECONDS", 0.0)  # chunks of one
        patch.setattr(ray_loop, "_LOG_SECONDS", 0.0)
        patch.setattr(checkpoints.Checkpoints, "save", save_and_wait)
        share_programs(patch)
        yield


@pytest.fixture(autouse=True)
def collect_garbage():
    """Collects the coroutines that orbax drops after an error while their warnings are ignored."""
    yield
    gc.collect()


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def train(run_dir, after=None, env=None, **given):
    given = {"config": CONFIG, "total_steps": UPDATES * BATCH, "checkpoint_seconds": 0} | given
    return jppo.train(env or Cued(), run_dir=run_dir, progress=Stopping(after), **given)


def resume(path, env=None, **given):
    given = {"resume": True} | given
    return jppo.train(env or Cued(), run_dir=path, progress=Stopping(), **given)


def assert_same(state, other):
    state, other = copy_leaves(state), copy_leaves(other)
    assert state.keys() == other.keys()
    for name, leaf in state.items():
        np.testing.assert_array_equal(leaf, other[name], name)


def assert_rows(run_dir, updates):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == list(range(1, updates + 1))


def latest(run_dir, message=pytest.fail):
    return latest_checkpoint(run_dir, message)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "full")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """An interrupted run with three checkpoints."""
    path = tmp_path_factory.mktemp("runs") / "stopped"
    assert train(path, after=5, max_checkpoints=3).summary["status"] == "interrupted"
    return path


@pytest.fixture
def copied(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run")


# Runs that end early


@pytest.mark.slow
def test_an_interrupt_while_a_resumed_run_compiles_keeps_its_files(copied, monkeypatch):
    def make_interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return make_loop(*arguments)

    make_loop = training_run.make_loop
    monkeypatch.setattr(training_run, "make_loop", make_interrupted)
    before = {path.name: path.read_bytes() for path in copied.iterdir() if path.is_file()}
    with pytest.raises(KeyboardInterrupt):
        resume(copied)
    assert {"summary.json", "policy_state.npz", "metrics.jsonl"} < before.keys()
    assert {path.name: path.read_bytes() for path in copied.iterdir() if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupt", "kill", "kill while saving"])
def test_resuming_a_killed_run_gives_the_result_of_an_uninterrupted_run(full, tmp_path, how):
    path = tmp_path / "run"
    argv = [sys.executable, one_run.__file__, str(path), how]
    environment = os.environ | {"PYTHONPATH": str(Path(jppo.__file__).parent.parent)}
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == (0 if how == "interrupt" else -signal.SIGKILL), ended.stderr
    assert len((path / "metrics.jsonl").read_text().splitlines()) >= one_run.END
    incomplete = [file for file in (path / "checkpoints").iterdir() if not file.name.isdecimal()]
    assert bool(incomplete) == (how == "kill while saving")
    reporter = Stopping()
    result = jppo.train(Cued(), run_dir=path, run=RESUME, progress=reporter)
    assert any(text.startswith(f"resuming from {path}/checkpoints/") for text in reporter.messages)
    assert_same(result.state, full.state)
    assert_rows(path, UPDATES)
    for name in set(full.metrics) - {"time/elapsed", "time/steps_per_second"}:
        np.testing.assert_array_equal(result.metrics[name], full.metrics[name], name)
        np.testing.assert_array_equal(read_metrics(path)[name], full.metrics[name], name)
    for name in ("status", "updates", "episodes", "return_mean", "return_std", "checkpoint"):
        assert result.summary[name] == full.summary[name], name


# On the device


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint_and_the_run_resumes_from_it(full, copied):
    (path,) = (copied / "checkpoints").glob(str(len(read_metrics(copied)["update"])))
    assert latest(copied).path == path
    assert latest(copied).update == read_metrics(copied)["update"][-1] < UPDATES
    result = resume(copied)
    assert result.summary["status"] == "finished"
    assert_same(result.state, full.state)
    assert set(result.metrics) == set(full.metrics)
    np.testing.assert_array_equal(result.metrics["loss/value"], full.metrics["loss/value"])
    assert_rows(copied, UPDATES)
    assert (result.summary["episodes"], result.summary["checkpoint"]) == (full.summary["episodes"], UPDATES)
    assert np.diff(result.metrics["time/elapsed"]).min() > 0.0


def test_an_existing_run_dir_is_resumed(full, copied):
    assert_same(train(copied, seed=0).state, full.state)


@pytest.mark.slow
def test_resume_with_another_number_of_devices(full, copied):
    result = resume(copied, num_devices=4)
    assert result.summary["num_devices"] == 4
    for name, leaf in copy_leaves(full.state).items():
        np.testing.assert_allclose(copy_leaves(result.state)[name], leaf, rtol=1e-3, atol=1e-4, err_msg=name)


def test_the_newest_checkpoints_are_kept(stopped, full):
    assert sorted(int(path.name) for path in (full.run_dir / "checkpoints").iterdir()) == [UPDATES - 2, UPDATES]
    assert len(list((stopped / "checkpoints").iterdir())) == 3


@pytest.mark.slow
def test_a_finished_run_can_be_extended_only_without_schedules(full, tmp_path):
    with pytest.raises(
        ValueError, match=r"with total_steps = 384; it cannot change to 768, because .*: learning_rate = linear"
    ):
        train(full.run_dir, total_steps=2 * UPDATES * BATCH)
    level = jppo.Hyperparams(learning_rate=2.5e-4)
    whole = train(tmp_path / "whole", hyperparams=level)
    half = train(tmp_path / "half", hyperparams=level, total_steps=UPDATES // 2 * BATCH)
    assert half.summary["status"] == "finished"
    with pytest.raises(ValueError, match="with total_steps = 192; it can be increased, but 32 is lower"):
        resume(tmp_path / "half", total_steps=BATCH)
    assert_same(resume(tmp_path / "half", total_steps=UPDATES * BATCH).state, whole.state)
    assert read_config(tmp_path / "half")["total_steps"] == UPDATES * BATCH


@pytest.mark.slow
def test_a_finished_run_returns_its_result_again(full):
    before = {path: path.read_bytes() for path in full.run_dir.rglob("*") if path.is_file()}
    reporter = Stopping()
    again = jppo.train(Cued(), run_dir=full.run_dir, progress=reporter)
    assert any("is already finished" in text for text in reporter.messages)
    assert_same(again.state, full.state)
    assert_same(again.policy.state, full.policy.state)
    assert jsonable(again.summary) == jsonable(full.summary)
    for name, column in full.metrics.items():
        np.testing.assert_array_equal(again.metrics[name], column, name)
    assert {path: path.read_bytes() for path in full.run_dir.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_finished_run_with_a_damaged_checkpoint_repeats_the_last_updates(full, tmp_path):
    path = shutil.copytree(full.run_dir, tmp_path / "run")
    flip(largest(path / "checkpoints" / str(UPDATES)))
    result = train(path)
    assert_same(result.state, full.state)
    assert latest(path).update == UPDATES


def untimed_lines(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


@pytest.mark.slow
def test_lines_of_several_updates_and_of_a_resumed_run(full, tmp_path):
    whole = train(tmp_path / "whole", log_every=5)
    lines = untimed_lines(tmp_path / "whole")
    assert [line["update"] for line in lines] == whole.metrics["update"].tolist() == [5, 10, 12]
    train(tmp_path / "part", after=7, log_every=5)
    assert [line["update"] for line in untimed_lines(tmp_path / "part")] == [5, 8]
    with pytest.raises(ValueError, match="log_every is 5 in the run, but 1 now"):
        resume(tmp_path / "part", log_every=1)
    resumed = resume(tmp_path / "part")
    after = untimed_lines(tmp_path / "part")
    assert [line["update"] for line in after] == [5, 8, 10, 12]
    assert (after[0], after[-1]) == (lines[0], lines[-1])
    assert sum(line["episode/count"] for line in after) == sum(line["episode/count"] for line in lines)
    for name in ("return_mean", "return_std", "episodes"):
        assert resumed.summary[name] == whole.summary[name] == pytest.approx(full.summary[name], rel=1e-6), name
    for name in ("loss/value", "grad/norm"):
        assert lines[1][name] == pytest.approx(full.metrics[name][5:10].mean(), rel=1e-6), name
    count, mean = full.metrics["episode/count"][5:10], np.nan_to_num(full.metrics["episode/return_mean"][5:10])
    assert lines[1]["episode/count"] == count.sum()
    assert lines[1]["episode/return_mean"] == pytest.approx((count * mean).sum() / count.sum(), rel=1e-6)


@pytest.mark.slow
def test_an_environment_may_change_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = jppo.train(Moving(), run_dir="run", config=CONFIG, total_steps=2 * BATCH)
    assert result.run_dir == tmp_path / "run"
    assert {"config.json", "metrics.jsonl", "checkpoints", "summary.json"} <= set(os.listdir(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("step", [BATCH, UPDATES * BATCH], ids=["first update", "last update"])
def test_a_deleted_run_directory_is_reported(full, tmp_path, step):
    class Deleting(Stopping):
        def update(self, env_steps, *args):
            if env_steps == step:
                shutil.rmtree(tmp_path / "run")

    reporter = Deleting()
    given = {"config": CONFIG, "total_steps": UPDATES * BATCH}
    result = jppo.train(Cued(), run_dir=tmp_path / "run", progress=reporter, **given)
    assert result.summary["failed_writes"] == ["metrics.jsonl"]
    assert sum("metrics.jsonl could not be written (No such file" in text for text in reporter.messages) == 1
    assert_same(load_run(tmp_path / "run", env=Cued()).policy_state, full.policy.state)


@pytest.mark.slow
def test_a_run_without_a_checkpoint_starts_from_the_beginning(full, copied):
    shutil.rmtree(copied / "checkpoints")
    (copied / "checkpoints").mkdir()
    reporter = Stopping()
    result = jppo.train(Cued(), run_dir=copied, run=RESUME, progress=reporter)
    assert any("has no checkpoint; starting from the beginning" in text for text in reporter.messages)
    assert_same(result.state, full.state)
    assert_rows(copied, UPDATES)


# Damaged files


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def largest(path):
    """The largest file with arrays of a checkpoint."""
    return max((path / "default" / "d").iterdir(), key=os.path.getsize)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(largest(path)),
        lambda path: os.truncate(largest(path), 10),
        lambda path: largest(path).unlink(),
        lambda path: (path / "_CHECKPOINT_METADATA").unlink(),
        lambda path: (path / "_CHECKPOINT_METADATA").write_text('{"custom'),
        lambda path: (path / "default" / "manifest.ocdbt").write_bytes(b""),
        lambda path: [shutil.rmtree(path), path.mkdir()],
    ],
    ids=["flipped", "cut", "lost", "unheaded", "torn header", "no manifest", "empty"],
)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(copied, damage):
    *_, before, last = sorted(int(path.name) for path in (copied / "checkpoints").iterdir())
    damage(copied / "checkpoints" / str(last))
    said = []
    assert latest(copied, said.append).update == before
    assert len(said) == 1
    assert said[0].startswith(f"{copied}/checkpoints/{last} is damaged (")


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(full, copied):
    last = max(int(path.name) for path in (copied / "checkpoints").iterdir())
    flip(largest(copied / "checkpoints" / str(last)))
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"update": 99')
    assert_same(resume(copied, checkpoint_seconds=0).state, full.state)
    assert_rows(copied, UPDATES)
    assert {path.name for path in (copied / "checkpoints").iterdir()} == {"10", "12", f"{last}.damaged"}


@pytest.mark.slow
def test_a_setting_missing_in_config_json_has_its_default(full, copied):
    settings = read_config(copied)
    for part, name in (("config", "kl_control"), ("hyperparams", "target_kl")):
        del settings[part][name]
    (copied / "config.json").write_text(json.dumps(settings))
    assert_same(resume(copied).state, full.state)


def test_other_names_in_the_folder_of_checkpoints_are_ignored(copied):
    folders = [copied / "checkpoints" / name for name in ("²", "007", "5x", "best-so-far", "5.orbax")]
    for folder in folders:
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    os.mkfifo(copied / "checkpoints" / "pipe")
    assert latest(copied) is not None
    assert resume(copied).summary["status"] == "finished"
    assert all((folder / "notes.txt").read_text() == "mine" for folder in folders)


@pytest.mark.parametrize("name", ["0", "1", "99999999999", "1٣"])
def test_a_folder_of_others_with_a_number_as_name_is_refused(copied, name):
    """orbax would delete it with its old checkpoints."""
    folder = copied / "checkpoints" / name
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert latest(copied) is not None
    with pytest.raises(ValueError, match=f"checkpoints/{name} is not a checkpoint, .*rename or move it"):
        resume(copied)
    assert (folder / "notes.txt").read_text() == "mine"
    delete_checkpoints(copied)
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_named_pipe_with_a_number_as_name_is_refused(copied):
    os.mkfifo(copied / "checkpoints" / "99")
    with pytest.raises(ValueError, match="checkpoints/99 is not a folder"):
        resume(copied)


@pytest.mark.slow
def test_an_infinite_max_grad_norm_survives_resume(tmp_path):
    path = tmp_path / "run"
    train(path, after=4, hyperparams=jppo.Hyperparams(max_grad_norm=float("inf")))
    assert read_config(path)["hyperparams"]["max_grad_norm"] == "inf"
    result = resume(path)
    assert float(result.state.train.hyperparams.max_grad_norm) == float("inf")
    assert result.summary["status"] == "finished"


@pytest.mark.slow
def test_a_damaged_line_of_metrics_is_removed(full, copied):
    lines = (copied / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_bytes(
        b"".join([*lines[:2], b'[1]\n{"update": null}\n{"update": "x"}\n{"update": Infinity}\n', *lines[2:]])
    )
    assert_same(resume(copied).state, full.state)
    assert_rows(copied, UPDATES)


@pytest.mark.slow
def test_missing_metrics_are_nan(copied):
    rows = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    rows = [{name: value for name, value in row.items() if name != "grad/norm"} | {"old": 1.0} for row in rows]
    rows[0]["episode/count"] = None
    (copied / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = resume(copied).metrics
    before = len(rows)
    assert np.isnan(metrics["grad/norm"][:before]).all()
    assert np.isfinite(metrics["grad/norm"][before:]).all()
    assert (metrics["old"][:before] == 1.0).all()
    assert np.isnan(metrics["old"][before:]).all()


@pytest.mark.slow
@pytest.mark.parametrize("content", ['{"status": "fin', "[1]", "\udcff"])
def test_a_damaged_summary_is_ignored(full, copied, content):
    (copied / "summary.json").write_text(content, errors="surrogateescape")
    assert_same(resume(copied).state, full.state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seed", None, "it has no seed"),
        ("total_steps", "x", "total_steps is 'x'"),
        ("total_steps", True, "total_steps is True"),
        ("actors", "x", "actors is 'x'"),
        ("config", [], r"config is \[\]"),
        ("hyperparams", {"gama": 1.0}, "has no field"),
    ],
)
def test_a_damaged_config_json_is_refused(copied, name, value, message):
    settings = read_config(copied) | {name: value}
    (copied / "config.json").write_text(json.dumps({name: x for name, x in settings.items() if x is not None}))
    with pytest.raises(ValueError, match=rf"config\.json is damaged.*{message}"):
        resume(copied)
    assert main(["train", "Cued", "--resume", str(copied)]) == 2


@pytest.mark.slow
def test_the_files_of_a_run_killed_at_its_start_are_reused(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").touch()
    (path / "config.json.tmp").write_text("{")
    assert train(path).summary["status"] == "finished"


@pytest.mark.slow
def test_resume_with_a_relative_path(full, copied, monkeypatch):
    monkeypatch.chdir(copied.parent)
    result = jppo.train(Cued(), run_dir=copied.name, run=RESUME, progress=Stopping())
    assert_same(result.state, full.state)


def test_a_damaged_policy_is_replaced_by_that_of_the_newest_checkpoint(copied):
    good = load_run(copied, env=Cued()).policy_state
    os.truncate(copied / "policy_state.npz", 10)
    with pytest.warns(UserWarning, match="the policy of the newest checkpoint, after update"):
        assert_same(load_run(copied, env=Cued()).policy_state, good)


def test_all_checkpoints_damaged_is_an_error(copied):
    for path in (copied / "checkpoints").iterdir():
        flip(largest(path))
    before = (copied / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"all 3 checkpoints in .* are damaged; use another run_dir"):
        resume(copied)
    assert (copied / "metrics.jsonl").read_bytes() == before
    assert (copied / "policy_state.npz").exists()


def test_a_failed_tensorboard_write_is_reported_once(tmp_path):
    (tmp_path / "run").mkdir()
    said = []
    writer = RunWriter(tmp_path / "run", {}, message=said.append)
    writer._events._writer._py_recordio_writer._writer = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    for update in range(1, 50):
        writer.write_updates([{"update": update, "env_steps": 8 * update, "loss/total": 0.5}])
    assert_rows(tmp_path / "run", 49)
    assert len(said) == 1
    assert "tensorboard could not be written (No space left on device)" in said[0]
    writer.abort()


def test_interrupt_while_a_new_run_is_deleted(tmp_path, monkeypatch):
    def interrupted_delete(path):
        signal.raise_signal(signal.SIGINT)
        delete_run(path)

    monkeypatch.setattr("jppo.runs.writer.delete_run", interrupted_delete)
    writer = RunWriter(tmp_path / "new" / "run", {})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            writer.abort()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "new").exists()


def events(run_dir):
    """Returns (step, names, whether it starts a session) of all events, in TensorBoard's order."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted((run_dir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            found.append((event.step, {value.tag for value in event.summary.value}, event.HasField("session_log")))
            data = data[16 + length :]
    return found


@pytest.mark.slow
def test_tensorboard_drops_steps_after_the_checkpoint(copied):
    steps = [step for step, names, _ in events(copied) if names]
    assert steps == [BATCH * update for update in range(1, len(steps) + 1)]
    last = latest(copied).update
    shutil.rmtree(copied / "checkpoints" / str(last))
    before = latest(copied).update
    resume(copied)
    sessions = [step for step, _, begins in events(copied) if begins]
    assert sessions == [before * BATCH + 1], "TensorBoard must drop later steps"
    steps = [step for step, names, _ in events(copied) if "loss/total" in names]
    assert steps[-(UPDATES - before) :] == [BATCH * update for update in range(before + 1, UPDATES + 1)]


# Failed writes


def limit_file_size(size=resource.RLIM_INFINITY):
    """Limits the size of files that this process can write, like a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.slow
def test_failed_saves_are_reported_once_and_training_continues(tmp_path, monkeypatch):
    save = Checkpoints._start_save

    def fail_in_the_middle(self, update, *args):
        if 3 < update < 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(self, update, *args)

    monkeypatch.setattr(Checkpoints, "_start_save", fail_in_the_middle)
    reporter = Stopping()
    given = {"config": CONFIG, "total_steps": UPDATES * BATCH, "run": ALWAYS}
    result = jppo.train(Cued(), run_dir=tmp_path / "run", progress=reporter, **given)
    warnings = [text for text in reporter.messages if text.startswith("WARNING")]
    assert len(warnings) == 1
    assert "could not be written (No space left on device); the newest checkpoint is of update " in warnings[0]
    assert (result.summary["status"], result.summary["updates"]) == ("finished", UPDATES)
    assert latest(tmp_path / "run").update == result.summary["checkpoint"] == UPDATES


def test_an_error_of_the_background_thread_is_reported(tmp_path):
    said, state = [], {"x": np.random.default_rng(0).random(100_000)}
    saver = Checkpoints(tmp_path, 0.0, 2, said.append)
    start_to_save(saver, 1, 0.5, {}, state)
    saver.wait()
    limit_file_size(1000)
    try:
        start_to_save(saver, 2, 1.0, {}, state)
        saver.wait()
    finally:
        limit_file_size()
    assert saver.update == 1
    assert "the checkpoint of update 2 could not be written" in said[0]
    start_to_save(saver, 3, 1.5, {}, state)
    saver.close()
    assert saver.update == 3
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "3"]
    assert len(said) == 1


@pytest.mark.slow
def test_a_full_disk_does_not_stop_training(full, tmp_path):
    class Shrinking(Stopping):
        def update(self, step, *args):
            if step == 6 * BATCH:
                limit_file_size(os.path.getsize(tmp_path / "run" / "metrics.jsonl") + 100)

    reporter = Shrinking()
    given = {"config": CONFIG, "total_steps": UPDATES * BATCH, "run": ALWAYS}
    try:
        result = jppo.train(Cued(), run_dir=tmp_path / "run", progress=reporter, **given)
    finally:
        limit_file_size()
    assert (result.summary["status"], result.summary["updates"]) == ("finished", UPDATES)
    assert_same(result.state, full.state)
    assert "metrics.jsonl" in result.summary["failed_writes"]
    assert_rows(tmp_path / "run", 6)
    assert len([text for text in reporter.messages if "metrics.jsonl could not be written" in text]) == 1
    assert_same(resume(tmp_path / "run").state, full.state)


def test_metrics_may_be_infinite(tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    rows = [(np.inf, 1e308), (-np.inf, 1e308)]
    writer.write_updates(
        [{"update": n, "env_steps": 8 * n, "my/a": a, "my/b": b} for n, (a, b) in enumerate(rows, start=1)]
    )
    assert writer.close({"x": np.zeros(3, np.float32)}, {"status": "finished"}) == []


def test_means_of_infinite_metrics():
    means, infinite = LineMeans(2), np.array([np.inf, -np.inf, np.inf, 1.0])
    lines = means.add(
        {
            "update": np.arange(1, 5),
            "my/a": infinite,
            "episode/count": np.array([1, 1, 0, 1]),
            "episode/return_mean": infinite,
            "episode/return_std": np.zeros(4),
        }
    )
    np.testing.assert_array_equal(lines["my/a"], [np.nan, np.inf])
    np.testing.assert_array_equal(lines["episode/return_mean"], [np.nan, 1.0])
    np.testing.assert_array_equal(lines["episode/return_std"], [np.nan, 0.0])


def test_a_failed_line_of_metrics_is_counted(tmp_path):
    said = []
    writer = RunWriter(tmp_path / "run", {}, message=said.append)
    writer.write_updates([{"update": 1, "env_steps": 8}])
    limit_file_size(20)
    try:
        for update in (2, 3):
            writer.write_updates([{"update": update, "env_steps": 8 * update}])
    finally:
        limit_file_size()
    writer.write_updates([{"update": 4, "env_steps": 32}])
    assert writer.close({"x": np.zeros(3, np.float32)}, {"status": "finished"}) == ["metrics.jsonl"]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [1, 4]
    assert sum("metrics.jsonl could not be written" in text for text in said) == 1
    assert json.loads((tmp_path / "run/summary.json").read_text())["failed_writes"] == ["metrics.jsonl"]


@pytest.mark.slow
def test_a_failed_save_warns_without_a_reporter(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Checkpoints, "_start_save", fail)
    with pytest.warns(UserWarning, match=r"the checkpoint of update 1 could not be written .*; there is no checkpoint"):
        jppo.train(Cued(), config=CONFIG, total_steps=BATCH, run_dir=tmp_path / "run")


def test_no_earlier_checkpoint_is_named_if_there_is_none(copied):
    said = []
    for path in (copied / "checkpoints").iterdir():
        (path / "_CHECKPOINT_METADATA").write_text("{}")
    with pytest.raises(ValueError, match=r"checkpoints in .* are damaged; use another run_dir"):
        checkpoints.latest_checkpoint(copied, said.append)
    assert all("the checkpoint before it is used" in text for text in said[:-1])
    assert said[-1].endswith(")")


def test_another_checkpoint_format_is_refused(copied):
    for path in (copied / "checkpoints").iterdir():
        file = path / "_CHECKPOINT_METADATA"
        content = json.loads(file.read_text())
        content["custom_metadata"]["format"] = FORMAT - 1
        file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"has checkpoint format {FORMAT - 1}, this version of jppo reads {FORMAT}"):
        resume(copied)


def test_every_kind_of_leaf_is_restored(tmp_path):
    state = {
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(3, impl="rbg"), 2),
        "nan": jnp.array([jnp.nan, -0.0, jnp.inf]),
        "half": jnp.ones((2, 3), jnp.bfloat16),
        "none": jnp.zeros((0, 3)),
        "flag": jnp.array(True),
        "host": np.arange(4, dtype=np.uint8),
        "nothing": (),
    }
    saver = Checkpoints(tmp_path, 0.0, 2, pytest.fail)
    saver.save(7, 1.5, {"restarts": 2}, state)
    saver.close()
    found = latest(tmp_path)
    assert (found.update, found.seconds, found.counts) == (7, 1.5, {"restarts": 2})
    restored = found.restore(state)
    assert_same(restored, state)
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True)
    assert all((a.dtype, a.shape) == (b.dtype, b.shape) for a, b in pairs)
    with pytest.raises(ValueError, match=r"it contains \['nan'\] = float32\[3\], the run needs float32\[4\]"):
        found.restore(state | {"nan": jnp.zeros(4)})
    with pytest.raises(ValueError, match=r"it contains \['flag'\] = bool\[\], the run needs nothing"):
        found.restore({name: leaf for name, leaf in state.items() if name != "flag"})


def test_a_sharded_state_is_restored_on_another_mesh(tmp_path):
    from jax.sharding import NamedSharding, PartitionSpec

    def sharded(num_devices):
        mesh = jax.make_mesh((num_devices,), ("d",), devices=jax.devices()[:num_devices])
        return jax.device_put(jnp.arange(16.0).reshape(8, 2), NamedSharding(mesh, PartitionSpec("d")))

    saver = Checkpoints(tmp_path, 0.0, 2, pytest.fail)
    saver.save(1, 0.0, {}, {"x": sharded(4)})
    saver.close()
    restored = latest(tmp_path).restore({"x": sharded(2)})["x"]
    assert restored.sharding == sharded(2).sharding
    np.testing.assert_array_equal(restored, np.arange(16.0).reshape(8, 2))


def test_a_second_process_cannot_write_the_run(copied):
    import filelock

    with filelock.FileLock(copied / ".lock"), pytest.raises(ValueError, match="is being written by another process"):
        resume(copied)


# Refused settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": SMALL(num_envs=16, num_steps=4)}, "num_envs is 8 in the run, but 16 now; num_"),
        ({"seed": 1}, "with other settings: seed is 0 in the run, but 1 now; pass the"),
        ({"hyperparams": jppo.Hyperparams(gamma=0.5)}, "gamma is 0.99 in the run, but 0.5 now"),
        ({"env": "another"}, "env is Cued in the run, but ObsActionReward now"),
        ({"network": "own"}, "is mlp in the run, but custom now"),
        ({"checkpoint_seconds": -1}, "checkpoint_seconds = -1 must be a number of at least 0"),
        ({"checkpoint_seconds": "often"}, "checkpoint_seconds = 'often' must be"),
        ({"max_checkpoints": 0}, "max_checkpoints = 0 must be a whole number of at least 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_settings_are_refused_with_the_differences(copied, given, message):
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    if "env" in given:
        given = {"env": ObsActionReward()}
    if "network" in given:
        env = jppo.make_env(Cued())
        given = {"network": make_network(CONFIG, env.obs_spec, env.action_spec)}
    with pytest.raises(ValueError, match=message):
        resume(copied, **given)
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before


def test_other_directories_cannot_be_resumed(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run directory: it has no config\.json"):
        resume(tmp_path)
    with pytest.raises(ValueError, match="resume needs a run_dir"):
        jppo.train(Cued(), run=RESUME)


@pytest.mark.slow
@pytest.mark.parametrize("keeps_folder", [False, True])
def test_a_run_without_checkpoints_cannot_resume(copied, keeps_folder):
    shutil.rmtree(copied / "checkpoints")
    if keeps_folder:  # a user may empty it to save space
        (copied / "checkpoints").mkdir()
        (copied / "summary.json").write_text('{"status": "finished"}')
    files = {path.name: path.read_bytes() for path in copied.iterdir() if path.is_file()}
    with pytest.raises(ValueError, match="already contains a run without checkpoints; use another"):
        resume(copied)
    assert files == {path.name: path.read_bytes() for path in copied.iterdir() if path.is_file()}


# With actors


ACTORS = {"env": Guessing, "backend": "ray"}


@pytest.fixture(scope="module", params=[0, 1], ids=["in turn", "overlapping"])
def acted(request, tmp_path_factory):
    """A complete run with actors in this process."""
    lag = {"policy_lag": request.param}
    return lag, train(tmp_path_factory.mktemp("runs") / "acted", num_actors=0, **lag, **ACTORS)


def last_checkpoint(run_dir):
    return latest(run_dir).leaves


@pytest.mark.slow
def test_the_learner_and_the_random_streams_are_restored(acted, tmp_path):
    lag, whole = acted
    part = train(tmp_path / "run", after=4, num_actors=0, **lag, **ACTORS)
    assert part.summary["status"] == "interrupted"
    result = resume(tmp_path / "run", env=Guessing)
    assert result.summary["num_actors"] == 0, "as it was"
    assert_same(result.state, whole.state)
    ours, theirs = last_checkpoint(result.run_dir), last_checkpoint(whole.run_dir)
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        np.testing.assert_array_equal(leaf, theirs[name], name)
    np.testing.assert_array_equal(result.metrics["actors/policy_lag"], whole.metrics["actors/policy_lag"])
    assert_rows(result.run_dir, UPDATES)


@pytest.mark.slow
def test_environments_are_reset_with_other_seeds(tmp_path):
    given = {"num_actors": 0, "backend": "ray", "env": "CartPole-v1"}
    train(tmp_path / "run", after=4, **given)
    twice = [shutil.copytree(tmp_path / "run", tmp_path / name) for name in "ab"]
    results = [resume(path, env="CartPole-v1") for path in twice]
    assert_same(results[0].state, results[1].state)
    whole = train(tmp_path / "whole", **given)
    first = latest(tmp_path / "run").update
    losses = [result.metrics["loss/value"] for result in (results[0], whole)]
    np.testing.assert_array_equal(losses[0][:first], losses[1][:first])
    assert losses[0][first] not in losses[1], "the environments were not reset, or as at the start"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_resume_with_another_number_of_actors(acted, tmp_path, monkeypatch):
    lag, whole = acted
    train(tmp_path / "run", after=4, num_actors=0, **lag, **ACTORS)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    result = resume(tmp_path / "run", env=Guessing, num_actors=2, address="local", **lag)
    assert result.summary["num_actors"] == 2
    for name, leaf in last_checkpoint(whole.run_dir).items():
        ours = last_checkpoint(result.run_dir)[name]
        np.testing.assert_allclose(ours, leaf, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_another_policy_lag_is_refused(tmp_path):
    train(tmp_path / "run", after=4, num_actors=0, **ACTORS)
    with pytest.raises(ValueError, match="policy_lag is 0 in the run, but 1 now"):
        resume(tmp_path / "run", env=Guessing, policy_lag=1)


# The trained policy


@pytest.mark.slow
def test_an_unfinished_run_has_the_policy_of_its_newest_checkpoint(copied):
    last = max((copied / "checkpoints").iterdir(), key=lambda path: int(path.name))
    policy = jppo.load_policy(copied, env=Cued())
    (copied / "policy_state.npz").unlink()
    from_checkpoint = jppo.load_policy(copied, env=Cued())
    assert_same(from_checkpoint.state, policy.state)
    assert from_checkpoint.act([1.0]).shape == ()
    flip(largest(last))
    with pytest.warns(UserWarning, match=f"{last} is damaged"):
        assert int(load_run(copied, env=Cued()).policy_state.obs_stats.count) < int(policy.state.obs_stats.count)
    shutil.rmtree(copied / "checkpoints")
    with pytest.raises(ValueError, match="has no policy: its run did not finish and has no checkpoint"):
        jppo.load_policy(copied, env=Cued())


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["policy", "summary", "incomplete summary"])
def test_a_finished_run_writes_missing_files_again(full, tmp_path, damage):
    run = shutil.copytree(full.run_dir, tmp_path / "run")
    (run / ("policy_state.npz" if damage == "policy" else "summary.json")).unlink()
    if damage == "incomplete summary":
        (run / "summary.json").write_text('{"status": "finished"}')
    again = jppo.train(Cued(), run_dir=run)
    assert again.summary["updates"] == UPDATES
    assert json.loads((run / "summary.json").read_text())["steps"] == UPDATES * BATCH
    assert_same(jppo.load_policy(run, env=Cued()).state, full.policy.state)


def test_a_finished_run_without_metrics_is_refused(full, tmp_path):
    run = shutil.copytree(full.run_dir, tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"metrics\.jsonl cannot be read \(No such file or directory\); use another"):
        jppo.train(Cued(), run_dir=run)


@pytest.mark.slow
def test_a_custom_network_is_needed_to_load_the_policy(tmp_path):
    env = jppo.make_env(Cued())
    network = make_network(CONFIG, env.obs_spec, env.action_spec)
    result = train(tmp_path / "run", network=network)
    with pytest.raises(ValueError, match=r"with a custom network; .*load_policy\(run_dir, network=\.\.\.\)"):
        jppo.load_policy(tmp_path / "run", env=Cued())
    with pytest.raises(ValueError, match=r"in a custom environment, Cued; .* env=\.\.\."):
        jppo.load_policy(tmp_path / "run", network=network)
    assert_same(jppo.load_policy(tmp_path / "run", network=network, env=Cued()).state, result.policy.state)


# From the command line


@pytest.mark.slow
def test_the_command_line_resumes_with_the_settings_of_the_run(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    options = ["train", "CartPole-v1", "--num-envs", "8", "--num-steps", "8", "--hidden-sizes", "8", "--seed", "5"]
    with lenient():
        assert main([*options, "--num-devices", "1", "--total-steps", "640", "--run-dir", str(run)]) == 0
        assert main(["train", "CartPole-v1", "--resume", str(run)]) == 0
        assert "is already finished; nothing is left to train" in capsys.readouterr().out
        assert main(["train", "CartPole-v1", "--resume", str(run), "--num-envs", "16"]) == 2
        assert "num_envs is 8 in the run, but 16 now" in capsys.readouterr().err
        summary = run / "summary.json"
        summary.write_text(json.dumps(json.loads(summary.read_text()) | {"status": "interrupted"}))
        shutil.rmtree(run / "checkpoints/10")
        (run / "checkpoints").mkdir(exist_ok=True)
        assert main(["train", "CartPole-v1", f"--run-dir={run}", "--num-devices", "1"]) == 0
    assert_rows(run, 10)
