"""Every gymnax environment trains, or says why it cannot."""

import jax
import pytest
from checks import SMALL, check_two_updates
from lenient import lenient_env

import jppo
from jppo.envs import available

NEEDS_DOWNLOAD = "MNISTBandit-bsuite"


@pytest.mark.parametrize("name", [name for name in available() if name != NEEDS_DOWNLOAD])
def test_every_environment_trains(name):
    check_two_updates(lenient_env(name), SMALL())


def test_an_environment_that_needs_a_download_says_so(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network here")

    monkeypatch.setattr("gymnax.utils.load_mnist._download", refuse)
    with pytest.raises(ValueError, match=f"{NEEDS_DOWNLOAD} .*needs a download, which failed .*no network here"):
        jppo.make_anakin(NEEDS_DOWNLOAD)


def test_convolutions_on_images():
    check_two_updates(lenient_env("Breakout-MinAtar"), SMALL(network="cnn", shared_torso=True))


@pytest.mark.parametrize(("shared_torso", "towers"), [(False, {"actor", "critic"}), (True, {"shared"})])
def test_a_shared_torso_shares_its_convolutions(shared_torso, towers):
    agent = jppo.make_anakin(lenient_env("Breakout-MinAtar"), SMALL(network="cnn", shared_torso=shared_torso))
    params = jax.eval_shape(agent.init, jax.random.key(0)).train.policy.params["params"]
    assert set(params) == {f"{tower}{part}" for tower in towers for part in ("", "_conv")} | {"policy", "value"}
