"""Tests `jppo.jit`: the compilation cache and the settings of the compiler."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jppo.devices import jit as jit_module

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)
TRAIN = """
import jax, jppo
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
agent = jppo.make_anakin("CartPole-v1", jppo.PPOConfig(num_envs=4, num_steps=4))
jppo.jit(agent.step).lower(jax.eval_shape(agent.init, jax.random.key(0))).compile()
print(len(hits), jax.config.jax_compilation_cache_dir)
"""


@pytest.fixture
def no_cache(monkeypatch):
    """Removes the compilation cache from JAX's config."""
    before = {option: getattr(jax.config, option) for option in OPTIONS}
    jax.config.update(OPTIONS[0], None)
    monkeypatch.delenv(jit_module.CACHE, raising=False)
    yield monkeypatch
    for option, value in before.items():
        jax.config.update(option, value)


def cache_folder() -> str | None:
    """Returns the folder of the compilation cache of a new process."""
    jit_module._enable_cache.__wrapped__()
    return jax.config.jax_compilation_cache_dir


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HOME", jit_module.CACHE])
def test_the_cache_is_in_a_private_folder_of_the_user(no_cache, tmp_path, variable):
    no_cache.delenv("XDG_CACHE_HOME", raising=False)
    no_cache.setenv(variable, str(tmp_path))
    folder = Path(cache_folder())
    below = {"XDG_CACHE_HOME": "jppo", "HOME": ".cache/jppo", jit_module.CACHE: "."}[variable]
    assert folder.parent == tmp_path / below
    assert folder.name.startswith(f"jax-{jax.__version__}-")
    assert folder.stat().st_mode & 0o777 == 0o700, "other users must not be able to write programs"


@pytest.mark.parametrize("off", ["off", "OFF", "0", "none"])
def test_the_cache_can_be_switched_off(no_cache, tmp_path, off):
    no_cache.setenv("HOME", str(tmp_path))
    no_cache.setenv(jit_module.CACHE, off)
    assert cache_folder() is None
    assert not list(tmp_path.iterdir())


def test_a_cache_that_the_user_configured_is_kept(no_cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    assert cache_folder() == str(tmp_path / "mine")


def test_without_a_writable_folder_there_is_no_cache(no_cache, tmp_path):
    (tmp_path / "file").touch()
    no_cache.setenv(jit_module.CACHE, str(tmp_path / "file" / "below"))
    assert cache_folder() is None


@pytest.mark.parametrize("flags", ["", "--xla_backend_optimization_level=0 --xla_dump_to=dump"])
def test_a_flag_of_the_user_takes_precedence(monkeypatch, flags):
    monkeypatch.setenv("XLA_FLAGS", flags)
    passed = {}
    monkeypatch.setattr(jax, "jit", lambda fun, compiler_options: passed.update(compiler_options))
    jit_module.jit(abs)
    assert passed["xla_cpu_prefer_vector_width"] == 512
    assert ("xla_backend_optimization_level" in passed) == (flags == "")


@pytest.mark.slow
def test_a_second_process_does_not_compile(tmp_path):
    env = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    env |= {"JAX_PLATFORMS": "cpu", jit_module.CACHE: str(tmp_path)}
    said = [
        subprocess.run([sys.executable, "-c", TRAIN], env=env, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    (first, folder), (second, _) = (done.stdout.split() for done in said)
    assert (first, second > "0") == ("0", True)  # a slow machine caches more programs
    assert any(path.name.endswith("-cache") for path in Path(folder).iterdir())
    assert [done.stderr for done in said] == ["", ""]


@pytest.mark.parametrize("size", [4, 2**20])
def test_arrays_of_any_size_are_put_on_the_device_unchanged(size):
    device = jax.devices()[3]
    tree = {"many": np.arange(size, dtype=np.float32), "few": (np.ones((2, 3), np.float16), np.array(True), ())}
    there = jit_module.make_device_put(jax.sharding.SingleDeviceSharding(device))(tree)
    assert jax.tree.structure(there) == jax.tree.structure(tree)
    for given, expected in zip(jax.tree.leaves(there), jax.tree.leaves(tree), strict=True):
        assert (given.dtype, given.devices()) == (expected.dtype, {device})
        np.testing.assert_array_equal(given, expected)
