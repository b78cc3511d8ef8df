"""A run is never lost, and never lies: what is saved, what is put back, and what is refused."""

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
from concurrent.futures import Future
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import one_run
import pytest
from checks import SMALL, group
from host_probes import Guessing, share_programs
from lenient import lenient
from one_run import BATCH, CONFIG, UPDATES, Cued
from probes import ObsActionReward

import jppo
from jppo.actors.local import LocalRunner
from jppo.cli.main import main
from jppo.ppo.networks import make_network
from jppo.runs import checkpoints
from jppo.runs.checkpoints import FORMAT, identity, newest, read, to_host, write
from jppo.runs.load import load_run
from jppo.runs.run_dir import read_config, read_metrics, run_config
from jppo.runs.writer import RunWriter
from jppo.training import device_loop, ray_loop
from jppo.training.progress import NullReporter

RESUME, ALWAYS = jppo.RunConfig(resume=True), jppo.RunConfig(checkpoint_seconds=0)


class Stopping(NullReporter):
    """Sends Ctrl-C once so many updates are logged; keeps what it is told."""

    def __init__(self, after=None):
        self.after, self.messages = after, []

    def message(self, text):
        self.messages.append(text)

    def update(self, step, steps_per_second, recent_return):
        if self.after is not None and step >= self.after * BATCH:
            self.after = None
            os.kill(os.getpid(), signal.SIGINT)


RUN = ("CartPole-v1", "anakin", 0, 64, CONFIG, jppo.Hyperparams())


class AtOnce:
    """In the place of the thread that writes, so that there is one whenever it is due."""

    def __init__(self, *args):
        pass

    def submit(self, function, *args):
        future = Future()
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self):
        pass


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_loop, "_CHUNK_SECONDS", 0.0)  # chunks of one
        patch.setattr(ray_loop, "_LOG_SECONDS", 0.0)
        patch.setattr(checkpoints, "ThreadPoolExecutor", AtOnce)
        share_programs(patch)
        yield


@pytest.fixture(autouse=True)
def swept():
    """On an error orbax drops coroutines; they are collected here, where their complaints are ignored."""
    yield
    gc.collect()


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def train(run_dir, after=None, env=None, **given):
    given = {"config": CONFIG, "total_steps": UPDATES * BATCH, "checkpoint_seconds": 0} | given
    return jppo.train(env or Cued(), run_dir=run_dir, progress=Stopping(after), **group(given))


def go_on(path, env=None, **given):
    given = {"resume": True} | given
    return jppo.train(env or Cued(), run_dir=path, progress=Stopping(), **group(given))


def assert_same(state, other):
    state, other = to_host(state), to_host(other)
    assert state.keys() == other.keys()
    for name, leaf in state.items():
        np.testing.assert_array_equal(leaf, other[name], name)


def assert_rows(run_dir, updates):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == list(range(1, updates + 1))


def latest(run_dir, message=pytest.fail):
    return newest(run_dir, read_config(run_dir), message)


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


# Of processes that end


@pytest.mark.parametrize("how", ["interrupt", "kill", "kill while saving"])
def test_a_run_that_another_process_began_and_lost_is_the_undisturbed_one(full, tmp_path, how):
    path = tmp_path / "run"
    argv = [sys.executable, one_run.__file__, str(path), how]
    environment = os.environ | {"PYTHONPATH": str(Path(jppo.__file__).parent.parent)}
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == (0 if how == "interrupt" else -signal.SIGKILL), ended.stderr
    assert len((path / "metrics.jsonl").read_text().splitlines()) >= one_run.END
    reporter = Stopping()
    result = jppo.train(Cued(), run_dir=path, run=RESUME, progress=reporter)
    assert any(text.startswith(f"resuming from {path}/checkpoints/") for text in reporter.messages)
    cut_off = [text for text in reporter.messages if text.endswith("was cut off while it was written; it is left out")]
    assert len(cut_off) == (how == "kill while saving")
    assert_same(result.state, full.state)
    assert_rows(path, UPDATES)
    for name in set(full.metrics) - {"time/elapsed", "time/steps_per_second"}:
        np.testing.assert_array_equal(result.metrics[name], full.metrics[name], name)
        np.testing.assert_array_equal(read_metrics(path)[name], full.metrics[name], name)
    for name in ("status", "updates", "episodes", "return_mean", "return_std", "checkpoint"):
        assert result.summary[name] == full.summary[name], name


# On the device


def test_ctrl_c_saves_where_it_stopped_and_the_run_goes_on_from_there(full, copied):
    (path,) = (copied / "checkpoints").glob(str(len(read_metrics(copied)["update"])))
    assert latest(copied).path == path
    assert latest(copied).update == read_metrics(copied)["update"][-1] < UPDATES
    result = go_on(copied)
    assert result.summary["status"] == "finished"
    assert_same(result.state, full.state)
    assert set(result.metrics) == set(full.metrics)
    np.testing.assert_array_equal(result.metrics["loss/value"], full.metrics["loss/value"])
    assert_rows(copied, UPDATES)
    assert (result.summary["episodes"], result.summary["checkpoint"]) == (full.summary["episodes"], UPDATES)
    assert np.diff(result.metrics["time/elapsed"]).min() > 0.0


def test_naming_the_run_directory_again_goes_on_too(full, copied):
    assert_same(train(copied, seed=0).state, full.state)


def test_a_run_goes_on_with_another_number_of_devices(full, copied):
    result = go_on(copied, num_devices=4)
    assert result.summary["num_devices"] == 4
    for name, leaf in to_host(full.state).items():
        np.testing.assert_allclose(to_host(result.state)[name], leaf, rtol=1e-3, atol=1e-4, err_msg=name)


def test_so_many_checkpoints_stay(stopped, full):
    assert sorted(int(path.name) for path in (full.run_dir / "checkpoints").iterdir()) == [UPDATES - 2, UPDATES]
    assert len(list((stopped / "checkpoints").iterdir())) == 3


def test_a_finished_run_says_so_and_grows_where_nothing_was_annealed(full, tmp_path):
    with pytest.raises(ValueError, match=r"which is finished; name another run_dir$"):
        train(full.run_dir)
    with pytest.raises(ValueError, match=r"of total_steps = 384, towards whose end .* cannot get 768 \S+ \(anneal"):
        train(full.run_dir, total_steps=2 * UPDATES * BATCH)
    level = SMALL(num_envs=8, num_steps=4, num_minibatches=2, anneal_learning_rate=False)
    whole = train(tmp_path / "whole", config=level)
    half = train(tmp_path / "half", config=level, total_steps=UPDATES // 2 * BATCH)
    assert half.summary["status"] == "finished"
    with pytest.raises(ValueError, match="finished; name another run_dir, or give more total_steps"):
        go_on(tmp_path / "half")
    with pytest.raises(ValueError, match="of total_steps = 192; it can get more, not 32"):
        go_on(tmp_path / "half", total_steps=BATCH)
    assert_same(go_on(tmp_path / "half", total_steps=UPDATES * BATCH).state, whole.state)
    assert read_config(tmp_path / "half")["total_steps"] == UPDATES * BATCH


def test_without_a_checkpoint_yet_a_run_begins_anew(full, copied):
    shutil.rmtree(copied / "checkpoints")
    (copied / "checkpoints").mkdir()
    reporter = Stopping()
    result = jppo.train(Cued(), run_dir=copied, run=RESUME, progress=reporter)
    assert any("has no checkpoint; starting from the beginning" in text for text in reporter.messages)
    assert_same(result.state, full.state)
    assert_rows(copied, UPDATES)


# What is damaged


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def largest(path):
    return max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(largest(path)),
        lambda path: os.truncate(largest(path), 10),
        lambda path: largest(path).unlink(),
        lambda path: (path / "_CHECKPOINT_METADATA").unlink(),
        lambda path: (path / "_CHECKPOINT_METADATA").write_text('{"custom'),
        lambda path: (path / "_METADATA").write_text("nonsense"),
        lambda path: (path / "manifest.ocdbt").write_bytes(b""),
        lambda path: [shutil.rmtree(path), path.mkdir()],
    ],
    ids=["flipped", "cut", "lost", "unheaded", "torn header", "torn names", "no manifest", "empty"],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(copied, damage):
    *_, before, last = sorted(int(path.name) for path in (copied / "checkpoints").iterdir())
    damage(copied / "checkpoints" / str(last))
    said = []
    assert latest(copied, said.append).update == before
    assert len(said) == 1
    assert said[0].startswith(f"{copied}/checkpoints/{last} is damaged (")


def test_a_run_goes_on_from_the_one_before_a_damaged_one_which_is_put_aside(full, copied):
    last = max(int(path.name) for path in (copied / "checkpoints").iterdir())
    flip(largest(copied / "checkpoints" / str(last)))
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"update": 99')
    assert_same(go_on(copied, checkpoint_seconds=0).state, full.state)
    assert_rows(copied, UPDATES)
    assert {path.name for path in (copied / "checkpoints").iterdir()} == {"10", "12", f"{last}.damaged"}


def test_a_checkpoint_of_another_run_is_left_out(full, copied, tmp_path):
    other = tmp_path / "other"
    train(other, after=8, seed=5)
    shutil.copytree(other / "checkpoints/8", copied / "checkpoints/8")
    said, before = [], latest(copied, lambda text: None).update
    assert latest(copied, said.append).update == before < 8
    assert "it is another run's" in said[0]
    assert_same(go_on(copied).state, full.state)
    assert_rows(copied, UPDATES)


def test_a_checkpoint_under_another_number_is_named(copied):
    last = latest(copied).update
    (copied / "checkpoints" / str(last)).rename(copied / "checkpoints" / "30")
    said = []
    assert latest(copied, said.append).update < last
    assert "its header is not that of update 30" in said[0]


def change_header(path, **fields):
    file = path / "_CHECKPOINT_METADATA"
    content = json.loads(file.read_text())
    content["custom_metadata"] |= fields
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "fields",
    [{"update": "x"}, {"update": 10**6}, {"seconds": "x"}, {"format": float("inf")}, {"counts": 3}, {"leaves": []}],
)
def test_a_header_that_was_changed_is_damage(copied, fields):
    last = latest(copied).update
    change_header(copied / "checkpoints" / str(last), **fields)
    said = []
    assert latest(copied, said.append).update < last
    assert len(said) == 1


def test_a_checkpoint_that_is_removed_while_it_is_read_is_looked_for_again(copied, monkeypatch):
    """As a run that trains does."""
    gone, last = [], latest(copied).update

    def removing(path, run):
        if not gone:
            gone.append(path)
            shutil.rmtree(path)
        return read(path, run)

    monkeypatch.setattr(checkpoints, "read", removing)
    assert latest(copied).update < last


def test_a_checkpoint_that_is_half_removed_is_looked_for_again(copied, monkeypatch):
    before, last = sorted(copied.glob("checkpoints/[0-9]*"), key=lambda path: int(path.name))[-2:]
    hidden = last.rename(copied / "hidden")
    for other in copied.glob("checkpoints/[0-9]*"):
        if other != before:
            shutil.rmtree(other)
    (before / "_CHECKPOINT_METADATA").unlink()
    looked = []

    def appearing(path, run):
        if not looked:
            looked.append(hidden.rename(last))
        return read(path, run)

    monkeypatch.setattr(checkpoints, "read", appearing)
    assert str(latest(copied).update) == last.name


def test_a_setting_that_a_later_version_adds_is_its_default(full, copied):
    settings = read_config(copied)
    for part, name in (("config", "kl_control"), ("hyperparams", "target_kl")):
        del settings[part][name]
    (copied / "config.json").write_text(json.dumps(settings))
    assert_same(go_on(copied).state, full.state)


def test_a_folder_with_a_strange_number_is_no_checkpoint(copied):
    (copied / "checkpoints" / "²").mkdir()
    assert latest(copied) is not None


def test_an_unbounded_gradient_goes_on_unbounded(tmp_path):
    path = tmp_path / "run"
    train(path, after=4, hyperparams=jppo.Hyperparams(max_grad_norm=float("inf")))
    assert read_config(path)["hyperparams"]["max_grad_norm"] == "inf"
    result = go_on(path)
    assert float(result.state.train.hyperparams.max_grad_norm) == float("inf")
    assert result.summary["status"] == "finished"


def test_a_damaged_line_costs_itself_only(full, copied):
    lines = (copied / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_bytes(
        b"".join([*lines[:2], b'[1]\n{"update": null}\n{"update": "x"}\n{"update": Infinity}\n', *lines[2:]])
    )
    assert_same(go_on(copied).state, full.state)
    assert_rows(copied, UPDATES)


def test_metrics_that_are_gone_in_another_version_are_nan(copied):
    rows = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    rows = [{name: value for name, value in row.items() if name != "grad/norm"} | {"old": 1.0} for row in rows]
    rows[0]["episode/count"] = None
    (copied / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = go_on(copied).metrics
    before = len(rows)
    assert np.isnan(metrics["grad/norm"][:before]).all()
    assert np.isfinite(metrics["grad/norm"][before:]).all()
    assert (metrics["old"][:before] == 1.0).all()
    assert np.isnan(metrics["old"][before:]).all()


@pytest.mark.parametrize("content", ['{"status": "fin', "[1]", "\udcff"])
def test_a_damaged_summary_is_none(full, copied, content):
    (copied / "summary.json").write_text(content, errors="surrogateescape")
    assert_same(go_on(copied).state, full.state)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seed", None, "it has no seed"),
        ("total_steps", "x", "total_steps is 'x'"),
        ("total_steps", True, "total_steps is True"),
        ("actors", "x", "actors is 'x'"),
        ("config", [], r"config is \[\]"),
        ("hyperparams", {"gama": 1.0}, "unexpected keyword argument"),
    ],
)
def test_damaged_settings_are_named(copied, name, value, message):
    settings = read_config(copied) | {name: value}
    (copied / "config.json").write_text(json.dumps({name: x for name, x in settings.items() if x is not None}))
    with pytest.raises(ValueError, match=rf"config\.json is damaged.*{message}"):
        go_on(copied)
    assert main(["train", "Cued", "--resume", str(copied)]) == 2


def test_a_run_killed_before_it_began_begins(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").touch()
    (path / "config.json.tmp").write_text("{")
    assert train(path).summary["status"] == "finished"


def test_one_directory_under_two_names_is_one_run(full, copied, monkeypatch):
    monkeypatch.chdir(copied.parent)
    result = jppo.train(Cued(), run_dir=copied.name, run=RESUME, progress=Stopping())
    assert_same(result.state, full.state)


def test_a_damaged_policy_is_read_from_the_newest_checkpoint(copied):
    good = load_run(copied, env=Cued()).policy_state
    os.truncate(largest(copied / "policy"), 10)
    with pytest.warns(UserWarning, match="that of its newest checkpoint is taken, after update"):
        assert_same(load_run(copied, env=Cued()).policy_state, good)


def test_with_all_damaged_nothing_is_begun(copied):
    for path in (copied / "checkpoints").iterdir():
        flip(largest(path))
    before = (copied / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="has checkpoints, but all 3 are damaged; name another run_dir"):
        go_on(copied)
    assert (copied / "metrics.jsonl").read_bytes() == before
    assert (copied / "policy").is_dir()


@pytest.mark.parametrize(("number", "age"), [(FORMAT + 1, "newer"), (FORMAT - 1, "older")])
def test_another_format_is_refused_in_words(copied, number, age):
    for path in (copied / "checkpoints").iterdir():
        change_header(path, format=number)
    with pytest.raises(ValueError, match=rf"has format {number}, {age} than this jppo's {FORMAT}; it was written by"):
        go_on(copied)


def test_a_full_disk_ends_saving_but_not_the_run(tmp_path, monkeypatch):
    def full_disk(path, *args):
        if int(path.name) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, *args)

    monkeypatch.setattr(checkpoints, "write", full_disk)
    reporter = Stopping()
    run_dir = tmp_path / "run"
    result = jppo.train(
        Cued(), config=CONFIG, total_steps=UPDATES * BATCH, run_dir=run_dir, run=ALWAYS, progress=reporter
    )
    assert (result.summary["status"], result.summary["updates"]) == ("finished", UPDATES)
    warnings = [text for text in reporter.messages if text.startswith("WARNING")]
    assert len(warnings) == 2, "once in the middle, once for the last try"
    assert "could not be written (No space left on device); the newest is of update " in warnings[0]
    assert warnings[0].endswith("Training goes on, and tries again")
    assert warnings[1].endswith(f"the newest is of update {result.summary['checkpoint']}")
    assert 0 < result.summary["checkpoint"] <= 3
    assert latest(run_dir).update == result.summary["checkpoint"]


def test_saving_goes_on_when_there_is_room_again(tmp_path, monkeypatch):
    tried = []

    def full_for_once(path, *args):
        tried.append(int(path.name))
        if len(tried) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, *args)

    monkeypatch.setattr(checkpoints, "write", full_for_once)
    monkeypatch.setattr(checkpoints, "_FIRST_PAUSE", 1e-9)
    result = train(tmp_path / "run")
    assert tried[2:], "after the one that failed"
    assert latest(tmp_path / "run").update == result.summary["checkpoint"] == UPDATES


def test_a_disk_without_room_is_known_before_orbax_begins(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(OSError, match="No space left on device"):
        write(tmp_path / "1", {}, {"x": np.zeros(1 << 20, np.float32)})
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_nothing_more_costs_what_would_be_on_it_but_not_the_run(full, tmp_path):
    """Files of this process cannot grow beyond some size: metrics, events, checkpoints and the policy alike."""
    reporter = Stopping()

    class Shrinking(Stopping):
        def update(self, step, *args):
            if step == 6 * BATCH:
                limit(os.path.getsize(tmp_path / "run" / "metrics.jsonl") + 100)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    reporter = Shrinking()
    given = {"config": CONFIG, "total_steps": UPDATES * BATCH, "run": ALWAYS}
    try:
        result = jppo.train(Cued(), run_dir=tmp_path / "run", progress=reporter, **given)
    finally:
        limit(resource.RLIM_INFINITY)
    assert (result.summary["status"], result.summary["updates"]) == ("finished", UPDATES)
    assert_same(result.state, full.state)
    assert "metrics.jsonl" in result.summary["failed_writes"]
    assert_rows(tmp_path / "run", 6)
    said = [text for text in reporter.messages if "metrics.jsonl could not be written" in text]
    assert [text.endswith(end) for text, end in zip(said, ("are tried again", "it is lost"), strict=True)] == [True] * 2
    assert_same(go_on(tmp_path / "run").state, full.state)


def test_metrics_that_could_not_be_written_are_written_when_they_can_be(tmp_path, monkeypatch):
    monkeypatch.setattr("jppo.runs.writer._AGAIN_SECONDS", 0.0)
    said = []
    writer = RunWriter(tmp_path / "run", {}, say=said.append)
    writer.write_updates([{"update": 1, "env_steps": 8}])
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, resource.RLIM_INFINITY))
    try:
        for update in range(2, 5):
            writer.write_updates([{"update": update, "env_steps": 8 * update}])
        assert_rows(tmp_path / "run", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    writer.write_updates([{"update": 5, "env_steps": 40}])
    assert_rows(tmp_path / "run", 5)
    assert len([text for text in said if "metrics.jsonl could not be written" in text]) == 1
    writer.abort()


def test_lines_that_were_too_many_to_wait_are_told_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("jppo.runs.writer._AGAIN_SECONDS", 0.0)
    monkeypatch.setattr("jppo.runs.writer._WAITING_BYTES", 70)
    writer = RunWriter(tmp_path / "run", {}, say=lambda text: None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
    try:
        for update in range(1, 9):
            writer.write_updates([{"update": update, "env_steps": 8 * update}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert writer.close({"x": np.zeros(3, np.float32)}, {"status": "finished"}) == ["metrics.jsonl"]
    assert_rows(tmp_path / "run", 2)
    assert json.loads((tmp_path / "run/summary.json").read_text())["failed_writes"] == ["metrics.jsonl"]


def test_an_error_that_comes_with_the_closing_of_a_file_is_told_too(tmp_path):
    """As network file systems and quotas have it."""
    said = []
    writer = RunWriter(tmp_path / "run", {}, say=said.append)
    writer.write_updates([{"update": 1, "env_steps": 8}])

    class Refusing:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def close(self):
            if not self.file.closed:
                self.file.close()
                raise OSError(errno.EDQUOT, "Disk quota exceeded")

    writer._metrics._file = Refusing(writer._metrics._file)
    assert writer.close({"x": np.zeros(3, np.float32)}, {}) == ["metrics.jsonl"]
    assert "Disk quota exceeded" in said[0]
    writer.abort()
    assert (tmp_path / "run/summary.json").exists()


def test_a_disk_that_does_not_tell_its_size_is_tried(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(total=0, free=0))
    write(tmp_path / "1", {}, {"x": np.zeros(3, np.float32)})
    assert (tmp_path / "1").is_dir()


def test_pauses_between_attempts_end_somewhere(tmp_path, monkeypatch):
    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(checkpoints, "write", fail)
    said = []
    saving = checkpoints.Checkpoints(tmp_path, run_config(*RUN), 0.0, 2, said.append)
    for update in range(1, 30):
        saving.save(update, 0.0, {}, {})
    saving.close()
    assert len(said) == 2
    assert saving._pause == 300.0


def test_tensorboards_disk_may_be_full(tmp_path):
    (tmp_path / "run").mkdir()
    said = []
    writer = RunWriter(tmp_path / "run", {}, say=said.append)
    writer._events._writer._py_recordio_writer._writer = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    for update in range(1, 50):
        writer.write_updates([{"update": update, "env_steps": 8 * update, "loss/total": 0.5}])
    assert_rows(tmp_path / "run", 49)
    assert len(said) == 1
    assert "tensorboard could not be written (No space left on device)" in said[0]
    writer.abort()


def events(run_dir):
    """(step, names, whether it begins a session) of all that TensorBoard is to read, in its order."""
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


def test_tensorboard_forgets_what_came_after_the_checkpoint(copied):
    steps = [step for step, names, _ in events(copied) if names]
    assert steps == [BATCH * update for update in range(1, len(steps) + 1)]
    last = latest(copied).update
    shutil.rmtree(copied / "checkpoints" / str(last))
    before = latest(copied).update
    go_on(copied)
    sessions = [step for step, _, begins in events(copied) if begins]
    assert sessions == [before * BATCH + 1], "where steps from on are forgotten"
    steps = [step for step, names, _ in events(copied) if "loss/total" in names]
    assert steps[-(UPDATES - before) :] == [BATCH * update for update in range(before + 1, UPDATES + 1)]


def test_trouble_is_said_even_where_nothing_is_shown(tmp_path, monkeypatch):
    def full_disk(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "write", full_disk)
    with pytest.warns(UserWarning, match=r"the checkpoint of update 1 could not be written .*; there is none"):
        jppo.train(Cued(), config=CONFIG, total_steps=BATCH, run_dir=tmp_path / "run")


def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    def fail(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(ocp.StandardCheckpointer, "_save_step_metadata", fail, raising=True)
    with pytest.raises(OSError, match="full"):
        write(tmp_path / "1", {}, {"x": np.zeros(3, np.float32)})
    assert list(tmp_path.iterdir()) == []


def test_every_kind_of_leaf_comes_back(tmp_path):
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
    (tmp_path / "checkpoints").mkdir()
    settings = run_config(*RUN)
    header = {"format": FORMAT, "run": identity(settings), "update": 7, "seconds": 1.5, "counts": {"restarts": 2}}
    write(tmp_path / "checkpoints/7", header, to_host(state))
    found = newest(tmp_path, settings, pytest.fail)
    assert (found.update, found.seconds, found.counts) == (7, 1.5, {"restarts": 2})
    back = found.put(jax.tree.map(lambda x: x, state))
    assert_same(back, state)
    assert all(a.dtype == b.dtype for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True))
    with pytest.raises(ValueError, match=r"the run has \['nan'\] = float32\[3\], given is float32\[4\]"):
        found.put(state | {"nan": jnp.zeros(4)})
    with pytest.raises(ValueError, match=r"the run has \['flag'\] = bool\[\], given is nothing"):
        found.put({name: leaf for name, leaf in state.items() if name != "flag"})


# What is refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": SMALL(num_envs=16, num_steps=4)}, "the run has num_envs = 8, given is 16; the run has num_"),
        ({"seed": 1}, "already holds another run: the run has seed = 0, given is 1; name another"),
        ({"hyperparams": jppo.Hyperparams(gamma=0.5)}, "the run has gamma = 0.99, given is 0.5"),
        ({"env": "another"}, "the run has env = Cued, given is ObsActionReward"),
        ({"network": "own"}, "the run has network = mlp, given is custom"),
        ({"checkpoint_seconds": -1}, "checkpoint_seconds = -1 must be a number of at least 0"),
        ({"checkpoint_seconds": "often"}, "checkpoint_seconds = 'often' must be"),
        ({"max_checkpoints": 0}, "max_checkpoints = 0 must be a whole number of at least 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_run_is_refused_with_the_difference(copied, given, message):
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    if "env" in given:
        given = {"env": ObsActionReward()}
    if "network" in given:
        env = jppo.make_env(Cued())
        given = {"network": make_network(CONFIG, env.obs_spec, env.action_spec)}
    with pytest.raises(ValueError, match=message):
        go_on(copied, **given)
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before


def test_what_is_no_run_cannot_go_on(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run directory: it has no config\.json"):
        go_on(tmp_path)
    with pytest.raises(ValueError, match="resume needs a run_dir"):
        jppo.train(Cued(), run=RESUME)


def test_a_run_without_checkpoints_cannot_go_on(copied):
    shutil.rmtree(copied / "checkpoints")
    with pytest.raises(ValueError, match="already holds a run without checkpoints; name another"):
        go_on(copied)


def test_two_processes_do_not_write_one_run(copied):
    import fcntl

    with (copied / "metrics.jsonl").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is being written by another process; name another"):
            go_on(copied)


# With actors


ACTORS = {"env": Guessing, "backend": "ray"}


@pytest.fixture(scope="module", params=[0, 1], ids=["in turn", "overlapping"])
def acted(request, tmp_path_factory):
    """A whole run in this process."""
    lag = {"policy_lag": request.param}
    return lag, train(tmp_path_factory.mktemp("runs") / "acted", num_actors=0, **lag, **ACTORS)


def last_checkpoint(run_dir):
    return latest(run_dir).leaves


def test_learner_and_streams_go_on_where_they_were(acted, tmp_path):
    lag, whole = acted
    part = train(tmp_path / "run", after=4, num_actors=0, **lag, **ACTORS)
    assert part.summary["status"] == "interrupted"
    result = go_on(tmp_path / "run", env=Guessing)
    assert result.summary["num_actors"] == 0, "as it was"
    assert_same(result.state, whole.state)
    ours, theirs = last_checkpoint(result.run_dir), last_checkpoint(whole.run_dir)
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        np.testing.assert_array_equal(leaf, theirs[name], name)
    np.testing.assert_array_equal(result.metrics["actors/policy_lag"], whole.metrics["actors/policy_lag"])
    assert_rows(result.run_dir, UPDATES)


def test_environments_begin_anew_with_other_seeds(tmp_path):
    given = {"num_actors": 0, "backend": "ray", "env": "CartPole-v1"}
    train(tmp_path / "run", after=4, **given)
    twice = [shutil.copytree(tmp_path / "run", tmp_path / name) for name in "ab"]
    results = [go_on(path, env="CartPole-v1") for path in twice]
    assert_same(results[0].state, results[1].state)
    whole = train(tmp_path / "whole", **given)
    first = latest(tmp_path / "run").update
    losses = [result.metrics["loss/value"] for result in (results[0], whole)]
    np.testing.assert_array_equal(losses[0][:first], losses[1][:first])
    assert losses[0][first] not in losses[1], "the environments were not reset, or as at the start"


class Two:
    """Two actors that are in this process."""

    def __init__(self, spec, config):
        assert config.num_actors == 2
        self.runners = [LocalRunner(spec, first + np.arange(4)) for first in (0, 4)]

    def poll(self, timeout):
        return [fragment for runner in self.runners for fragment in runner.poll(timeout)]

    def ready(self, timeout):
        return "two"

    def counts(self):
        return self.runners[0].counts()

    def start(self, *given):
        for runner in self.runners:
            runner.start(*given)

    def close(self):
        for runner in self.runners:
            runner.close()


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize("pretended", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_another_number_of_actors(acted, tmp_path, monkeypatch, pretended):
    lag, whole = acted
    train(tmp_path / "run", after=4, num_actors=0, **lag, **ACTORS)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    if pretended:
        monkeypatch.setattr(ray_loop, "_make_actors", lambda spec, config, message: Two(spec, config))
    result = go_on(tmp_path / "run", env=Guessing, num_actors=2, address="local", **lag)
    assert result.summary["num_actors"] == 2
    for name, leaf in last_checkpoint(whole.run_dir).items():
        ours = last_checkpoint(result.run_dir)[name]
        np.testing.assert_allclose(ours, leaf, rtol=1e-4, atol=1e-5, err_msg=name)


def test_another_lag_is_another_run(tmp_path):
    train(tmp_path / "run", after=4, num_actors=0, **ACTORS)
    with pytest.raises(ValueError, match="the run has policy_lag = 0, given is 1"):
        go_on(tmp_path / "run", env=Guessing, policy_lag=1)


# What was learnt


def test_the_policy_of_a_killed_run_is_that_of_its_newest_checkpoint(copied):
    last = max((copied / "checkpoints").iterdir(), key=lambda path: int(path.name))
    policy = jppo.load_policy(copied, env=Cued())
    shutil.rmtree(copied / "policy")
    from_checkpoint = jppo.load_policy(copied, env=Cued())
    assert_same(from_checkpoint.state, policy.state)
    assert from_checkpoint.act([1.0]).shape == ()
    flip(largest(last))
    with pytest.warns(UserWarning, match=f"{last} is damaged"):
        assert int(load_run(copied, env=Cued()).policy_state.obs_stats.count) < int(policy.state.obs_stats.count)
    shutil.rmtree(copied / "checkpoints")
    with pytest.raises(ValueError, match="has no policy: its run did not finish, nor come to a checkpoint"):
        jppo.load_policy(copied, env=Cued())


def test_a_network_of_ones_own_must_be_given(tmp_path):
    env = jppo.make_env(Cued())
    network = make_network(CONFIG, env.obs_spec, env.action_spec)
    result = train(tmp_path / "run", network=network)
    with pytest.raises(ValueError, match=r"with a network of its own; .*load_policy\(run_dir, network=\.\.\.\)"):
        jppo.load_policy(tmp_path / "run", env=Cued())
    with pytest.raises(ValueError, match=r"in an environment of its own; .*, env=\.\.\."):
        jppo.load_policy(tmp_path / "run", network=network)
    assert_same(jppo.load_policy(tmp_path / "run", network=network, env=Cued()).state, result.policy.state)


# From the command line


def test_the_command_goes_on_with_the_settings_of_the_run(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    options = ["train", "CartPole-v1", "--num-envs", "8", "--num-steps", "8", "--hidden-sizes", "8", "--seed", "5"]
    with lenient():
        assert main([*options, "--num-devices", "1", "--total-steps", "640", "--run-dir", str(run)]) == 0
        assert main(["train", "CartPole-v1", "--resume", str(run)]) == 2
        assert "which is finished; name another" in capsys.readouterr().err
        assert main(["train", "CartPole-v1", "--resume", str(run), "--num-envs", "16"]) == 2
        assert "the run has num_envs = 8, given is 16" in capsys.readouterr().err
        summary = run / "summary.json"
        summary.write_text(json.dumps(json.loads(summary.read_text()) | {"status": "interrupted"}))
        shutil.rmtree(run / "checkpoints/10")
        (run / "checkpoints").mkdir(exist_ok=True)
        assert main(["train", "CartPole-v1", f"--run-dir={run}", "--num-devices", "1"]) == 0
    assert_rows(run, 10)
