"""Tests that deterministic runs with the same seed give bit-identical policies."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from checks import SMALL
from lenient import lenient

import jppo
from jppo.devices.determinism import GPU_FLAG, ask_for_determinism, check_determinism, fingerprint
from jppo.runs.run_dir import config_of, read_config

SIZES = ("--num-envs", "8", "--num-steps", "16", "--total-steps", "1024", "--learning-rate", "2.5e-4")
MODES = {
    "on two devices": ("Pendulum-v1", "--normalize-obs", "--normalize-reward", "--num-devices", "2"),
    "with actors": ("CartPole-v1", "--backend", "ray", "--num-actors", "2", "--policy-lag", "1"),
}


def train_in_a_process(*words, cwd, flags=""):
    """Runs `jppo train` in a new process with users' compiler options. Returns summary.json and config.json."""
    environ = os.environ | {"XLA_FLAGS": flags}
    command = [sys.executable, "-m", "jppo", "train", *words, "--run-dir", str(cwd), "--quiet", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1]), json.loads((cwd / "config.json").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_two_processes_train_the_same_policy(tmp_path, mode):
    words = (*MODES[mode], *SIZES, "--deterministic", "--seed", "7")
    first, second = (train_in_a_process(*words, cwd=tmp_path / name) for name in ("first", "second"))
    assert first[0]["policy_sha256"] == second[0]["policy_sha256"]
    for summary, config in (first, second):
        assert summary["status"] == "finished"
        assert config["deterministic"] is True
        assert GPU_FLAG in config["xla_flags"].split()


def trained(seed, **more):
    with lenient():
        return jppo.train(
            "CartPole-v1", **({"config": SMALL(), "total_steps": 64, "seed": seed, "num_devices": 1} | more)
        )


@pytest.mark.slow
def test_the_flag_is_added_to_other_flags_and_set_again_on_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--mine=1")
    ask_for_determinism()
    path = tmp_path / "run"
    trained(0, deterministic=True, run_dir=path)
    config = read_config(path)
    assert (config["deterministic"], config["xla_flags"]) == (True, f"--mine=1 {GPU_FLAG}")
    resumed = {"resume": True, "run_dir": path, "config": config_of(config, path)[0]}
    assert trained(0, **resumed).summary["status"] == "finished"  # nothing is left to train
    monkeypatch.setenv("XLA_FLAGS", "")
    (path / "summary.json").unlink()
    trained(0, **resumed)
    assert read_config(path)["deterministic"] is True
    (path / "summary.json").unlink()
    trained(0, deterministic=False, **resumed)
    assert "deterministic" not in read_config(path)


@pytest.mark.slow
def test_the_summary_contains_the_fingerprint_of_the_policy():
    first, again, other = trained(0), trained(0), trained(1, deterministic=True)
    assert first.summary["policy_sha256"] == again.summary["policy_sha256"] == fingerprint(first.policy.state)
    assert first.summary["policy_sha256"] != other.summary["policy_sha256"]


def test_a_gpu_without_the_flag_is_refused(monkeypatch):
    check_determinism()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    with pytest.raises(ValueError, match="deterministic = True needs XLA_FLAGS=--xla_gpu_deterministic_ops=true in"):
        check_determinism()
    ask_for_determinism()
    ask_for_determinism()
    assert os.environ["XLA_FLAGS"] == f"--xla_gpu_deterministic_ops=false {GPU_FLAG}"
    check_determinism()


def test_a_fingerprint_depends_on_bits_shapes_dtypes_and_names():
    tree = {"a": np.zeros(4, np.float32)}
    others = [
        {"a": np.array([0.0, 0.0, 0.0, -0.0], np.float32)},
        {"a": np.zeros((2, 2), np.float32)},
        {"a": np.zeros(4, np.int32)},
        {"b": np.zeros(4, np.float32)},
    ]
    assert fingerprint(tree) == fingerprint({"a": np.zeros(4, np.float32)})
    assert len({fingerprint(each) for each in [tree, *others]}) == 5


@pytest.mark.slow
def test_a_deterministic_run_never_restarts_actors(tmp_path):
    arguments = {"backend": "ray", "num_actors": 0, "max_restarts": 5, "run_dir": tmp_path / "run"}
    trained(0, deterministic=True, **arguments)
    config = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert config["actors"]["max_restarts"] == 0
