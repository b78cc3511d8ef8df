"""Tests that an observation space means the same on the device, on the host, in containers and in exports."""

import dataclasses
import json

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from parallel_probes import Team

import jppo
from jppo.actors.numpy_params import cast_leaves
from jppo.actors.numpy_policy.spaces import _component_categories
from jppo.envs.gymnasium import make_host_env
from jppo.envs.gymnasium_vector import make_vector
from jppo.envs.spaces import ObsSpec, component_categories
from jppo.ppo.policy import prepare_obs

# space, an observation of it, the network's input
TABLE = {
    "Discrete": (spaces.Discrete(3), 2, [0, 0, 1]),
    "Discrete with start": (spaces.Discrete(3, start=3), 3, [1, 0, 0]),
    "Discrete with negative start": (spaces.Discrete(3, start=-1), 0, [0, 1, 0]),
    "MultiDiscrete": (spaces.MultiDiscrete([2, 3]), [1, 0], [0, 1, 1, 0, 0]),
    "MultiDiscrete with start": (spaces.MultiDiscrete([2, 3], start=[5, -1]), [5, 1], [1, 0, 0, 0, 1]),
    "MultiDiscrete matrix": (spaces.MultiDiscrete([[2], [2]]), [[0], [1]], [1, 0, 0, 1]),
    "MultiBinary": (spaces.MultiBinary(3), [1, 0, 1], [1, 0, 1]),
    "flags as uint8": (spaces.Box(0, 1, (2,), np.uint8), [1, 0], [1, 0]),
    "codes as uint8": (spaces.Box(0, 10, (2,), np.uint8), [10, 5], [1, 0.5]),
    "pixels": (spaces.Box(0, 255, (2,), np.uint8), [255, 51], [1, 0.2]),
    "integers": (spaces.Box(-9, 9, (2,), np.int32), [-9, 4], [-9, 4]),
    "floats": (spaces.Box(-1, 1, (2,), np.float32), [-1, 0.5], [-1, 0.5]),
}
CONTAINERS = {
    "alone": (lambda part: part, spaces.space.Space),
    "Dict": (lambda part: {"b": part, "a": part}, spaces.Dict),
    "Tuple": (lambda part: (part, part), spaces.Tuple),
}
SIZES = {"num_envs": 2, "num_steps": 8, "hidden_sizes": (4,)}


def inside(container, part):
    """Returns a space in a container of its kind."""
    wrap, kind = CONTAINERS[container]
    return part if container == "alone" else kind(wrap(part))


def host_class(space, values):
    """Returns a class of environments whose observations are these values, one after the other."""

    class Host(gymnasium.Env):
        observation_space, action_space = space, spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.t = 0
            return values[0], {}

        def step(self, action):
            self.t += 1
            return values[min(self.t, len(values) - 1)], 1.0, self.t == 9, False, {}

    return Host


def device_env(space, values):
    """Returns the same environment in JAX."""
    stacked = jax.tree.map(lambda *rows: jnp.stack([jnp.asarray(row) for row in rows]), *values)

    def at(t):
        return jax.tree.map(lambda rows: rows[jnp.minimum(t, len(values) - 1)], stacked)

    def reset(key):
        return at(0), jnp.int32(0)

    def step(key, t, action):
        return at(t + 1), t + 1, jnp.float32(1), t + 1 == 9, jnp.bool_(False)

    return jppo.with_limit_and_reset(jppo.EpisodicEnv("Same", reset, step, spaces.Discrete(2), space))


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", TABLE)
def test_a_space_means_the_same_on_the_device_and_on_the_host(name, container):
    part, value, expected = TABLE[name]
    value = np.asarray(value, part.dtype)
    space, obs = inside(container, part), CONTAINERS[container][0](value)
    narrow = jax.tree.map(lambda x: x.astype(jax.dtypes.canonicalize_dtype(x.dtype)), obs)
    host, device = make_host_env(host_class(space, [obs])), device_env(space, [narrow])
    assert host.obs_spec == device.obs_spec
    batch = jax.tree.map(lambda x: x[None], narrow)
    for features in jax.tree.leaves(prepare_obs(host.obs_spec, batch)):
        assert features.dtype == jnp.float32
        np.testing.assert_allclose(features, [expected], rtol=1e-6)


@pytest.mark.parametrize("name", TABLE)
def test_the_numpy_form_prepares_observations_like_the_one_in_jax(name, tmp_path):
    part, value, _ = TABLE[name]
    value = np.asarray(value, part.dtype)
    policy = jppo.train(host_class(part, [value]), num_actors=0, total_steps=16, **SIZES).policy
    numpy_policy = jppo.numpy_policy.load(jppo.export_policy(policy, tmp_path / "p.npz"))
    batch = np.stack([value, part.sample()])
    np.testing.assert_allclose(numpy_policy.value(batch), policy.value(batch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("part", "value", "wrong", "named"),
    [
        (spaces.Discrete(5), 1, 0.7, "0.7"),
        (spaces.Discrete(5), 1, 9, "9"),
        (spaces.Discrete(5, start=3), 3, 2, "2"),
        (spaces.MultiDiscrete([2, 3]), [0, 0], [0, 3], "3"),
        (spaces.Box(0, 255, (2,), np.uint8), [9, 9], [9, 300], "300"),
        (spaces.Box(0, 255, (2,), np.uint8), [9, 9], [0.9, 1.0], "0.9"),
        (spaces.Box(0, 10, (2,), np.uint8), [9, 9], np.array([0, 11], np.uint8), "11"),
        (spaces.MultiBinary(2), [0, 1], [0, 0.5], "0.5"),
    ],
    ids=str,
)
def test_act_and_exports_refuse_numbers_that_the_space_lacks(part, value, wrong, named, tmp_path):
    obs = {"cue": np.asarray(value, part.dtype)}
    policy = jppo.train(host_class(spaces.Dict(cue=part), [obs]), num_actors=0, total_steps=16, **SIZES).policy
    files = [jppo.export_policy(policy, tmp_path / f"p.{ending}") for ending in ("npz", "stablehlo")]
    for act in (policy.act, jppo.numpy_policy.load(files[0]).act, jppo.load_exported(files[1]).act):
        act(obs)
        with pytest.raises(ValueError, match=rf"observation\['cue'\] has {named}; its space has"):
            act({"cue": wrong})


@pytest.mark.parametrize("wrong", ["left", ["1", "2"], [1 + 2j, 0], [1, [2, 3]], [None, 1], [2**70, 1]], ids=str)
def test_leaves_that_are_not_numbers_of_the_space_are_named(wrong):
    spec = {"cue": ObsSpec((2,), "int32")}
    with pytest.raises(jppo.errors.Refused, match=r"observation\['cue'\] cannot be converted to int32: "):
        cast_leaves(spec, [wrong])


@pytest.mark.parametrize(("nvec", "start"), [((3,), (0,)), ((2, 3), (5, -1)), ((1, 4, 2), (0, 2**31 - 9, -(2**31)))])
def test_categories_are_the_same_in_the_numpy_form(nvec, start):
    for ours, theirs in zip(component_categories(nvec, start), _component_categories(nvec, start), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("part", [spaces.Discrete(3), spaces.MultiDiscrete([3])], ids=str)
def test_training_refuses_categories_that_the_space_lacks(part):
    values = [{"cue": np.full(part.shape, i, np.int32)} for i in range(5)]
    space = spaces.Dict(cue=part)
    for env, options in ((host_class(space, values), {"num_actors": 0}), (device_env(space, values), {})):
        with pytest.raises((ValueError, RuntimeError), match=r"observation\['cue'\] has 3; its space has"):
            jppo.train(env, total_steps=64, **options, **SIZES)
        assert "spaces" in jppo.check_env(env).failed
    with pytest.raises(jppo.errors.Refused, match=r"observation\['cue'\] has 3; its space has"):
        jppo.sweep(device_env(space, values), seeds=2, total_steps=64, **SIZES)


def test_64_bit_integers_do_not_wrap():
    space = spaces.Box(0, 2**40, (1,), np.int64)
    policy = jppo.train(host_class(space, [np.array([2**33])]), num_actors=0, total_steps=16, **SIZES).policy
    assert policy.obs_spec.dtype == "float32"
    assert policy.value(np.array([2**33])) != policy.value(np.array([0]))


def test_many_categories_are_refused_before_training():
    for part in (spaces.Discrete(10_001), spaces.MultiDiscrete([5_001, 5_000])):
        value = np.zeros(part.shape, np.int32)
        for make in (lambda: make_host_env(host_class(part, [value])), lambda: device_env(part, [value])):  # noqa: B023
            with pytest.raises(ValueError, match="10,001 categories, which would be one-hot; at most 10,000"):
                make()


@pytest.mark.parametrize("late", [1, 150])
def test_training_refuses_uint8_above_the_space(late):
    """The network's input is uint8 / high."""
    space = spaces.Dict(grid=spaces.Box(0, 9, (2,), np.uint8))
    values = [{"grid": np.array([0, 9 if i < late else 77], np.uint8)} for i in range(late + 1)]

    class Late(host_class(space, values)):
        def step(self, action):
            return *super().step(action)[:2], self.t == 200, False, {}

    with pytest.raises((ValueError, RuntimeError), match=r"observation\['grid'\] has 77"):
        jppo.train(Late, num_actors=0, total_steps=512, **SIZES)
    if late == 1:
        with pytest.raises(ValueError, match=r"observation\['grid'\] has 77; its space has integers from 0 to 9"):
            jppo.train(device_env(space, values), total_steps=64, **SIZES)


class Numbered(spaces.Discrete):
    """A subclass of Discrete."""


def test_subclasses_of_spaces_are_the_same_spaces():
    space = Numbered(3, start=100)
    host, device = host_class(space, [np.int64(100)]), device_env(space, [np.int32(100)])
    for spec in (make_host_env(host).obs_spec, jppo.make_env(device).obs_spec):
        assert (spec.num_categories, spec.start) == (3, 100)


def test_bounds_of_uint8_apply_to_each_number():
    space = spaces.Box(np.array([0, 0], np.uint8), np.array([2, 250], np.uint8), dtype=np.uint8)
    spec = make_host_env(host_class(space, [np.array([1, 125], np.uint8)])).obs_spec
    features = prepare_obs(spec, jnp.array([[1, 125]], jnp.uint8))
    np.testing.assert_allclose(features, [[0.5, 0.5]])
    twin = jppo.numpy_policy.ObsArray.from_json(json.loads(json.dumps(dataclasses.asdict(spec))))
    np.testing.assert_array_equal(twin.features(np.array([[1, 125]], np.uint8)), features)


@pytest.mark.parametrize("last", [2**32, 7])
def test_host_observations_are_compared_before_they_are_narrowed(last):
    """2**32 would wrap to category 0; the final observation of an episode counts, too."""

    class Ends(host_class(spaces.Discrete(3), [np.int64(0)])):
        steps = 0

        def step(self, action):
            self.steps += 1
            ends = self.steps == 200  # after the check of the first steps
            return np.int64(last if ends else 0), 0.0, False, ends, {}

    with pytest.raises((ValueError, RuntimeError), match=f"{last}"):
        jppo.train(Ends, num_actors=0, total_steps=8192, **SIZES)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(
    ("part", "value"),
    [
        (spaces.Box(-9, 9, (2,), np.int32), np.array([1, 2**32 + 1])),
        (spaces.Box(-9, 9, (), np.int32), np.int64(2**32)),
        (spaces.Box(0, 255, (2, 2), np.uint8), np.full((2, 2), 256, np.uint16)),
        (spaces.Box(-9, 9, (2,), np.int8), [1, 300]),
        (spaces.MultiDiscrete([3, 3], dtype=np.int32), np.array([0, 2**32])),
        (spaces.Discrete(3, dtype=np.int32), 2**32),
    ],
    ids=str,
)
def test_integers_do_not_wrap_in_the_buffers_of_vector_environments(part, value, container):
    space, first, wrong = (inside(container, part), *map(CONTAINERS[container][0], (part.sample() * 0, value)))
    biggest = np.max(value)
    for values in ([first, wrong], [first] * 9 + [wrong]):  # the second ends an episode
        env = make_host_env(host_class(space, [first]))._replace(source=host_class(space, values))
        envs = env.make([0, 1])
        envs.reset()
        actions = np.zeros(2, np.int64)
        with pytest.raises(ValueError, match=rf"^observation\S* has {biggest}, which is not {part.dtype}"):
            [envs.step(actions) for _ in range(9)]


def test_integers_of_several_agents_do_not_wrap():
    class Counts(Team):
        def observation_space(self, agent):
            return spaces.Dict(cue=spaces.Box(-9, 9, (1,), np.int32))

        def see(self):
            return {agent: {"cue": np.array([2**32])} for agent in self.agents}

    envs = make_vector(Counts, [0, 1, 2])
    with pytest.raises(ValueError, match=r"observation\['cue'\] has 4294967296, which is not int32"):
        envs.reset()


def test_narrow_integers_that_fit_are_accepted_in_wider_dtypes():
    space = spaces.Dict(a=spaces.Box(-9, 9, (2,), np.int32), b=spaces.MultiBinary(2))
    envs = make_vector(host_class(space, [{"a": np.array([-9, 9]), "b": [True, False]}]), [0, 1])
    obs = envs.reset(seed=[0, 1])[0]
    np.testing.assert_array_equal(obs["a"], [[-9, 9], [-9, 9]])
    assert (obs["a"].dtype, obs["b"].dtype) == (np.int32, np.int8)


def test_bool_observations_of_a_discrete_space_are_categories():
    features = prepare_obs(ObsSpec((), "bool", num_categories=2), jnp.array([False, True]))
    np.testing.assert_array_equal(features, np.eye(2))
