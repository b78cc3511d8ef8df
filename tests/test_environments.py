"""Tests that every gymnax environment trains, or raises a clear error."""

import functools

import jax
import numpy as np
import pytest
from checks import SMALL, check_two_updates
from lenient import lenient, lenient_env

import jppo
from jppo.envs import available

NEEDS_DOWNLOAD = "MNISTBandit-bsuite"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in available() if name != NEEDS_DOWNLOAD])
def test_every_environment_trains(name):
    check_two_updates(lenient_env(name), SMALL())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "Breakout-MinAtar"))
        for name in available()
        if "MinAtar" in name
    ],
)
def test_images_stored_as_bool_contain_only_zeros_and_ones(name):
    env = lenient_env(name)
    assert env.obs_spec.dtype == "bool"

    def step(state, key):
        action = jax.random.randint(key, (), 0, env.action_spec.num_actions)
        obs, state, _, _, _, info = env.source.step(key, state, action, env.params)
        return state, (obs, info["final_observation"])

    with lenient():
        _, state = env.source.reset(jax.random.key(0), env.params)
        _, seen = jax.jit(functools.partial(jax.lax.scan, step))(state, jax.random.split(jax.random.key(1), 300))
    for obs in seen:
        assert obs.dtype == np.float32
        assert set(np.unique(obs)) == {0.0, 1.0}


def test_a_failed_download_raises_a_clear_error(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network here")

    monkeypatch.setattr("gymnax.utils.load_mnist._download", refuse)
    with pytest.raises(ValueError, match=f"{NEEDS_DOWNLOAD} .*its download failed .*no network here"):
        jppo.make_anakin(NEEDS_DOWNLOAD)


@pytest.mark.slow
def test_cnn_trains_on_images():
    check_two_updates(lenient_env("Breakout-MinAtar"), SMALL(network="cnn", shared_torso=True))


@pytest.mark.parametrize(("shared_torso", "towers"), [(False, {"actor", "critic"}), (True, {"shared"})])
def test_a_shared_torso_shares_its_convolutions(shared_torso, towers):
    agent = jppo.make_anakin(lenient_env("Breakout-MinAtar"), SMALL(network="cnn", shared_torso=shared_torso))
    params = jax.eval_shape(agent.init, jax.random.key(0)).train.policy_state.params["params"]
    assert set(params) == {f"{tower}{part}" for tower in towers for part in ("", "_conv")} | {"policy", "value"}
