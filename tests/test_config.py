"""Tests the validation of configurations and its error messages."""

import dataclasses
import math
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import BoxTimeLimit

import jppo
from jppo.config.checks import check_total_steps
from jppo.config.ppo import Hyperparams, PPOConfig, check_hyperparams
from jppo.config.ray import RayConfig, spread_envs
from jppo.sweeps.grid import check_seeds

FIELDS = [field.name for field in dataclasses.fields(PPOConfig)]
NUMBERS = [field.name for field in dataclasses.fields(Hyperparams)]
COUNTS = ["num_envs", "num_steps", "num_epochs", "num_minibatches", "num_strata"]


def refusal(**fields):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (callers check the message)
        PPOConfig(**fields)
    return str(caught.value)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -3, -2.0, 1.5, math.inf, np.float32(math.inf), "8", None, True, math.nan])
def test_counts_must_be_positive_integers(name, value):
    assert refusal(**{name: value}) == f"{name} = {value!r} must be a whole number of at least 1"


@pytest.mark.parametrize(
    ("num_minibatches", "nearest"), [(3, "1, 2, 4, 5, 8"), (30, "5, 8, 10, 20, 40"), (41, "5, 8, 10, 20, 40")]
)
def test_unequal_minibatches_are_refused_with_the_nearest_valid_numbers(num_minibatches, nearest):
    message = refusal(num_envs=8, num_steps=5, num_minibatches=num_minibatches)
    assert message == (
        f"num_envs*num_steps = 40 is not divisible by num_minibatches = {num_minibatches}; "
        f"nearest numbers that divide it: {nearest}"
    )


def test_one_sample_per_minibatch_cannot_be_standardized():
    fields = {"num_envs": 4, "num_steps": 2, "num_minibatches": 8}
    message = refusal(**fields)
    assert "num_minibatches = 8" in message
    assert "normalize_advantage" in message
    assert PPOConfig(**fields, normalize_advantage=False).minibatch_size == 1


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("network", "transformer", "mlp, cnn"),
        ("activation", "gelu", "tanh, relu, swish"),
        ("kl_control", None, "none, stop, adapt"),
        ("action_bounds", 1, "clip, tanh"),
        ("network", ["mlp"], "mlp, cnn"),
    ],
)
def test_choices(name, value, choices):
    assert refusal(**{name: value}) == f"{name} = {value!r} is not one of {choices}"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(PPOConfig) if field.type is bool])
@pytest.mark.parametrize("value", [1, "no", None])
def test_flags(name, value):
    assert refusal(**{name: value}) == f"{name} = {value!r} must be True or False"


def test_hidden_sizes_may_be_a_list():
    assert PPOConfig(hidden_sizes=[32, 16]) == PPOConfig(hidden_sizes=(32, 16))
    assert hash(PPOConfig(hidden_sizes=[32, 16])) == hash(PPOConfig(hidden_sizes=(32, 16)))


def test_replace_returns_a_validated_copy():
    assert PPOConfig(num_envs=8).replace(num_steps=16) == PPOConfig(num_envs=8, num_steps=16)
    assert Hyperparams().replace(gamma=0.5) == Hyperparams(gamma=0.5)
    with pytest.raises(ValueError, match="num_envs = 0 must be"):
        PPOConfig().replace(num_envs=0)


@pytest.mark.parametrize("value", [[64, 0], 64, "64", (64, 0), (64, 2.5), None])
def test_hidden_sizes(value):
    assert refusal(hidden_sizes=value).startswith("hidden_sizes = ")


@pytest.mark.parametrize("value", [2**24 + 1, 10**30])
def test_layers_have_a_largest_size(value):
    message = f"= {value} must be a whole number from 1 to 16,777,216"
    assert refusal(hidden_sizes=(64, value)) == f"hidden_sizes {message}"
    assert refusal(recurrent_size=value) == f"recurrent_size {message}"


@pytest.mark.parametrize("name", ["actor_obs", "critic_obs"])
def test_names_of_observation_leaves_are_distinct(name):
    message = f"{name} = ('x', 'y', 'x') contains a name twice; use ('x', 'y')"
    assert refusal(**{name: ["x", "y", "x"]}) == message


def test_no_hidden_layer_is_a_linear_policy():
    assert PPOConfig(hidden_sizes=()).hidden_sizes == ()


def test_a_config_is_a_frozen_hashable_value():
    config = PPOConfig(num_envs=8)
    assert hash(config) == hash(PPOConfig(num_envs=8))
    assert {config: 1}[PPOConfig(num_envs=8)] == 1
    assert config != PPOConfig(num_envs=16)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_envs = 4
    with pytest.raises(ValueError, match="num_epochs"):
        dataclasses.replace(config, num_epochs=0)
    hash(Hyperparams())


def test_numpy_integers_are_whole_numbers():
    assert PPOConfig(num_envs=np.int64(8)) == PPOConfig(num_envs=8)
    assert PPOConfig(num_envs=np.int16(512), num_steps=np.int16(128)).batch_size == 65_536


def test_sizes():
    config = PPOConfig(num_envs=6, num_steps=10, num_minibatches=4)
    assert (config.batch_size, config.minibatch_size) == (60, 15)
    assert [config.num_updates(steps) for steps in (1, 60, 61, 600)] == [1, 1, 2, 10]


@pytest.mark.parametrize(
    ("num_envs", "num_steps", "num_minibatches", "strata"),
    [(64, 128, 4, 8), (8, 5, 1, 8), (6, 4, 4, 6), (7, 4, 4, 7), (11, 4, 4, 1), (8, 5, 8, 1), (1, 128, 4, 1)],
)
def test_strata(num_envs, num_steps, num_minibatches, strata):
    config = PPOConfig(num_envs=num_envs, num_steps=num_steps, num_minibatches=num_minibatches)
    assert config.effective_strata == strata


_ODD = st.sampled_from([None, -1, 0, 2.5, "mlp", (), (64,), [8], True, math.nan, math.inf, b"x"])
_PLAUSIBLE = {
    **{name: st.integers(-1, 40) for name in COUNTS},
    "network": st.sampled_from(["mlp", "cnn", "MLP"]),
    "hidden_sizes": st.lists(st.integers(0, 9), max_size=3).map(tuple),
    "activation": st.sampled_from(["tanh", "relu", "swish", ""]),
    "kl_control": st.sampled_from(["none", "stop", "adapt", "off"]),
    "action_bounds": st.sampled_from(["clip", "tanh", "scale"]),
}


@settings(deadline=None, max_examples=300)
@given(fields=st.fixed_dictionaries({}, optional={name: _PLAUSIBLE.get(name, st.booleans()) | _ODD for name in FIELDS}))
def test_every_combination_is_valid_or_refused_with_a_field_name(fields):
    try:
        config = PPOConfig(**fields)
    except ValueError as error:
        if not any(name in str(error) for name in FIELDS):
            raise
        return
    assert hash(config) == hash(dataclasses.replace(config))
    assert config.minibatch_size * config.num_minibatches == config.num_envs * config.num_steps
    assert 1 <= config.effective_strata <= config.num_strata
    assert config.num_envs % config.effective_strata == 0
    assert config.batch_size // config.effective_strata % config.num_minibatches == 0


def test_the_defaults_and_the_limits_of_the_ranges_are_valid():
    check_hyperparams(Hyperparams())
    check_hyperparams(Hyperparams(gamma=1, gae_lambda=0.0, learning_rate=0, ent_coef=0, max_grad_norm=math.inf))
    check_hyperparams(Hyperparams(learning_rate=np.float32(1e-3), gamma=jnp.asarray(0.9)))


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, -math.inf, "fast", "", None, 1j, (1, 2), np.ones(3)])
def test_hyperparameters_must_be_numbers(name, value):
    with pytest.raises(ValueError, match=f"^{name} = "):
        check_hyperparams(Hyperparams(**{name: value}))


@pytest.mark.parametrize("name", sorted(set(NUMBERS) - {"ent_coef"}))
def test_only_the_entropy_bonus_may_be_negative(name):
    with pytest.raises(ValueError, match=rf"^{name} = -0\.1 is outside [\[(]0, "):
        check_hyperparams(Hyperparams(**{name: -0.1}))


@pytest.mark.parametrize("name", sorted(set(NUMBERS) - {"max_grad_norm"}))
def test_only_the_gradient_norm_may_be_unbounded(name):
    with pytest.raises(ValueError, match=f"^{name} = inf is outside "):
        check_hyperparams(Hyperparams(**{name: math.inf}))


@pytest.mark.parametrize("name", ["clip_eps", "vf_clip_eps", "max_grad_norm", "target_kl", "adam_eps"])
def test_divisors_and_clip_ranges_must_be_positive(name):
    with pytest.raises(ValueError, match=rf"^{name} = 0 is outside \(0, inf\)$"):
        check_hyperparams(Hyperparams(**{name: 0}))


@pytest.mark.parametrize("name", ["gamma", "gae_lambda"])
def test_discounts_are_at_most_one(name):
    with pytest.raises(ValueError, match=rf"^{name} = 1\.01 is outside \[0, 1\]$"):
        check_hyperparams(Hyperparams(**{name: 1.01}))


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, np.int64])
@pytest.mark.parametrize(
    ("record", "names"),
    [
        (PPOConfig, (*COUNTS, "recurrent_size", "sequence_length", "staggered_start")),
        (jppo.RunConfig, ("max_checkpoints", "callback_every", "log_every", "eval_every", "eval_episodes")),
        (RayConfig, ("num_actors", "envs_per_actor", "max_restarts")),
        (jppo.PBTConfig, ("every",)),
    ],
)
def test_whole_floats_become_ints(record, names, kind):
    """Search spaces give floats."""
    for name in names:
        value = getattr(record(**{name: kind(8.0)}), name)
        assert (name, value, type(value)) == (name, 8, int)


def test_whole_floats_in_other_places():
    sizes = PPOConfig(hidden_sizes=[64.0, np.float32(32.0)]).hidden_sizes
    assert (sizes, set(map(type, sizes))) == ((64, 32), {int})
    assert PPOConfig().scale_envs(2.0) == PPOConfig().scale_envs(2)
    assert type(PPOConfig().scale_envs(2.0).num_envs) is int
    assert check_seeds(3.0) == [0, 1, 2]
    assert check_seeds([3.0, 4]) == [3, 4]


@pytest.mark.parametrize(("value", "whole"), [(1, 1), (5e5, 500_000), (np.int32(7), 7), (np.float64(3.0), 3)])
def test_total_steps_may_be_written_as_a_float(value, whole):
    steps = check_total_steps(value)
    assert steps == whole
    assert type(steps) is int


@pytest.mark.parametrize("value", [0, -1, 0.5, 1.5, math.nan, math.inf, -math.inf, "100", None, True])
def test_invalid_total_steps_are_refused(value):
    with pytest.raises(ValueError, match=r"^total_steps = .* must be a whole number of at least 1$"):
        check_total_steps(value)


def test_valid_ray_configs():
    RayConfig(
        num_actors=0, envs_per_actor=1, policy_lag=1, actor_cpus=0.25, actor_gpus=0, actor_timeout=5, max_restarts=0
    )
    assert RayConfig(num_actors=np.int64(3)) == RayConfig(num_actors=3)
    assert hash(RayConfig()) == hash(RayConfig())


def spread(num_envs=64, num_steps=128, cores=4, fixed=False, **actors):
    config, actors = spread_envs(PPOConfig(num_envs=num_envs, num_steps=num_steps), RayConfig(**actors), cores, fixed)
    return actors.num_actors, actors.envs_per_actor, config.num_envs, config.num_steps


def test_environments_are_divided_among_actors():
    assert spread() == (4, 16, 64, 128)
    assert spread(cores=12) == (8, 8, 64, 128)
    assert spread(cores=0) == (1, 64, 64, 128)
    assert spread(num_actors=0) == (0, 64, 64, 128)
    assert spread(num_actors=32, fixed=True) == (32, 2, 64, 128)
    assert spread(num_actors=8, envs_per_actor=4) == (8, 4, 32, 128)
    assert spread(num_actors=0, envs_per_actor=4) == (0, 4, 4, 128)
    assert spread(envs_per_actor=4) == (4, 4, 16, 128)
    assert spread(envs_per_actor=4, fixed=True) == (16, 4, 64, 128)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"num_actors": 6},
            "num_envs = 64 cannot be spread evenly over num_actors = 6; nearest numbers that divide it: 1, 2, 4, "
            "8, 16; or set envs_per_actor",
        ),
        (
            {"num_actors": 2, "envs_per_actor": 4, "fixed": True},
            "num_actors = 2 with envs_per_actor = 4 gives num_envs = 8, but num_envs = 64; set only two of the three",
        ),
    ],
)
def test_environments_that_cannot_be_divided_are_refused(given, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        spread(**given)


_COUNT = st.integers(1, 24)


@settings(deadline=None, max_examples=300)
@given(
    config=st.builds(lambda n, t: PPOConfig(num_envs=n, num_steps=t, num_minibatches=1), _COUNT, st.integers(2, 24)),
    num_actors=st.none() | st.integers(0, 24),
    envs_per_actor=st.none() | _COUNT,
    cores=st.integers(0, 24),
    fixed=st.booleans(),
)
def test_every_division_keeps_num_steps_or_is_refused(config, num_actors, envs_per_actor, cores, fixed):
    wanted = RayConfig(num_actors=num_actors, envs_per_actor=envs_per_actor, policy_lag=1)
    try:
        spread_config, actors = spread_envs(config, wanted, cores, fixed)
    except ValueError as error:
        numbers = set(map(int, re.findall(r"\d+", str(error))))
        assert numbers & {config.num_envs, config.batch_size}
        assert {num_actors, envs_per_actor} - {None, 0} <= numbers
        return
    assert max(actors.num_actors, 1) * actors.envs_per_actor == spread_config.num_envs
    assert spread_config.num_steps == config.num_steps
    assert num_actors in (None, actors.num_actors)
    assert envs_per_actor in (None, actors.envs_per_actor)
    assert num_actors is not None or (fixed and envs_per_actor is not None) or actors.num_actors <= max(cores, 1)
    assert spread_config == config or not (fixed or envs_per_actor is None)
    assert actors == dataclasses.replace(wanted, num_actors=actors.num_actors, envs_per_actor=actors.envs_per_actor)
    assert spread_envs(spread_config, actors, cores + 1, fixed=True) == (spread_config, actors)


GIVEN = {
    "num_envs": st.sampled_from([0, 1, 2, 3, 4, 8, 2.5, True, "4"]),
    "num_steps": st.sampled_from([-1, 1, 2, 5, 8, None]),
    "num_epochs": st.sampled_from([0, 1, 2]),
    "num_minibatches": st.sampled_from([0, 1, 2, 3, 7]),
    "network": st.sampled_from(["mlp", "cnn", "rnn"]),
    "hidden_sizes": st.sampled_from([(8,), (), (4, 8), (0,), [8], 8, [0], (2.5,)]),
    "activation": st.sampled_from(["tanh", "relu", "swish", "gelu", None]),
    **{
        name: st.sampled_from([True, False, True, False, 1, "yes"])
        for name in (*("shared_torso", "normalize_obs", "normalize_reward", "normalize_advantage", "clip_value"),)
    },
    "kl_control": st.sampled_from(["none", "stop", "adapt", "adaptive"]),
    "action_bounds": st.sampled_from(["clip", "tanh", "squash"]),
}
WITHIN = {  # valid values
    name: st.sampled_from(values)
    for name, values in {
        **{"num_envs": [1, 2, 4], "num_steps": [1, 2, 8], "num_epochs": [1, 2], "num_minibatches": [1, 2]},
        **{"network": ["mlp"], "hidden_sizes": [(8,), ()], "activation": ["tanh", "relu", "swish"]},
        "kl_control": ["none", "stop", "adapt"],
        "action_bounds": ["clip", "tanh"],
    }.items()
} | {name: st.booleans() for name in GIVEN if name.split("_")[0] in ("shared", "normalize")}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.one_of(st.fixed_dictionaries(WITHIN), st.fixed_dictionaries({}, optional=GIVEN)))
def test_every_configuration_trains_or_is_refused_with_a_field_name(chosen):
    """Traces an update, which checks shapes and dtypes, instead of compiling it, which would be slow."""
    refusal = ""
    try:
        agent = jppo.make_anakin(BoxTimeLimit(), jppo.PPOConfig(**chosen), total_steps=64)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert any(name in refusal for name in GIVEN)
        return
    state = jax.eval_shape(agent.init, jax.random.key(0), jppo.Hyperparams())
    after, metrics = jax.eval_shape(agent.step, state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert metrics["finite"].shape == ()
