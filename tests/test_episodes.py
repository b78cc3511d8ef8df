"""Tests time limits and resets of environments that have neither."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from host_probes import Guessing

import jppo
from jppo.cli.main import parse_command
from jppo.devices.jit import jit, lower
from jppo.envs import make_env
from jppo.envs.masks import has_mask
from jppo.envs.resets import make_restart
from jppo.runs.render import checked_image

GOAL = 3.0


def walk_reset(key):
    """A walk from a random start: the observation is (start, steps so far)."""
    obs = jnp.stack([jax.random.uniform(key), jnp.zeros(())])
    return obs, obs


def walk_step(key, state, action):
    obs = state + jnp.array([0.0, 1.0])
    return obs, obs, action, obs[1] >= GOAL, False


def endless_step(key, state, action):
    obs, state, reward, _, _ = walk_step(key, state, action)
    return obs, state, reward, False, False


ACTIONS = spaces.Discrete(2)
WALK = jppo.EpisodicEnv("walk", walk_reset, walk_step, ACTIONS)
ENDLESS = WALK._replace(step=endless_step)


def play(env, num_steps, num_envs=4, seed=0):
    """Returns the first observations [N, ...] and the steps [T, N, ...] of a batch."""
    reset_key, *keys = jax.random.split(jax.random.key(seed), num_steps + 1)
    obs, state = jax.jit(jax.vmap(env.reset))(jax.random.split(reset_key, num_envs))
    step, steps = jax.jit(jax.vmap(env.step)), []
    for key in keys:
        steps.append(step(jax.random.split(key, num_envs), state, jnp.ones(num_envs, jnp.int32)))
        state = steps[-1].state
    return obs, jax.tree.map(lambda *x: np.stack(x), *steps)


def test_the_limit_truncates_and_does_not_terminate():
    first, steps = play(jppo.with_limit_and_reset(ENDLESS, limit=2), 4)
    np.testing.assert_array_equal(steps.truncated[:, 0], [False, True, False, True])
    assert not steps.terminated.any()
    np.testing.assert_array_equal(steps.state.time[:, 0], [1, 0, 1, 0])
    np.testing.assert_array_equal(steps.final_obs[1, :, 0], first[:, 0])  # the start of the episode that ended
    np.testing.assert_array_equal(steps.final_obs[:, 0, 1], [1.0, 2.0, 1.0, 2.0])
    np.testing.assert_array_equal(steps.obs[:, 0, 1], [1.0, 0.0, 1.0, 0.0])
    assert (steps.obs[1, :, 0] != first[:, 0]).all()  # a new start, not the first one


def test_a_termination_at_the_limit_is_no_truncation():
    _, steps = play(jppo.with_limit_and_reset(WALK, limit=int(GOAL)), 3)
    assert steps.terminated[-1].all()
    assert not steps.truncated.any()


def test_an_environment_may_truncate_itself():
    env = jppo.with_limit_and_reset(WALK._replace(step=lambda *args: (*walk_step(*args)[:3], False, True)))
    _, steps = play(env, 2)
    assert steps.truncated.all()
    assert not steps.terminated.any()


def test_fresh_resets_have_different_starts():
    _, steps = play(jppo.with_limit_and_reset(ENDLESS, limit=1), 8)
    assert len(np.unique(steps.obs[..., 0])) == steps.obs[..., 0].size


@pytest.mark.slow
def test_a_pool_has_as_many_starts_as_its_size_says():
    env = jppo.with_limit_and_reset(ENDLESS, limit=1, pool=3)
    first, steps = play(env, 16)
    assert len(np.unique(steps.obs[..., 0])) == 3
    assert len(np.unique(first[:, 0])) == 4  # first episodes and evaluations do not come from the pool
    assert set(np.unique(play(env, 16, seed=1)[1].obs[..., 0])) == set(np.unique(steps.obs[..., 0]))
    assert env.params.pool == 3


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 33])
def test_restarts_of_a_batch_equal_those_of_single_environments(size):
    restart = make_restart(walk_reset)
    keys = jax.random.split(jax.random.key(0), size)
    done = jax.random.bernoulli(jax.random.key(1), 0.5, (3, size)).at[0].set(False).at[1].set(True)
    old = jnp.arange(2.0 * size).reshape(size, 2)
    expected = jax.vmap(lambda key: walk_reset(key)[0])(keys)
    expected = jnp.where(done[..., None], expected, old)
    batched = jax.jit(jax.vmap(jax.vmap(restart), in_axes=(0, None, None, None)))(done, keys, old, old)
    np.testing.assert_array_equal(batched[0], expected)
    np.testing.assert_array_equal(batched[1], expected)
    single = restart(done[1, 0], keys[0], old[0], old[0])
    np.testing.assert_array_equal(single[0], expected[1, 0])


def test_only_environments_that_ended_are_reset():
    rows = []

    def counted_reset(key):
        jax.debug.callback(lambda _: rows.append(1), key)
        return walk_reset(key)

    restart = jax.jit(jax.vmap(make_restart(counted_reset)))
    done, old = jnp.zeros(64, bool), jnp.zeros((64, 2))
    keys = jax.random.split(jax.random.key(0), 64)
    jax.block_until_ready(restart(done, keys, old, old))
    jax.effects_barrier()
    assert not rows
    jax.block_until_ready(restart(done.at[7].set(True), keys, old, old))
    jax.effects_barrier()
    assert len(rows) == 4  # one block


class Masked(NamedTuple):
    position: jax.Array
    action_mask: jax.Array


def test_named_tuples_become_dicts_whose_mask_counts():
    def masked(obs):
        return Masked(obs, jnp.array([True, False]))

    def reset(key):
        obs, state = walk_reset(key)
        return masked(obs), state

    def step(*args):
        obs, *rest = walk_step(*args)
        return masked(obs), *rest

    env = jppo.with_limit_and_reset(jppo.EpisodicEnv("masked", reset, step, ACTIONS), limit=2)
    assert has_mask(env.obs_spec)
    assert set(env.reset(jax.random.key(0))[0]) == {"position", "action_mask"}


@pytest.mark.slow
def test_states_with_empty_arrays_train_on_several_devices():
    def reset(key):
        obs, state = walk_reset(key)
        return obs, (state, jnp.zeros((0, 3)))

    def step(key, state, action):
        assert state[1].shape == (0, 3)
        obs, *rest = walk_step(key, state[0], action)
        return obs, (rest[0], state[1]), *rest[1:]

    env = jppo.with_limit_and_reset(jppo.EpisodicEnv("empty", reset, step, ACTIONS))
    result = jppo.train(env, num_envs=8, num_steps=8, total_steps=128, hidden_sizes=(4,), num_devices=2)
    assert result.summary["status"] == "finished"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reset": lambda key: walk_reset(key)[0]}, "walk: reset returned"),
        ({"step": lambda *args: walk_step(*args)[:4]}, "walk: step returned 4 values"),
        ({"step": lambda *args: (walk_step(*args)[0], jnp.zeros(3), 0.0, False, False)}, "state"),
        ({"step": lambda *args: (*walk_step(*args)[:3], jnp.zeros(()), False)}, "terminated is float32"),
        ({"step": lambda *args: (*walk_step(*args)[:2], jnp.zeros(2), False, False)}, r"reward is float32\[2\]"),
        ({"observation_space": spaces.Box(0, 1, (3,))}, "its space says"),
        ({"reset": lambda: None}, r"walk: reset = <lambda> must accept the arguments \(key\).*; define reset"),
        (
            {"step": lambda state, action: None},
            r"walk: step = <lambda> must accept .* too many positional .*; define step\(key, state, action\)",
        ),
    ],
)
def test_mistakes_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        jppo.with_limit_and_reset(WALK._replace(**change))


@pytest.mark.parametrize("arguments", [{"limit": 0}, {"limit": 2.5}, {"limit": 10**12}, {"pool": 0}])
def test_wrong_arguments_are_named(arguments):
    with pytest.raises(ValueError, match="must be a whole number from 1 to 2,147,483,647"):
        jppo.with_limit_and_reset(WALK, **arguments)


def test_functions_may_call_a_redefined_function():
    """In a notebook, a cell may redefine a function that `reset` and `step` call."""

    def reset(key):
        return observe(0), jnp.int32(0)

    def step(key, state, action):
        return observe(state), state, 0.0, False, False

    def observe(state):
        return {"first": jnp.float32(state)}

    env = jppo.EpisodicEnv("redefined", reset, step, spaces.Discrete(2))
    assert set(jppo.with_limit_and_reset(env).obs_spec) == {"first"}

    def observe(state):  # noqa: F811
        return {"second": jnp.float32(state)}

    assert set(jppo.with_limit_and_reset(env).obs_spec) == {"second"}


def test_make_env_accepts_an_episodic_env():
    env = make_env(WALK, max_steps_in_episode=2, pool=5)
    assert (env.params.max_steps_in_episode, env.params.pool) == (2, 5)
    with pytest.raises(ValueError, match="unknown parameters limit; choose from max_steps_in_episode, pool"):
        make_env(WALK, limit=2)


def test_check_env_passes_and_tests_the_limit():
    report = jppo.check_env(jppo.with_limit_and_reset(ENDLESS, limit=20), steps=64)
    assert report.passed, report
    assert "max_steps_in_episode = 5" in report["time_limit"].seen
    assert report["carry"].status == "pass"
    assert "time increases" in report["hidden_reset"].seen


def test_check_env_finds_a_step_that_changes_the_state():
    env = jppo.with_limit_and_reset(ENDLESS, limit=20)

    def step(key, state, action):
        return env.step(key, state, action)._replace(state=state.time)

    report = jppo.check_env(env._replace(step=step), steps=8)
    assert report.failed == ("carry",)


@pytest.mark.slow
def test_an_episodic_env_is_drawn_by_its_function_for_at_most_2000_steps(tmp_path):
    def render(state):
        return np.full((8, 8, 3), int(50 * state[1]), np.uint8)

    env = jppo.with_limit_and_reset(WALK._replace(render=render), limit=20)
    result = jppo.train(env, num_envs=8, num_steps=8, total_steps=64, hidden_sizes=(4,), run_dir=tmp_path / "run")
    picture = jppo.play(result)
    assert "walk: 3 steps" in picture.description
    endless = jppo.with_limit_and_reset(
        ENDLESS._replace(render=lambda state: np.zeros((1, 1, 3), np.uint8)), limit=5000
    )
    assert "walk: 2000 steps" in jppo.play(endless, result.policy).description
    assert parse_command(["play", "run"]).max_steps == 2000
    with pytest.raises(ValueError, match="has no render function"):
        jppo.play(jppo.with_limit_and_reset(WALK), result.policy)


@pytest.mark.parametrize("shape", [(8, 9), (8, 9, 3), (8, 9, 4)])
def test_pictures_of_render_are_accepted(shape):
    image = np.zeros(shape, np.uint8)
    assert checked_image("walk", image) is image


@pytest.mark.parametrize(
    ("image", "found"),
    [
        (np.zeros(2), r"an array of shape \(2,\) and dtype float64"),
        (np.zeros((8, 9, 3), np.float32), r"an array of shape \(8, 9, 3\) and dtype float32"),
        (np.zeros((8, 9), bool), r"an array of shape \(8, 9\) and dtype bool"),
        (np.zeros((3, 8, 9), np.uint8), r"an array of shape \(3, 8, 9\) and dtype uint8"),
        ([np.zeros((8, 9, 3), np.uint8)] * 2, r"an array of shape \(2, 8, 9, 3\)"),
        (np.zeros((0, 9, 3), np.uint8), r"an array of shape \(0, 9, 3\)"),
        (None, "a NoneType"),
        ("text", "an array of shape"),
    ],
    ids=lambda value: "",
)
def test_other_results_of_render_are_named(image, found):
    with pytest.raises(ValueError, match=rf"^walk: render returned {found}.*; return an image \[height, width, 3\]"):
        checked_image("walk", image)


class Drawn(Guessing):
    render_mode = "rgb_array"

    def render(self):
        return np.zeros((8, 8, 3))


@pytest.mark.slow
def test_pictures_of_both_modes_are_checked():
    given = {"num_envs": 8, "num_steps": 8, "total_steps": 64, "hidden_sizes": (4,)}
    device = jppo.with_limit_and_reset(WALK._replace(render=lambda state: None), limit=2)
    for env, more in ((device, {}), (Drawn, {"num_actors": 0})):
        with pytest.raises(ValueError, match="render returned"):
            jppo.play(jppo.train(env, **given, **more))


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"num_actors": 0}])
def test_endless_episodes_are_reported(more):
    env = Endless if more else jppo.with_limit_and_reset(ENDLESS)
    given = {"num_envs": 2, "num_steps": 8, "hidden_sizes": (4,), "num_minibatches": 1, "num_epochs": 1} | more
    with pytest.warns(UserWarning, match="an evaluation cut 3 episodes at eval_max_steps = 7;") as caught:
        result = jppo.train(env, **given, total_steps=32, eval_every=1, eval_episodes=3, eval_max_steps=7)
    assert len(caught) == 1
    np.testing.assert_array_equal(result.metrics["eval/unfinished"], [3, 3])
    np.testing.assert_array_equal(result.metrics["eval/length_mean"], [7, 7])
    with pytest.warns(UserWarning, match="no episode ended in 10,240 steps"):
        jppo.train(env, **given | {"num_steps": 1024}, total_steps=10_240)


class Endless(Guessing):
    def step(self, action):
        return *super().step(action)[:2], False, False, {}


def test_large_arrays_in_a_program_are_reported():
    table = jnp.zeros((2**20, 4))
    nested = jax.jit(lambda i: table[i])

    def scan(function):
        return jit(lambda i: jax.lax.scan(lambda i, _: (i + 1, function(i)), i, length=2))

    for function in (nested, lambda i: table[i]):
        with pytest.warns(UserWarning, match="arrays of 16 MiB that the environment or network closes over"):
            lower(scan(function), np.int32(0))
    lower(scan(lambda i: i * 2), np.int32(0))


def test_training_without_jit_is_refused():
    with jax.disable_jit(), pytest.raises(ValueError, match="jppo needs jit; leave out JAX_DISABLE_JIT"):
        jppo.train("CartPole-v1")
