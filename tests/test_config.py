"""What the configuration refuses, and that it says why."""

import dataclasses
import math
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jppo.config import MAX_STRATA, Hyperparams, PPOConfig, check_hyperparams, check_total_steps

FIELDS = [field.name for field in dataclasses.fields(PPOConfig)]
NUMBERS = [field.name for field in dataclasses.fields(Hyperparams)]
COUNTS = ["num_envs", "num_steps", "num_epochs", "num_minibatches"]


def refusal(**fields):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (callers check the message)
        PPOConfig(**fields)
    return str(caught.value)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -3, 2.0, 1.5, "8", None, True, math.nan])
def test_counts_are_whole_and_positive(name, value):
    assert refusal(**{name: value}) == f"{name} = {value!r} must be a whole number of at least 1"


@pytest.mark.parametrize(
    ("num_minibatches", "nearest"), [(3, "1, 2, 4, 5, 8"), (30, "5, 8, 10, 20, 40"), (41, "5, 8, 10, 20, 40")]
)
def test_a_ragged_last_minibatch_is_refused_with_the_nearest_that_fit(num_minibatches, nearest):
    message = refusal(num_envs=8, num_steps=5, num_minibatches=num_minibatches)
    assert message == (
        f"num_envs*num_steps = 40 is not divisible by num_minibatches = {num_minibatches}; "
        f"nearest that divide it: {nearest}"
    )


def test_one_sample_cannot_be_standardised():
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


@pytest.mark.parametrize("value", [[64, 64], 64, "64", (64, 0), (64, 2.5), None])
def test_hidden_sizes(value):
    assert refusal(hidden_sizes=value).startswith("hidden_sizes = ")


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
    assert config.num_strata == strata


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
def test_every_combination_is_sound_or_refused_by_name(fields):
    try:
        config = PPOConfig(**fields)
    except ValueError as error:
        if not any(name in str(error) for name in FIELDS):
            raise
        return
    assert hash(config) == hash(dataclasses.replace(config))
    assert config.minibatch_size * config.num_minibatches == config.num_envs * config.num_steps
    assert 1 <= config.num_strata <= MAX_STRATA
    assert config.num_envs % config.num_strata == 0
    assert config.batch_size // config.num_strata % config.num_minibatches == 0


def test_the_defaults_and_the_edges_of_the_ranges_pass():
    check_hyperparams(Hyperparams())
    check_hyperparams(Hyperparams(gamma=1, gae_lambda=0.0, learning_rate=0, ent_coef=-0.1, max_grad_norm=math.inf))
    check_hyperparams(Hyperparams(learning_rate=np.float32(1e-3), gamma=jnp.asarray(0.9)))


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, -math.inf, "fast", "", None, 1j, (1, 2), np.ones(3)])
def test_no_hyperparameter_may_be_nan_or_no_number(name, value):
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
def test_what_divides_or_clips_may_not_be_zero(name):
    with pytest.raises(ValueError, match=rf"^{name} = 0 is outside \(0, inf\)$"):
        check_hyperparams(Hyperparams(**{name: 0}))


@pytest.mark.parametrize("name", ["gamma", "gae_lambda"])
def test_discounts_stop_at_one(name):
    with pytest.raises(ValueError, match=rf"^{name} = 1\.01 is outside \[0, 1\]$"):
        check_hyperparams(Hyperparams(**{name: 1.01}))


@pytest.mark.parametrize(("value", "whole"), [(1, 1), (5e5, 500_000), (np.int32(7), 7), (np.float64(3.0), 3)])
def test_total_steps_are_whole(value, whole):
    steps = check_total_steps(value)
    assert steps == whole
    assert type(steps) is int


@pytest.mark.parametrize("value", [0, -1, 0.5, 1.5, math.nan, math.inf, -math.inf, "100", None, True])
def test_other_total_steps_are_refused(value):
    with pytest.raises(ValueError, match=r"^total_steps = .* must be a whole number of at least 1$"):
        check_total_steps(value)
