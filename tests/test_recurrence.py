"""Tests recurrent policies: cells, rollouts, minibatches of sequences, both modes and whole updates."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_probes import Counting as HostCounting
from host_probes import InfoMasked
from lenient import lenient_env
from probes import Counting
from reference import GRU, LSTM, RecurrentReference

import jppo
from jppo.actors.env_runner import EnvRunner
from jppo.envs.spaces import ActionSpec, ObsSpec
from jppo.kernels import gradient
from jppo.networks.actor_critic import make_network
from jppo.networks.recurrent import Recurrent, initial_carry
from jppo.ppo.learner import make_learner
from jppo.ppo.normalization import moments_of
from jppo.ppo.policy import episode_starts, make_policy
from jppo.ppo.rollout import collect, init_collect
from jppo.ppo.types import EpisodeStats, Transition

T, N, L, H = 8, 4, 4, 5
CONFIG = jppo.PPOConfig(
    num_envs=N,
    num_steps=T,
    sequence_length=L,
    recurrent="gru",
    recurrent_size=H,
    hidden_sizes=(6, 7),
    num_minibatches=2,
)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_cells_equal_a_loop_in_numpy(cell):
    """The reference follows the equations of the papers, one step at a time."""
    rng = np.random.default_rng(0)
    x, reset = rng.normal(size=(6, 3, 2)).astype(np.float32), rng.random((6, 3)) < 0.3
    layer = Recurrent(cell, H)
    params = layer.init(jax.random.key(0), x[0], initial_carry(cell, 3, H))
    params = jax.tree.map(lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape).astype(np.float32), params)
    outputs, carry = layer.apply(params, x, initial_carry(cell, 3, H), reset)
    memory = {"gru": GRU, "lstm": LSTM}[cell]({k: np.asarray(v, float) for k, v in params["params"].items()})
    start = np.zeros((3, H) if cell == "gru" else (3, H, 2))
    expected = memory.forward(x.astype(float), start, reset)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(carry if cell == "gru" else carry[1], expected[-1], rtol=1e-4, atol=1e-5)
    if cell == "lstm":
        c = memory.tape[-1][-1]
        np.testing.assert_allclose(carry[0], c, rtol=1e-4, atol=1e-5)


class StepwiseGRU(nn.Module):
    """A user's network of flax's own cell, without `unroll`; its hidden size differs from its input size."""

    @nn.compact
    def __call__(self, obs, carry):
        carry, x = nn.GRUCell(features=H)(carry, obs)
        return jppo.Categorical(nn.Dense(2)(x)), nn.Dense(1)(x)[:, 0], carry

    @nn.nowrap
    def initial_carry(self, batch_size):
        return jnp.zeros((batch_size, H))


def make_parts(config=CONFIG, network=None):
    env = Counting()
    env = jppo.make_env(env)
    network = network or make_network(config, env.obs_spec, env.action_spec)
    policy = make_policy(network, env.obs_spec, env.action_spec)
    return env, policy, make_learner(policy, config)


@pytest.mark.parametrize("network", ["gru", "lstm", "user"])
def test_replayed_sequences_give_the_recorded_numbers(network):
    """Episodes of Counting end within sequences, at their first and at their last step, in both ways."""
    own = StepwiseGRU() if network == "user" else None
    config = dataclasses.replace(CONFIG, recurrent="gru" if own else network)
    env, policy, learner = make_parts(config, own)
    state = init_collect(env, jax.random.key(0), jnp.arange(N), policy.initial_carry(N))
    params = learner.init(jax.random.key(1), state.obs, jppo.Hyperparams(), 3).policy_state
    run = jax.jit(lambda params, state: collect(env, policy, T, params, state, 0.9, sequence_length=L))
    state, first, _ = run(params, state)
    _, rollout, _ = run(params, state)
    ends = np.concatenate([first.done, rollout.done])
    assert {t % L for t in np.flatnonzero(ends.any(axis=1))} >= {0, 1, L - 1}
    assert (rollout.truncated & ~rollout.terminated).any()
    starts = jax.tree.map(lambda leaf: leaf[:1], rollout.carry)
    assert jax.tree.leaves(starts)[0].shape == (1, N, H)
    reset = episode_starts(rollout.done)
    for k in range(T // L):
        rows = slice(k * L, (k + 1) * L)
        carry = jax.tree.map(lambda leaf, k=k: leaf[k], rollout.carry)
        part = jax.tree.map(lambda leaf, rows=rows: leaf[rows], rollout.replace(carry=()))
        distribution, value, _ = policy.unroll(params, part.obs, carry, reset[rows])
        np.testing.assert_allclose(value.reshape(L, N), part.value, rtol=1e-5, atol=1e-6)
        log_prob = distribution.log_prob(part.action.reshape(-1)).reshape(L, N)
        np.testing.assert_allclose(log_prob, part.log_prob, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cell", ["gru", pytest.param("lstm", marks=pytest.mark.slow)])
def test_whole_updates_equal_a_numpy_implementation(cell):
    """Episodes end inside the sequences, in both ways, and the stored carries are not zero."""
    num_envs, size = 8, 3
    config = dataclasses.replace(CONFIG, recurrent=cell, num_envs=num_envs, num_epochs=2, num_strata=2)
    obs_spec, action_spec = ObsSpec((size,), "float32"), ActionSpec((), "int32", num_actions=4)
    policy = make_policy(make_network(config, obs_spec, action_spec), obs_spec, action_spec)
    learner = make_learner(policy, config)
    numbers = jppo.Hyperparams(learning_rate=3e-3, gamma=0.97, ent_coef=0.02, vf_coef=0.7, adam_eps=1e-3)
    rng = np.random.default_rng(0)
    draw = functools.partial(rng.normal, 0.0, 0.5)
    state = jax.jit(learner.init)(jax.random.key(0), jnp.zeros((num_envs, size)), numbers, 2)
    params = jax.tree.map(lambda x: x + draw(x.shape).astype(np.float32), state.policy_state.params)
    state = state.replace(policy_state=state.policy_state.replace(params=params))
    reference = RecurrentReference(state, config, numbers)
    update = jax.jit(learner.update)
    for _ in range(2):
        reward, value, next_value, log_prob = draw(size=(4, T, num_envs)).astype(np.float32)
        rollout = Transition(
            obs=draw(size=(T, num_envs, size)).astype(np.float32),
            action=rng.integers(0, 4, (T, num_envs)).astype(np.int32),
            log_prob=0.2 * log_prob - 1.4,
            value=value,
            next_value=next_value,
            reward=reward,
            terminated=rng.random((T, num_envs)) < 0.15,
            truncated=rng.random((T, num_envs)) < 0.15,
            carry=jax.tree.map(
                lambda x: draw(size=(T // L, *x.shape)).astype(np.float32), policy.initial_carry(num_envs)
            ),
        )
        none = moments_of(rollout.reward)
        state, metrics = update(state, rollout, EpisodeStats(returns=none, lengths=none, discounted=none))
        for name, number in reference.update(rollout).items():
            np.testing.assert_allclose(metrics[name], number, rtol=2e-4, atol=1e-5, err_msg=name)
        assert metrics["grad/norm"] > numbers.max_grad_norm
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=5e-6),
            state.policy_state.params,
            reference.as_flax(),
        )
    assert reference.gradient_steps == 2 * config.num_epochs * config.num_minibatches


def test_values_of_successors_use_the_carry_after_the_last_step():
    """Steps the network by hand along each environment, with the true successor observations."""
    env, policy, learner = make_parts()
    start = init_collect(env, jax.random.key(0), jnp.arange(N), policy.initial_carry(N))
    params = learner.init(jax.random.key(1), start.obs, jppo.Hyperparams(), 3).policy_state
    end, rollout, _ = jax.jit(
        lambda: collect(env, policy, T, params, start, 0.9, sequence_length=L, keep_next_obs=True)
    )()
    carry = policy.initial_carry(N)
    for t in range(T):
        _, value, carry = policy.step(params, rollout.obs[t], carry)
        np.testing.assert_allclose(value, rollout.value[t], rtol=1e-5, atol=1e-6)
        _, next_value, _ = policy.step(params, rollout.next_obs[t], carry)
        expected = np.where(rollout.terminated[t], 0.0, next_value)
        np.testing.assert_allclose(rollout.next_value[t], expected, rtol=1e-5, atol=1e-6)
        carry = jnp.where(rollout.done[t][:, None], 0.0, carry)
    np.testing.assert_allclose(end.carry, carry, rtol=1e-5, atol=1e-6)
    assert rollout.truncated.any()


def test_actors_reset_the_carry_at_the_end_of_an_episode():
    """Steps the network by hand over the recorded observations."""
    agent, key = jppo.make_sebulba(HostCounting, CONFIG, total_steps=T * N), jax.random.key(0)
    params = jax.device_get(agent.init(key, jppo.Hyperparams()).policy_state)
    rollout = EnvRunner(agent.runner_spec(key), np.arange(N)).collect(params, 0.9).rollout
    carry = agent.policy.initial_carry(N)
    for t in range(T):
        if t % L == 0:
            np.testing.assert_allclose(rollout.carry[t // L], carry, rtol=1e-5, atol=1e-6)
        carry = agent.policy.step(params, rollout.obs[t], carry)[2]
        carry = jnp.where(rollout.done[t][:, None], 0.0, carry)
    assert rollout.done[:L].any()


class EmptyAtOne(InfoMasked):
    """Marks no action as legal at time 1 of each episode."""

    def info(self):
        return {"action_mask": super().info()["action_mask"] * np.int8(self.time != 1)}


@pytest.mark.slow
def test_actors_stop_before_a_first_step_without_legal_actions():
    config = dataclasses.replace(CONFIG, num_steps=1, num_minibatches=1, sequence_length=None)
    agent, key = jppo.make_sebulba(EmptyAtOne, config, total_steps=2 * N), jax.random.key(0)
    runner, params = EnvRunner(agent.runner_spec(key), np.arange(N)), jax.device_get(agent.init(key).policy_state)
    runner.collect(params, 0.9)
    with pytest.raises(ValueError, match="EmptyAtOne: action_mask marks no legal action in environment 0 at step 0"):
        runner.collect(params, 0.9)


def test_first_minibatch_has_ratio_one():
    config = dataclasses.replace(CONFIG, num_epochs=1, num_minibatches=1)
    result = jppo.train(Counting(), total_steps=T * N, config=config, learning_rate=0.1, num_devices=1)
    assert abs(result.metrics["policy/approx_kl"][0]) < 1e-9
    assert result.metrics["policy/clip_fraction"][0] == 0.0


@pytest.mark.slow
def test_devices_do_not_change_a_run():
    options = {"total_steps": 3 * T * N, "config": CONFIG, "seed": 2}
    one, four = (jppo.train(Counting(), num_devices=n, **options) for n in (1, 4))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        one.policy.state.params,
        four.policy.state.params,
    )


@pytest.mark.slow
def test_microbatches_of_sequences_do_not_change_a_run(monkeypatch):
    """On two devices of a CPU, minibatches whose activations exceed the cache are split."""
    found, count = [], gradient.num_microbatches

    def recorded(*args):
        found.append(count(*args))
        return found[-1]

    monkeypatch.setattr(gradient, "num_microbatches", recorded)
    monkeypatch.setattr(gradient, "_MIN_SEQUENCES", 1)
    config = dataclasses.replace(CONFIG, num_minibatches=1)
    options = {"total_steps": 2 * T * N, "config": config, "seed": 2, "num_devices": 2}
    whole = jppo.train(Counting(), **options)
    monkeypatch.setattr(gradient, "_CACHE_BYTES", 512)
    split = jppo.train(Counting(), **options)
    assert set(found) == {1, 4}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        whole.policy.state.params,
        split.policy.state.params,
    )


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    env = lenient_env("CartPole-v1")
    options = {"config": CONFIG, "seed": 2, "learning_rate": 1e-2, "num_devices": 1}
    first = jppo.train(env, total_steps=2 * T * N, run_dir=tmp_path / "run", **options)
    resumed = jppo.train(env, total_steps=4 * T * N, run_dir=tmp_path / "run", **options)
    alone = jppo.train(env, total_steps=4 * T * N, **options)
    assert resumed.summary["policy_sha256"] == alone.summary["policy_sha256"] != first.summary["policy_sha256"]
    np.testing.assert_array_equal(resumed.state.collect.carry, alone.state.collect.carry)


@pytest.mark.slow
def test_policy_acts_with_a_state():
    """Acting step by step with the state equals unrolling the sequence."""
    result = jppo.train(lenient_env("CartPole-v1"), total_steps=T * N, config=CONFIG, num_devices=1)
    policy, obs = result.policy, np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    state, actions = None, []
    for t in range(6):
        action, state = policy.act(obs[t], state, episode_start=t == 3)
        actions.append(int(action))
    reset = np.arange(6)[:, None] == 3
    start = policy.policy.initial_carry(1)
    distribution, _, _ = policy.policy.unroll(policy.state, obs[:, None], start, reset)
    assert actions == distribution.mode().tolist()
    assert np.isfinite(jppo.evaluate(result, num_episodes=3, max_steps=20).returns).all()

    wrong = np.zeros((1, 7), np.float32)
    with pytest.raises(ValueError, match=r"arrays of shapes \[\(1, 7\)\]; for 1 observations, .* needs"):
        policy.act(obs[0], wrong)
    with pytest.raises(ValueError, match=r"for 6 observations"):
        policy.value(obs, policy.act(obs[0])[1])
    actions, state = policy.act(obs[:0])
    assert (actions.shape, len(state), policy.value(obs[:0]).shape) == ((0,), 0, (0,))


@pytest.mark.slow
def test_seeds_under_vmap_equal_single_runs():
    agent = jppo.make_anakin(Counting(), CONFIG, total_steps=2 * T * N)
    keys = jax.random.split(jax.random.key(0), 2)
    together = jax.jit(jax.vmap(agent.train, in_axes=(0, None)))(keys, jppo.Hyperparams())[0]
    alone = jax.jit(agent.train)(keys[1], jppo.Hyperparams())[0]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[1], b, rtol=1e-4, atol=1e-6),
        together.train.policy_state.params,
        alone.train.policy_state.params,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 3}, "num_steps = 8 is not divisible by sequence_length = 3"),
        (
            {"sequence_length": 8, "num_minibatches": 8},
            "sequences of 8 steps, which are not divisible by num_minibatches = 8",
        ),
        ({"recurrent_size": 0}, "recurrent_size"),
        ({"recurrent": "rnn"}, "gru"),
        (
            {"actor_obs": ("a",)},
            r"^actor_obs = \('a',\) and critic_obs = \(\) differ, but actor and critic share the gru and the layers "
            "before it; use the same names for both, or use recurrent = none$",
        ),
        (
            {"critic_obs": ("a",), "recurrent": "none", "sequence_length": None, "shared_torso": True},
            r"share their hidden layers \(shared_torso = True\); use the same names for both, or set shared_torso to",
        ),
    ],
)
def test_invalid_settings_are_explained(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **options)


def test_sequence_length_must_fit_the_network():
    plain = jppo.PPOConfig(num_envs=N, num_steps=T)
    with pytest.raises(ValueError, match="needs a recurrent network"):
        jppo.make_anakin(Counting(), dataclasses.replace(plain, sequence_length=4))
    feed_forward = make_network(plain, ObsSpec((3,), "float32"), ActionSpec((), "int32", num_actions=2))
    with pytest.raises(ValueError, match="is feed-forward; leave one of them out"):
        jppo.make_anakin(Counting(), CONFIG, network=feed_forward)
    with pytest.raises(ValueError, match="set sequence_length"):
        jppo.make_anakin(Counting(), plain, network=StepwiseGRU())


def test_carries_of_changing_shape_are_rejected():
    class Growing(StepwiseGRU):
        @nn.compact
        def __call__(self, obs, carry):
            distribution, value, carry = super().__call__(obs, carry)
            return distribution, value, jnp.concatenate([carry, carry], axis=-1)

    with pytest.raises(ValueError, match="same structure, shapes and dtypes"):
        jppo.make_anakin(Counting(), CONFIG, network=Growing())


def returning(value):
    return lambda self, *args: value


@pytest.mark.parametrize(
    ("method", "function", "message"),
    [
        (
            "initial_carry",
            lambda self: jnp.zeros((3, H)),
            "initial_carry failed for observations .*: TypeError: .* argu",
        ),
        (
            "initial_carry",
            returning(jnp.zeros(H)),
            r"initial_carry\(7\) has arrays of shapes \[\(5,\)\]; the first dim",
        ),
        ("initial_carry", returning(None), r"\(7\) has no arrays; leave the method out"),
        ("unroll", lambda self, params, obs, carry: carry, "unroll failed for observations .*: TypeError: .* argu"),
        (
            "unroll",
            returning(3.0),
            r"unroll returned arrays of shapes \[\(\)\] for 3 steps of 7 sequences",
        ),
        (
            "unroll",
            lambda self, params, obs, carry, reset: (jppo.Categorical(obs[..., :2]), obs[..., 0], carry),
            r"shapes \[\(3, 7, 2\), \(3, 7\), \(7, 5\)\] .* of shapes \[\(21, 2\), \(21,\), \(7, 5\)\]",
        ),
    ],
)
def test_invalid_methods_of_recurrent_networks_are_explained(method, function, message):
    network = type("Wrong", (StepwiseGRU,), {method: nn.nowrap(function)})()
    with pytest.raises(ValueError, match=message) as error:
        jppo.make_anakin(Counting(), CONFIG, network=network)
    assert "\n" not in str(error.value)
