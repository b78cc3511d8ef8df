"""Tests the loss terms against float64 loops and scipy, and their zero gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from probes import Probe

import jppo
from jppo.networks.distributions import Categorical, DiagGaussian
from jppo.ppo import losses
from jppo.ppo.losses import gae
from jppo.ppo.normalization import moments_of

EPS = 0.2


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    size = 257
    old = rng.normal(-1.0, 0.5, size)
    columns = {
        "log_prob": old + rng.normal(0.0, 0.3, size),
        "old_log_prob": old,
        "advantage": rng.normal(0.2, 2.0, size),
        "value": rng.normal(size=size),
        "old_value": rng.normal(size=size),
        "target": rng.normal(size=size),
    }
    return {name: column.astype(np.float32) for name, column in columns.items()}


def columns_of(batch, *names):
    return [jnp.asarray(batch[name]) for name in names]


def test_clipped_surrogate_loss(batch):
    total, cases = 0.0, set()
    for new, old, advantage in zip(batch["log_prob"], batch["old_log_prob"], batch["advantage"], strict=True):
        ratio = math.exp(float(new) - float(old))
        clipped = min(max(ratio, 1 - EPS), 1 + EPS)
        total += min(ratio * advantage, clipped * advantage)
        cases.add((advantage > 0, (ratio > 1 + EPS) - (ratio < 1 - EPS)))
    assert len(cases) == 6, "every side of the ratio with every sign of the advantage"
    actual = losses.clipped_surrogate_loss(*columns_of(batch, "log_prob", "old_log_prob", "advantage"), EPS)
    assert float(actual) == pytest.approx(-total / len(batch["log_prob"]), rel=1e-5)


def test_value_losses(batch):
    plain = clipped = 0.0
    for value, old, target in zip(batch["value"], batch["old_value"], batch["target"], strict=True):
        near = float(old) + min(max(float(value) - float(old), -EPS), EPS)
        plain += 0.5 * (float(value) - target) ** 2
        clipped += 0.5 * max((float(value) - target) ** 2, (near - target) ** 2)
    size = len(batch["value"])
    value, old, target = columns_of(batch, "value", "old_value", "target")
    assert float(losses.value_loss(value, target)) == pytest.approx(plain / size, rel=1e-5)
    assert float(losses.clipped_value_loss(value, old, target, EPS)) == pytest.approx(clipped / size, rel=1e-5)
    assert clipped > plain


def test_kl_and_clip_fraction(batch):
    kl = outside = 0.0
    for new, old in zip(batch["log_prob"], batch["old_log_prob"], strict=True):
        log_ratio = float(new) - float(old)
        kl += math.exp(log_ratio) - 1 - log_ratio
        outside += abs(math.exp(log_ratio) - 1) > EPS
    size = len(batch["log_prob"])
    new, old = columns_of(batch, "log_prob", "old_log_prob")
    assert float(losses.approx_kl(new, old)) == pytest.approx(kl / size, rel=1e-4)
    assert float(losses.clip_fraction(new, old, EPS)) == pytest.approx(outside / size, rel=1e-6)
    assert 0.1 < outside / size < 0.9


def test_approx_kl_estimates_the_kl_of_two_gaussians():
    mean, std, samples = 0.3, 1.2, 200_000
    old, new = scipy.stats.norm(0.0, 1.0), scipy.stats.norm(mean, std)
    x = old.rvs(samples, random_state=0)
    exact = math.log(std) + (1 + mean**2) / (2 * std**2) - 0.5
    estimate = losses.approx_kl(*(jnp.asarray(d.logpdf(x), jnp.float32) for d in (new, old)))
    assert float(estimate) == pytest.approx(exact, rel=0.03)


def test_approx_kl_keeps_its_digits_near_zero():
    """A KL of 5e-7, from ratios that differ from 1 by 1e-3."""
    log_ratio = jnp.full(1000, 1e-3, jnp.float32)
    assert float(losses.approx_kl(log_ratio, jnp.zeros(1000))) == pytest.approx(5.0e-7, rel=1e-2)


def test_equal_policies_have_no_kl_and_no_clipping(batch):
    log_prob, advantage = columns_of(batch, "log_prob", "advantage")
    assert float(losses.approx_kl(log_prob, log_prob)) == 0.0
    assert float(losses.clip_fraction(log_prob, log_prob, 1e-6)) == 0.0
    loss, gradient = jax.value_and_grad(losses.clipped_surrogate_loss)(log_prob, log_prob, advantage, EPS)
    assert float(loss) == pytest.approx(-batch["advantage"].mean(dtype=float), rel=1e-5)
    np.testing.assert_allclose(gradient, -batch["advantage"] / len(batch["advantage"]), rtol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [
        (1.5, 2.0, False),  # the ratio exceeds the clip range and the advantage is positive
        (1.5, -2.0, True),
        (0.5, -2.0, False),
        (0.5, 2.0, True),
        (1.1, 2.0, True),
        (0.9, -2.0, True),
    ],
)
def test_policy_gradient_vanishes_where_the_objective_is_clipped(ratio, advantage, moves):
    log_prob, old, gain = jnp.asarray([math.log(ratio)]), jnp.zeros(1), jnp.asarray([advantage])
    gradient = jax.grad(losses.clipped_surrogate_loss)(log_prob, old, gain, EPS)
    np.testing.assert_allclose(gradient, [-ratio * advantage if moves else 0.0], rtol=1e-5)


@pytest.mark.parametrize(
    ("value", "target", "slope"),
    [
        (0.1, 1.0, -0.9),  # within the clip: as without it
        (0.5, 1.0, 0.0),  # beyond the clip, and the clipped error is the larger
        (1.5, 1.0, 0.0),
        (0.5, 0.0, 0.5),  # beyond, but away from the target: pulled back
    ],
)
def test_value_gradient_vanishes_once_clipped_towards_the_target(value, target, slope):
    arguments = (jnp.asarray([value]), jnp.zeros(1), jnp.asarray([target]), EPS)
    np.testing.assert_allclose(jax.grad(losses.clipped_value_loss)(*arguments), [slope], rtol=1e-6)


def test_a_huge_clip_is_no_clip(batch):
    value, old, target = columns_of(batch, "value", "old_value", "target")
    unclipped = float(losses.value_loss(value, target))
    assert float(losses.clipped_value_loss(value, old, target, 1e6)) == pytest.approx(unclipped, rel=1e-2)
    new, old, advantage = columns_of(batch, "log_prob", "old_log_prob", "advantage")
    importance = -np.mean(np.exp(batch["log_prob"].astype(float) - batch["old_log_prob"]) * batch["advantage"])
    assert float(losses.clipped_surrogate_loss(new, old, advantage, 1e6)) == pytest.approx(importance, rel=1e-4)


def test_standardize(batch):
    x = batch["advantage"] * 30 + 500
    m = moments_of(jnp.asarray(x), num_batch_dims=1)
    actual = np.asarray(losses.standardize(jnp.asarray(x), m.mean, m.variance), float)
    np.testing.assert_allclose(actual, scipy.stats.zscore(x.astype(float)), atol=2e-5)
    constant = losses.standardize(jnp.full(4, 3.0), jnp.asarray(3.0), jnp.asarray(0.0))
    np.testing.assert_array_equal(constant, 0.0)


def explained(target, value):
    target, value = np.asarray(target, np.float32), np.asarray(value, np.float32)
    both = (moments_of(jnp.asarray(x), num_batch_dims=1) for x in (target - value, target))
    return float(losses.explained_variance(*both))


def test_explained_variance(batch):
    target, value = batch["target"], batch["target"] + 0.5 * batch["value"]
    expected = 1 - np.var(target.astype(float) - value) / np.var(target.astype(float))
    assert explained(target, value) == pytest.approx(expected, rel=1e-5)
    assert explained(target, target) == 1.0
    assert explained(target, target + 3) == pytest.approx(1.0, abs=1e-6)
    assert explained(target, np.zeros_like(target)) == pytest.approx(0.0, abs=1e-6)
    assert explained(target, -target) == pytest.approx(-3.0, rel=1e-5)


def test_explained_variance_of_constant_targets_is_nan():
    assert math.isnan(explained([2.0, 2.0], [2.0, 2.0]))
    assert math.isnan(explained([2.0, 2.0], [1.0, 3.0]))


_ARRAYS = hnp.arrays(np.float32, 16, elements=st.floats(-3, 3, width=32))


@settings(deadline=None, max_examples=100)
@given(new=_ARRAYS, old=_ARRAYS, advantage=_ARRAYS, eps=st.floats(0.015625, 0.875, width=32))
def test_bounds(new, old, advantage, eps):
    ratio = np.exp(new.astype(float) - old)
    slack = 1e-5 * (1 + np.abs(ratio * advantage).max())
    surrogate, kl, fraction = map(float, _terms(new, old, advantage, np.float32(eps)))
    assert surrogate >= -np.mean(ratio * advantage) - slack, "the clipped objective must not exceed the unclipped one"
    assert kl >= -1e-6
    assert 0.0 <= fraction <= 1.0


@jax.jit
def _terms(new, old, advantage, eps):
    surrogate = losses.clipped_surrogate_loss(new, old, advantage, eps)
    return surrogate, losses.approx_kl(new, old), losses.clip_fraction(new, old, eps)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, column: losses.clipped_surrogate_loss(x, x, column, 0.2),
        losses.value_loss,
        lambda x, column: losses.clipped_value_loss(column, x, x, 0.2),
        lambda x, column: losses.approx_kl(column, x),
        lambda x, column: losses.clip_fraction(x, column, 0.2),
        lambda x, column: losses.standardize(column, x[0], x[0]),
        lambda x, column: losses.standardize(x, x, x),
        lambda x, column: Categorical(jnp.zeros((4, 3))).log_prob(column.astype(jnp.int32)),
        lambda x, column: DiagGaussian(jnp.zeros((4, 3)), jnp.zeros((4, 3))).log_prob(column),
        lambda x, column: gae(column, column, x, column > 0, column > 0, 0.9, 0.9),
        lambda x, column: gae(x, x, x, x > 0, x > 0, 0.9, 0.9),
    ],
)
def test_arrays_of_another_shape_raise_instead_of_broadcasting(loss):
    with pytest.raises(AssertionError, match="Assertion assert_"):
        loss(jnp.ones(4), jnp.ones((4, 1)))


@pytest.mark.parametrize(
    ("name", "value", "arguments"),
    [
        ("loss", lambda batch: (0.0, {}), "apply, batch, hyperparams, config, key"),
        ("advantages", lambda rollout: None, "apply, rollout, hyperparams, config"),
        ("LossModule.init", lambda: ((), ()), "key, obs"),
        ("LossModule.apply", lambda batch: (0.0, {}), "params, state, apply, batch, hyperparams, config, key"),
        ("LossModule.reward", lambda rollout: rollout.reward, "params, state, rollout, axis_name"),
    ],
)
def test_functions_with_wrong_arguments_raise(name, value, arguments):
    options = {name: value}
    if name.startswith("LossModule."):
        options = {"loss": module()._replace(**{name.removeprefix("LossModule."): value})}
    message = rf"^{name} = <lambda> must accept the arguments \({arguments}\): "
    with pytest.raises(TypeError, match=message):
        jppo.make_anakin(Probe(), **options)


def returning(value):
    return lambda *args: value


def metric(name, value):
    return lambda apply, batch, *rest: (jnp.mean(apply(batch.obs)[1]), {name: value})


def module(init=returning(((), ())), **functions):
    return jppo.LossModule(init=init, apply=lambda params, state, *args: losses.ppo_loss(*args), **functions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": jppo.LossModule(init=returning(((), ())), apply=None)}, "LossModule.apply = None must be a function"),
        ({"loss": returning(0.0)}, r"the loss returned float; it must return \(scalar, dict of scalar metrics\)"),
        ({"loss": returning((0.0, {}, 1))}, "the loss returned tuple of 3; it must"),
        ({"loss": lambda apply, *rest: jnp.zeros(())}, r"the loss returned an array of shape \(\); it must return"),
        ({"loss": lambda apply, batch, *rest: apply(batch.obs)[1].mean()}, r"returned an array of shape \(\); it must"),
        ({"loss": returning((0, {}))}, "the loss is int32, which has no gradient; it must be a real float"),
        ({"loss": returning((np.True_, {}))}, "the loss is bool, which has no gradient"),
        ({"loss": returning((0.0, []))}, "the loss returned list as metrics; it must"),
        ({"loss": returning((0.0, jnp.zeros(2)))}, r"the loss returned an array of shape \(2,\) as metrics; it must"),
        ({"loss": returning((np.zeros(3), {}))}, r"the loss has shape \(3,\); the loss must return"),
        ({"loss": metric("my/x", np.zeros(3))}, r"the metric 'my/x' has shape \(3,\)"),
        ({"loss": metric("update", 0.0)}, "the metric 'update' is one of jppo's; choose another name"),
        ({"loss": metric("eval/return_mean", 0.0)}, "the metric 'eval/return_mean' is one of jppo's"),
        ({"loss": metric("grad/norm", 0.0)}, "the metric 'grad/norm' is one of jppo's"),
        ({"loss": metric("value/mean", 0.0)}, "the metric 'value/mean' is one of jppo's"),
        ({"loss": metric(3, 0.0)}, "the name of a metric must be a printable text, not 3"),
        ({"loss": metric("my/x", None)}, "the metric .my/x. is not a real number, but NoneType; the loss must return"),
        ({"loss": metric("my/x", "one")}, "the metric .my/x. is not a real number, but str"),
        ({"loss": metric("my/x", 1j)}, "the metric .my/x. is not a real number, but complex"),
        ({"loss": lambda apply, *rest: (0.0, {"x": rest[-1]})}, "the metric .x. is not a real number, but key<fry>"),
        ({"loss": returning((None, {}))}, "the loss is not a real number, but NoneType"),
        ({"loss": lambda apply, batch, *rest: (apply(batch.next_obs)[1].mean(), {})}, "next_obs is empty; set"),
        (
            {"loss": lambda apply, batch, *rest: (apply({"x": batch.obs})[1].mean(), {})},
            r"the network got observations with the tree structure .*'x'.*; it needs PyTreeDef\(\*\)",
        ),
        (
            {"loss": lambda apply, batch, *rest: (apply(jnp.zeros((4, 3)))[1].mean(), {})},
            r"the network got observations of shape \[4, 3\]; it needs \[B, 1\]",
        ),
        (
            {"loss": lambda apply, batch, *rest: (apply(batch.obs[0])[1].mean(), {})},
            r"the network got observations of shape \[1\]; it needs \[B, 1\]",
        ),
        (
            {"loss": lambda apply, batch, *rest: ((batch.next_obs - apply(batch.obs)[1][:, None]).mean(), {})},
            "next_obs is empty; set",
        ),
        (
            {"loss": module(reward=lambda params, state, rollout, axis: (rollout.next_obs.sum(-1), state))},
            r"next_obs is empty; set PPOConfig\(keep_next_obs=True\)",
        ),
        ({"advantages": lambda apply, rollout, *rest: 2 * (apply(rollout.next_obs)[1],)}, "next_obs is empty"),
        ({"loss": module(returning(({"a": "x"}, ())))}, r"parameters\['a'\] of the LossModule are str, but must"),
        ({"loss": returning((0.5, {}))}, "the loss never calls apply"),
        ({"loss": module(returning(3))}, r"LossModule.init returned int; it must return \(parameters, state\)"),
        (
            {"loss": module(returning((np.zeros(3, int), ())))},
            "parameters of the LossModule are int32, but must",
        ),
        ({"loss": module(reward=returning(np.zeros((8, 4))))}, r"LossModule.reward returned ndarray; it must"),
        (
            {"loss": module(reward=returning((np.zeros(3), ())))},
            r"LossModule has shape \(3,\); .* = \[8, 4\]",
        ),
        (
            {"loss": module(reward=lambda params, state, rollout, axis: (rollout.reward, np.float32(1.0)))},
            r"LossModule.reward returned the state float32\[\], but must keep its shapes and dtypes, \(\)",
        ),
        ({"advantages": returning(0.0)}, "the function of the advantages returned float; it must return"),
        ({"advantages": returning((np.zeros((8, 4)), np.zeros(3)))}, r"array of value targets has shape \(3,\)"),
    ],
)
def test_invalid_results_of_losses_and_advantages_are_explained(options, message):
    def trace():
        agent = jppo.make_anakin(Probe(), jppo.PPOConfig(num_envs=4, num_steps=8, hidden_sizes=(4,)), **options)
        jax.eval_shape(agent.step, jax.eval_shape(agent.init, jax.random.key(0)))

    with pytest.raises(ValueError, match=message) as error:
        trace()
    assert "\n" not in str(error.value)


def test_losses_evaluate_recurrent_networks_on_all_rows():
    def loss(apply, batch, hyperparams, config, key):
        return apply(batch.obs[:8])[1].mean(), {}

    config = jppo.PPOConfig(num_envs=4, num_steps=8, num_minibatches=2, hidden_sizes=(4,), recurrent="gru")
    with pytest.raises(ValueError, match=r"observations of shape \[8, 1\]; it needs \[16, 1\]"):
        jppo.make_anakin(Probe(), config, loss=loss)


def test_advantages_may_be_numpy_arrays():
    zeros, config = np.zeros((8, 4)), jppo.PPOConfig(num_envs=4, num_steps=8, hidden_sizes=(4,))
    agent = jppo.make_anakin(Probe(), config, advantages=lambda *_: (zeros, zeros))
    metrics = jax.eval_shape(agent.step, jax.eval_shape(agent.init, jax.random.key(0)))[1]
    assert metrics["loss/total"].dtype == "float32"
