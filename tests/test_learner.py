"""Tests the update against an independent implementation in float64 NumPy, and its invariants."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import cpu_only
from jax.sharding import Mesh, PartitionSpec
from lenient import lenient_env
from reference import Reference

from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.config.schedules import linear
from jppo.envs.spaces import ActionSpec, ObsSpec
from jppo.kernels import gradient as gradients
from jppo.networks.actor_critic import ActorCritic, make_network
from jppo.ppo.anakin import make_anakin
from jppo.ppo.learner import make_learner
from jppo.ppo.losses import approx_kl, gae, mean_over_rows, ppo_loss
from jppo.ppo.normalization import moments_of
from jppo.ppo.policy import make_policy
from jppo.ppo.types import EpisodeStats, Transition

T, N, OBS = 8, 16, 3
OBS_SPEC = ObsSpec((OBS,), "float32")
ACTIONS = {
    "discrete": ActionSpec((), "int32", 4),
    "continuous": ActionSpec((2,), "float32", low=(-1.0,) * 2, high=(1.0,) * 2),
}
BASE = PPOConfig(num_envs=N, num_steps=T, num_epochs=3, num_minibatches=4, hidden_sizes=(8, 8))
NORMALISED = dataclasses.replace(
    BASE,
    normalize_obs=True,
    normalize_reward=True,
    clip_value=False,
    kl_control="adapt",
)
NUMBERS = Hyperparams(
    learning_rate=3e-3,
    gamma=0.97,
    gae_lambda=0.9,
    ent_coef=0.02,
    vf_coef=0.7,
    vf_clip_eps=0.3,
    adam_eps=1e-3,
    target_kl=0.1,
)


def variant(**fields):
    return dataclasses.replace(BASE, **fields)


def numbers(**fields):
    return dataclasses.replace(NUMBERS, **fields)


def policy_of(config, kind="discrete"):
    return make_policy(make_network(config, OBS_SPEC, ACTIONS[kind]), OBS_SPEC, ACTIONS[kind])


@jax.jit
def stats_of(rollout):
    """Returns random episode statistics; an update uses only `discounted`, to scale rewards."""
    return EpisodeStats(
        returns=moments_of(rollout.reward, rollout.done),
        lengths=moments_of(jnp.abs(rollout.value), rollout.done),
        discounted=moments_of(2.0 * rollout.reward + 0.5),
    )


@functools.cache
def compiled(config, kind="discrete"):
    """Returns (init, jitted update), shared by the tests because compilation takes seconds."""
    learner = make_learner(policy_of(config, kind), config)

    def init(seed=0, hyperparams=NUMBERS, num_updates=10):
        return learner.init(jax.random.key(seed), jnp.zeros((N, OBS)), hyperparams, num_updates)

    jitted = jax.jit(learner.update)
    return init, lambda state, rollout, stats=None: jitted(state, rollout, stats or stats_of(rollout))


@functools.cache
def acting(config, kind):
    policy = policy_of(config, kind)

    @jax.jit
    def act(policy_state, obs, key):
        distribution, value = policy.step(policy_state, obs)[:2]
        action = distribution.sample(seed=key)
        return action, distribution.log_prob(action), value

    return act


def rollout_for(state, config, seed, kind="discrete", off_policy=0.0):
    """Returns a rollout of the policy on random observations; `off_policy` changes the recorded log_prob and value."""
    rng = np.random.default_rng(seed)
    obs = rng.normal([0.0, 5.0, -2.0], [1.0, 2.0, 0.1], (T, N, OBS)).astype(np.float32)
    act = acting(config, kind)
    keys = jax.random.split(jax.random.key(seed + 1000), T)
    columns = [act(state.policy_state, jnp.asarray(o), key) for o, key in zip(obs, keys, strict=True)]
    action, log_prob, value = (jnp.stack(column) for column in zip(*columns, strict=True))
    noise = off_policy * rng.normal(size=(2, T, N)).astype(np.float32)
    reward, next_value = rng.normal(0.3, 1.0, (2, T, N)).astype(np.float32)
    return Transition(
        obs=jnp.asarray(obs),
        action=action,
        log_prob=log_prob + noise[0],
        value=value + noise[1],
        next_value=jnp.asarray(next_value),
        reward=jnp.asarray(reward),
        terminated=jnp.asarray(rng.random((T, N)) < 0.1),
        truncated=jnp.asarray(rng.random((T, N)) < 0.1),
    )


def largest_difference(tree, other):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return max(float(np.abs(np.asarray(a, float) - np.asarray(b, float)).max()) for a, b in pairs)


@pytest.mark.slow
def test_clip_reward_trains_on_the_signs_of_rewards():
    """The statistics of episodes are those of the original rewards."""
    init, update = compiled(variant(clip_reward=True))
    state = init()
    rollout = rollout_for(state, BASE, 0)
    stats = stats_of(rollout)
    clipped, metrics = update(state, rollout, stats)
    expected, _ = compiled(BASE)[1](state, rollout.replace(reward=jnp.sign(rollout.reward)), stats)
    assert largest_difference(clipped.policy_state, expected.policy_state) < 1e-6
    np.testing.assert_allclose(metrics["episode/return_mean"], stats.returns.mean)
    with pytest.raises(ValueError, match="clip_reward and normalize_reward exclude each other"):
        variant(clip_reward=True, normalize_reward=True)


@pytest.mark.parametrize(
    ("kind", "config"), [("discrete", BASE), ("continuous", NORMALISED)], ids=["discrete", "continuous-normalised"]
)
def test_updates_match_a_numpy_implementation(kind, config):
    init, update = compiled(config, kind)
    first = state = init()
    reference = Reference(state, config, NUMBERS, kind == "discrete")
    for seed in range(4):
        rollout = rollout_for(state, config, seed, kind, off_policy=0.15)
        state, metrics = update(state, rollout)
        expected = reference.update(rollout)
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=2e-4, atol=1e-5, err_msg=name)
        params = reference.as_flax()
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=5e-6), state.policy_state.params, params
        )
        assert 0.05 < expected["policy/clip_fraction"] < 0.95
        assert expected["grad/norm"] > NUMBERS.max_grad_norm
    assert largest_difference(state.policy_state.params, first.policy_state.params) > 0.05
    assert (int(state.update), reference.gradient_steps) == (4, 4 * config.num_epochs * config.num_minibatches)


@pytest.mark.slow
def test_first_minibatch_has_ratio_one_and_kl_zero():
    """Normalizers change only after the epochs, so that learner and policy see the same observations."""
    config = variant(num_epochs=1, num_minibatches=1, normalize_obs=True, normalize_advantage=False)
    init, update = compiled(config)
    state, policy = init(), policy_of(config)
    for seed in range(4):
        rollout = rollout_for(state, config, seed)
        after, metrics = update(state, rollout)
        assert abs(float(metrics["policy/approx_kl"])) < 1e-9
        assert float(metrics["policy/clip_fraction"]) == 0.0
        columns = (rollout.reward, rollout.value, rollout.next_value, rollout.terminated, rollout.truncated)
        advantage = gae(*columns, NUMBERS.gamma, NUMBERS.gae_lambda)
        assert float(metrics["loss/policy"]) == pytest.approx(-float(advantage.mean()), abs=1e-6)
        moved = state.policy_state.replace(obs_stats=after.policy_state.obs_stats)
        distribution, _ = policy.step(moved, rollout.obs.reshape(-1, OBS))[:2]
        too_early = approx_kl(distribution.log_prob(rollout.action.reshape(-1)), rollout.log_prob.reshape(-1))
        assert float(too_early) > 1e-8, "the test must fail with the statistics after the update"
        state = after
    assert float(state.policy_state.obs_stats.count) == 4 * T * N


@pytest.mark.slow
def test_kl_stop_ends_after_the_first_epoch_above_the_target():
    init, update = compiled(variant(kl_control="stop"))
    one_init, one_update = compiled(variant(num_epochs=1))
    tiny = numbers(target_kl=1e-12)
    state, one_state = init(hyperparams=tiny), one_init(hyperparams=tiny)
    for seed in range(2):
        rollout = rollout_for(state, BASE, seed)
        state, metrics = update(state, rollout)
        one_state, one_metrics = one_update(one_state, rollout)
        assert float(metrics["policy/approx_kl"]) > 1e-6
        assert largest_difference(state.policy_state, one_state.policy_state) < 1e-6
        assert largest_difference(metrics, one_metrics) < 1e-5


def mean_log_prob(apply, batch, hyperparams, config, key):
    return -apply(batch.obs)[0].log_prob(batch.action).mean(), {}


@pytest.mark.parametrize("control", ["stop", "adapt"])
def test_a_loss_without_kl_is_refused_where_kl_is_controlled(control):
    with pytest.raises(ValueError, match=f'kl_control = "{control}" needs a loss that returns .*policy/approx_kl'):
        make_anakin(lenient_env("CartPole-v1"), variant(kl_control=control), loss=mean_log_prob)


def test_kl_stop_with_a_large_target_never_stops():
    init, update = compiled(variant(kl_control="stop"))
    _, plain_update = compiled(BASE)
    state = init(hyperparams=numbers(target_kl=1e3))
    rollout = rollout_for(state, BASE, 0)
    (stopped, metrics), (plain, plain_metrics) = update(state, rollout), plain_update(state, rollout)
    assert largest_difference(stopped.policy_state, plain.policy_state) < 1e-6
    assert largest_difference(metrics, plain_metrics) < 1e-5
    assert int(stopped.opt_state[0].count) == BASE.num_epochs * BASE.num_minibatches


def test_kl_adapt_changes_the_learning_rate_within_bounds():
    init, update = compiled(NORMALISED, "continuous")
    rollout = rollout_for(init(), NORMALISED, 0, "continuous")
    kl = float(update(init(), rollout)[1]["policy/approx_kl"])
    assert kl > 1e-6

    def scale_after(target_kl, scale=1.0):
        state = init(hyperparams=numbers(target_kl=target_kl))
        state, metrics = update(state.replace(learning_rate_scale=jnp.asarray(scale)), rollout)
        np.testing.assert_allclose(metrics["learning_rate"], scale * NUMBERS.learning_rate, rtol=1e-6)
        return float(state.learning_rate_scale)

    assert scale_after(kl / 3) == pytest.approx(1 / 1.5)
    assert scale_after(kl) == 1.0
    assert scale_after(3 * kl) == pytest.approx(1.5)
    assert scale_after(1e6, scale=99.0) == pytest.approx(100.0)
    assert scale_after(1e-12, scale=0.0101) == pytest.approx(0.01)


def test_annealing_ends_at_zero():
    init, update = compiled(BASE)
    state = init(hyperparams=numbers(learning_rate=linear(3e-3, 0.0)), num_updates=4)
    rollout = rollout_for(state, BASE, 0)
    rates, moves = [], []
    for _ in range(6):
        after, metrics = update(state, rollout)
        rates.append(float(metrics["learning_rate"]))
        moves.append(largest_difference(after.policy_state, state.policy_state))
        state = after
    np.testing.assert_allclose(rates, 3e-3 * np.array([1, 0.75, 0.5, 0.25, 0, 0]), rtol=1e-6)
    assert min(moves[:4]) > 0
    assert moves[4:] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("field", "value"),
    [("reward", np.nan), ("reward", np.inf), ("value", np.nan), ("log_prob", np.nan), ("obs", np.nan)],
)
def test_update_that_is_not_finite_is_skipped(field, value):
    config, kind = NORMALISED, "continuous"
    init, update = compiled(config, kind)
    state, _ = update(init(), rollout_for(init(), config, 0, kind))
    rollout = rollout_for(state, config, 1, kind)
    poison = getattr(rollout, field)
    poison = poison.at[(T // 2, N // 2) + (0,) * (poison.ndim - 2)].set(value)
    after, metrics = update(state, rollout.replace(**{field: poison}))
    assert not bool(metrics["finite"])
    for part in ("policy_state", "opt_state", "reward_stats", "learning_rate_scale"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, part), getattr(state, part))
    assert int(after.update) == int(state.update) + 1
    recovered, metrics = update(after, rollout)
    assert bool(metrics["finite"])
    assert largest_difference(recovered.policy_state, after.policy_state) > 0


def test_overflow_of_the_gradient_norm_is_reported():
    init, update = compiled(BASE, "discrete")
    state = init()
    steep = state.replace(hyperparams=dataclasses.replace(state.hyperparams, vf_coef=jnp.float32(1e25)))
    after, metrics = update(steep, rollout_for(state, BASE, 0, "discrete"))
    assert np.isfinite(metrics["loss/total"])
    assert not bool(metrics["finite"])
    assert largest_difference(after.policy_state, state.policy_state) == 0


def test_return_that_is_not_finite_does_not_change_the_reward_scale():
    """An episode that once had a NaN reward has a NaN return until it ends, even with finite rewards."""
    config, kind = NORMALISED, "continuous"
    init, update = compiled(config, kind)
    state = init()
    rollout = rollout_for(state, config, 0, kind)
    stats = stats_of(rollout)
    bad = stats.replace(discounted=jax.tree.map(lambda x: x * jnp.nan, stats.discounted))
    state, metrics = update(state, rollout, bad)
    assert not bool(metrics["finite"])
    state, metrics = update(state, rollout)
    assert bool(metrics["finite"])
    assert np.isfinite(jax.tree.leaves(state.reward_stats)).all()


@pytest.mark.parametrize("num_devices", [2, 8])
def test_sharded_update_equals_update_on_one_device(num_devices):
    config, kind = NORMALISED, "continuous"
    init, update = compiled(config, kind)
    learner = make_learner(policy_of(config, kind), config, axis_name="devices")
    replicated, by_env = PartitionSpec(), PartitionSpec(None, "devices")
    sharded_update = jax.jit(
        jax.shard_map(
            lambda state, rollout: learner.update(state, rollout, stats_of(rollout)),
            mesh=Mesh(np.array(jax.devices()[:num_devices]), ("devices",)),
            in_specs=(replicated, by_env),
            out_specs=(replicated, replicated),
            check_vma=False,
        )
    )
    state = other = init()
    for seed in range(2):
        rollout = rollout_for(state, config, seed, kind, off_policy=0.05)
        state, metrics = update(state, rollout)
        other, other_metrics = sharded_update(other, rollout)
        assert set(metrics) == set(other_metrics)
        for name in metrics:
            np.testing.assert_allclose(other_metrics[name], metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)
        assert largest_difference(other.policy_state.params, state.policy_state.params) < 1e-5
        ours, theirs = ((s.policy_state.obs_stats, s.reward_stats) for s in (state, other))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), ours, theirs)


def num_microbatches(rows, policy=None, loss=ppo_loss, config=BASE):
    """The number of microbatches for a minibatch of `rows` rows."""
    policy, found, count = policy or policy_of(config), [], gradients.num_microbatches

    def counted(*args):
        found.append(count(*args))
        return 1

    config = dataclasses.replace(config, num_envs=rows, num_steps=1, num_minibatches=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "num_microbatches", counted)
        learner = make_learner(policy, config, loss=loss)
        state = jax.eval_shape(learner.init, jax.random.key(0), jnp.zeros((N, OBS)), NUMBERS, 10)
        floats = dict.fromkeys(("log_prob", "value", "next_value", "reward"), jnp.zeros((1, rows)))
        flags = dict.fromkeys(("terminated", "truncated"), jnp.zeros((1, rows), bool))
        obs, action = jnp.zeros((1, rows, OBS)), jnp.zeros((1, rows), jnp.int32)
        rollout = Transition(obs=obs, action=action, **floats, **flags)
        jax.eval_shape(lambda state: learner.update(state, rollout, stats_of(rollout)), state)
    return found[0] if found else 1


@pytest.mark.slow
def test_large_minibatches_are_split_evenly(monkeypatch):
    wide = variant(hidden_sizes=(64, 64))
    assert [num_microbatches(rows, config=wide) for rows in (2048, 4096, 8192)] == [1, 1, 2]
    for rows in (16_384, 65_536, 60_000):
        pieces = num_microbatches(rows, config=wide)
        assert rows % pieces == 0
        assert 2048 <= rows // pieces <= 5000
    assert num_microbatches(65_537, config=wide) == 1, "a prime number of rows cannot be split"
    assert num_microbatches(16_384, config=variant(hidden_sizes=(256, 256))) > 2 * num_microbatches(16_384, config=wide)


@cpu_only
@pytest.mark.parametrize(("rows", "alone", "of_each"), [(16_384, 4, 4), (8192, 2, 1)])
def test_devices_of_a_cpu_share_its_cache(monkeypatch, rows, alone, of_each):
    """Two microbatches are faster only on a single device, which computes both at once."""
    found, count = [], gradients.num_microbatches

    def counted(loss, params, rows, axis_name):
        found.append((rows.samples.value.shape[1], count(loss, params, rows, axis_name)))
        return 1

    monkeypatch.setattr(gradients, "num_microbatches", counted)
    config = variant(hidden_sizes=(64, 64), num_envs=rows, num_steps=1, num_minibatches=1, num_epochs=1)
    for num_devices in (1, 2):
        agent = make_anakin(lenient_env("CartPole-v1"), config, num_devices=num_devices)
        jax.eval_shape(agent.step, jax.eval_shape(agent.init, jax.random.key(0)))
    assert list(dict.fromkeys(found)) == [(rows, alone), (rows // 2, of_each)]


@cpu_only
def test_minibatches_are_split_only_for_losses_declared_as_means_over_rows(monkeypatch):
    monkeypatch.setattr(gradients, "_CACHE_BYTES", 2048)
    network = policy_of(BASE).network

    class Own:
        init, apply = network.init, network.apply

    def undeclared_loss(*args):
        return ppo_loss(*args)

    @mean_over_rows
    def declared_loss(*args):
        return ppo_loss(*args)

    class Inheriting(ActorCritic):
        pass

    inheriting = Inheriting(network.action, network.kind, network.hidden_sizes)
    assert num_microbatches(64) > 1
    assert num_microbatches(64, policy=make_policy(inheriting, OBS_SPEC, ACTIONS["discrete"])) > 1
    assert num_microbatches(64, policy=make_policy(Own(), OBS_SPEC, ACTIONS["discrete"])) > 1
    assert num_microbatches(64, loss=declared_loss) > 1
    assert num_microbatches(64, loss=undeclared_loss) == 1
    with monkeypatch.context() as patch:
        patch.setattr("jppo.kernels.ENABLED", False)
        assert num_microbatches(64) == 1
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert num_microbatches(64) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("config", "kind"), [(BASE, "discrete"), (NORMALISED, "continuous")])
def test_microbatches_give_the_gradient_of_the_minibatch(monkeypatch, config, kind):
    init, update = compiled(config, kind)
    monkeypatch.setattr(gradients, "num_microbatches", lambda *args: args[2].samples.value.size // 8)
    learner = make_learner(policy_of(config, kind), config)
    in_pieces = jax.jit(lambda state, rollout: learner.update(state, rollout, stats_of(rollout)))
    sharded = make_learner(policy_of(config, kind), config, axis_name="devices")
    replicated, by_env = PartitionSpec(), PartitionSpec(None, "devices")
    on_two = jax.jit(
        jax.shard_map(
            lambda state, rollout: sharded.update(state, rollout, stats_of(rollout)),
            mesh=Mesh(np.array(jax.devices()[:2]), ("devices",)),
            in_specs=(replicated, by_env),
            out_specs=(replicated, replicated),
            check_vma=False,
        )
    )
    states = [init()] * 3
    for seed in range(2):
        rollout = rollout_for(states[0], config, seed, kind, off_policy=0.05)
        outcomes = [run(state, rollout) for run, state in zip((update, in_pieces, on_two), states, strict=True)]
        states, metrics = zip(*outcomes, strict=True)
        for other, other_metrics in zip(states[1:], metrics[1:], strict=True):
            assert largest_difference(other.policy_state.params, states[0].policy_state.params) < 1e-5
            for name, value in metrics[0].items():
                np.testing.assert_allclose(other_metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_vmap_over_seeds_and_hyperparams_equals_a_loop():
    learner = make_learner(policy_of(BASE), BASE)
    _, update = compiled(BASE)
    seeds = jnp.arange(3)
    rates = np.array([1e-3, 3e-3, 1e-2], np.float32)
    hyperparams = jax.tree.map(lambda x: np.full(3, x, np.float32), NUMBERS)
    hyperparams = dataclasses.replace(hyperparams, learning_rate=rates)

    def first(seed, hyperparams):
        return learner.init(jax.random.key(seed), jnp.zeros((N, OBS)), hyperparams, 10)

    states = jax.vmap(first)(seeds, hyperparams)
    singles = [jax.tree.map(lambda x, i=i: x[i], states) for i in range(3)]
    rollouts = [rollout_for(state, BASE, seed) for seed, state in enumerate(singles)]
    batched = jax.tree.map(lambda *x: jnp.stack(x), *rollouts)
    after, metrics = jax.jit(jax.vmap(lambda s, r: learner.update(s, r, stats_of(r))))(states, batched)
    for i, (state, rollout) in enumerate(zip(singles, rollouts, strict=True)):
        alone, alone_metrics = update(state, rollout)
        assert largest_difference(jax.tree.map(lambda x, i=i: x[i], after.policy_state), alone.policy_state) < 1e-5
        for name, value in alone_metrics.items():
            np.testing.assert_allclose(metrics[name][i], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert len({float(x) for x in metrics["learning_rate"]}) == 3
    assert largest_difference(singles[0].policy_state, singles[1].policy_state) > 0.01


def test_64_bit_mode_is_rejected():
    with jax.enable_x64(True), pytest.raises(ValueError, match="jppo computes in 32 bits, JAX in 64"):
        make_learner(policy_of(BASE), BASE)
