"""Tests exported policies: they act like the trained policy, and damaged or foreign files execute nothing."""

import collections
import contextlib
import copy
import dataclasses
import functools
import hashlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL, cpu_only
from lenient import lenient
from saved import save_run

import jppo
from jppo.actors import numpy_policy
from jppo.cli.main import main
from jppo.envs.masks import has_mask, without_mask
from jppo.envs.spaces import ActionSpec, ObsSpec
from jppo.networks.actor_critic import make_network
from jppo.networks.distributions import Categorical
from jppo.ppo.normalization import Moments
from jppo.ppo.policy import make_policy
from jppo.ppo.types import PolicyState
from jppo.runs.load import load_run
from jppo.runs.policy import TrainedPolicy

FOUR = ObsSpec((4,), "float32")
THREE = ActionSpec((), "int32", num_actions=3)
INF = float("inf")
BOX = ActionSpec((2, 2), "float32", low=(-2.0, 0.5, -1.0, -INF), high=(2.0, 3.0, INF, INF))
PARTS = {
    "where": ObsSpec((1,), "float32"),
    "picture": ObsSpec((2, 2), "uint8"),
    "both": (ObsSpec((), "int32", 9, start=-1), ObsSpec((3,), "int8")),
}
PRIVILEGED = {
    "z": FOUR,
    "action_mask": ObsSpec((3,), "int8"),
    "a": {"y": ObsSpec((2, 2), "uint8"), "x": FOUR},
    "unseen": ObsSpec((), "int32", 5),
}
CASES = {
    "tanh": ({}, FOUR, THREE),
    "relu, shared": ({"activation": "relu", "shared_torso": True}, FOUR, ActionSpec((), "int8", 3, start=4)),
    "swish, clip": ({"activation": "swish", "normalize_obs": True}, FOUR, BOX),
    "tanh bounds, eleven layers": ({"action_bounds": "tanh", "hidden_sizes": (5,) * 11}, FOUR, BOX),
    "linear": ({"hidden_sizes": ()}, ObsSpec((3, 2), "int32"), ActionSpec((), "float32", low=(-3.0,), high=(INF,))),
    "one-hot": ({"normalize_obs": True}, ObsSpec((), "int32", 5, start=-2), THREE),
    "dict": ({"normalize_obs": True, "shared_torso": True}, PARTS, THREE),
    "masked": ({"normalize_obs": True}, {"z": FOUR, "action_mask": ObsSpec((3,), "int8"), "a": FOUR}, THREE),
    "masked images": ({"network": "cnn"}, {"x": ObsSpec((6, 5, 4), "bool"), "action_mask": ObsSpec((3,), "i1")}, THREE),
    "asymmetric": ({"actor_obs": ("z",), "critic_obs": ("z", "a"), "normalize_obs": True}, PRIVILEGED, THREE),
    "small images": ({"network": "cnn"}, ObsSpec((10, 8, 4), "bool"), THREE),
    "stacks": ({"network": "cnn", "shared_torso": True, "normalize_obs": True}, ObsSpec((2, 7, 9), "float32"), BOX),
    "screens": ({"network": "cnn", "activation": "swish"}, ObsSpec((47, 52, 3), "uint8"), BOX),
    "image and vectors": (
        {"network": "cnn", "shared_torso": True, "normalize_obs": True},
        {"image": ObsSpec((6, 5, 4), "uint8"), "place": ObsSpec((), "int32", 5), "velocity": FOUR},
        THREE,
    ),
    "images of two kinds": (
        {"network": "cnn", "actor_obs": ("grid", "state"), "critic_obs": ("screen", "grid", "hint")},
        {
            "screen": ObsSpec((3, 45, 40), "uint8"),
            "state": FOUR,
            "action_mask": ObsSpec((3,), "int8"),
            "grid": ObsSpec((6, 5, 4), "bool"),
            "hint": FOUR,
        },
        THREE,
    ),
    "image for the critic": (
        {"network": "cnn", "actor_obs": ("state",), "critic_obs": ("image",)},
        {"image": ObsSpec((6, 5, 4), "bool"), "state": FOUR},
        THREE,
    ),
    "scalars": ({"normalize_obs": True}, {"place": ObsSpec((), "float32"), "velocity": FOUR}, THREE),
    "scalar": ({"normalize_obs": True}, ObsSpec((), "float32"), THREE),
    "stacks of screens": ({"network": "cnn", "shared_torso": True}, ObsSpec((4, 45, 40), "uint8"), THREE),
}  # fmt: skip


def is_spec(node):
    return isinstance(node, ObsSpec)


def observations(obs_spec, count):
    """Returns a batch of random observations."""
    rng = np.random.default_rng(0)

    def draw(spec):
        if spec.dtype == "float32":
            return rng.normal(0.0, 2.0, (count, *spec.shape)).astype(np.float32)
        low, high = (spec.start, spec.start + spec.num_categories) if spec.num_categories else (0, 2)
        return rng.integers(low, 256 if spec.dtype == "uint8" else high, (count, *spec.shape)).astype(spec.dtype)

    obs = jax.tree.map(draw, obs_spec, is_leaf=is_spec)
    if has_mask(obs):
        obs["action_mask"][np.arange(count), rng.integers(3, size=count)] = 1
    return obs


def untrained(settings, obs_spec, action_spec, network=None):
    """Returns a policy with random weights that are large enough to affect the actions."""
    config = SMALL(**settings)
    whole = make_policy(
        network or make_network(config, obs_spec, action_spec),
        obs_spec,
        jax.tree.map(lambda spec: dataclasses.replace(spec, bounds=config.action_bounds), action_spec),
    )
    rng, obs = np.random.default_rng(1), observations(obs_spec, 1)
    shapes = jax.eval_shape(whole.init, jax.random.key(0), obs)

    def draw(leaf):
        return jnp.asarray(rng.normal(0.0, 1.0, leaf.shape) * np.prod(leaf.shape[:-1]) ** -0.5, jnp.float32)

    def moments(spec):
        mean, spread = (rng.uniform(0.2, 2.0, spec.feature_shape).astype(np.float32) for _ in range(2))
        return Moments(count=jnp.asarray(9.0), mean=jnp.asarray(mean), m2=jnp.asarray(9.0 * spread))

    stats = jax.tree.map(moments, without_mask(obs_spec), is_leaf=is_spec) if config.normalize_obs else ()
    state = PolicyState(params=jax.tree.map(draw, shapes), obs_stats=stats)
    if action_spec == THREE and not whole.is_recurrent and network is None:  # every action must occur
        masked, obs = has_mask(obs_spec), observations(obs_spec, 16)
        logits = whole.step(state, obs | {"action_mask": np.ones((16, 3), bool)} if masked else obs)[0].logits
        state.params["params"]["policy"]["bias"] -= logits.mean(axis=0)
    return TrainedPolicy(whole, state)


@pytest.fixture(scope="module")
def simple():
    return untrained({}, FOUR, THREE)


@pytest.fixture
def exported(simple, tmp_path):
    return jppo.export_policy(simple, tmp_path / "policy.npz")


@pytest.mark.parametrize("name", CASES)
def test_exported_policies_equal_the_trained_policy(name, tmp_path):
    trained, obs_spec = untrained(*CASES[name]), CASES[name][1]
    batch = observations(obs_spec, 16)
    actions, values = trained.act(batch), trained.value(batch)
    assert np.unique(actions, axis=0).shape[0] > 1, "the policy must not be constant"
    for path, load in (("policy.npz", numpy_policy.load), ("policy.stablehlo", jppo.load_exported)):
        loaded = load(jppo.export_policy(trained, tmp_path / path))
        acted, valued = loaded.act(batch), loaded.value(batch)
        assert (acted.dtype, acted.shape) == (actions.dtype, actions.shape)
        assert (valued.dtype, valued.shape) == (np.float32, (16,))
        np.testing.assert_allclose(valued, values, rtol=1e-4, atol=1e-4)
        if CASES[name][2].num_actions:
            np.testing.assert_array_equal(acted, actions)
        else:
            np.testing.assert_allclose(acted, actions, rtol=1e-4, atol=1e-4)
        if path == "policy.npz" or name == "dict":  # another program to compile
            one = jax.tree.map(lambda leaf: leaf[0], batch)
            np.testing.assert_allclose(loaded.act(one), actions[0], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(loaded.value(one), values[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        loaded.act(batch, sampled=True, seed=3), trained.act(batch, sampled=True, seed=3), rtol=1e-5, atol=1e-6
    )
    assert sorted(tmp_path.iterdir()) == [tmp_path / "policy.npz", tmp_path / "policy.stablehlo"]


SEVERAL = ActionSpec((2, 2), "int16", nvec=(2, 3, 4, 2), start=(1, 0, 0, -7))
NESTED = {
    "turn": ActionSpec((), "int32", 3, start=4),
    "arm": (BOX, SEVERAL),
    "keys": ActionSpec((3,), "int8", nvec=(2,) * 3),
}
MASKED = {"x": FOUR, "action_mask": ObsSpec((11,), "bool")}


@pytest.mark.parametrize(("obs_spec", "action_spec"), [(PARTS, NESTED), (MASKED, SEVERAL), (FOUR, {"a": BOX})], ids=str)
def test_actions_of_several_components_are_exported(obs_spec, action_spec, tmp_path):
    trained, batch = untrained({"action_bounds": "tanh"}, obs_spec, action_spec), observations(obs_spec, 16)
    if has_mask(obs_spec):
        batch["action_mask"][:, [1, 3, 5, 10]] = True
    actions, near = trained.act(batch), functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    one = jax.tree.map(lambda leaf: leaf[0], (batch, actions))
    for path, load in (("policy.npz", numpy_policy.load), ("policy.stablehlo", jppo.load_exported)):
        loaded = load(jppo.export_policy(trained, tmp_path / path))
        acted = loaded.act(batch)
        jax.tree.map(near, acted, actions)
        assert jax.tree.map(lambda leaf: leaf.dtype, acted) == jax.tree.map(lambda leaf: leaf.dtype, actions)
    jax.tree.map(near, numpy_policy.load(tmp_path / "policy.npz").act(one[0]), one[1])
    sampled = numpy_policy.load(tmp_path / "policy.npz").act(batch, rng=np.random.default_rng(0))
    assert jax.tree.map(np.shape, sampled) == jax.tree.map(np.shape, actions)
    if has_mask(obs_spec):
        batch["action_mask"][:] = False
        batch["action_mask"][:, [1, 3, 5, 10]] = True
        np.testing.assert_array_equal(loaded.act(batch), np.broadcast_to([[2, 1], [0, -6]], (16, 2, 2)))
        batch["action_mask"][3, 10] = False
        with pytest.raises(ValueError, match="action_mask marks no legal action in row 3"):
            numpy_policy.load(tmp_path / "policy.npz").act(batch)


RECURRENT = {
    "gru": ({"recurrent": "gru", "hidden_sizes": (8, 7), "recurrent_size": 5, "normalize_obs": True}, PARTS, BOX),
    "one part": ({"recurrent": "gru", "actor_obs": ("cue",), "critic_obs": ("cue",)}, {"a": FOUR, "cue": FOUR}, BOX),
    "lstm": ({"recurrent": "lstm", "hidden_sizes": (), "recurrent_size": 6}, FOUR, BOX),
    "images": (
        {"recurrent": "gru", "network": "cnn", "shared_torso": True},
        {"image": ObsSpec((6, 5, 4), "bool"), "x": FOUR},
        THREE,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_policies_are_exported(name, tmp_path):
    """Plays three steps, with a new episode in some rows of the last."""
    trained, near = untrained(*RECURRENT[name]), functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    batch, starts = observations(RECURRENT[name][1], 12), np.arange(4) == 1
    steps = [jax.tree.map(lambda leaf, t=t: leaf[4 * t : 4 * t + 4], batch) for t in range(3)]
    for path, load in (("policy.npz", numpy_policy.load), ("policy.stablehlo", jppo.load_exported)):
        loaded = load(jppo.export_policy(trained, tmp_path / path))
        state = expected_state = None
        for obs, start in zip(steps, (None, None, starts), strict=True):
            near(loaded.value(obs, state), trained.value(obs, expected_state))
            action, state = loaded.act(obs, state, start)
            expected, expected_state = trained.act(obs, expected_state, start)
            near(action, expected)
            jax.tree.map(near, state, expected_state)
        single, _ = loaded.act(jax.tree.map(lambda leaf: leaf[0], steps[2]))
        near(single, trained.act(steps[2])[0][0])
        assert loaded.is_recurrent


@pytest.mark.parametrize("copied", [lambda policy: pickle.loads(pickle.dumps(policy)), copy.deepcopy])
@pytest.mark.parametrize("name", ["tanh bounds, eleven layers", "images of two kinds", "gru"])
def test_copies_of_policies_act_alike(name, copied):
    case = (CASES | RECURRENT)[name]
    trained, batch = untrained(*case), observations(case[1], 6)
    policy = copied(trained)
    jax.tree.map(np.testing.assert_array_equal, policy.act(batch), trained.act(batch))
    np.testing.assert_array_equal(policy.value(batch), trained.value(batch))
    assert repr(policy) == repr(trained)


def test_an_actor_needs_only_the_parts_that_it_sees(tmp_path):
    trained, batch = untrained(*CASES["asymmetric"]), observations(PRIVILEGED, 5)
    loaded = numpy_policy.load(jppo.export_policy(trained, tmp_path / "policy.npz"))
    program = jppo.load_exported(jppo.export_policy(trained, tmp_path / "policy.stablehlo"))
    deployed = {name: batch[name] for name in ("z", "action_mask")}
    for acting in (trained, loaded, program):
        np.testing.assert_array_equal(acting.act(deployed), trained.act(batch))
        one = {name: leaf[2] for name, leaf in deployed.items()}
        np.testing.assert_array_equal(acting.act(one), trained.act(batch)[2])
        lists = {name: leaf.tolist() for name, leaf in deployed.items()}
        np.testing.assert_array_equal(acting.act(lists), trained.act(batch))
        ordered = collections.OrderedDict(reversed(list(deployed.items())))
        np.testing.assert_array_equal(acting.act(ordered), trained.act(batch))
        for needed in ("z", "action_mask"):
            with pytest.raises(ValueError, match="the observation"):
                acting.act({name: leaf for name, leaf in batch.items() if name != needed})
        with pytest.raises(ValueError, match="the observation"):
            acting.value(deployed)
        with pytest.raises(ValueError, match=r"an observation has shape .*; the policy takes"):
            acting.act(deployed | {"z": np.zeros((5, 3))})


def test_observations_with_nan_are_refused(tmp_path):
    trained, batch = untrained(*CASES["asymmetric"]), observations(PRIVILEGED, 5)
    loaded = numpy_policy.load(jppo.export_policy(trained, tmp_path / "policy.npz"))
    program = jppo.load_exported(jppo.export_policy(trained, tmp_path / "policy.stablehlo"))
    broken = batch | {"z": np.where(np.arange(5)[:, None] == 3, np.nan, batch["z"])}
    with pytest.raises(ValueError, match=r"^the observation contains NaN or infinity"):
        trained.act(batch | {"z": np.where(np.isnan(broken["z"]), np.inf, broken["z"])})
    for acting in (trained, loaded, program):
        for wrong in (broken, jax.tree.map(lambda leaf: leaf[3], broken)):
            with pytest.raises(ValueError, match=r"^the observation contains NaN or infinity; check the environment"):
                acting.act(wrong)
    with pytest.raises(ValueError, match=r"^the observation contains NaN"):
        trained.value(broken)


@cpu_only
def test_states_that_do_not_fit_are_refused(simple, exported, tmp_path):
    obs, recurrent = observations(FOUR, 2), untrained({"recurrent": "gru", "recurrent_size": 5}, FOUR, THREE)
    for loaded in (
        numpy_policy.load(exported),
        jppo.load_exported(jppo.export_policy(simple, tmp_path / "x.stablehlo")),
    ):
        with pytest.raises(ValueError, match="this policy is not recurrent"):
            loaded.act(obs, np.zeros((2, 5)))
    loaded = numpy_policy.load(jppo.export_policy(recurrent, tmp_path / "policy.npz"))
    with pytest.raises(ValueError, match=r"the state has shapes \[\(3, 5\)\]; for 2 observations it has \[\(2, 5\)\]"):
        loaded.act(obs, np.zeros((3, 5)))
    lstm = untrained({"recurrent": "lstm", "recurrent_size": 5}, FOUR, THREE)
    numpy_lstm = numpy_policy.load(jppo.export_policy(lstm, tmp_path / "lstm.npz"))
    with pytest.raises(ValueError, match=r"for 2 observations it has \[\(2, 5\), \(2, 5\)\]"):
        numpy_lstm.act(obs, np.zeros((2, 5)))
    state = lstm.act(obs)[1]
    for policy in (lstm, numpy_lstm):
        np.testing.assert_array_equal(policy.act(obs, list(state))[0], lstm.act(obs, state)[0])
    program = jppo.load_exported(jppo.export_policy(recurrent, tmp_path / "policy.stablehlo", platforms=["cpu"]))
    for state in (np.zeros((3, 5)), np.zeros((2, 4)), (np.zeros((2, 5)),)):
        with pytest.raises(ValueError, match=r"^state has arrays of shapes .*; for 2 observations, this policy needs"):
            program.act(obs, state)
    for policy in (loaded, program, recurrent):
        np.testing.assert_array_equal(policy.act(obs, np.zeros((2, 5), int))[0], recurrent.act(obs)[0])
        with pytest.raises(ValueError, match=r"^episode_start has shape \(3,\); for 2 observations it must be \(2,\)"):
            policy.act(obs, np.zeros((2, 5)), np.zeros(3, bool))
        for start in ("yes", np.ones(2), [0, 1]):
            with pytest.raises(ValueError, match=r"^episode_start must be bool; it is "):
                policy.act(obs, np.zeros((2, 5)), start)
        with pytest.raises(ValueError, match=r"^episode_start is a ragged list; for 2 observations it must be 2 bools"):
            policy.act(obs, np.zeros((2, 5)), [[True], [True, False]])
    for policy in (program, recurrent):
        for seed in ("one", 1.5, -1):
            with pytest.raises(ValueError, match=f"^seed = {seed!r} must be a whole number"):
                policy.act(obs, sampled=True, seed=seed)


@pytest.mark.parametrize("platforms", ["cpu", (), ("cpu", "quantum")])
def test_unknown_platforms_are_refused(simple, tmp_path, platforms):
    with pytest.raises(ValueError, match="must be a sequence of cpu, cuda, rocm, tpu"):
        jppo.export_policy(simple, tmp_path / "policy.stablehlo", platforms=platforms)
    assert not list(tmp_path.iterdir())


def test_the_remedy_for_an_exported_result_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"policy is a dict; it must be a TrainedPolicy, such as result\.policy"):
        jppo.export_policy({}, tmp_path / "policy.npz")


def test_files_of_the_first_version_are_read(simple, exported):
    """They have no recurrent layers, masks and components."""

    def downgrade(description, arrays):
        description["version"] = 1
        description.pop("action_mask")
        for name in ("recurrent", "num_encoder_layers"):
            description["network"].pop(name)
        description["action"].pop("nvec")

    rewrite(exported, downgrade)
    obs = observations(FOUR, 5)
    np.testing.assert_array_equal(numpy_policy.load(exported).act(obs), simple.act(obs))


def test_files_of_the_third_version_are_read(tmp_path):
    """In these, the strides of the image are a list."""
    trained = untrained(*CASES["stacks"])
    path = jppo.export_policy(trained, tmp_path / "policy.npz")

    def downgrade(description, arrays):
        description["version"] = 3
        description["network"] |= {"strides": [1], "channels_first": True}

    rewrite(path, downgrade)
    obs = observations(CASES["stacks"][1], 5)
    np.testing.assert_allclose(numpy_policy.load(path).act(obs), trained.act(obs), rtol=1e-4, atol=1e-4)


def test_a_mask_without_legal_actions_is_an_error_in_numpy(tmp_path):
    obs = {"x": np.ones((3, 4), np.float32), "action_mask": np.array([[1, 0, 0], [0, 0, 0], [0, 0, 1]], np.int8)}
    trained = untrained({}, {"x": FOUR, "action_mask": ObsSpec((3,), "int8")}, THREE)
    loaded = numpy_policy.load(jppo.export_policy(trained, tmp_path / "policy.npz"))
    with pytest.raises(ValueError, match="action_mask marks no legal action in row 1"):
        loaded.act(obs)


def test_empty_statistics_only_clip(tmp_path):
    trained = untrained({"normalize_obs": True}, FOUR, THREE)
    zeros = jax.tree.map(jnp.zeros_like, trained.state.obs_stats)
    trained.state = trained.state.replace(obs_stats=zeros)
    loaded = numpy_policy.load(jppo.export_policy(trained, tmp_path / "policy.npz"))
    obs = np.array([[100.0, -100.0, 0.5, 0.0]], np.float32)
    np.testing.assert_allclose(loaded.value(obs), trained.value(obs), rtol=1e-5)


def test_numpy_samples_actions_with_their_probabilities(simple, exported):
    obs = observations(FOUR, 1)
    wanted = jax.nn.softmax(simple.policy.step(simple.state, obs)[0].logits)[0]
    drawn = numpy_policy.load(exported).act(np.repeat(obs, 20_000, axis=0), rng=np.random.default_rng(0))
    assert drawn.dtype == np.int32
    np.testing.assert_allclose(np.bincount(drawn) / 20_000, wanted, atol=4 * 0.5 / 20_000**0.5)


def test_numpy_samples_normal_distributions(tmp_path):
    free = ActionSpec((2,), "float32", low=(-INF, -INF), high=(INF, INF))
    trained = untrained({}, FOUR, free)
    loaded, obs = numpy_policy.load(jppo.export_policy(trained, tmp_path / "policy.npz")), observations(FOUR, 1)
    drawn = loaded.act(np.repeat(obs, 20_000, axis=0), rng=np.random.default_rng(0))
    std = np.exp(trained.state.params["params"]["log_std"])
    np.testing.assert_allclose(drawn.mean(0), trained.act(obs)[0], atol=0.03 * std.max())
    np.testing.assert_allclose(drawn.std(0), std, rtol=0.03)
    assert drawn.dtype == np.float32
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.03


def test_samples_of_the_program_differ_without_a_seed(simple, tmp_path):
    loaded = jppo.load_exported(jppo.export_policy(simple, tmp_path / "policy.stablehlo"))
    obs = observations(FOUR, 500)
    assert (loaded.act(obs, sampled=True) != loaded.act(obs, sampled=True)).any()
    assert set(loaded.exported.platforms) == {"cpu", "cuda", "rocm", "tpu"}
    only = jppo.load_exported(jppo.export_policy(simple, tmp_path / "cpu.stablehlo", platforms=["cpu"]))
    assert only.exported.platforms == ("cpu",)


NUMPY_ALONE = """
import json, sys
import numpy as np
{how}
loaded = numpy_policy.load({path!r})
print(json.dumps([loaded.act({obs!r}).tolist(), loaded.act({obs!r}, rng=np.random.default_rng(0)).shape]))
found = {{"jax", "jaxlib", "flax", "jppo"}} & set(sys.modules)
assert found == {found!r}, found
"""


@pytest.mark.parametrize("copied", [False, True])
def test_numpy_policy_needs_only_numpy(simple, exported, tmp_path, copied):
    obs = observations(FOUR, 3)
    how, found = "from jppo import numpy_policy", {"jppo"}
    if copied:
        shutil.copytree(Path(numpy_policy.__file__).parent, tmp_path / "numpy_policy")
        how, found = f"sys.path[:0] = [{str(tmp_path)!r}]; import numpy_policy", set()
    code = NUMPY_ALONE.format(how=how, path=str(exported), obs=obs.tolist(), found=found)
    paths = os.pathsep.join([str(Path(jppo.__file__).parent.parent)] * (not copied))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [simple.act(obs).tolist(), [3]]


def test_documented_use_without_jppo(simple, tmp_path):
    path, obs = jppo.export_policy(simple, tmp_path / "policy.stablehlo"), observations(FOUR, 3)
    program = jax.export.deserialize(bytearray(path.read_bytes()))
    found = program.call(obs, np.uint32(0))
    np.testing.assert_array_equal(found["greedy"], simple.act(obs))
    np.testing.assert_allclose(found["value"], simple.value(obs), rtol=1e-5)


class Own(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return Categorical(nn.Dense(3)(obs)), nn.Dense(1)(obs)[:, 0]


def test_custom_networks_are_exported_as_programs(tmp_path):
    trained, obs = untrained({}, FOUR, THREE, Own()), observations(FOUR, 5)
    with pytest.raises(ValueError, match=r"its network is your own Own; export it as .stablehlo"):
        jppo.export_policy(trained, tmp_path / "policy.npz")
    loaded = jppo.load_exported(jppo.export_policy(trained, tmp_path / "policy.stablehlo"))
    np.testing.assert_array_equal(loaded.act(obs), trained.act(obs))


class Fixed(nn.Module):
    """A network that needs the batch size as a number."""

    @nn.compact
    def __call__(self, obs):
        return Categorical(nn.Dense(3)(obs) + np.zeros((int(obs.shape[0]), 3))), nn.Dense(1)(obs)[:, 0]


def test_networks_for_one_batch_size_are_refused(tmp_path):
    trained = untrained({}, FOUR, THREE, Fixed())
    with pytest.raises(
        ValueError, match=r"^the network cannot be exported \(.*batch.* any batch size and on all of cpu$"
    ):
        jppo.export_policy(trained, tmp_path / "policy.stablehlo", platforms=["cpu"])
    assert not list(tmp_path.iterdir())


def call(*argv):
    """Runs the command line. Returns exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in argv])
    return code, out.getvalue(), err.getvalue()


def test_run_directories_are_exported_by_the_command(tmp_path):
    run_dir, obs = tmp_path / "run", observations(FOUR, 4)
    save_run(run_dir)
    with lenient():
        wanted = load_run(run_dir).policy.value(obs)
    for name, load, said in (
        ("policy.npz", numpy_policy.load, "numpy_policy.load"),
        ("policy.stablehlo", jppo.load_exported, "load_exported"),
    ):
        with lenient():
            code, out, err = call("export", run_dir, tmp_path / name)
        assert (code, err) == (0, "")
        words = " ".join(out.split())
        assert words.startswith(f"wrote {tmp_path / name} (")
        assert words.endswith(f" bytes); load it with jppo.{said}")
        np.testing.assert_allclose(load(tmp_path / name).value(obs), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("policy.onnx", "must end in .npz (for NumPy alone) or .stablehlo (for JAX, or any XLA)"),
        ("policy", "must end in .npz"),
        ("nowhere/policy.npz", "cannot be written: there is no directory"),
        ("policy.npz", "is not a run directory: it has no config.json"),
    ],
)
def test_invalid_exports_are_refused(tmp_path, output, message):
    code, out, err = call("export", tmp_path, tmp_path / output)
    assert (code, out) == (2, "")
    assert message in err


def test_a_failed_write_keeps_the_previous_file(simple, tmp_path, monkeypatch):
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(ValueError, match=r"folder.npz cannot be written: it is not a regular file"):
        jppo.export_policy(simple, tmp_path / "folder.npz")
    (tmp_path / "old.npz").write_text("old")

    def refuse(source, destination):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ValueError, match=r"old.npz cannot be written: Permission denied"):
        jppo.export_policy(simple, tmp_path / "old.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.npz", "old.npz"]
    assert (tmp_path / "old.npz").read_text() == "old"


@pytest.mark.parametrize("obs", [1.0, [1.0, 2.0], np.zeros((3, 2)), np.zeros((2, 4, 1)), {"cue": [1.0]}], ids=str)
def test_observations_of_another_shape_are_refused(simple, exported, tmp_path, obs):
    program = jppo.load_exported(jppo.export_policy(simple, tmp_path / "policy.stablehlo"))
    for loaded in (numpy_policy.load(exported), program):
        with pytest.raises(ValueError, match=r"the observation must be an array|an observation has s|consists of obs"):
            loaded.act(obs)


def test_messages_name_the_observation_leaf(tmp_path):
    loaded = numpy_policy.load(jppo.export_policy(untrained({}, PARTS, THREE), tmp_path / "policy.npz"))
    obs = observations(PARTS, 2)
    for wrong, message in (
        ({"where": obs["where"]}, "the observation must be a dict of both, picture, where"),
        (obs | {"both": obs["both"][:1]}, r"the observation\['both'\] must be a tuple of 2"),
        (obs | {"where": {}}, r"the observation\['where'\] must be an array"),
        (obs | {"where": np.zeros((3, 1))}, r"an observation has shape \(3, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            loaded.act(wrong)


def test_observations_in_other_containers_are_refused(tmp_path):
    trained = untrained({}, FOUR, THREE)
    trained.policy = trained.policy._replace(obs_spec=Moments(count=FOUR, mean=FOUR, m2=FOUR))
    for name in ("policy.npz", "policy.stablehlo"):
        with pytest.raises(ValueError, match="come as Moments; an exported policy takes arrays, dicts"):
            jppo.export_policy(trained, tmp_path / name)


def test_the_npz_file_contains_no_pickles(exported):
    with np.load(exported, allow_pickle=False) as arrays:
        description = json.loads(str(arrays["description"]))
        assert {array.dtype.kind for array in arrays.values()} == {"f", "U"}
    assert (description["format"], description["version"]) == ("jppo policy", 4)
    assert description["action"]["num_actions"] == 3
    assert description["observation"] == {
        **{"shape": [4], "dtype": "float32", "num_categories": 0, "start": 0, "nvec": [], "high": 255.0}
    }


class Trap:
    """Creates a file when it is unpickled."""

    def __reduce__(self):
        return open, ("trapped", "w")


def rewrite(path, change):
    """Writes a copy of a file with changed description and arrays."""
    with np.load(path) as found:
        arrays = dict(found)
    description = json.loads(str(arrays["description"]))
    change(description, arrays)
    np.savez(
        path,
        **{"description": np.array(json.dumps(description))} | {k: v for k, v in arrays.items() if k != "description"},
    )


def deep(path):
    nested = '{"observation":' + '{"tuple":[' * 5000 + "]}" * 5000 + "}"
    np.savez(path, description=np.array(nested))


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "cut": (cut, "is damaged or not a policy that jppo exported for NumPy"),
    "flipped": (flip, "is damaged"),
    "gone": (Path.unlink, "cannot be read: No such file"),
    "text": (lambda path: path.write_text("hello"), "is damaged or not a policy that jppo exported for NumPy$"),
    "other": (lambda path: np.savez(path, a=np.zeros(3, np.float32)), "is damaged or not a policy that jppo exported"),
    "version": (lambda path: rewrite(path, lambda d, a: d.update(version=5)), "has format version 5, .* 1 to 4;"),
    "format": (lambda path: rewrite(path, lambda d, a: d.pop("format")), "is not a policy that jppo exported"),
    "description": (lambda path: rewrite(path, lambda d, a: d.pop("network")), "is damaged: 'network' is missing"),
    "deep": (deep, "is damaged"),
    "missing": (lambda path: rewrite(path, lambda d, a: a.pop("value/bias")), "is damaged: 'value/bias' is missing"),
    "shape": (
        lambda path: rewrite(path, lambda d, a: a.update({"policy/bias": np.zeros(4, np.float32)})),
        r"policy/bias is float32\[4\]; it must be float32\[3\]",
    ),
    "observation": (
        lambda path: rewrite(path, lambda d, a: d["observation"].update(shape=[10**9, 10**9])),
        r"actor/dense/0/kernel is float32\[4, 8\]; it must be float32\[1000000000000000000, 8\]",
    ),
    "dtype": (lambda path: rewrite(path, lambda d, a: d["observation"].update(dtype="O")), "unknown dtype 'O'"),
    "sizes": (lambda path: rewrite(path, lambda d, a: d["observation"].update(shape=[-4])), r"kernel is float32\[4, 8"),
    "strides": (lambda path: rewrite(path, lambda d, a: d["network"].update(strides=[0])), "is damaged: "),
    "inputs": (lambda path: rewrite(path, lambda d, a: d["network"].update(actor_inputs=[3])), "is damaged: "),
    "no inputs": (lambda path: rewrite(path, lambda d, a: d["network"].update(actor_inputs=[])), "is damaged: "),
    "pickle": (lambda path: rewrite(path, lambda d, a: a.update(x=np.array(Trap()))), "is damaged or not a policy"),
    "list": (lambda path: rewrite(path, lambda d, a: d.update(observation={"dict": [1]})), "is damaged: "),
    "NaN": (
        lambda path: rewrite(path, lambda d, a: a.update({"value/bias": np.full(1, np.nan, np.float32)})),
        "value/bias contains NaN",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_and_foreign_npz_files_are_refused(exported, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    damage, message = DAMAGES[name]
    damage(exported)
    with pytest.raises(ValueError, match=message):
        numpy_policy.load(exported)
    assert not Path("trapped").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "is incomplete or was not written by jppo as a .stablehlo file"),
        (flip, "is damaged: its bytes are not those that were exported"),
        (lambda path: path.write_bytes(b""), "is incomplete or was not written by jppo"),
        (lambda path: path.write_bytes(b"jppo policy 1"), "is damaged"),
        (lambda path: path.write_bytes(b"no" + hashlib.sha256(b"no").digest() + b"jppo policy 1"), "holds no program"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"2"), "has version 2 of the format; jppo .* reads 1"),
        (Path.unlink, "cannot be read: No such file"),
    ],
)
def test_damaged_and_foreign_programs_are_refused(simple, tmp_path, damage, message):
    path = jppo.export_policy(simple, tmp_path / "policy.stablehlo")
    damage(path)
    with pytest.raises(ValueError, match=message):
        jppo.load_exported(path)


def test_npz_files_are_no_programs(exported):
    with pytest.raises(ValueError, match=r"as a \.stablehlo file; load an \.npz file with jppo\.numpy_policy\.load$"):
        jppo.load_exported(exported)


def test_an_empty_batch_is_accepted(simple, exported):
    nothing = np.zeros((0, 4), np.float32)
    for acting in (simple, numpy_policy.load(exported)):
        assert acting.act(nothing).shape == acting.value(nothing).shape == (0,)


def test_exports_of_a_policy_are_identical(simple, exported, tmp_path):
    again = jppo.export_policy(simple, tmp_path / "again.npz")
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(exported.read_bytes()).digest()
