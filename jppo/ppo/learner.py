"""One PPO update: advantages, then epochs of minibatches. The rollouts of both modes are its input."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh

from jppo.config.checks import check_total_steps
from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.devices.mesh import AXIS, make_mesh
from jppo.ppo import losses
from jppo.ppo.advantages import gae
from jppo.ppo.hyperparams import current_hyperparams, evaluate_schedules, schedule_metrics
from jppo.ppo.kernels.finite import all_finite
from jppo.ppo.kernels.flat_gradient import pack
from jppo.ppo.kernels.microbatches import accumulate_gradients, num_microbatches
from jppo.ppo.losses import Loss, ppo_loss
from jppo.ppo.minibatches import epoch_keys, local_strata, minibatch_indices
from jppo.ppo.networks import Network, make_network
from jppo.ppo.normalization import all_reduce, empty_moments, is_moments, moments_of, scale_reward
from jppo.ppo.optimizer import Optimizer, adam, apply_gradient, check_optimizer
from jppo.ppo.policy import Policy, check_network, make_policy
from jppo.ppo.types import Array, Batch, EpisodeStats, Metrics, Moments, PolicyState, PyTree, Rollout, TrainState

_ParamsAndOptState = tuple[PyTree, PyTree]
_LR_FACTOR, _LR_SCALE_RANGE = 1.5, (1e-2, 1e2)  # of kl_control="adapt"


class Learner(NamedTuple):
    """Pure functions that make and update a `TrainState`."""

    init: Callable[[Array, PyTree, Hyperparams, Array | int], TrainState]  # (key, obs, hyperparams, num_updates)
    update: Callable[[TrainState, Rollout, EpisodeStats], tuple[TrainState, Metrics]]


class LearnerSetup(NamedTuple):
    """The parts of an agent that do not depend on how rollouts are collected."""

    policy: Policy
    learner: Learner
    mesh: Mesh
    num_updates: int  # of the whole run


class _LearnerSpec(NamedTuple):
    """The arguments of `make_learner`, for the functions of one update."""

    policy: Policy
    config: PPOConfig
    optimizer: Optimizer
    loss: Loss
    axis_name: str | None


def build_learner(
    env: Any,
    config: PPOConfig,
    *,
    total_steps: int,
    network: Network | None,
    optimizer: Optimizer,
    loss: Loss | None,
    num_devices: int,
) -> LearnerSetup:
    """Validates an agent's arguments and returns the parts that both modes share.

    Args:
      env: an Environment or a HostEnvironment.
      total_steps: environment steps of a run, rounded up to whole updates.
      network: None for the network that the config describes.
      optimizer, loss: see `make_learner`.
      num_devices: devices over which environments are sharded.

    Raises:
      ValueError: an invalid network or optimizer, or a number of devices that is not available or does not fit.
    """
    network = make_network(config, env.obs_spec, env.action_spec) if network is None else network
    params = check_network(network, env.obs_spec, env.action_spec)
    check_optimizer(optimizer, params)
    action_spec = dataclasses.replace(env.action_spec, bounds=config.action_bounds)
    policy = make_policy(network, env.obs_spec, action_spec, params)
    mesh = make_mesh(config, num_devices)
    learner = make_learner(policy, config, optimizer, loss, AXIS if num_devices > 1 else None)
    num_updates = config.num_updates(check_total_steps(total_steps))
    return LearnerSetup(policy=policy, learner=learner, mesh=mesh, num_updates=num_updates)


def make_learner(
    policy: Policy,
    config: PPOConfig,
    optimizer: Optimizer = adam,
    loss: Loss | None = None,
    axis_name: str | None = None,
) -> Learner:
    """Returns the learner of a policy.

    Args:
      optimizer: a function of the hyperparameters that returns an optax transformation; its output is multiplied by
        -learning_rate.
      loss: a function with the arguments and results of `ppo_loss` (the default); its metrics are logged. Large
        minibatches are split for speed only if the loss is declared with `mean_over_rows`.
      axis_name: mesh axis over which environments are sharded; None for one device.

    Raises:
      ValueError: JAX is configured to compute in 64 bits.
    """
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError("jppo computes in 32 bits, JAX in 64 (JAX_ENABLE_X64, or jax_enable_x64): switch that off")
    spec = _LearnerSpec(policy, config, optimizer, ppo_loss if loss is None else loss, axis_name)

    def init(key: Array, obs: PyTree, hyperparams: Hyperparams, num_updates: Array | int) -> TrainState:
        """Returns the state before the first update, for observations like obs [B, *obs]."""
        params_key, run_key = jax.random.split(key)
        hyperparams = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), hyperparams)
        params = policy.init(params_key, obs)
        features = jax.eval_shape(policy.prepare, obs)
        stats = jax.tree.map(lambda x: empty_moments(x.shape[1:]), features) if config.normalize_obs else ()
        return TrainState(
            policy=PolicyState(params=params, obs_stats=stats),
            opt_state=optimizer(evaluate_schedules(hyperparams, 0.0)).init(params),
            hyperparams=hyperparams,
            reward_stats=empty_moments(),
            learning_rate_scale=jnp.ones(()),
            key=run_key,
            update=jnp.zeros((), jnp.int32),
            num_updates=jnp.asarray(num_updates, jnp.int32),
        )

    return Learner(init=init, update=functools.partial(_update, spec))


def _update(spec: _LearnerSpec, state: TrainState, rollout: Rollout, stats: EpisodeStats) -> tuple[TrainState, Metrics]:
    """Runs one PPO update.

    If anything becomes NaN or infinite, only `update` and `key` change, and metrics["finite"] is False.
    """
    config, schedules = spec.config, state.hyperparams
    state = state.replace(hyperparams=current_hyperparams(state))
    rate = state.hyperparams.learning_rate * state.learning_rate_scale
    batch, moments = _make_batch(config, state, rollout)
    stats, moments = all_reduce((stats, moments), spec.axis_name)
    next_key, shuffle_key = jax.random.split(state.key)
    after, metrics = _run_epochs(spec, state, batch, rollout.reward.shape, rate, shuffle_key)
    after = _update_statistics(spec, after, rollout, stats)
    if config.kl_control == "adapt":
        after = after.replace(learning_rate_scale=_adapt_learning_rate_scale(after, metrics["policy/approx_kl"]))
    finite = all_finite(
        (after.policy, after.opt_state, after.reward_stats, metrics["loss/total"], metrics["grad/norm"])
    )
    # A condition instead of a selection per array, which would be one kernel each.
    after = jax.lax.cond(finite, lambda new, old: new, lambda new, old: old, after, state)
    metrics |= _value_metrics(moments) | episode_metrics(stats) | {"learning_rate": rate, "finite": finite}
    metrics |= schedule_metrics(schedules, state.hyperparams)
    return after.replace(update=state.update + 1, key=next_key, hyperparams=schedules), metrics


def episode_metrics(stats: EpisodeStats) -> Metrics:
    """Returns the metrics episode/*: scalars, NaN if no episode ended."""
    none = stats.returns.count == 0
    return {
        "episode/return_mean": jnp.where(none, jnp.nan, stats.returns.mean),
        "episode/return_std": jnp.where(none, jnp.nan, stats.returns.std),
        "episode/length_mean": jnp.where(none, jnp.nan, stats.lengths.mean),
        "episode/count": stats.returns.count,
    }


def _make_batch(config: PPOConfig, state: TrainState, rollout: Rollout) -> tuple[Batch, dict[str, Moments]]:
    """Returns the rollout with advantages and targets, flattened to [B, ...], and moments for the metrics value/*.

    target = advantage + value
    """
    hyperparams = state.hyperparams
    reward = scale_reward(rollout.reward, state.reward_stats) if config.normalize_reward else rollout.reward
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
    moments = {"residual": moments_of(advantage), "target": moments_of(target), "value": moments_of(rollout.value)}
    batch = Batch(
        obs=rollout.obs,
        action=rollout.action,
        log_prob=rollout.log_prob,
        value=rollout.value,
        advantage=advantage,
        target=target,
    )
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch), moments


def _value_metrics(moments: dict[str, Moments]) -> Metrics:
    return {
        "value/mean": moments["value"].mean,
        "value/explained_variance": losses.explained_variance(moments["residual"], moments["target"]),
    }


def _run_epochs(
    spec: _LearnerSpec, state: TrainState, batch: Batch, shape: tuple[int, ...], rate: Array, shuffle_key: Array
) -> tuple[TrainState, Metrics]:
    """Takes num_epochs * num_minibatches gradient steps; metrics are means over the steps that were taken.

    Args:
      shape: (T, N) of this device's rollout.
    """
    config, hyperparams = spec.config, state.hyperparams
    num_steps, num_envs = shape

    def epoch(learned: _ParamsAndOptState, keys: Array) -> tuple[_ParamsAndOptState, Metrics]:
        rows = minibatch_indices(keys, num_steps, num_envs, config.num_minibatches)
        advantages = batch.advantage[rows]
        if config.normalize_advantage:  # all minibatches at once: one collective
            advantages = jax.vmap(functools.partial(standardize_advantages, axis_name=spec.axis_name))(advantages)

        def step(learned: _ParamsAndOptState, minibatch: tuple[Array, Array]) -> tuple[_ParamsAndOptState, Metrics]:
            rows, advantage = minibatch
            samples = jax.tree.map(lambda x: x[rows], batch).replace(advantage=advantage)
            return _gradient_step(spec, learned, samples, state.policy.obs_stats, hyperparams, rate)

        learned, metrics = jax.lax.scan(step, learned, (rows, advantages))
        return learned, jax.tree.map(jnp.mean, metrics)

    strata = local_strata(config, num_envs, spec.axis_name)
    keys = epoch_keys(shuffle_key, config, num_steps * num_envs, strata)
    learned = (state.policy.params, state.opt_state)
    if config.kl_control == "stop":
        learned, metrics = _epochs_until_kl(epoch, learned, keys, hyperparams.target_kl)
    else:
        learned, per_epoch = jax.lax.scan(epoch, learned, keys)
        metrics = jax.tree.map(jnp.mean, per_epoch)
    params, opt_state = learned
    return state.replace(policy=state.policy.replace(params=params), opt_state=opt_state), metrics


def standardize_advantages(advantage: Array, axis_name: str | None) -> Array:
    """Returns a minibatch's advantages [B] with mean 0 and variance 1 over all devices."""
    moments = all_reduce(moments_of(advantage, num_batch_dims=1), axis_name)
    return losses.standardize(advantage, moments.mean, moments.variance)


def _gradient_step(
    spec: _LearnerSpec,
    learned: _ParamsAndOptState,
    samples: Batch,
    obs_stats: PyTree,
    hyperparams: Hyperparams,
    rate: Array,
) -> tuple[_ParamsAndOptState, Metrics]:
    """Takes one gradient step on a minibatch: gradient, mean over devices, clipping, optimizer."""
    params, opt_state = learned

    def loss_of(params: PyTree, samples: Batch) -> tuple[Array, Metrics]:
        distribution, value = spec.policy.apply(PolicyState(params=params, obs_stats=obs_stats), samples.obs)
        return spec.loss(distribution, value, samples, hyperparams, spec.config)

    def gradient_of(samples: Batch) -> tuple[Metrics, PyTree]:
        (total, metrics), gradient = jax.value_and_grad(loss_of, has_aux=True)(params, samples)
        return metrics | {"loss/total": total}, pack(gradient)

    count = 1
    if getattr(spec.loss, "mean_over_rows", False):
        features = jax.eval_shape(spec.policy.prepare, samples.obs)
        count = num_microbatches(spec.policy.network, loss_of, params, samples, features, spec.axis_name)
    zero = jax.tree.map(jnp.zeros_like, pack(params))
    metrics, gradient = accumulate_gradients(gradient_of, samples, count, zero, spec.axis_name)
    if spec.axis_name is not None:
        metrics = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), metrics)  # metrics may be bool or int
        joined, restore = ravel_pytree((gradient, metrics))  # one collective instead of one per array
        gradient, metrics = restore(jax.lax.pmean(joined, spec.axis_name))
    optimizer, max_norm = spec.optimizer(hyperparams), hyperparams.max_grad_norm
    params, opt_state, norm = apply_gradient(optimizer, params, opt_state, gradient, max_norm, rate)
    return (params, opt_state), metrics | {"grad/norm": norm}


def _epochs_until_kl(epoch: Callable, carry: PyTree, keys: Array, target_kl: Array | float) -> tuple[PyTree, Metrics]:
    """Runs epochs until an epoch's mean KL exceeds target_kl; metrics are means over the epochs that ran."""
    carry, total = epoch(carry, keys[0])

    def is_below_target(loop: tuple[PyTree, Metrics, Array, Array]) -> Array:
        _, _, last_kl, done = loop
        return jnp.logical_and(done < keys.shape[0], last_kl <= target_kl)

    def body(loop: tuple[PyTree, Metrics, Array, Array]) -> tuple[PyTree, Metrics, Array, Array]:
        carry, total, _, done = loop
        carry, metrics = epoch(carry, keys[done])
        return carry, jax.tree.map(jnp.add, total, metrics), metrics["policy/approx_kl"], done + 1

    start = (carry, total, total["policy/approx_kl"], jnp.ones((), jnp.int32))
    carry, total, _, done = jax.lax.while_loop(is_below_target, body, start)
    return carry, jax.tree.map(lambda x: x / done.astype(jnp.float32), total)


def _update_statistics(spec: _LearnerSpec, state: TrainState, rollout: Rollout, stats: EpisodeStats) -> TrainState:
    """Adds the rollout to the running statistics, after the epochs: the first minibatch must see the same normalized
    observations as the policy did."""
    if spec.config.normalize_obs:
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rollout.obs)
        added = jax.tree.map(lambda x: moments_of(x, num_batch_dims=1), spec.policy.prepare(flat))
        added = all_reduce(added, spec.axis_name)
        obs_stats = jax.tree.map(lambda old, new: old + new, state.policy.obs_stats, added, is_leaf=is_moments)
        state = state.replace(policy=state.policy.replace(obs_stats=obs_stats))
    if spec.config.normalize_reward:
        state = state.replace(reward_stats=state.reward_stats + stats.discounted)
    return state


def _adapt_learning_rate_scale(state: TrainState, kl: Array) -> Array:
    """Returns the learning-rate scale after an update with this KL: divided by 1.5 if kl > 2 * target_kl, multiplied by
    1.5 if kl < target_kl / 2, within [0.01, 100]."""
    target, scale = state.hyperparams.target_kl, state.learning_rate_scale
    scale = jnp.where(kl > 2.0 * target, scale / _LR_FACTOR, scale)
    scale = jnp.where(kl < 0.5 * target, scale * _LR_FACTOR, scale)
    return jnp.clip(scale, *_LR_SCALE_RANGE)
