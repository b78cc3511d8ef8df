"""The one update: advantages, then epochs of minibatches. Both ways of collecting feed it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.devices.jit import materialize_on_cpu
from jppo.ppo import losses
from jppo.ppo.advantages import gae
from jppo.ppo.grad_accumulation import accumulate_gradients, num_microbatches, residual_bytes
from jppo.ppo.minibatches import epoch_keys, local_strata, minibatch_indices
from jppo.ppo.networks import ActorCritic
from jppo.ppo.normalization import all_reduce, empty_moments, moments_of, scale_reward
from jppo.ppo.optimizer import Optimizer, adam, apply_gradient, ravel_f32
from jppo.ppo.policy import Policy
from jppo.ppo.types import Array, EpisodeStats, Metrics, PolicyState, PyTree, Rollout, TrainState

_Learnt = tuple[PyTree, PyTree]  # params, opt_state
Loss = Callable[[Any, Array, "Batch", Hyperparams, PPOConfig], tuple[Array, Metrics]]

_SMALL_SIZE = 2**16  # numbers
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


class _Parts(NamedTuple):
    policy: Policy
    config: PPOConfig
    optimizer: Optimizer
    loss: Loss
    axis_name: str | None


def make_learner(
    policy: Policy,
    config: PPOConfig,
    optimizer: Optimizer = adam,
    loss: Loss | None = None,
    axis_name: str | None = None,
) -> Learner:
    """The learner of a policy.

    Args:
      optimizer: makes an optax transformation whose output is scaled by -learning_rate.
      loss: has the arguments and results of `ppo_loss`, which it is when None; its metrics are logged.
      axis_name: mesh axis over which environments are sharded; None on one device.

    Raises:
      ValueError: JAX computes in 64 bits.
    """
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError("jppo computes in 32 bits, JAX in 64 (JAX_ENABLE_X64, or jax_enable_x64): switch that off")
    parts = _Parts(policy, config, optimizer, ppo_loss if loss is None else loss, axis_name)

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
            update=jnp.zeros((), jnp.int32),
            num_updates=jnp.asarray(num_updates, jnp.int32),
        )

    def update(state: TrainState, rollout: Rollout, stats: EpisodeStats) -> tuple[TrainState, Metrics]:
        """Runs one PPO update. If anything becomes NaN or infinite, only `update` and `key` change, and
        metrics["finite"] is False."""
        stats = all_reduce(stats, axis_name)
        rate = learning_rate(state, config)
        batch, value_metrics = _prepare(parts, state, rollout)
        next_key, shuffle_key = jax.random.split(state.key)
        after, metrics = _run_epochs(parts, state, batch, rollout.reward.shape, rate, shuffle_key)
        after = _update_statistics(parts, after, rollout, stats)
        if config.kl_control == "adapt":
            after = after.replace(learning_rate_scale=_adapted(after, metrics["policy/approx_kl"]))
        finite = _all_finite(
            (after.policy, after.opt_state, after.reward_stats, metrics["loss/total"], metrics["grad/norm"])
        )
        # no selections, as it is under vmap: those are a kernel for each array
        after = jax.lax.cond(finite, lambda new, old: new, lambda new, old: old, after, state)
        metrics |= value_metrics | episode_metrics(stats) | {"learning_rate": rate, "finite": finite}
        return after.replace(update=state.update + 1, key=next_key), metrics

    return Learner(init, update)


def learning_rate(state: TrainState, config: PPOConfig) -> Array:
    """The rate of the update at hand, a scalar: linear from learning_rate at the first update to 0 after the last."""
    rate = state.hyperparams.learning_rate * state.learning_rate_scale
    if config.anneal_learning_rate:
        rate = rate * jnp.maximum(0.0, 1.0 - state.update / state.num_updates)
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
    distribution: Any, value: Array, batch: Batch, hyperparams: Hyperparams, config: PPOConfig
) -> tuple[Array, Metrics]:
    """policy loss + vf_coef * value loss - ent_coef * entropy. Schulman et al. (2017), eq. 9, with the sign of a loss.

    Args:
      distribution, value: the network's outputs for batch.obs; value [B].
      batch: a minibatch, its advantages standardised where config says so.

    Returns:
      a scalar, and metrics (scalars, logged as means over the gradient steps).
    """
    log_prob = distribution.log_prob(batch.action)
    policy_loss = losses.clipped_surrogate_loss(log_prob, batch.log_prob, batch.advantage, hyperparams.clip_eps)
    if config.clip_value:
        value_loss = losses.clipped_value_loss(value, batch.value, batch.target, hyperparams.vf_clip_eps)
    else:
        value_loss = losses.value_loss(value, batch.target)
    entropy = jnp.mean(distribution.entropy())
    total = policy_loss + hyperparams.vf_coef * value_loss - hyperparams.ent_coef * entropy
    measured = jax.lax.stop_gradient(log_prob)
    return total, {
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "policy/entropy": entropy,
        "policy/approx_kl": losses.approx_kl(measured, batch.log_prob),
        "policy/clip_fraction": losses.clip_fraction(measured, batch.log_prob, hyperparams.clip_eps),
    }


def _prepare(parts: _Parts, state: TrainState, rollout: Rollout) -> tuple[Batch, Metrics]:
    """Advantages and targets, flattened to [B, ...]."""
    reward = scale_reward(rollout.reward, state.reward_stats) if parts.config.normalize_reward else rollout.reward
    hyperparams = state.hyperparams
    advantage = gae(
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
        {"residual": moments_of(advantage), "target": moments_of(target), "value": moments_of(rollout.value)},
        parts.axis_name,
    )
    batch = Batch(rollout.obs, rollout.action, rollout.log_prob, rollout.value, advantage, target)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    return flat, {
        "value/mean": moments["value"].mean,
        "value/explained_variance": losses.explained_variance(moments["residual"], moments["target"]),
    }


def _run_epochs(
    parts: _Parts, state: TrainState, batch: Batch, shape: tuple[int, ...], rate: Array, shuffle_key: Array
) -> tuple[TrainState, Metrics]:
    """num_epochs x num_minibatches gradient steps; metrics are means over those that were taken."""
    config, hyperparams = parts.config, state.hyperparams
    num_steps, num_envs = shape

    def epoch(learnt: _Learnt, keys: Array) -> tuple[_Learnt, Metrics]:
        rows = minibatch_indices(keys, num_steps, num_envs, config.num_minibatches)
        advantages = batch.advantage[rows]
        if config.normalize_advantage:  # of all minibatches at once: one collective
            advantages = jax.vmap(functools.partial(_standardized, axis_name=parts.axis_name))(advantages)

        def step(learnt: _Learnt, minibatch: tuple[Array, Array]) -> tuple[_Learnt, Metrics]:
            rows, advantage = minibatch
            samples = jax.tree.map(lambda x: x[rows], batch)._replace(advantage=advantage)
            return _gradient_step(parts, learnt, samples, state.policy.obs_stats, hyperparams, rate)

        learnt, metrics = jax.lax.scan(step, learnt, (rows, advantages))
        return learnt, jax.tree.map(jnp.mean, metrics)

    strata = local_strata(config, num_envs, parts.axis_name)
    keys = epoch_keys(shuffle_key, config, num_steps * num_envs, strata)
    learnt = (state.policy.params, state.opt_state)
    if config.kl_control == "stop":
        learnt, metrics = _epochs_until_kl(epoch, learnt, keys, hyperparams.target_kl)
    else:
        learnt, per_epoch = jax.lax.scan(epoch, learnt, keys)
        metrics = jax.tree.map(jnp.mean, per_epoch)
    params, opt_state = learnt
    return state.replace(policy=state.policy.replace(params=params), opt_state=opt_state), metrics


def _standardized(advantage: Array, axis_name: str | None) -> Array:
    """[B] advantages of a minibatch with mean 0 and variance 1 over all devices."""
    moments = all_reduce(moments_of(advantage, num_batch_dims=1), axis_name)
    return losses.standardize(advantage, moments.mean, moments.variance)


def _gradient_step(
    parts: _Parts, learnt: _Learnt, samples: Batch, obs_stats: PyTree, hyperparams: Hyperparams, rate: Array
) -> tuple[_Learnt, Metrics]:
    """One minibatch: gradient, all-reduce, clip, optimiser."""
    params, opt_state = learnt

    def loss_of(params: PyTree, samples: Batch) -> tuple[Array, Metrics]:
        distribution, value = parts.policy.apply(PolicyState(params=params, obs_stats=obs_stats), samples.obs)
        return parts.loss(distribution, value, samples, hyperparams, parts.config)

    def varying(tree: PyTree) -> PyTree:
        return tree if parts.axis_name is None else jax.lax.pcast(tree, parts.axis_name, to="varying")

    def gradient(samples: Batch) -> tuple[Metrics, Array]:
        # Marked as differing between devices: else shard_map (check_vma=True) sums the gradients of its own accord.
        (total, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(varying(params), samples)
        return metrics | {"loss/total": total}, ravel_f32(grads)[0]

    zero = varying(jnp.zeros_like(ravel_f32(params)[0]))
    pieces = _num_pieces(parts, loss_of, params, samples)
    metrics, grads = accumulate_gradients(gradient, samples, pieces, zero, parts.axis_name)
    if parts.axis_name is not None:
        metrics = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), metrics)  # means of numbers and of truths
        joined, parted = ravel_pytree((grads, metrics))  # a CPU's devices meet once for every array of a sum
        grads, metrics = parted(jax.lax.pmean(joined, parts.axis_name))
    optimizer, max_norm = parts.optimizer(hyperparams), hyperparams.max_grad_norm
    params, opt_state, norm = apply_gradient(optimizer, params, opt_state, grads, max_norm, rate)
    return (params, opt_state), metrics | {"grad/norm": norm}


def _num_pieces(parts: _Parts, loss_of: Callable[..., PyTree], params: PyTree, samples: Batch) -> int:
    """Into how many pieces a minibatch is cut: 1 off a CPU, and unless the loss is known to be a mean of what each row
    gives, as it need not be with a network or loss of the user's."""
    network, rows = parts.policy.network, len(samples.value)
    if jax.default_backend() != "cpu" or type(network) is not ActorCritic or parts.loss is not ppo_loss:
        return 1
    if network.kind == "mlp" and network.hidden_sizes:
        features = jax.tree.leaves(jax.eval_shape(parts.policy.prepare, samples.obs))
        num_bytes = rows * network.residual_bytes(sum(leaf.size for leaf in features) // rows)
    else:
        num_bytes = residual_bytes(lambda params: loss_of(params, samples), params)
    return num_microbatches(num_bytes, rows, parts.axis_name)


def _epochs_until_kl(epoch: Callable, carry: PyTree, keys: Array, target_kl: Array | float) -> tuple[PyTree, Metrics]:
    """Runs epochs until one's mean KL exceeds target_kl; metrics are means over the epochs that ran."""
    carry, total = epoch(carry, keys[0])

    def more(loop: tuple[PyTree, Metrics, Array, Array]) -> Array:
        _, _, last_kl, done = loop
        return jnp.logical_and(done < keys.shape[0], last_kl <= target_kl)

    def body(loop: tuple[PyTree, Metrics, Array, Array]) -> tuple[PyTree, Metrics, Array, Array]:
        carry, total, _, done = loop
        carry, metrics = epoch(carry, keys[done])
        return carry, jax.tree.map(jnp.add, total, metrics), metrics["policy/approx_kl"], done + 1

    start = (carry, total, total["policy/approx_kl"], jnp.ones((), jnp.int32))
    carry, total, _, done = jax.lax.while_loop(more, body, start)
    return carry, jax.tree.map(lambda x: x / done.astype(jnp.float32), total)


def _update_statistics(parts: _Parts, state: TrainState, rollout: Rollout, stats: EpisodeStats) -> TrainState:
    """Normalisers move after the epochs, so that the first minibatch sees exactly what the policy saw."""
    if parts.config.normalize_obs:
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rollout.obs)
        fresh = jax.tree.map(lambda x: moments_of(x, num_batch_dims=1), parts.policy.prepare(flat))
        fresh = all_reduce(fresh, parts.axis_name)
        obs_stats = jax.tree.map(lambda old, new: old + new, state.policy.obs_stats, fresh, is_leaf=_is_moments)
        state = state.replace(policy=state.policy.replace(obs_stats=obs_stats))
    if parts.config.normalize_reward:
        state = state.replace(reward_stats=state.reward_stats + stats.discounted)
    return state


def _adapted(state: TrainState, kl: Array) -> Array:
    """The learning-rate scale after an update of this KL: down if over twice the target, up if under half of it."""
    target, scale = state.hyperparams.target_kl, state.learning_rate_scale
    scale = jnp.where(kl > 2.0 * target, scale / _ADAPT_FACTOR, scale)
    scale = jnp.where(kl < 0.5 * target, scale * _ADAPT_FACTOR, scale)
    return jnp.clip(scale, *_ADAPT_RANGE)


def _all_finite(tree: Any) -> Array:
    """Small arrays as one, since each by itself is two kernels to compile and to run (docs/performance.md)."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    small = [leaf for leaf in leaves if leaf.size <= _SMALL_SIZE and jnp.isrealobj(leaf)]
    others = [leaf for leaf in leaves if leaf.size > _SMALL_SIZE or jnp.iscomplexobj(leaf)]
    # stored, or XLA looks at each by itself, and at all anew for whatever depends on them
    joined = materialize_on_cpu(jnp.concatenate([leaf.astype(jnp.float32).ravel() for leaf in small]))
    return materialize_on_cpu(jnp.stack([jnp.isfinite(x).all() for x in [joined, *others]])).all()


def _is_moments(node: Any) -> bool:
    return hasattr(node, "m2")
