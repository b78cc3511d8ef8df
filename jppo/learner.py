"""The one update: advantages, then epochs of minibatches. Both ways of collecting feed it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jppo import losses
from jppo.advantages import generalized_advantages
from jppo.config import Hyperparams, PPOConfig
from jppo.networks import Policy
from jppo.shuffle import minibatch_indices
from jppo.statistics import all_reduce, empty_moments, moments_of, scale_reward
from jppo.types import Array, EpisodeStats, Metrics, PolicyState, PyTree, Rollout, TrainState

Optimizer = Callable[[Hyperparams], optax.GradientTransformation]

_ADAPT_FACTOR, _ADAPT_RANGE = 1.5, (1e-2, 1e2)


class Learner(NamedTuple):
    """Pure functions: `init(key, obs, hyperparams, num_updates)` and `update(state, rollout, stats)`."""

    init: Callable[..., TrainState]
    update: Callable[[TrainState, Rollout, EpisodeStats], tuple[TrainState, Metrics]]


class Batch(NamedTuple):
    """Flattened samples; leaves [B, ...]."""

    obs: PyTree
    action: Array
    log_prob: Array
    value: Array
    advantage: Array
    target: Array


def adam(hyperparams: Hyperparams) -> optax.GradientTransformation:
    """The default optimiser: Adam's direction, which the learner scales by -learning_rate."""
    return optax.scale_by_adam(eps=hyperparams.adam_eps)


def make_learner(
    policy: Policy, config: PPOConfig, optimizer: Optimizer = adam, axis_name: str | None = None
) -> Learner:
    """The learner of a policy.

    Args:
      optimizer: makes an optax transformation whose output is scaled by -learning_rate.
      axis_name: mesh axis over which environments are sharded; None on one device.
    """

    def init(key: Array, obs: PyTree, hyperparams: Hyperparams, num_updates: Array | int) -> TrainState:
        """State before the first update, for observations like obs [B, *obs]."""
        params_key, run_key = jax.random.split(key)
        hyperparams = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), hyperparams)
        params = policy.init(params_key, obs)
        features = jax.eval_shape(policy.prepare, obs)
        stats = jax.tree.map(lambda x: empty_moments(x.shape[1:]), features) if config.normalize_obs else ()
        return TrainState(
            policy=PolicyState(params=params, obs_stats=stats),
            opt_state=optimizer(hyperparams).init(params),
            hyperparams=hyperparams,
            reward_stats=empty_moments(),
            learning_rate_scale=jnp.ones(()),
            key=run_key,
            step=jnp.zeros((), jnp.int32),
            num_updates=jnp.asarray(num_updates, jnp.int32),
        )

    def update(state: TrainState, rollout: Rollout, stats: EpisodeStats) -> tuple[TrainState, Metrics]:
        """One PPO update; on NaN or infinity the state comes back as it was, and metrics["finite"] is False."""
        stats = all_reduce(stats, axis_name)
        rate = learning_rate(state, config)
        batch, value_metrics = _prepare(state, rollout, config, axis_name)
        after, metrics = _run_epochs(state, batch, rollout.reward.shape, rate, policy, optimizer, config, axis_name)
        after = _update_statistics(after, rollout, stats, policy, config, axis_name)
        if config.kl_control == "adapt":
            after = after.replace(learning_rate_scale=_adapted(after, metrics["policy/approx_kl"]))
        finite = _all_finite((after.policy, after.reward_stats, metrics["loss/policy"], metrics["loss/value"]))
        after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)
        metrics |= value_metrics | episode_metrics(stats) | {"learning_rate": rate, "finite": finite}
        return after.replace(step=state.step + 1), metrics

    return Learner(init, update)


def learning_rate(state: TrainState, config: PPOConfig) -> Array:
    """The rate of the update at hand, a scalar: linear from learning_rate at the first update to 0 after the last."""
    rate = state.hyperparams.learning_rate * state.learning_rate_scale
    if config.anneal_learning_rate:
        rate = rate * jnp.maximum(0.0, 1.0 - state.step / state.num_updates)
    return rate


def episode_metrics(stats: EpisodeStats) -> Metrics:
    """episode/*: scalars, NaN where no episode ended."""
    none = stats.returns.count == 0
    return {
        "episode/return_mean": jnp.where(none, jnp.nan, stats.returns.mean),
        "episode/return_std": jnp.where(none, jnp.nan, stats.returns.std),
        "episode/length_mean": jnp.where(none, jnp.nan, stats.lengths.mean),
        "episode/count": stats.returns.count,
    }


def ppo_loss(
    params: PyTree, obs_stats: PyTree, batch: Batch, hyperparams: Hyperparams, policy: Policy, config: PPOConfig
) -> tuple[Array, Metrics]:
    """policy loss + vf_coef * value loss - ent_coef * entropy, over a minibatch whose advantages are as they count."""
    distribution, value = policy.apply(PolicyState(params=params, obs_stats=obs_stats), batch.obs)
    log_prob = distribution.log_prob(batch.action)
    policy_loss = losses.clipped_surrogate_loss(log_prob, batch.log_prob, batch.advantage, hyperparams.clip_eps)
    if config.clip_value:
        value_loss = losses.clipped_value_loss(value, batch.value, batch.target, hyperparams.vf_clip_eps)
    else:
        value_loss = losses.value_loss(value, batch.target)
    entropy = jnp.mean(distribution.entropy())
    total = policy_loss + hyperparams.vf_coef * value_loss - hyperparams.ent_coef * entropy
    return total, {
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "policy/entropy": entropy,
        "policy/approx_kl": losses.approx_kl(log_prob, batch.log_prob),
        "policy/clip_fraction": losses.clip_fraction(log_prob, batch.log_prob, hyperparams.clip_eps),
    }


def _prepare(state: TrainState, rollout: Rollout, config: PPOConfig, axis_name: str | None) -> tuple[Batch, Metrics]:
    """Advantages and targets, flattened to [B, ...]."""
    reward = scale_reward(rollout.reward, state.reward_stats) if config.normalize_reward else rollout.reward
    hyperparams = state.hyperparams
    advantage = generalized_advantages(
        reward,
        rollout.value,
        rollout.next_value,
        rollout.terminated,
        rollout.truncated,
        hyperparams.gamma,
        hyperparams.gae_lambda,
    )
    target = advantage + rollout.value
    moments = all_reduce(
        {"residual": moments_of(advantage), "target": moments_of(target), "value": moments_of(rollout.value)}, axis_name
    )
    batch = Batch(rollout.obs, rollout.action, rollout.log_prob, rollout.value, advantage, target)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    return flat, {
        "value/mean": moments["value"].mean,
        "value/explained_variance": losses.explained_variance(moments["residual"], moments["target"]),
    }


def _run_epochs(
    state: TrainState,
    batch: Batch,
    shape: tuple[int, ...],
    rate: Array,
    policy: Policy,
    optimizer: Optimizer,
    config: PPOConfig,
    axis_name: str | None,
) -> tuple[TrainState, Metrics]:
    """num_epochs x num_minibatches gradient steps; metrics are means over those that were taken."""
    num_steps, num_envs = shape
    strata = _local_strata(config, num_envs, axis_name)
    hyperparams = state.hyperparams
    tx = optimizer(hyperparams)

    def minibatch_step(
        carry: tuple[PyTree, PyTree], keyed: tuple[Array, Array]
    ) -> tuple[tuple[PyTree, PyTree], Metrics]:
        params, opt_state = carry
        epoch_key, number = keyed
        rows = minibatch_indices(
            epoch_key,
            number,
            num_steps=num_steps,
            num_envs=num_envs,
            num_minibatches=config.num_minibatches,
            strata=strata,
        )
        minibatch = jax.tree.map(lambda x: x[rows], batch)
        if config.normalize_advantage:
            m = all_reduce(moments_of(minibatch.advantage, num_batch_dims=1), axis_name)
            minibatch = minibatch._replace(advantage=losses.standardize(minibatch.advantage, m.mean, m.variance))
        # Marked as differing between devices: else shard_map (check_vma=True) sums the gradients of its own accord.
        local = params if axis_name is None else jax.lax.pcast(params, axis_name, to="varying")
        grad = jax.grad(ppo_loss, has_aux=True)
        grads, metrics = grad(local, state.policy.obs_stats, minibatch, hyperparams, policy, config)
        if axis_name is not None:
            grads, metrics = jax.lax.pmean((grads, metrics), axis_name)
        norm = optax.tree.norm(grads)
        scale = jnp.minimum(1.0, hyperparams.max_grad_norm / jnp.maximum(norm, 1e-12))
        direction, opt_state = tx.update(jax.tree.map(lambda g: g * scale, grads), opt_state, params)
        params = jax.tree.map(lambda p, d: p - rate * d, params, direction)
        return (params, opt_state), metrics | {"grad/norm": norm}

    def epoch(carry: tuple[PyTree, PyTree], epoch_key: Array) -> tuple[tuple[PyTree, PyTree], Metrics]:
        numbers = jnp.arange(config.num_minibatches, dtype=jnp.int32)
        keyed = (jnp.broadcast_to(epoch_key, numbers.shape), numbers)
        carry, metrics = jax.lax.scan(minibatch_step, carry, keyed)
        return carry, jax.tree.map(jnp.mean, metrics)

    epoch_keys = jax.random.split(jax.random.fold_in(state.key, state.step), config.num_epochs)
    carry = (state.policy.params, state.opt_state)
    if config.kl_control == "stop":
        (params, opt_state), metrics = _epochs_until_kl(epoch, carry, epoch_keys, hyperparams.target_kl)
    else:
        (params, opt_state), per_epoch = jax.lax.scan(epoch, carry, epoch_keys)
        metrics = jax.tree.map(jnp.mean, per_epoch)
    return state.replace(policy=state.policy.replace(params=params), opt_state=opt_state), metrics


def _epochs_until_kl(
    epoch: Callable, carry: PyTree, epoch_keys: Array, target_kl: Array | float
) -> tuple[PyTree, Metrics]:
    """Runs epochs until one's mean KL exceeds target_kl; metrics are means over the epochs that ran."""
    carry, total = epoch(carry, epoch_keys[0])

    def more(loop: tuple[PyTree, Metrics, Array, Array]) -> Array:
        _, _, last_kl, done = loop
        return jnp.logical_and(done < epoch_keys.shape[0], last_kl <= target_kl)

    def body(loop: tuple[PyTree, Metrics, Array, Array]) -> tuple[PyTree, Metrics, Array, Array]:
        carry, total, _, done = loop
        carry, metrics = epoch(carry, epoch_keys[done])
        return carry, jax.tree.map(jnp.add, total, metrics), metrics["policy/approx_kl"], done + 1

    start = (carry, total, total["policy/approx_kl"], jnp.ones((), jnp.int32))
    carry, total, _, done = jax.lax.while_loop(more, body, start)
    return carry, jax.tree.map(lambda x: x / done, total)


def _update_statistics(
    state: TrainState, rollout: Rollout, stats: EpisodeStats, policy: Policy, config: PPOConfig, axis_name: str | None
) -> TrainState:
    """Normalisers move after the epochs, so that the first minibatch sees exactly what the policy saw."""
    if config.normalize_obs:
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rollout.obs)
        fresh = jax.tree.map(lambda x: moments_of(x, num_batch_dims=1), policy.prepare(flat))
        fresh = all_reduce(fresh, axis_name)
        obs_stats = jax.tree.map(lambda old, new: old + new, state.policy.obs_stats, fresh, is_leaf=_is_moments)
        state = state.replace(policy=state.policy.replace(obs_stats=obs_stats))
    if config.normalize_reward:
        state = state.replace(reward_stats=state.reward_stats + stats.discounted)
    return state


def _local_strata(config: PPOConfig, num_envs: int, axis_name: str | None) -> Array:
    """Global numbers of the shards that this device's `num_envs` environments make up, [S] i32."""
    count = config.num_strata * num_envs // config.num_envs
    first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * count
    return first + jnp.arange(count, dtype=jnp.int32)


def _adapted(state: TrainState, kl: Array) -> Array:
    """The learning-rate scale after an update of this KL: down if over twice the target, up if under half of it."""
    target, scale = state.hyperparams.target_kl, state.learning_rate_scale
    scale = jnp.where(kl > 2.0 * target, scale / _ADAPT_FACTOR, scale)
    scale = jnp.where(kl < 0.5 * target, scale * _ADAPT_FACTOR, scale)
    return jnp.clip(scale, *_ADAPT_RANGE)


def _all_finite(tree: Any) -> Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def _is_moments(node: Any) -> bool:
    return hasattr(node, "m2")
