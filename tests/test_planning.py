"""Plans: their numbers are those of the program, and what does not fit is refused in words."""

import dataclasses

import jax
import pytest
from checks import SMALL, compiled_programs
from probes import Counting

import jppo
from jppo.benchmark import plan as planning
from jppo.devices.memory import bytes_free, bytes_needed, show_bytes
from jppo.sweeps import population

CONFIG = SMALL(num_envs=8, num_steps=16, num_minibatches=2)


def plan(free, config=CONFIG, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "bytes_free", lambda devices: free)
        return jppo.plan(Counting(), config=config, **{"num_devices": 1, "seconds": 0.05} | options)


@pytest.fixture(scope="module")
def planned():
    return plan(2_000_000)


def needs(num_envs, num_devices=1):
    agent = jppo.make_anakin(Counting(), dataclasses.replace(CONFIG, num_envs=num_envs), num_devices=num_devices)
    return bytes_needed(planning._compile(agent)[0])


def test_the_parts_make_the_whole(planned):
    agent = jppo.make_anakin(Counting(), CONFIG)
    state = jax.jit(agent.init)(jax.random.key(0), jppo.Hyperparams())
    params = jax.tree.leaves(state.train.policy.params)
    assert planned.parameters == sum(leaf.size for leaf in params) == 2 * (3 * 8 + 8) + 2 * 8 + 2 + 8 + 1
    assert planned.bytes["parameters"] == 4 * planned.parameters
    assert planned.bytes["optimiser"] == 2 * planned.bytes["parameters"] + 4  # two moments and a count
    assert planned.bytes["environments"] == sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.collect)
    )
    assert sum(planned.bytes.values()) == planned.bytes_needed == needs(8)
    assert (planned.bytes_free, planned.num_devices, planned.env) == (2_000_000, 1, "Counting")


def test_the_largest_fits_and_twice_it_does_not(planned):
    assert planned.largest_num_envs % 8 == 0
    assert needs(planned.largest_num_envs) <= 2_000_000
    assert needs(2 * planned.largest_num_envs) > 2_000_000
    lanes = planned.largest_population // len(jax.local_devices())
    agent = jppo.make_anakin(Counting(), CONFIG)
    assert 0.8 * 2_000_000 < population.compile_population(agent, lanes).bytes <= 1.05 * 2_000_000


def test_the_trial_takes_about_as_long_as_asked(planned):
    assert planned.compile_seconds > 0.0
    assert planned.steps_per_second > 100.0
    assert planned.run_seconds == pytest.approx(planned.run_steps / planned.steps_per_second)


def test_devices_share_the_environments(planned):
    agent = jppo.make_anakin(Counting(), CONFIG, num_devices=4)
    state = jax.eval_shape(agent.init, jax.random.key(0), jppo.Hyperparams())
    parts = planning._parts(state, planning._compile(agent)[0], 4)
    assert parts["environments"] == planned.bytes["environments"] // 4
    assert parts["parameters"] == planned.bytes["parameters"]


def test_what_does_not_fit_is_refused_with_what_does():
    free = needs(4)
    message = r"num_envs = 8 and num_steps = 16 need .* KiB .* and .* are free; the largest num_envs that fits is 4"
    with compiled_programs("run_chunk") as names, pytest.raises(ValueError, match=message):
        plan(free)
    assert len(names) <= 6
    with pytest.raises(ValueError, match="lower num_steps, too"):
        plan(10)


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        ("Taxi-v4", {}, "Taxi-v4 is an environment of Gymnasium's; a plan is of a run on the device"),
        ("CartPole-v2", {}, "did you mean CartPole-v1"),
        ("CartPole-v1", {"seconds": 0.0}, "seconds = 0.0 must be more than 0"),
        (Counting(), {"num_devices": 9}, "num_devices = 9; JAX has 8 here"),
    ],
)
def test_what_cannot_be_planned(env, options, message):
    with pytest.raises(ValueError, match=message):
        jppo.plan(env, **options)


def test_free_memory_is_some():
    assert 1 << 20 < bytes_free(8) < bytes_free(1) < 1 << 45


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0 bytes"), (1000, "1000 bytes"), (2048, "2 KiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5,120 GiB")],
)
def test_bytes_are_shown_in_their_unit(number, shown):
    assert show_bytes(number) == shown
