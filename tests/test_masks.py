"""Tests masks in the info of Gymnasium environments, states without legal actions, and masks in jppo.check_env."""

import functools

import broken_host_envs as host
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from host_probes import Compound, Counting, InfoMasked, MaskedVector, masked_vector
from probes import Masked

import jppo
from jppo.actors import numpy_policy
from jppo.actors.actor import make_actor_error
from jppo.benchmark.timing import step_environments
from jppo.envs.contract import BrokenContractError
from jppo.envs.masks import check_mask_spec, nearest_legal
from jppo.envs.spaces import ActionSpec, ObsSpec
from jppo.runs import render
from jppo.runs.render import play_gif

QUICK = {"config": SMALL(num_minibatches=2), "learning_rate": 1e-3, "num_actors": 0, "progress": "none"}


class Inner(Counting):
    """Gives all actions as legal."""

    def info(self):
        return {"action_mask": np.ones(2, bool)}


class Several(Counting):
    """Has a MultiDiscrete action, and its mask as a tuple of one array per component, as Gymnasium's spaces take it."""

    action_space = spaces.MultiDiscrete([3, 2])

    def info(self):
        return {"action_mask": (np.eye(3, dtype=np.int8)[self.time % 3], np.array([0, 1], np.int8))}

    def step(self, action):
        assert tuple(action) == (self.time % 3, 1), action
        return super().step(action)


class Parts(Compound):
    """Has a dict of observations."""

    action_space = spaces.Discrete(2)

    def info(self):
        return {"action_mask": np.array([0, 1], np.int8)}

    def step(self, action):
        assert action == 1, action
        return Counting.step(self, action)


def test_a_mask_in_the_info_works_in_every_command(tmp_path):
    run_dir = tmp_path / "run"
    result = jppo.train(InfoMasked, total_steps=64, run_dir=run_dir, **QUICK)
    result = jppo.train(InfoMasked, total_steps=128, run_dir=run_dir, run=jppo.RunConfig(resume=True), **QUICK)
    assert result.summary["updates"] == 4
    lengths, returns = result.metrics["episode/length_mean"], result.metrics["episode/return_mean"]
    np.testing.assert_array_equal(lengths, returns)
    evaluation = jppo.evaluate(result, num_episodes=5, sampled=True)
    np.testing.assert_array_equal(evaluation.returns, evaluation.lengths)
    played = play_gif(result.agent.env, result.policy, sampled=True)
    assert played.episode_return == played.length
    policy = jppo.load_policy(run_dir, env=InfoMasked)
    exported = numpy_policy.load(jppo.export_policy(policy, tmp_path / "policy.npz"))
    env = InfoMasked()
    obs, info = env.reset(seed=3)
    obs = {"observation": obs, "action_mask": info["action_mask"]}
    assert policy.act(obs) == policy.act(obs, sampled=True) == exported.act(obs) == 1 + 3 % 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "names", "mask"),
    [
        (InfoMasked, ["action_mask", "observation"], ObsSpec((4,), "int8")),
        (Several, ["action_mask", "observation"], ObsSpec((5,), "int8")),
        (Parts, ["action_mask", "bits", "clock", "image", "numbers"], ObsSpec((2,), "int8")),
    ],
)
def test_a_mask_in_the_info_becomes_an_observation_leaf(env, names, mask):
    made = jppo.make_host_env(env)
    assert sorted(made.obs_spec) == names
    assert made.obs_spec["action_mask"] == mask
    obs = made.make([0, 1]).reset()
    assert obs["action_mask"].shape == (2, *mask.shape)
    jppo.train(env, total_steps=32, **QUICK)  # step raises for illegal actions


def test_a_mask_in_the_observation_comes_before_the_info():
    class Both(Inner):
        observation_space = spaces.Dict(x=Counting.observation_space, action_mask=spaces.MultiBinary(2))

        def see(self):
            return {"x": super().see(), "action_mask": np.array([1, 0], np.int8)}

    made = jppo.make_host_env(Both)
    assert not made.adds_mask
    np.testing.assert_array_equal(made.make([0]).reset()["action_mask"], [[1, 0]])


def broken(mask, from_time=1, space=None):
    """Returns a class of environments whose mask is invalid from this time on."""

    class Broken(Inner):
        action_space = space or Counting.action_space

        def info(self):
            return super().info() if self.time < from_time else mask

    return Broken


def as_vector(env, mode):
    """Returns a function that makes vectors of Gymnasium with masks in the infos."""
    return lambda num_envs: SyncVectorEnv([env] * num_envs, copy=False, autoreset_mode=mode)


INVALID_MASKS = [
    ({}, r"the info of step has no action_mask, but that of an earlier reset had one; return the mask in the info"),
    ({"action_mask": np.ones(3, bool)}, r"action_mask in the info of step is bool of 3 entries, .*; return 2 bools"),
    ({"action_mask": np.ones(2)}, r"action_mask in the info of step is float64 of 2 entries, .*; return 2 bools"),
    ({"action_mask": np.array([0, 2])}, r"action_mask in the info of step is int64 of 2 entries, \[0 2\]; return 2 b"),
    ({"action_mask": None}, r"action_mask in the info of step is object of 1 entries"),
]


@pytest.mark.parametrize(("info", "message"), INVALID_MASKS)
def test_an_invalid_mask_in_the_info_is_reported_in_one_line(info, message):
    with pytest.raises(ValueError, match=f"^broken.*Broken: {message}"):
        jppo.make_host_env(broken(info))
    envs = jppo.make_host_env(broken(info, from_time=2)).make([3])  # an episode of this seed has two steps
    envs.step(np.array([0]))
    with pytest.raises(ValueError, match=f"^{message}"):
        envs.step(np.array([0]))


@pytest.mark.slow
def test_an_invalid_mask_during_a_run_ends_it_with_one_line():
    with pytest.raises(jppo.ActorsFailed) as error:
        jppo.train(broken({}, from_time=2), total_steps=64, **QUICK)
    assert str(error.value).endswith("reset had one; return the mask in the info of each reset and step")
    assert "\n" not in str(error.value)
    actor_error = make_actor_error(BrokenContractError("no mask", "return one"), "traceback")
    assert actor_error == ("no mask; return one", "")


def test_masks_in_the_info_that_are_not_supported_are_reported_in_one_line():
    box = broken({}, 10, spaces.Box(-1.0, 1.0, (2,)))
    with pytest.raises(ValueError, match=r"there is an action_mask, but the action space Box.* has no categories; rem"):
        jppo.make_host_env(box)
    with pytest.raises(ValueError, match=r"SyncVectorEnv has autoreset_mode AutoresetMode\.NEXT_STEP"):
        jppo.make_host_env(as_vector(Inner, AutoresetMode.NEXT_STEP))


class Method(InfoMasked):
    """Has its mask as the method action_masks(), as for MaskablePPO of sb3-contrib."""

    def info(self):
        return {}

    def action_masks(self):
        return super().info()["action_mask"].astype(bool)


class ListOfParts(Several):
    """Returns one list per component. The mask in the info differs, and counts less than the method."""

    def info(self):
        return {"action_mask": np.ones(5, bool)}

    def action_masks(self):
        return [[self.time % 3 == i for i in range(3)], [False, True]]


class Bits(Method):
    """Has MultiBinary actions: two entries per bit."""

    action_space = spaces.MultiBinary(2)

    def action_masks(self):
        return np.array([1, 0, 0, 1], bool)

    def step(self, action):
        assert tuple(action) == (0, 1), action
        return Counting.step(self, action)


class ActionMasker(gymnasium.Wrapper):
    """The wrapper of sb3-contrib: the method exists in this wrapper only."""

    def action_masks(self):
        return self.unwrapped.info()["action_mask"]


def wrapped():
    """Has more wrappers around the one with the method, as those of gymnasium.make."""
    return gymnasium.wrappers.TimeLimit(ActionMasker(InfoMasked()), 3)


@pytest.mark.parametrize("env", [Method, ListOfParts, Bits, wrapped])
def test_the_method_action_masks_is_the_mask(env):
    made = jppo.make_host_env(env)
    assert (made.adds_mask, sorted(made.obs_spec)) == (True, ["action_mask", "observation"])
    jppo.train(env, total_steps=64, **QUICK)  # step raises for illegal actions
    report = jppo.check_env(env, steps=32, num_envs=2)
    assert report["masks"].status == "pass", report


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (np.ones(3, bool), "is bool of 3 entries, .*; return 4 bools, or integers 0 and 1"),
        (np.ones(4), "is float64 of 4 entries"),
        (None, "is object of 1 entries"),
    ],
)
def test_an_invalid_result_of_action_masks_is_reported_in_one_line(monkeypatch, masks, message):
    monkeypatch.setattr(Method, "action_masks", lambda self: masks)
    with pytest.raises(ValueError, match=rf"^Method: action_masks\(\) after reset {message}"):
        jppo.make_host_env(Method)


@pytest.mark.parametrize("env", [InfoMasked, Method, Several])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_masks_outside_the_observations_of_a_vector_are_refused(env, mode):
    with pytest.raises(ValueError, match=r"a vector environment has a.*; make the mask a leaf of a Dict"):
        jppo.make_host_env(as_vector(env, mode))


@pytest.mark.parametrize(
    ("spec", "mask", "action", "chosen"),
    [
        (ActionSpec((), "int32", num_actions=3, start=5), [[0, 1, 0], [1, 0, 1]], [7, 6], [6, 7]),
        (
            ActionSpec((2,), "int32", nvec=(3, 2), start=(1, 0)),
            [[0, 1, 0, 1, 0], [1, 0, 1, 0, 1]],
            [[1, 1], [2, 0]],
            [[2, 0], [3, 1]],
        ),
        (
            ActionSpec((2, 2), "int32", nvec=(3, 2, 1, 4)),
            [[0, 0, 1, 1, 0, 1, 0, 1, 0, 0]],
            [[[0, 1], [0, 2]]],
            [[[2, 0], [0, 1]]],
        ),
    ],
)
def test_an_illegal_action_is_replaced_by_the_next_legal_one(spec, mask, action, chosen):
    for module in (np, jnp):
        found = nearest_legal(spec, module.asarray(mask), module.asarray(action, spec.dtype))
        assert found.dtype == spec.dtype
        np.testing.assert_array_equal(found, chosen)


def test_taxi_has_a_mask():
    made = jppo.make_host_env("Taxi-v4")
    envs = made.make([0, 1])
    obs, taxi = envs.reset(), gymnasium.make("Taxi-v4")
    number, info = taxi.reset(seed=1)
    assert obs["observation"][1] == number
    np.testing.assert_array_equal(obs["action_mask"][1], info["action_mask"])
    assert made.obs_spec["observation"].num_categories == 500


class EmptyOnHost(InfoMasked):
    """Marks no action as legal at time 1 of each episode, in which it raises for every action."""

    def info(self):
        info = super().info()
        return {"action_mask": info["action_mask"] * np.int8(self.time != 1)}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"recurrent": "none"}, {"recurrent": "lstm", "sequence_length": 4}])
@pytest.mark.parametrize("num_actors", [0, 2])
def test_a_mask_without_legal_actions_ends_a_run_on_the_host(options, num_actors):
    message = "EmptyOnHost: action_mask marks no legal action in environment 0 at step 1 of a rollout; every mask must"
    with pytest.raises((ValueError, jppo.ActorsFailed), match=message):
        jppo.train(
            EmptyOnHost,
            total_steps=64,
            **QUICK | {"config": SMALL(**options), "num_actors": num_actors, "max_restarts": 0},
        )


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_mask_without_legal_actions_ends_a_run_on_the_device(num_devices):
    with pytest.raises(jppo.TrainingDiverged, match=r"update 1 made .* its masks for rows without a legal action"):
        jppo.train(device_masked(empty_at=3), config=SMALL(), total_steps=64, num_devices=num_devices, progress="none")


@pytest.mark.slow
def test_bench_takes_legal_actions_only():
    result = jppo.bench(InfoMasked, config=SMALL(), num_actors=0, seconds=0.1)  # step raises for illegal actions
    assert result.env == "InfoMasked"
    agent = jppo.make_anakin(Masked(), SMALL())
    start = jax.jit(agent.init)(jax.random.key(0)).collect
    end = jax.jit(functools.partial(step_environments, agent))(start, jax.random.key(1))
    np.testing.assert_array_equal(end.episode.returns, end.episode.lengths)  # -1 for an illegal action


def test_a_policy_raises_for_a_mask_without_legal_actions():
    result = jppo.train(InfoMasked, total_steps=32, **QUICK)
    with pytest.raises(
        ValueError, match="EmptyOnHost: action_mask marks no legal action in environment 0 at step 1; e"
    ):
        jppo.evaluate(EmptyOnHost, result.policy, num_episodes=2)
    with pytest.raises(
        ValueError, match="EmptyOnHost: action_mask marks no legal action in environment 0 at step 1; e"
    ):
        play_gif(jppo.make_host_env(EmptyOnHost), result.policy)
    obs = {"observation": np.zeros((2, 3)), "action_mask": np.array([[0, 0, 1, 0], [0, 0, 0, 0]], np.int8)}
    with pytest.raises(ValueError, match="action_mask marks no legal action in row 1 of the observations; every mask"):
        result.policy.act(obs)
    assert result.policy.value(obs).shape == (2,)


@pytest.mark.slow
def test_an_evaluation_on_the_device_raises_for_a_mask_without_legal_actions(monkeypatch):
    result = jppo.train(Masked(), config=SMALL(), total_steps=96, progress="none")
    np.testing.assert_array_equal(result.metrics["episode/return_mean"], 5.0)
    np.testing.assert_array_equal(jppo.evaluate(result, num_episodes=3).returns, 5.0)
    env, message = jppo.make_env(device_masked(empty_at=3)), "Masked: action_mask .* in episode 0 at step 3; every mask"
    with pytest.raises(ValueError, match=message):
        jppo.evaluate(env, result.policy, num_episodes=3)
    monkeypatch.setattr(render, "check_drawable", lambda env: None)
    with pytest.raises(ValueError, match=message):
        play_gif(env, result.policy)
    returns = []
    played = render._play_on_device(env, result.policy, 0, False, 3, lambda state, so_far: returns.append(so_far))
    assert (returns, *played) == ([1.0, 2.0, 3.0], 3.0, False)
    with pytest.raises(ValueError, match="in episode 0 at step 3; every mask"):
        play_gif(jppo.make_env(EmptyFromThree()), result.policy)


@pytest.mark.slow
def test_a_million_steps_on_the_device_contain_no_illegal_action():
    config = SMALL(num_envs=1000, num_steps=40, num_minibatches=4)
    result = jppo.train(Masked(), config=config, total_steps=1_000_000, progress="none")
    assert result.summary["steps"] == 1_000_000
    np.testing.assert_array_equal(result.metrics["episode/length_mean"], 5.0)  # an illegal action ends the episode
    np.testing.assert_array_equal(result.metrics["episode/return_mean"], 5.0)


@pytest.mark.slow
def test_a_million_steps_on_the_host_contain_no_illegal_action(monkeypatch):
    monkeypatch.setattr(MaskedVector, "illegal", 0)
    monkeypatch.setattr(MaskedVector, "steps", 0)
    config = SMALL(num_envs=500, num_steps=80, num_minibatches=4)
    result = jppo.train(masked_vector, total_steps=1_000_000, **QUICK | {"config": config})
    assert result.summary["steps"] == 1_000_000
    np.testing.assert_array_equal(result.metrics["episode/length_mean"], 50.0)  # an illegal action ends the episode
    np.testing.assert_array_equal(result.metrics["episode/return_mean"], 50.0)
    assert MaskedVector.steps >= 1_000_000
    assert MaskedVector.illegal == 0


@pytest.mark.slow
def test_actors_take_no_illegal_action():
    config = SMALL(num_envs=40, num_steps=50, num_minibatches=4)
    result = jppo.train(masked_vector, total_steps=20_000, **QUICK | {"config": config, "num_actors": 2})
    assert result.summary["steps"] == 20_000
    np.testing.assert_array_equal(result.metrics["episode/length_mean"], 50.0)  # an illegal action ends the episode
    np.testing.assert_array_equal(result.metrics["episode/return_mean"], 50.0)


class MaskedWalk(host.Sound):
    """Has a mask that allows both actions, or that allows action 1 only, alternately."""

    observation_space = spaces.Dict(x=host.Sound.observation_space, action_mask=spaces.Box(-9, 9, (2,), np.int8))
    always = np.array([0, 1], np.int8)

    def see(self):
        return {"x": super().see(), "action_mask": self.mask()}

    def mask(self):
        return self.always | (self.age % 2)

    def step(self, action):
        self.act(action)
        return super().step(action)

    def act(self, action):
        assert action or self.age % 2, "illegal action"


class Twos(MaskedWalk):
    def mask(self):
        return super().mask() * np.int8(2)


class EmptyLater(MaskedWalk):
    def mask(self):
        return super().mask() * np.int8(self.age != 7)


class EmptyAtTheEnd(MaskedWalk):
    def mask(self):
        return super().mask() * np.int8(self.age < 25 and abs(self.place) <= 0.5)


class RaisesForLegal(MaskedWalk):
    def act(self, action):
        assert action != 0, "0 is not possible"


class FloatMask(MaskedWalk):
    observation_space = spaces.Dict(x=host.Sound.observation_space, action_mask=spaces.Box(0.0, 1.0, (2,)))

    def mask(self):
        return super().mask().astype(np.float32)


class ThreeEntries(MaskedWalk):
    observation_space = spaces.Dict(x=host.Sound.observation_space, action_mask=spaces.MultiBinary(3))
    always = np.ones(3, np.int8)


def masked_walks(num_envs):
    return SyncVectorEnv([MaskedWalk] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def device_masked(**fields):
    env = Masked()
    vars(env).update(fields)
    return env


class EmptyFromThree(Masked):
    """Has no legal action from time 3 on. Illegal actions do not end the episode."""

    def get_obs(self, state, *args):
        obs = super().get_obs(state, *args)
        return obs | {"action_mask": obs["action_mask"] & (state.time < 3)}

    def step_env(self, *args):
        obs, state, reward, _, info = super().step_env(*args)
        return obs, state, reward, state.time < 0, info


class DeviceTwos(Masked):
    def get_obs(self, *args):
        obs = super().get_obs(*args)
        return obs | {"action_mask": 2 * obs["action_mask"].astype(np.int32)}


class SevenEntries(Masked):
    def get_obs(self, *args):
        return super().get_obs(*args) | {"action_mask": np.ones(7, bool)}

    def observation_space(self, params=None):
        whole = super().observation_space(params)
        return type(whole)(whole.spaces | {"action_mask": spaces.MultiBinary(7)})


def test_the_error_for_a_mask_of_combinations_names_the_remedy():
    obs_spec = {"action_mask": ObsSpec((4, 10), "bool")}
    with pytest.raises(ValueError, match=r"40 entries; the action space has 14 categories; for a mask of combinations"):
        check_mask_spec(obs_spec, ActionSpec((2,), "int32", nvec=(4, 10)))
    with pytest.raises(ValueError, match=r"40 entries; the action space has 3 categories$"):
        check_mask_spec(obs_spec, ActionSpec((), "int32", num_actions=3))


@pytest.mark.parametrize("env", [MaskedWalk, EmptyAtTheEnd, masked_walks, InfoMasked, Several, Masked()])
def test_check_env_takes_legal_actions_only(env):
    check = jppo.check_env(env, steps=64, num_envs=2)["masks"]
    assert check.status == "pass", check
    assert "masks; on average," in check.seen


@pytest.mark.parametrize(
    ("env", "status", "seen"),
    [
        (Twos, "fail", "action_mask contains 2"),
        (EmptyLater, "fail", "action_mask marks no legal action in the state after"),
        (RaisesForLegal, "fail", "with action 0, which action_mask marks as legal, raised AssertionError: 0 is not"),
        (ThreeEntries, "fail", "action_mask has shape (3,), 3 entries; the action space has 2 categories"),
        (FloatMask, "warn", "action_mask is float32"),
        (broken({}, from_time=2), "fail", "the info of step has no action_mask"),
        (device_masked(empty_at=3), "fail", "action_mask marks no legal action"),
        (DeviceTwos(), "fail", "action_mask contains 2"),
        (SevenEntries(), "fail", "action_mask has shape (7,), 7 entries; the action space has 6 categories"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__),
)
def test_check_env_finds_an_invalid_mask(env, status, seen):
    report = jppo.check_env(env, steps=64, num_envs=2)
    assert report["masks"].status == status
    assert seen in report["masks"].seen
    assert report["masks"].advice
    assert set(report.failed) <= {"masks"}
