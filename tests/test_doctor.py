"""Tests the checks of `jppo doctor`."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import types
from collections import namedtuple
from pathlib import Path

import jax
import pytest

import jppo
from jppo.actors import ray_cluster
from jppo.cli import diagnosis
from jppo.cli.diagnosis import Finding
from jppo.cli.main import main

Usage = namedtuple("Usage", "total used free")


def findings_of(check):
    found = list(check) if not isinstance(check, Finding) else [check]
    assert all(bool(one.problem) == bool(one.fix) for one in found)
    return {one.name: one for one in found}


def test_doctor_finds_no_problem_here(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for said in (
        "Python ",
        "jaxlib ",
        "8 x cpu",
        "gymnax ",
        "Ray ",
        *("flax ", "optax ", "orbax-checkpoint ", "gymnasium ", "numpy ", "chex "),
        "cache ",
        "memory ",
        "disk ",
        "wandb",
        "0 problems",
    ):
        assert said in out


def test_a_problem_is_shown_with_its_command_and_exit_code_1(capsys, monkeypatch):
    bad = Finding("Ray", "2.0", "Ray is broken", "pip install ray")
    monkeypatch.setattr(diagnosis, "diagnose", lambda: iter([Finding("jax", "1"), bad]))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out == "  jax          1\n! Ray          2.0\n\nRay is broken\n  pip install ray\n\n1 problem\n"
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[1]["fix"] == "pip install ray"


@pytest.mark.parametrize(("gpus", "platforms", "problem"), [(0, "", False), (2, "", True), (2, "cpu", False)])
def test_gpus_that_jax_does_not_use(tmp_path, monkeypatch, gpus, platforms, problem):
    program = tmp_path / "nvidia-smi"
    lines = "".join(f"GPU {i}: NVIDIA H100 (UUID: GPU-{i})\\n" for i in range(gpus))
    program.write_text(f"#!/bin/sh\nprintf '{lines}'\n" if gpus else "#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    devices = findings_of(diagnosis.check_jax())["devices"]
    assert bool(devices.problem) is problem
    if problem:
        assert devices.problem == "this machine has 2 NVIDIA GPUs, but jaxlib has no support for GPUs"
        assert devices.fix == "pip install -U 'jax[cuda13]'"


def test_a_platform_that_jax_does_not_have():
    """In a new process, because JAX chooses its platform once."""
    program = "from jppo.cli.diagnosis import check_jax; print(list(check_jax())[-1])"
    environment = os.environ | {"JAX_PLATFORMS": "cuda", "PYTHONPATH": str(Path(jppo.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, timeout=60, check=True)
    assert b"JAX_PLATFORMS=cuda names a platform that JAX does not have here" in done.stdout, done.stderr
    assert b"fix='unset JAX_PLATFORMS'" in done.stdout


def test_missing_and_old_packages(monkeypatch):
    lines = ["jax>=0.10.2,<0.12", "optax>=0.2.6", "ray>=2.51,<3", "chex>=0.1.90", 'wandb>=0.19; extra == "wandb"']
    monkeypatch.setattr(diagnosis.importlib.metadata, "requires", lambda name: lines)
    versions = {"jax": "0.9.0", "chex": "0.1.91", "numpy": "2.4.6"}
    monkeypatch.setattr(diagnosis, "find_version", lambda name: versions.get(name, "missing"))
    shown, *found = diagnosis.check_packages()
    assert shown == Finding("packages", "chex 0.1.91, numpy 2.4.6, optax missing")
    assert [(one.problem, one.fix) for one in found] == [
        ("jppo needs jax<0.12,>=0.10.2; version 0.9.0 is installed", "pip install 'jax<0.12,>=0.10.2'"),
        ("optax is not installed; jppo needs it", "pip install 'optax>=0.2.6'"),
        ("ray is not installed; jppo needs it", "pip install 'ray<3,>=2.51'"),
    ]


@pytest.mark.parametrize(
    ("broken", "problem", "fix"),
    [
        (
            types.ModuleType("gymnax"),
            "another package has overwritten gymnax",
            "pip uninstall -y stable-gymnax",
        ),
        (
            None,
            "gymnax cannot be imported: import of",
            "pip install --force-reinstall --no-deps 'gymnax>",
        ),
    ],
)
def test_a_damaged_gymnax(monkeypatch, broken, problem, fix):
    assert list(diagnosis.check_gymnax()) == []
    monkeypatch.setitem(sys.modules, "gymnax", broken)
    (finding,) = diagnosis.check_gymnax()
    assert finding.problem.startswith(problem)
    assert finding.fix.startswith(fix)


def test_an_installation_without_metadata(monkeypatch):
    def missing(name):
        raise diagnosis.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(diagnosis.importlib.metadata, "requires", missing)
    (finding,) = diagnosis.check_packages()
    assert finding.fix == f"pip install -e {Path(jppo.__file__).parents[1]}"


def test_damaged_packages(tmp_path):
    """In a new process, where JAX and Ray cannot be imported; all other checks still run."""
    for name in ("jax", "ray"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('broken')")
    path = f"{tmp_path}:{Path(jppo.__file__).parents[1]}"
    command = [sys.executable, "-m", "jppo", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONPATH": path}, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    problems = {one["problem"] for one in json.loads(done.stdout)}
    assert {"JAX cannot be imported: broken", "Ray cannot be imported: broken"} <= problems


@pytest.fixture
def without_cache_of_jax():
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.usefixtures("without_cache_of_jax")
def test_cache_of_compiled_programs(tmp_path, monkeypatch):
    monkeypatch.setenv("JPPO_COMPILATION_CACHE", str(tmp_path / "cache"))
    path = diagnosis.check_cache().text.split(",")[0]
    Path(path).mkdir(parents=True)
    (Path(path) / "program").write_bytes(bytes(2048))
    finding = diagnosis.check_cache()
    assert (finding.text, finding.problem) == (f"{path}, 2 KiB, writable", "")
    (tmp_path / "file").touch()
    monkeypatch.setenv("JPPO_COMPILATION_CACHE", str(tmp_path / "file"))
    finding = diagnosis.check_cache()
    assert finding.problem == f"the cache of compiled programs cannot be written: {tmp_path}/file"
    assert finding.fix == "export JPPO_COMPILATION_CACHE=/another/folder"
    monkeypatch.setenv("JPPO_COMPILATION_CACHE", "off")
    assert diagnosis.check_cache() == Finding("cache", "off (JPPO_COMPILATION_CACHE=off)")


def test_ray_of_another_address(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert diagnosis.check_ray().text.endswith(" CPUs on this machine")

    def refuse(address):
        raise ConnectionRefusedError("refused")

    monkeypatch.setenv("RAY_ADDRESS", "localhost:1")
    monkeypatch.setattr(ray_cluster, "check_reachable", refuse)
    finding = diagnosis.check_ray()
    assert finding.problem == "no Ray cluster answers at RAY_ADDRESS=localhost:1 (refused)"
    assert finding.fix == "unset RAY_ADDRESS"


def test_sessions_of_ray(tmp_path, monkeypatch):
    processes, folder = tmp_path / "proc", tmp_path / "ray"
    for number, words in {
        1: ["/x/raylet", "--session_dir=/r/session_2026-11-24_1_2"],
        2: ["grep", "session_7"],
    }.items():
        (processes / str(number)).mkdir(parents=True)
        (processes / str(number) / "cmdline").write_bytes("\0".join(words).encode())
    assert diagnosis.find_sessions(processes) == ["session_2026-11-24_1_2"]
    for name in ("session_2026-11-24_1_2", "session_2026-11-23_1_2"):
        (folder / name).mkdir(parents=True)
        (folder / name / "log").write_bytes(bytes(1024))
    monkeypatch.setattr(diagnosis, "find_sessions", lambda: ["session_2026-11-24_1_2"])
    finding = diagnosis.check_sessions(folder)
    running = "1 running (session_2026-11-24_1_2; `ray stop` ends them)"
    assert (finding.text, finding.problem) == (f"{running}, files of 1 old ones in {folder}: 1 KiB", "")
    monkeypatch.setattr(diagnosis, "_OLD_SESSIONS_BYTES", 1000)
    finding = diagnosis.check_sessions(folder)
    assert finding.problem == f"old sessions of Ray use 1 KiB in {folder}"
    os.utime(folder / "session_2026-11-23_1_2", (0, 0))
    subprocess.run(finding.fix, shell=True, check=True)
    assert [path.name for path in folder.iterdir()] == ["session_2026-11-24_1_2"]


def test_low_memory_and_disk(monkeypatch):
    monkeypatch.setattr(diagnosis, "host_bytes_free", lambda: 2.0**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 2**20))
    found = findings_of(diagnosis.diagnose())
    assert found["memory"].problem == "memory: only 1 MiB free"
    assert found["disk"].problem == f"disk: only 1 MiB free in {tempfile.gettempdir()}"


def test_extras_are_those_of_the_project(monkeypatch):
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert set(diagnosis.EXTRAS) == set(project["optional-dependencies"]) - {"dev", "docs"}
    missing = diagnosis.check_extra("x", ("missing-package",))
    assert missing.text == "x          missing: pip install 'jppo[x]'"
    monkeypatch.setattr(diagnosis, "find_version", lambda name: "1.2")
    assert diagnosis.check_extra("tune", ("a", "b")).text == "tune       installed: a 1.2, b 1.2"
