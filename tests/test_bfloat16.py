"""Tests `compute_dtype="bfloat16"`: hidden layers in bfloat16, everything else in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL
from host_probes import Counting as HostCounting
from lenient import lenient_env
from probes import BoxTimeLimit, Counting, DictCounting, ObsActionReward
from test_kernels import Image
from test_networks import Half
from test_sweeps import Cued

import jppo
from jppo import kernels
from jppo.actors import numpy_policy
from jppo.actors.action_selection import make_action_selection
from jppo.kernels import permutation
from jppo.ppo.anakin import collect_rollout
from jppo.ppo.policy import act, episode_starts

HALF = functools.partial(SMALL, compute_dtype="bfloat16", num_epochs=1, num_minibatches=1, hidden_sizes=(16, 16))
CASES = {
    "mlp": (ObsActionReward(), {}),
    "gaussian": (BoxTimeLimit(), {"shared_torso": True, "normalize_obs": True}),
    "cnn": (Image(6), {"network": "cnn"}),
    "several inputs": (DictCounting(), {}),
    "gru": (Counting(), {"recurrent": "gru", "recurrent_size": 16, "sequence_length": 4}),
    "lstm": (Counting(), {"recurrent": "lstm", "recurrent_size": 16}),
}
RATIO_TOLERANCE = 0.01


@functools.cache
def update_of(case, dtype="bfloat16"):
    """Returns the agent, its state, and the state and metrics after one update."""
    env, options = CASES[case]
    agent = jppo.make_anakin(env, HALF(**options).replace(compute_dtype=dtype), total_steps=64)
    state = jax.jit(agent.init)(jax.random.key(0))
    return agent, state, *jax.jit(agent.step)(state)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_products_are_bfloat16_and_everything_else_is_float32(case):
    agent, state, after, metrics = update_of(case)
    assert metrics["finite"]
    for leaf in jax.tree.leaves((state.train, after.train, state.collect, metrics)):
        assert leaf.dtype != jnp.bfloat16
    program = str(jax.make_jaxpr(agent.step)(state))
    assert "bf16" in program
    assert any("bf16" in line for line in program.splitlines() if "dot_general" in line or "conv_general" in line)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_first_minibatch_has_ratio_one(case):
    """Rollout and update evaluate the same function; only the rounding of products with other shapes may differ."""
    _, _, _, metrics = update_of(case)
    assert abs(float(metrics["policy/approx_kl"])) < RATIO_TOLERANCE**2
    assert metrics["policy/clip_fraction"] == 0.0


@pytest.mark.parametrize("case", ["mlp", "gru"])
@pytest.mark.slow
def test_recorded_numbers_are_those_of_the_update(case):
    agent, state, _, _ = update_of(case)
    rollout = jax.jit(functools.partial(collect_rollout, agent.env, agent.policy, agent.config))(
        state.train, state.collect
    )[1]
    carry = jax.tree.map(lambda x: x[0], rollout.carry)
    unroll = jax.jit(agent.policy.unroll)
    distribution, value, _ = unroll(state.train.policy_state, rollout.obs, carry, episode_starts(rollout.done))
    action = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rollout.action)
    ratio = np.exp(distribution.log_prob(action) - rollout.log_prob.ravel())
    assert abs(ratio - 1.0).max() < RATIO_TOLERANCE
    np.testing.assert_allclose(value, rollout.value.ravel(), atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mlp", "gru"])
def test_updates_are_close_to_those_in_float32(case):
    """Gradients agree up to the digits of bfloat16."""
    assert "bf16" not in str(jax.make_jaxpr(update_of(case, "float32")[0].step)(update_of(case)[1]))
    norms = [float(update_of(case, dtype)[3]["grad/norm"]) for dtype in ("bfloat16", "float32")]
    assert norms[0] == pytest.approx(norms[1], rel=0.1)
    assert norms[0] != norms[1]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mlp", "lstm"])
def test_updates_agree_with_the_plain_kernels(monkeypatch, case):
    monkeypatch.setattr("jppo.kernels.dense.WIDE", 1)
    monkeypatch.setattr("jppo.kernels.joined_layers.WIDE", 1)
    monkeypatch.setattr(permutation, "permute_index_plain", permutation.permute_index_tuned)
    agent, state, _, metrics = update_of(case)
    monkeypatch.setattr(kernels, "ENABLED", False)
    plain = jppo.make_anakin(CASES[case][0], agent.config, total_steps=64)
    start = jax.jit(plain.init)(jax.random.key(0))
    policy = start.train.policy_state.replace(params=state.train.policy_state.params)
    _, expected = jax.jit(plain.step)(start.replace(train=start.train.replace(policy_state=policy)))
    for name in ("loss/total", "grad/norm", "value/mean"):
        assert float(metrics[name]) == pytest.approx(float(expected[name]), rel=0.05, abs=1e-3), name


@pytest.mark.slow
def test_actors_select_actions_with_the_network_that_the_learner_updates():
    """NumPy has no bfloat16, so the actors use the compiled program."""
    config = HALF(num_envs=4, num_steps=16)
    options = {"config": config, "total_steps": 64, "learning_rate": 0.0, "num_devices": 1}
    result = jppo.train(HostCounting, ray=jppo.RayConfig(num_actors=0), **options)
    assert abs(result.metrics["policy/approx_kl"][0]) < RATIO_TOLERANCE**2
    assert result.metrics["policy/clip_fraction"][0] == 0.0
    for dtype, uses_numpy in (("float32", True), ("bfloat16", False)):
        agent = jppo.make_anakin(ObsActionReward(), config.replace(compute_dtype=dtype))
        selection = make_action_selection(agent.policy, 4)
        assert ("numpy" in selection.compile.__qualname__) == uses_numpy


@pytest.mark.slow
def test_runs_are_saved_resumed_evaluated_and_exported(tmp_path):
    options = {"config": HALF(), "learning_rate": 1e-2, "num_devices": 1}
    env = lenient_env("CartPole-v1")
    whole = jppo.train(env, total_steps=128, **options)
    jppo.train(env, total_steps=64, run_dir=tmp_path / "run", **options)
    result = jppo.train(env, total_steps=128, run_dir=tmp_path / "run")
    assert result.agent.config.compute_dtype == "bfloat16"
    for one, other in zip(jax.tree.leaves(whole.policy.state), jax.tree.leaves(result.policy.state), strict=True):
        np.testing.assert_array_equal(one, other)
    assert jppo.evaluate(result, num_episodes=2).returns.shape == (2,)
    obs = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    jppo.export_policy(result.policy, tmp_path / "policy.stablehlo", platforms=("cpu",))
    exported = jppo.load_exported(tmp_path / "policy.stablehlo")
    np.testing.assert_allclose(exported.value(obs), result.policy.value(obs), atol=0.02)
    jppo.export_policy(result.policy, tmp_path / "policy.npz")
    value = numpy_policy.load(tmp_path / "policy.npz").value(obs)  # in float32, with the same weights
    np.testing.assert_allclose(value, result.policy.value(obs), atol=0.05)
    assert act(result.policy.policy, result.policy.state, obs).log_prob.dtype == jnp.float32


def test_own_network_chooses_its_own_dtype():
    with pytest.raises(ValueError, match=r"compute_dtype = bfloat16 .*cast the inputs and parameters in Half.apply"):
        jppo.make_anakin(ObsActionReward(), HALF(), network=Half())


@pytest.mark.slow
def test_sweeps_load_policies_with_parameters_in_bfloat16(tmp_path):
    """NumPy's files store bfloat16 as bytes without a type."""
    options = {"config": SMALL(), "seeds": 2, "total_steps": 64, "num_devices": 1, "network": Half()}
    first = jppo.sweep(Cued(), sweep_dir=tmp_path, **options)
    again = jppo.sweep(Cued(), sweep_dir=tmp_path, **options)
    assert [run.status for run in again.runs] == ["finished"] * 2
    for one, other in zip(first.runs, again.runs, strict=True):
        leaves = [jax.tree.leaves(run.policy_state) for run in (one, other)]
        assert [leaf.dtype for leaf in leaves[1]] == [jnp.bfloat16] * len(leaves[1])
        for old, new in zip(*leaves, strict=True):
            np.testing.assert_array_equal(old, new)


@pytest.mark.slow
def test_cartpole_is_learned_in_bfloat16(optimized):
    env, options = lenient_env("CartPole-v1"), {"preset": "cleanrl-classic", "total_steps": 300_000, "num_envs": 8}
    options["learning_rate"] = jppo.schedules.linear(1e-3, 0.0)
    runs = [jppo.train(env, seed=seed, compute_dtype="bfloat16", **options) for seed in range(3)]
    assert np.median([run.summary["return_mean"] for run in runs]) > 400.0  # 497, 491, 400
