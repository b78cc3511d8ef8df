"""Common mistakes with environments raise one line that names the mistake, before training starts."""

import functools
import sys

import broken_device_envs as device
import broken_host_envs as host
import gymnasium
import numpy as np
import pytest
from probes import Probe

import jppo
from jppo.envs import make_env


class OldStep(host.Sound):
    """Returns four values, as old Gym."""

    def step(self, action):
        return *super().step(action)[:3], {}


class OldReset(host.Sound):
    """Returns the observation without info."""

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0]


class OtherShapeLater(host.Sound):
    """The observations of step have another shape than those of reset."""

    def step(self, action):
        obs, *rest = super().step(action)
        return np.append(obs, obs), *rest


class Exiting(host.Sound):
    """Ends the process in reset."""

    def reset(self, **kwargs):
        raise SystemExit(0)


class OutOfBounds(host.Sound):
    """Declares narrower bounds than those of its observations."""

    observation_space = gymnasium.spaces.Box(5.0, 6.0, host.Sound.observation_space.shape)


class Category(host.Sound):
    """Returns a category that the space does not have."""

    observation_space = gymnasium.spaces.Discrete(4)

    def reset(self, **kwargs):
        return 4, {}

    def step(self, action):
        return 4, 0.0, False, False, {}


class Sized(host.Sound):
    """Needs an argument."""

    def __init__(self, size):
        super().__init__()


def make_device_env():
    return device.Sound()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (host.Sound(), r"Sound is an environment; pass a function that makes a new gymnasium environment"),
        (Sized, r"Sized needs the arguments size; pass lambda: Sized\(size=\.\.\.\)"),
        (functools.partial(OldStep), r"OldStep: step returned 4 values \(.*\); return obs, reward, terminated"),
        (OldReset, r"OldReset: reset returned a ndarray; return obs, info"),
        (OtherShapeLater, r"OtherShapeLater: the observation of step does not fit observation_space: observation has"),
        (
            Category,
            r"Category: the observation does not fit .*: observation is 4; its space says 0 to 3",
        ),
        (device.Sound, r"Sound is a class; pass an instance: Sound\(\)"),
        (
            make_device_env,
            r"made an object of type Sound; it must make a gymnasium\.Env; pass the JAX environment itself",
        ),
        (
            lambda: jppo.EpisodicEnv("mine", None, None, None),
            "made an object of type EpisodicEnv; .*; pass the JAX environment itself",
        ),
        (device.FiveValues(), r"step returned 5 values; gymnax >= 1\.0\.1 returns six"),
        (device.OtherShape(), r"observation has shape \[2\]; its space says \[3\]; declare the space"),
    ],
    ids=lambda value: "" if isinstance(value, str) else getattr(value, "__name__", type(value).__name__),
)
def test_a_mistake_raises_one_line(env, message):
    with pytest.raises(ValueError, match=message) as raised:
        jppo.train(env, total_steps=1)
    assert "\n" not in str(raised.value)


def test_a_function_as_device_environment_is_named():
    with pytest.raises(ValueError, match="pass the environment that the function makes"):
        make_env(make_device_env)


def test_exit_of_an_environment_is_an_error():
    with pytest.raises(RuntimeError, match=r"the environment called sys\.exit\(0\)"):
        jppo.make_host_env(Exiting)


@pytest.mark.parametrize("method", ["reset_env", "step_env"])
def test_exit_of_an_environment_on_the_device_is_an_error(method):
    env = type("Exiting", (Probe,), {method: lambda *args: sys.exit(3)})()
    with pytest.raises(RuntimeError, match=r"^the environment called sys\.exit\(3\)$"):
        jppo.train(env, total_steps=1)


def test_observations_outside_a_box_warn():
    with pytest.warns(UserWarning, match=r"OutOfBounds: observation has .*, outside \[5, 6\] of its observation_space"):
        jppo.make_host_env(OutOfBounds)
