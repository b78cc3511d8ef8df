"""Tests adapters for Gymnasium environments by comparison with manual steps, their error messages, and evaluation."""

import copy
import dataclasses
import functools
import os
import sys

import gymnasium
import host_probes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces, wrappers
from gymnasium.envs.registration import EnvSpec
from host_probes import Chatty, Continuous, Counting, Listing, Parts, Reusing

import jppo
from jppo.envs import envpool, host_families, modules
from jppo.envs.gymnasium import is_host_env, make_host_env, open_host_env
from jppo.envs.host_families import host_env_names
from jppo.envs.spaces import ActionSpec, ObsSpec, to_env_action
from jppo.networks.distributions import Categorical
from jppo.ppo.policy import make_policy
from jppo.ppo.types import PolicyState
from jppo.runs import episodes, render
from jppo.runs.policy import TrainedPolicy

SEEDS = (5, 0, 7, 2, 9, 3)


def by_hand(make, seeds, actions):
    """Steps single environments and resets each at the end of its episodes.

    Returns the first observations, and for each step the next observations, (reward, terminated, truncated) and the
    final observations, as lists over environments.
    """
    envs = [make() for _ in seeds]
    first = [copy.deepcopy(env.reset(seed=seed)[0]) for env, seed in zip(envs, seeds, strict=True)]
    steps = []
    for row in actions:
        following, outcomes, final = [], [], {}
        for i, (env, action) in enumerate(zip(envs, row, strict=True)):
            obs, *outcome, _ = env.step(action)
            obs = copy.deepcopy(obs)
            if any(outcome[1:]):
                final[i], obs = obs, copy.deepcopy(env.reset()[0])
            following.append(obs)
            outcomes.append(outcome)
        steps.append((following, outcomes, final))
    for env in envs:
        env.close()
    return first, steps


def check_by_hand(source, make, seeds=SEEDS, num_steps=14, draw=None):
    """Compares jppo's adapter with single environments that are stepped manually. Returns the number of truncations."""
    env, rng = make_host_env(source), np.random.default_rng(0)
    start = getattr(env.action_space, "start", 0)
    draw = draw or (lambda rng: start + rng.integers(2))
    actions = np.array([[draw(rng) for _ in seeds] for _ in range(num_steps)])
    first, steps = by_hand(make, seeds, actions)
    envs = env.make(list(seeds))
    check_obs(envs.reset(), first)
    cut = 0
    for row, (following, outcomes, final) in zip(actions, steps, strict=True):
        after = envs.step(row)
        check_obs(after.obs, following)
        given = zip(after.reward, after.terminated, after.truncated, strict=True)
        assert [list(outcome) for outcome in given] == outcomes
        assert sorted(after.final_obs) == sorted(final)
        for i, obs in final.items():
            check_obs(jax.tree.map(lambda x: np.asarray(x)[None], after.final_obs[i]), [obs])
        cut += after.truncated.sum()
    envs.close()
    return cut


def check_obs(batch, observations):
    """Compares a batch [n, ...] with n observations."""
    first = observations[0]
    if isinstance(first, dict):
        assert set(batch) == set(first)
    if isinstance(first, dict | tuple):
        for key in first if isinstance(first, dict) else range(len(first)):
            check_obs(batch[key], [obs[key] for obs in observations])
    else:
        np.testing.assert_array_equal(batch, np.array(observations))


@pytest.mark.parametrize(
    ("source", "make"),
    [
        (Counting, Counting),
        (Reusing, Counting),
        (Chatty, Counting),
        (Listing, Counting),
        (Parts, Parts),
        (host_probes.same_step, Counting),
        (host_probes.disabled, Counting),
        (host_probes.disabled_parts, Parts),
        ("host_probes:Counting", Counting),
        ("host_probes:disabled", Counting),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_next_and_final_observations_equal_those_of_manual_steps(source, make):
    assert check_by_hand(source, make) > 5


class InArrays(gymnasium.Wrapper):
    """Returns terminated and truncated as arrays of one element."""

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, np.array([terminated]), np.array([truncated]), info


@pytest.mark.parametrize(
    "wrap",
    [
        InArrays,
        lambda env: wrappers.TimeLimit(env, 2),
        lambda env: wrappers.FrameStackObservation(env, 3),
        wrappers.RecordEpisodeStatistics,
        lambda env: wrappers.TimeAwareObservation(wrappers.TimeLimit(env, 9), normalize_time=False),
        lambda env: wrappers.TransformReward(env, lambda reward: np.float32(2.0 * reward)),
    ],
    ids=["InArrays", "TimeLimit", "FrameStack", "Statistics", "TimeAware", "Reward"],
)
def test_wrappers(wrap):
    make = functools.partial(lambda wrap: wrap(Counting()), wrap)
    assert check_by_hand(make, make) > 5


def test_environments_of_gymnasium_by_id():
    check_by_hand("CartPole-v1", functools.partial(gymnasium.make, "CartPole-v1"), num_steps=60)


def test_mujoco(tmp_path, monkeypatch):
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log to the current directory
    env = make_host_env("HalfCheetah-v5")
    assert env.obs_spec == ObsSpec((17,), "float32")
    assert env.action_spec == ActionSpec((6,), "float32", low=(-1.0,) * 6, high=(1.0,) * 6)
    make = functools.partial(gymnasium.make, "HalfCheetah-v5", max_episode_steps=7)
    assert check_by_hand(make, make, (1, 2), 20, lambda rng: rng.uniform(-1, 1, 6).astype(np.float32)) == 4


def test_atari():
    pytest.importorskip("ale_py")
    env = make_host_env("ALE/Pong-v5")
    assert (env.obs_spec, env.action_spec.num_actions) == (ObsSpec((210, 160, 3), "uint8"), 6)
    assert "ALE/Pong-v5" in host_env_names()
    make = functools.partial(gymnasium.make, "ALE/Pong-v5", max_episode_steps=5)
    assert check_by_hand(make, make, (1, 2), 12, lambda rng: rng.integers(6)) == 4


def test_atari_preprocessing(monkeypatch):
    """Each step has four frames, and the last observation of a truncated game shows the last frames."""
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    monkeypatch.setattr(host_families, "_ATARI_STEPS", 5)
    env = make_host_env("atari:Pong-v5")
    assert (env.obs_spec, env.action_spec.num_actions) == (ObsSpec((4, 84, 84), "uint8"), 6)
    make = functools.partial(host_families.make_family_env, "atari:Pong-v5")
    assert check_by_hand("atari:Pong-v5", make, (1, 2), 12, lambda rng: rng.integers(6)) == 4
    game = make()
    frame = game.unwrapped.ale.getEpisodeFrameNumber
    game.reset(seed=0)
    start, ends = frame(), []
    for step in range(1, 6):
        obs, _, terminated, truncated, _ = game.step(2)  # up
        ends.append((terminated, truncated))
        assert frame() - start == 4 * step
    assert ends == [(False, False)] * 4 + [(False, True)]
    assert (obs[-1] != obs[-2]).any()


def test_lost_lives_do_not_end_atari_episodes():
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    game = host_families.make_family_env("atari:Breakout-v5")
    game.reset(seed=0)
    ale, lives = game.unwrapped.ale, []
    while not (lives and lives[-1] == 0):
        *_, terminated, truncated, _ = game.step(1)  # FIRE
        lives.append(ale.lives())
        assert terminated == (lives[-1] == 0)
        assert not truncated
    assert set(lives) == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("name", ["Backgammon-v5", "VideoCheckers-v5"])
def test_atari_games_without_an_idle_action_start_at_once(name):
    """Gymnasium's wrapper refuses idle frames there."""
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    game = host_families.make_family_env(f"atari:{name}")
    assert "NOOP" not in game.unwrapped.get_action_meanings()
    assert game.reset(seed=0)[0].shape == (4, 84, 84)
    assert game.unwrapped.ale.getEpisodeFrameNumber() < 4  # Backgammon starts with two frames


def test_minigrid_observations_are_vectors():
    """The environment itself limits the steps of an episode."""
    pytest.importorskip("minigrid")
    name = "minigrid:MiniGrid-Empty-5x5-v0"
    env = make_host_env(name)
    assert (env.obs_spec, env.action_spec.num_actions) == (ObsSpec((2835,), "uint8"), 7)
    assert name in host_env_names()
    make = functools.partial(host_families.make_family_env, name)
    assert check_by_hand(name, make, (1, 2), 110, lambda rng: rng.integers(2)) == 2  # turns only
    with pytest.raises(ValueError, match="unknown environment 'minigrid:MiniGrid-Empt-5x5-v0'; did you mean minigrid:"):
        make_host_env("minigrid:MiniGrid-Empt-5x5-v0")


def test_box2d():
    pytest.importorskip("Box2D")
    make = functools.partial(gymnasium.make, "LunarLander-v3", max_episode_steps=7)
    assert check_by_hand(make, make, (1, 2), 20, lambda rng: rng.integers(4)) == 4


def test_envpool():
    """Gymnasium's CartPole computes the true successor of each observation."""
    pytest.importorskip("envpool")
    physics = gymnasium.make("CartPole-v1").unwrapped
    physics.reset(seed=0)

    def successor(obs, action):
        physics.state, physics.steps_beyond_terminated = obs.astype(np.float64), None
        return physics.step(action)

    envs = make_host_env("envpool:CartPole-v1").make([3, 4, 5])
    obs, rng, time, cut = envs.reset().copy(), np.random.default_rng(0), np.zeros(3, int), 0
    for _ in range(600):
        balancing = (obs[:, 2] + 0.5 * obs[:, 3] + 0.1 * obs[:, 1] + 0.05 * obs[:, 0] > 0).astype(np.int32)
        action = np.where([True, False, False], balancing, rng.integers(2, size=3))
        after, time = envs.step(action), time + 1
        assert set(after.final_obs) == set(np.flatnonzero(after.terminated | after.truncated))
        for i in range(3):
            expected, _, terminated, _, _ = successor(obs[i], int(action[i]))
            np.testing.assert_allclose(after.final_obs.get(i, after.obs[i]), expected, rtol=1e-4, atol=1e-4)
            assert after.terminated[i] == terminated
            assert after.truncated[i] == (time[i] == 500 and not terminated)
            if i in after.final_obs:
                assert np.abs(after.obs[i]).max() <= 0.05, "the first observation of an episode is near 0"
                time[i], cut = 0, cut + after.truncated[i]
        obs = after.obs.copy()
    envs.close()
    assert cut == 1


def test_drawings_of_envpool(monkeypatch):
    pytest.importorskip("envpool")
    pole = make_host_env("envpool:CartPole-v1")
    envs = pole.make([3], render=True)
    envs.reset()
    first = envs.render()
    assert (first.shape, first.dtype) == ((400, 600, 3), np.uint8)
    for _ in range(5):
        envs.step(np.ones(1, np.int32))
    assert (envs.render() != first).any()
    envs.close()
    monkeypatch.setattr(envpool, "_egl", [])
    reasons = {"FrozenLake-v1": "EnvPool has no renderer"}
    if sys.platform == "linux":
        reasons["HalfCheetah-v4"] = r".* libEGL\.so\.1"
    for task, reason in reasons.items():
        with pytest.raises(ValueError, match=rf"^envpool:{task} cannot be drawn: {reason}"):
            pole._replace(source=f"envpool:{task}").make([3], render=True)


def test_specs_of_observations_and_actions():
    env = make_host_env(Parts)
    assert env.obs_spec == {
        "where": ObsSpec((1,), "float32"),
        "picture": ObsSpec((2, 2), "uint8"),
        "both": (ObsSpec((), "int32", 9, start=-1), ObsSpec((1,), "int8")),
        "age": ObsSpec((1,), "float32"),
    }
    assert env.action_spec == ActionSpec((), "int32", 3, start=4)
    assert make_host_env(Continuous).action_spec == ActionSpec((2,), "float32", low=(-2.0, 0.5), high=(2.0, 3.0))
    assert make_host_env(env) is env
    assert [make_host_env(source).name for source in (Counting, "CartPole-v1")] == ["Counting", "CartPole-v1"]


def test_a_trained_policy_uses_the_values_of_discrete_spaces():
    """Value 0 of the network corresponds to the first value of a discrete space that does not start at 0."""

    class Telling(Fixed):
        def apply(self, params, obs):
            return super().apply(params, obs)[0], jnp.argmax(obs["both"][0], axis=-1)

    env = make_host_env(Parts)
    state = PolicyState(params={}, obs_stats=())
    policy = TrainedPolicy(make_policy(Telling(0.2, 0.1, 0.7), env.obs_spec, env.action_spec), state)
    real = Parts()
    obs = dict(real.reset(seed=0)[0])
    assert policy.value(obs) == 0.0
    assert policy.act(obs) == 6
    obs = dict(real.step(policy.act(obs))[0])
    assert policy.value(obs) == 1.0
    assert set(policy.act(jax.tree.map(lambda x: np.stack([x] * 99), obs), sampled=True, seed=0)) == {4, 5, 6}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bounds", ["clip", "tanh"])
def test_rounding_does_not_move_actions_out_of_bounds(dtype, bounds):
    """Environments check `action_space.contains(action)`."""
    low = np.round(np.random.default_rng(0).uniform(-3.0, 3.0, 50), 1)
    space = spaces.Box(low.astype(dtype), (low + 0.7).astype(dtype), dtype=dtype)
    spec = dataclasses.replace(make_host_env(acting(space)).action_spec, bounds=bounds)
    for sample in (-9.0, 0.3, 9.0):
        action = np.asarray(to_env_action(spec, jnp.full((1, 50), sample)))[0].astype(dtype)
        assert space.contains(action)
    np.testing.assert_allclose(action, space.high, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("source", ["CartPole-v1", host_probes.disabled, "envpool:CartPole-v1"])
def test_seeds_determine_the_first_observations(source):
    if "envpool" in str(source):
        pytest.importorskip("envpool")
    env = make_host_env(source)
    first = []
    for seeds in ([1, 2, 3], [1, 2, 3], [3, 9]):
        envs = env.make(seeds)
        first.append(np.array(envs.reset()))
        envs.close()
    np.testing.assert_array_equal(first[0], first[1])
    np.testing.assert_array_equal(first[0][2], first[2][0])
    assert len(np.unique(np.concatenate([first[0], first[2][1:]]), axis=0)) == 4


def test_vectors_made_by_gymnasium():
    same_step = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    make = functools.partial(gymnasium.make_vec, "CartPole-v1", vectorization_mode="sync", vector_kwargs=same_step)
    check_by_hand(make, functools.partial(gymnasium.make, "CartPole-v1"), num_steps=60)


def test_drawing_needs_neither_screen_nor_sound(monkeypatch):
    names = ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER")
    for name in names:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    render.check_drawable(make_host_env("CartPole-v1"))
    assert [os.environ[name] for name in names] == ["dummy", "dummy"]


def test_rendering_uses_render_mode_rgb_array():
    """The environment also renders into its observations."""
    asked = []

    def make(render_mode="rgb_array"):
        asked.append(render_mode)
        return wrappers.AddRenderObservation(Counting(render_mode))

    envs = make_host_env(make).make([1], render=True)
    assert asked == ["rgb_array"] * 2
    assert envs.reset().shape == (1, 64, 48, 3)
    envs.step(np.ones(1, int))
    assert envs.render().shape == (64, 48, 3)
    envs.close()
    with pytest.raises(ValueError, match=r"cannot be drawn: its render_mode is None; .*can take render_mode"):
        make_host_env(lambda: Counting(None)).make([1], render=True)


def test_a_registered_custom_environment_by_id(monkeypatch):
    spec = EnvSpec("tests/Counting-v3", "host_probes:Counting", max_episode_steps=2)
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    make = functools.partial(gymnasium.make, spec.id)
    assert check_by_hand(f"host_probes:{spec.id}", make) == check_by_hand(spec.id, make) > 30


class WithoutRenderMode(Counting):
    def __init__(self):
        super().__init__()


def test_a_registered_environment_needs_no_render_mode(monkeypatch):
    spec = EnvSpec("tests/Counting-v4", WithoutRenderMode)
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    env = make_host_env(spec.id)
    with pytest.raises(ValueError, match=r"^tests/Counting-v4 cannot be drawn: it has no parameter render_mode$"):
        env.make([1], render=True)


def shown(space, obs):
    return type("Shown", (Counting,), {"observation_space": space, "see": lambda self: obs})


def acting(space):
    return type("Acting", (Counting,), {"action_space": space})


BOX = spaces.Box(0, 9, (2,))
make_vec = functools.partial(gymnasium.make_vec, "CartPole-v1")
REFUSED = {
    "CartPol-v1": "unknown environment 'CartPol-v1'; did you mean CartPole-v1",
    "CartPole-v7": "unknown environment 'CartPole-v7'; did you mean CartPole-v1",
    "qqqq": "unknown environment 'qqqq'; `jppo envs` lists",
    "": "unknown environment ''; `jppo envs` lists",
    "nowhere:Env": "there is no module nowhere",
    "host_probes.nowhere:Env": "there is no module host_probes.nowhere",
    "host_probes:Nothing": "module host_probes has no Nothing and registers no such environment",
    "host_probes:by_hand.no": "module host_probes has no by_hand.no",
    "os:getcwd": "os:getcwd made an object of type str; it must make a gymnasium.Env",
    ":": ": has no name after the colon; write module:name",
    "host_probes:": "host_probes: has no name after the colon; write module:name",
    "./host_probes.py:Counting": "write the name of the module, not of its file: host_probes:Counting",
    "host_probes.py:Counting": "write the name of the module, not of its file: host_probes:Counting",
    "host_probes:INSTANCE": "host_probes:INSTANCE is a Counting, not a class or function that makes a gymnasium.Env",
    "an instance": (
        Counting(),
        "Counting is an environment; pass a function that makes a new gymnasium environment",
    ),
    "a made one": (gymnasium.make("CartPole-v1"), r"num_envs of them: lambda: gymnasium.make\('CartPole-v1'\)"),
    "None": (None, "NoneType is neither a name nor a function"),
    "no environment": (lambda: 3, "made an object of type int; it must make a gymnasium.Env"),
    "a vector": (
        lambda: host_probes.same_step(2),
        "made an object of type SyncVectorEnv; it must make a gymnasium.Env",
    ),
    "no vector": (lambda num_envs: Counting(), "takes num_envs but returned a Counting, not a vector environment"),
    "NEXT_STEP": (host_probes.next_step, "next_step: SyncVectorEnv has autoreset_mode AutoresetMode.NEXT_STEP"),
    "a ghost step": (host_probes.next_step, "make it with autoreset_mode=AutoresetMode.SAME_STEP"),
    "make_vec": (make_vec, "make_vec: CartPoleVectorEnv has autoreset_mode AutoresetMode.NEXT_STEP"),
    "another width": (host_probes.two_whatever, "was called with num_envs = 1 but made 2"),
    "Text": (shown(spaces.Text(3), "abc"), "Shown: observation space Text.* is not supported; Box, Discrete, "),
    "a part": (shown(spaces.Dict(a=BOX, b=spaces.Text(3)), {}), "observation space Text.* is not supported"),
    "empty": (shown(spaces.Box(0, 1, (0,)), np.zeros(0, np.float32)), "observation space .* is not supported"),
    "no parts": (shown(spaces.Dict(), {}), r"Shown: observation space Dict\(\) has no arrays"),
    "actions": (acting(spaces.Text(3)), "action space Text.* is not supported; use Discrete, MultiDiscrete"),
    "whole actions": (acting(spaces.Box(0, 3000, (2,), np.int64)), "action space .*int64.* at most 1,024 integers"),
    "another shape": (shown(BOX, np.zeros(3, np.float32)), "Shown: .*observation"),
    "a number": (shown(BOX, 0.0), "Shown: .*observation"),
    "nothing": (shown(BOX, None), "Shown: .*observation"),
    "fractions": (shown(spaces.Box(0, 9, (2,), np.uint8), np.full(2, 0.5)), "Shown: .*observation"),
    "a missing part": (shown(spaces.Dict(a=BOX, b=BOX), {"a": np.zeros(2, np.float32)}), "Shown: .*observation"),
    "a number as space": (
        lambda: wrappers.TimeLimit(acting(2)(), 9),
        "action_space of Acting is 2 of type builtins.int; it must be a gymnasium.Space",
    ),
    "no spaces": (type("Bare", (gymnasium.Env,), {}), "Bare has no (observation|action)_space"),
}


@pytest.mark.parametrize("case", REFUSED.items(), ids=lambda case: case[0])
def test_invalid_environments_are_refused(case):
    name, said = case
    source, message = (name, said) if isinstance(said, str) else said
    with pytest.raises(ValueError, match=message):
        make_host_env(source)


def test_a_syntax_error_in_a_module_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "unfinished.py").write_text("x = 1\nif x\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"^unfinished:Env: .* in .*unfinished\.py, line 2$"):
        make_host_env("unfinished:Env")


def test_a_factory_must_make_a_new_environment_each_time():
    env = Counting()
    with pytest.raises(ValueError, match="returned the same environment twice; it must make a new one in each call"):
        make_host_env(lambda: env).make([1, 2])


def test_train_refuses_instances_of_environments():
    for env in (Counting(), gymnasium.make("CartPole-v1"), host_probes.same_step(2)):
        with pytest.raises(ValueError, match="pass a function that makes a new gymnasium environment"):
            jppo.train(env)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("CartPol-v1", "envpool has no task 'CartPol-v1'; did you mean envpool:CartPole-v1"),
        ("q", "has no task 'q'; `jppo envs envpool` lists all tasks"),
        ("Go9x9-v1", "envpool:Go9x9-v1 has 2 players; jppo supports only EnvPool's tasks with one player"),
        ("Sudoku-v0", "EnvPool cannot make envpool:Sudoku-v0: failed to open Sudoku database"),
    ],
)
def test_tasks_of_envpool_that_cannot_be_trained_are_refused(task, message):
    pytest.importorskip("envpool")
    with pytest.raises(ValueError, match=message):
        make_host_env(f"envpool:{task}")


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [
        ("ale_py", "ALE/Pong-v5", "atari"),
        ("ale_py", "atari:Pong-v5", "atari"),
        ("cv2", "atari:Pong-v5", "atari"),
        ("envpool", "envpool:CartPole-v1", "envpool"),
        ("mujoco", "HalfCheetah-v5", "mujoco"),
        ("Box2D", "LunarLander-v3", "box2d"),
        ("minigrid", "minigrid:MiniGrid-Empty-5x5-v0", "minigrid"),
    ],
)
def test_missing_packages_are_named(monkeypatch, package, name, extra):
    if package == "cv2":
        pytest.importorskip("ale_py")
    stored = ("gymnasium.envs.mujoco", "gymnasium.envs.box2d")  # modules that store whether the package is installed
    for module in [module for module in sys.modules if module.startswith(stored)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match="needs a package") as caught:
        make_host_env(name)
    assert str(caught.value) == f"{name} needs a package that is not installed; pip install 'jppo[{extra}]'"


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("MiniGrid-Empty-5x5-v0", "minigrid"),
        ("Craftax-Symbolic-v1", "craftax"),
        ("navix/Empty", "navix"),
        ("mujoco",) * 2,
    ],
)
def test_names_of_families_without_prefix_get_a_hint(monkeypatch, name, family):
    monkeypatch.setattr(modules, "is_installed", lambda family: False)
    message = str(modules.unknown_environment(name, []))
    assert message.endswith(f"; the family {family} is not installed; pip install 'jppo[{family}]'")
    monkeypatch.setattr(modules, "is_installed", lambda family: True)
    message = str(modules.unknown_environment(name, []))
    assert message.endswith(f"; `jppo envs {family}` lists the names of this family")
    near = f"{family}:{name}"
    assert str(modules.unknown_environment(name, [near])).endswith(f"; did you mean {near}?")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        *(("HumanoidStandup-v6", "HumanoidStandup-v5"), ("HumanoidStandup", "HumanoidStandup-v5")),
        *(("Humanoid", "Humanoid-v5"), ("Walker", "Walker2d-v5"), ("Acrobot", "Acrobot-v1")),
        *(("PointRobot", "PointRobot-misc"), ("Pong-v5", "atari:Pong-v5"), ("Blackjack-v2", "Blackjack-v1")),
    ],
)
def test_hints_for_other_names_are_the_closest_ones(name, known):
    assert str(modules.unknown_environment(name, [known])).endswith(f"; did you mean {known}?")


@pytest.mark.parametrize("name", ["Taxi-v4", "atari:Pong-v5", "pettingzoo:mpe/simple_v3"])
def test_environments_of_the_host_are_not_made_on_the_device(name):
    with pytest.raises(ValueError, match=rf"^{name} runs in actors, not on the device; pass the name itself"):
        jppo.make_env(name)


class Changing(Counting):
    """Its observations after the first step have another shape or dtype."""

    shown = np.zeros(2)

    def see(self):
        return self.shown if self.time else super().see()


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("shown", [np.zeros(2), np.zeros(6), np.zeros((3, 1)), np.zeros(()), np.zeros(3, complex)])
def test_observations_that_change_are_an_error(monkeypatch, shown, num_envs):
    monkeypatch.setattr(Changing, "shown", shown)
    envs = open_host_env(Changing).make(list(range(num_envs)))
    envs.reset()
    with pytest.raises((ValueError, TypeError)):
        envs.step(np.zeros(num_envs, np.int32))


class Uneven(Counting):
    """Observations after the first step have 2, 4 and 3 numbers instead of 3, so that their total is correct."""

    def see(self):
        return np.zeros((2, 4, 3)[self.seed]) if self.time else super().see()


def test_wrong_sizes_with_a_correct_total_are_refused():
    envs = open_host_env(Uneven).make([0, 1, 2])
    envs.reset()
    with pytest.raises(ValueError, match=r"lengths \[2, 3, 4\]"):
        envs.step(np.zeros(3, np.int32))


def test_errors_of_environments_are_raised_unchanged():
    with pytest.raises(ZeroDivisionError):
        make_host_env(lambda: 1 / 0)
    envs = make_host_env(host_probes.Failing).make([0])
    envs.reset()
    for _ in range(2):
        envs.step(np.zeros(1, np.int32))
    with pytest.raises(ArithmeticError, match="the simulator broke"):
        envs.step(np.zeros(1, np.int32))


class Exiting(Counting):
    def __init__(self, where, at=0, error=SystemExit):
        super().__init__()
        self.where, self.calls_left, self.error = where, at, error
        self.exit_in("making")

    def reset(self, **kwargs):
        self.exit_in("reset")
        return super().reset(**kwargs)

    def step(self, action):
        self.exit_in("step")
        return super().step(action)

    def exit_in(self, where):
        if where == self.where:
            if not self.calls_left:
                raise self.error(0)
            self.calls_left -= 1


@pytest.mark.parametrize("where", ["making", "reset"])
def test_exits_of_environments_are_errors(where):
    with pytest.raises(RuntimeError, match=r"^the environment called sys\.exit\(0\)$"):
        make_host_env(functools.partial(Exiting, where))


class OldReset(Counting):
    def reset(self):
        return super().reset()


class WithoutOptions(Counting):
    def reset(self, seed=None):
        return super().reset(seed=seed)


@pytest.mark.parametrize(("env", "missing"), [(OldReset, "seed"), (WithoutOptions, "options")])
def test_a_reset_of_old_versions_of_gym_is_named(env, missing):
    with pytest.raises(
        ValueError, match=rf"^{env.__name__}: reset has no parameter {missing}; def reset\(self, \*, seed"
    ):
        make_host_env(env)


class OddReward(Counting):
    def __init__(self, reward):
        super().__init__()
        self.odd = reward

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, self.odd, *rest


class OddStep(Counting):
    def __init__(self, returned):
        super().__init__()
        self.returned = returned

    def step(self, action):
        return self.returned


@pytest.mark.parametrize(
    ("returned", "description"),
    [(None, "a NoneType"), ((np.zeros(3), 0.0, True), "3 values"), ((0, 0.0, False, False, {}, 1), "6 values")],
)
def test_a_step_without_five_values_is_named_although_a_wrapper_fails(returned, description):
    with pytest.raises(ValueError, match=rf"step returned {description}.*; return obs, reward, terminated"):
        make_host_env(lambda: wrappers.TimeLimit(OddStep(returned), 9))


class Unpacking(Counting):
    def step(self, action):
        first, second = action, *()
        return first, second


def test_an_error_of_unpacking_in_the_environment_is_raised_unchanged():
    with pytest.raises(ValueError, match="not enough values to unpack") as raised:
        make_host_env(lambda: wrappers.TimeLimit(Unpacking(), 9))
    assert raised.traceback[-1].name == "step"


@pytest.mark.parametrize("reward", [None, "1", np.ones(1)], ids=["None", "text", "array"])
def test_a_reward_that_is_not_a_number_is_named(reward):
    with pytest.raises(ValueError, match=r"^OddReward: reward is .*, not a number; float\(reward\)$"):
        make_host_env(functools.partial(OddReward, reward))


def test_exceptions_that_end_the_process_are_errors():
    with pytest.raises(RuntimeError, match=r"^the environment called raise GeneratorExit$"):
        make_host_env(functools.partial(Exiting, "reset", error=GeneratorExit))


@pytest.mark.slow
@pytest.mark.parametrize("num_actors", [0, 1])
def test_a_run_whose_environment_exits_is_saved(tmp_path, num_actors):
    config = jppo.PPOConfig(num_envs=1, num_steps=8, num_minibatches=1, hidden_sizes=(4,))
    env = functools.partial(Exiting, "step", at=20)
    ray = jppo.RayConfig(num_actors=num_actors, max_restarts=0)
    with pytest.raises(jppo.ActorsFailed, match=r"RuntimeError: the environment called sys\.exit\(0\)") as caught:
        jppo.train(env, config=config, total_steps=80, ray=ray, run_dir=tmp_path / "run")
    assert caught.value.result.summary["updates"] == 2
    assert (tmp_path / "run/policy_state.npz").is_file()


def test_names_of_host_environments():
    taken = ("CartPole-v1", "host_probes:Counting", "envpool:Pong-v5", Counting, host_probes.disabled)
    assert all(map(is_host_env, taken))
    assert not any(map(is_host_env, ("Breakout-MinAtar", "cartpole", "", None)))
    names = host_env_names()
    assert {"CartPole-v1", "Pendulum-v1", "Taxi-v4", "HalfCheetah-v5"} <= set(names)
    assert "CartPole-v0" not in names


@pytest.mark.parametrize(("group", "name"), [("mujoco", "HalfCheetah-v5"), ("box2d", "LunarLander-v3")])
def test_usable_environments_have_their_package(monkeypatch, group, name):
    monkeypatch.setattr(host_families, "is_installed", lambda family: family in ("mujoco", "box2d"))
    assert name in host_env_names(usable=True)
    monkeypatch.setattr(host_families, "is_installed", lambda family: family in {"mujoco", "box2d"} - {group})
    short = name.partition("-")[0]
    assert not [one for one in host_env_names(usable=True) if one.startswith(short)]
    assert name in host_env_names()


class Fixed:
    """A network with constant action probabilities."""

    def __init__(self, *probabilities):
        self.logits = jnp.log(jnp.asarray(probabilities))

    def init(self, key, obs):
        return {}

    def apply(self, params, obs):
        batch = jax.tree.leaves(obs)[0].shape[0]
        return Categorical(jnp.broadcast_to(self.logits, (batch, len(self.logits)))), jnp.zeros(batch)


def evaluate(source, network, **options):
    env = make_host_env(source)
    state = PolicyState(params={}, obs_stats=())
    policy = TrainedPolicy(make_policy(network, env.obs_spec, env.action_spec), state)
    return jppo.evaluate(env, policy, **options)


def lengths_of(seed, count):
    """Returns the lengths of the episodes of `count` environments, which depend on their seeds."""
    return [2 + seed % 3 for seed in episodes._seeds(seed, count)]


def test_consecutive_seeds_share_no_environment_seed():
    seeds = [episodes._seeds(seed, 16) for seed in (0, 1, 2**32 - 1)]
    assert len({number for numbers in seeds for number in numbers}) == 48
    assert all(0 <= number < 2**31 for numbers in seeds for number in numbers)


@pytest.mark.parametrize("action", [0, 1])
def test_evaluation_counts_every_episode_once(action):
    """Sixteen environments play twenty episodes: the first four play two each."""
    played = evaluate(Counting, Fixed(0.9 - 0.8 * action, 0.1 + 0.8 * action), num_episodes=20, seed=5)
    lengths = [n for i, n in enumerate(lengths_of(5, 16)) for _ in range(2 if i < 4 else 1)]
    assert played.lengths.tolist() == lengths
    assert played.returns.tolist() == [n * (n - 1) / 2 + 0.5 * n * action for n in lengths]
    assert played.finished.all()
    assert [x.dtype for x in played] == [np.float32, np.int32, bool]
    summary = played.summary()
    assert (summary["episodes"], summary["unfinished"]) == (20, 0)
    assert summary["length_mean"] == np.mean(lengths)


def test_evaluation_can_sample_actions():
    """The reward contains half the action."""
    draws = [evaluate(Counting, Fixed(0.4, 0.6), num_episodes=400, seed=seed, sampled=True) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(draws[0].returns, draws[1].returns)
    ones = [2.0 * (played.returns - played.lengths * (played.lengths - 1) / 2) for played in draws]
    assert ones[0][:100].tolist() != ones[2][:100].tolist()
    share = ones[0].sum() / draws[0].lengths.sum()
    assert share == pytest.approx(0.6, abs=4 * 0.5 / np.sqrt(draws[0].lengths.sum()))


def test_evaluation_stops_at_max_steps():
    played = evaluate(Counting, Fixed(0.9, 0.1), num_episodes=6, max_steps=2)
    assert played.lengths.tolist() == [2] * 6
    finished = [length == 2 for length in lengths_of(0, 6)]
    assert 0 < sum(finished) < 6
    assert played.finished.tolist() == finished
    assert played.returns.tolist() == [1.0] * 6
    assert played.summary()["unfinished"] == 6 - sum(finished)
    endless = evaluate(host_probes.NaNReward, Fixed(0.9, 0.1), num_episodes=40, max_steps=3)
    assert endless.lengths.tolist() == [3] * 16, "an environment must stop after an unfinished episode"
    assert not endless.finished.any()


def test_evaluation_supports_dicts_and_actions_that_do_not_start_at_0():
    played = evaluate(Parts, Fixed(0.2, 0.1, 0.7), num_episodes=3)
    lengths = np.array(lengths_of(0, 3))
    assert played.lengths.tolist() == lengths.tolist()
    assert played.returns.tolist() == (lengths * (lengths - 1) / 2 + 0.5 * 6 * lengths).tolist()


def test_dict_keys_of_different_types_are_refused():
    class Named(Counting):
        observation_space = spaces.Dict({1: spaces.Box(0, 1, (2,)), "a": spaces.Discrete(2)})

    with pytest.raises(ValueError, match=r"Named: observation space .* has names of different types"):
        make_host_env(Named)
