"""Tests that jppo deletes and overwrites only its own files, and opens only regular files."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from lenient import lenient
from one_run import BATCH, CONFIG, Cued
from run_files import SETTINGS, finished, write_run
from saved import ROW, save_run

import jppo
from jppo.cli.main import main
from jppo.runs.checkpoints import Checkpoints, delete_checkpoints, latest_checkpoint
from jppo.runs.files import jsonable, write_json
from jppo.runs.leaves import copy_leaves
from jppo.runs.load import read_summary
from jppo.runs.run_dir import BestPolicy, load_policy_state, read_best, read_config, read_metrics, write_output
from jppo.runs.writer import RunWriter, is_written
from jppo.sweeps.store import SweepStore, load_sweep

RUN_FILES = (
    "config.json",
    "metrics.jsonl",
    ".lock",
    "summary.json",
    "policy_state.npz",
    "best_policy.npz",
    "video.gif",
)
RUN_FOLDERS = ("checkpoints", "tensorboard")


def names(folder):
    return {path.name for path in folder.iterdir()}


def save_checkpoint(run_dir, *updates):
    checkpoints = Checkpoints(run_dir, 0.0, 2, pytest.fail)
    for update in updates:
        checkpoints.save(update, 1.0, {}, {"x": np.arange(3) + update})
        checkpoints.wait()
    checkpoints.close()
    return run_dir / "checkpoints"


@pytest.fixture
def target(tmp_path):
    """A folder outside of the run directory with one file."""
    path = tmp_path / "mine" / "notes.txt"
    path.parent.mkdir()
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"
    assert names(path.parent) == {"notes.txt"}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", [*RUN_FILES, *RUN_FOLDERS])
def test_run_directory_with_links_is_refused(tmp_path, target, name, resume):
    path = tmp_path / "run"
    path.mkdir()
    (path / name).symlink_to(target.parent if name in RUN_FOLDERS else target)
    with pytest.raises(ValueError, match=f"run/{name} is a link, and jppo would write it; use another directory"):
        RunWriter(path, {}, resume=resume)
    assert names(path) == {name}


@pytest.mark.parametrize("name", [*RUN_FILES, *RUN_FOLDERS])
def test_run_directory_with_other_kinds_of_files_is_refused(tmp_path, name):
    os.mkfifo(tmp_path / name)
    kind = "folder" if name in RUN_FOLDERS else "regular file"
    with pytest.raises(ValueError, match=f"{name} is not a {kind}, and jppo would write it"):
        RunWriter(tmp_path, {}, resume=True)


@pytest.mark.parametrize("name", ["sweep.json", "runs.csv", "copies.csv", "curves.png", "runs", "run_dirs"])
def test_sweep_directory_with_links_is_refused(tmp_path, target, name):
    path = tmp_path / "sweep"
    path.mkdir()
    if name != "sweep.json":
        write_json(path / "sweep.json", {})
    (path / name).symlink_to(target.parent if "." not in name else target)
    with pytest.raises(ValueError, match=f"sweep/{name} is a link"):
        SweepStore(path, [], {})


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_sweep_with_other_kinds_of_files_among_its_runs_is_refused(tmp_path, target, kind):
    options = {"seeds": 2, "total_steps": BATCH, "config": CONFIG, "sweep_dir": tmp_path / "sweep"}
    jppo.sweep(Cued(), **options)
    path = max((tmp_path / "sweep" / "runs").iterdir())
    path.unlink()
    {"link": lambda: path.symlink_to(target), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    found = "a link" if kind == "link" else "not a regular file"
    with pytest.raises(ValueError, match=f"runs/{path.name} is {found}, and jppo would write it"):
        jppo.sweep(Cued(), **options)
    if kind != "link":
        with pytest.raises(ValueError, match=rf"{path.name} is damaged \(it is not a regular file\)"):
            load_sweep(tmp_path / "sweep")


def test_link_that_appears_during_a_run_is_replaced(tmp_path, target):
    path = tmp_path / "run"
    writer = RunWriter(path, SETTINGS)
    writer.write_updates([ROW])
    (path / "summary.json").symlink_to(target)
    (path / "best_policy.npz").symlink_to(target)
    writer.save_best({"x": np.zeros(1)}, BestPolicy(1, 2.0, "recent return"))
    assert not writer.close({"x": np.zeros(1)}, {"status": "finished"})
    assert not (path / "summary.json").is_symlink()
    assert read_best(path).score == 2.0


def test_output_follows_links_to_regular_files_only(tmp_path):
    (tmp_path / "link.png").symlink_to(tmp_path / "target.png")
    write_output(tmp_path / "link.png", b"1", ".png")
    assert (tmp_path / "link.png").is_symlink()
    assert (tmp_path / "target.png").read_bytes() == b"1"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device.png").symlink_to(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"device.png cannot be written: it is not a regular file"):
        write_output(tmp_path / "device.png", b"1", ".png")


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json", ".lock"])
def test_runs_does_not_wait_for_a_named_pipe(tmp_path, name, capsys):
    path = write_run(tmp_path / "run", [1.0], summary=finished(1.0))
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    assert main(["runs", str(tmp_path)]) in (0, 1)
    assert "run" in capsys.readouterr().out
    assert not is_written(path)


def test_other_readers_do_not_wait_for_a_named_pipe(tmp_path):
    save_run(tmp_path / "run")
    for name in ("policy_state.npz", "best_policy.npz"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / "run" / name)
    with pytest.raises(ValueError, match=r"describes: it is not a regular file"):
        load_policy_state(tmp_path / "run", {"x": np.zeros(1)})
    with pytest.raises(ValueError, match="damaged: it is not a regular file"):
        read_best(tmp_path / "run")
    os.mkfifo(tmp_path / "sweep.json")
    with pytest.raises(ValueError, match=r"\(it is not a regular file\)"):
        load_sweep(tmp_path)


def test_checkpoints_keep_the_files_of_others(tmp_path):
    folder = save_checkpoint(tmp_path, 3, 5)
    for name in ("best-so-far", "0005", "5.bak", "²"):
        shutil.copytree(folder / "5", folder / name)
    (folder / "notes").write_text("mine")
    before = names(folder) - {"3"}
    save_checkpoint(tmp_path, 6)
    assert names(folder) == before | {"6"}
    assert latest_checkpoint(tmp_path, pytest.fail).update == 6
    delete_checkpoints(tmp_path)
    assert names(folder) == before - {"5"}


def test_checkpoint_under_the_name_of_another_update_is_set_aside(tmp_path):
    folder, said = save_checkpoint(tmp_path, 5), []
    shutil.copytree(folder / "5", folder / "20261129")  # a backup with the date as its name
    (folder / "20261130").mkdir()
    assert Checkpoints(tmp_path, 0.0, 2, said.append).update == 5
    assert len(said) == 2
    assert "20261129 is damaged (it is a copy of 5); the checkpoint before it is used" in said[1]
    assert names(folder) == {"5", "20261129.damaged", "20261130.damaged"}
    assert names(folder / "20261129.damaged") == names(folder / "5")


def test_incomplete_checkpoint_of_a_killed_run_is_removed(tmp_path):
    (tmp_path / "checkpoints" / "5.orbax-checkpoint-tmp-1").mkdir(parents=True)
    assert names(save_checkpoint(tmp_path, 6)) == {"6"}


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/7"])
def test_linked_folder_of_checkpoints_is_refused(tmp_path, target, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target.parent)
    with pytest.raises(ValueError, match=f"{name} is a link"):
        Checkpoints(tmp_path, 0.0, 2, pytest.fail)


def test_failed_start_deletes_its_own_files_only(tmp_path):
    writer = RunWriter(tmp_path / "new" / "run", {})
    save_nothing = Checkpoints(writer.path, 0.0, 2, pytest.fail)
    save_nothing.close()
    assert names(writer.path) >= {"config.json", "metrics.jsonl", "tensorboard", "checkpoints"}
    writer.abort()
    assert not (tmp_path / "new").exists()

    writer = RunWriter(tmp_path / "new" / "run", {})
    (writer.path / "episodes.csv").write_text("of the environment")
    (writer.path / "tensorboard" / "events.out.tfevents.1.host").write_text("of the environment")
    writer.abort()
    assert names(writer.path) == {"episodes.csv", "tensorboard"}
    assert names(writer.path / "tensorboard") == {"events.out.tfevents.1.host"}


class Writing(Cued):
    """Writes a file into its run directory and fails."""

    def __init__(self, path):
        super().__init__()
        self._path = path

    def step(self, *arguments):
        if self._path.parent.exists():
            self._path.write_text("mine")
            raise RuntimeError("a mistake of the environment")
        return super().step(*arguments)


def test_file_of_an_environment_that_fails_is_kept(tmp_path):
    path = tmp_path / "run" / "episodes.csv"
    with pytest.raises(RuntimeError, match="a mistake of the environment"):
        jppo.train(Writing(path), config=CONFIG, total_steps=BATCH, run_dir=path.parent)
    assert names(path.parent) == {"episodes.csv"}


@pytest.mark.slow
def test_result_without_a_run_directory_can_be_saved(tmp_path, monkeypatch):
    with lenient():
        result = jppo.train(Cued(), config=CONFIG, total_steps=3 * BATCH)
        monkeypatch.setenv("HOME", str(tmp_path))
        result.save("~/saved")
        path = tmp_path / "saved"
        policy = jppo.load_policy("~/saved", env=Cued())
    assert read_summary(path) == jsonable(result.summary | {"run_dir": str(path)})
    assert read_config(path)["config"]["num_envs"] == CONFIG.num_envs
    np.testing.assert_equal(read_metrics(path), result.metrics)
    for name, leaf in copy_leaves(result.policy.state).items():
        np.testing.assert_array_equal(copy_leaves(policy.state)[name], leaf, name)
    with pytest.raises(ValueError, match="already contains a run"):
        result.save(path)
    with pytest.raises(ValueError, match="without checkpoints; use another run_dir"):
        jppo.train(Cued(), config=CONFIG, total_steps=3 * BATCH, run_dir=path)
    assert main(["runs", str(tmp_path)]) == 0


def test_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert jppo.RunConfig(run_dir="~/runs/first").run_dir == tmp_path / "runs" / "first"
    assert jppo.RunConfig(run_dir=Path("~")).run_dir == tmp_path
    assert jppo.RunConfig(run_dir="a~b/~c").run_dir == Path("a~b/~c")
    jppo.Picture(b"1", "png", "").save("~/picture.png")
    assert (tmp_path / "picture.png").read_bytes() == b"1"
    with pytest.raises(ValueError, match=f"{tmp_path}/missing is not a run directory"):
        jppo.load_policy("~/missing")
    (tmp_path / "empty.npz").touch()
    with pytest.raises(ValueError, match=r"empty\.npz") as caught:
        jppo.numpy_policy.load("~/empty.npz")
    assert "No such file" not in str(caught.value)


@pytest.mark.parametrize("url", ["gs://bucket/first", "s3://bucket/first", "file:///tmp/first", Path("gs://bucket")])
def test_url_is_refused(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = {
        "run_dir": lambda: jppo.RunConfig(run_dir=url),
        "sweep_dir": lambda: jppo.sweep("CartPole-v1", sweep_dir=url),
        "path": lambda: jppo.Picture(b"1", "png", "").save(url),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name} = {re.escape(str(url))} is a URL; use a folder of this machine"):
            call()
    assert not names(tmp_path)


def test_windows_drive_and_colon_are_no_url():
    for name in ("C:/runs", "env:name/first", "a:b"):
        assert jppo.RunConfig(run_dir=name).run_dir == Path(name)
