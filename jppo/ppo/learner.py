"""One PPO update: advantages, then epochs of minibatches. The rollouts of both modes are its input."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jppo.config.checks import check_total_steps
from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.devices.mesh import AXIS, make_mesh
from jppo.envs.base import merge_dims
from jppo.envs.spaces import ACTION_MASK, Array, PyTree
from jppo.kernels.finite import all_finite
from jppo.networks.actor_critic import make_network
from jppo.ppo import losses
from jppo.ppo.checks.loss import call_with, check_advantages, check_bonus, check_kl, check_loss_init, check_precision
from jppo.ppo.checks.network import check_network
from jppo.ppo.checks.observations import first_empty_mask
from jppo.ppo.checks.optimizer import check_optimizer
from jppo.ppo.checks.settings import check_agents, check_functions, check_own_options, check_sequences
from jppo.ppo.losses import Advantages, Loss, LossModule, gae_advantages, ppo_loss
from jppo.ppo.minibatches import (
    LearnerSpec,
    Optimizer,
    ParamsAndOptState,
    adam,
    epoch_keys,
    gradient_step,
    join_params,
    local_strata,
    make_minibatch,
    minibatch_indices,
    split_params,
    take_rows,
)
from jppo.ppo.normalization import (
    Moments,
    all_reduce,
    empty_moments,
    is_moments,
    moments_of,
    scale_reward,
    where_active,
)
from jppo.ppo.policy import Network, Policy, RecurrentNetwork, episode_starts, make_policy
from jppo.ppo.types import (
    Batch,
    EpisodeStats,
    Metrics,
    PolicyState,
    Rollout,
    TrainState,
    current_hyperparams,
    derive_key,
    evaluate_schedules,
    schedule_metrics,
)

_LR_FACTOR, _LR_SCALE_RANGE = 1.5, (1e-2, 1e2)  # of kl_control="adapt"


class Learner(NamedTuple):
    """Pure functions that make and update a `TrainState`."""

    init: Callable[[Array, PyTree, Hyperparams, Array | int], TrainState]  # (key, obs, hyperparams, num_updates)
    update: Callable[[TrainState, Rollout, EpisodeStats], tuple[TrainState, Metrics]]


def make_learner(
    policy: Policy,
    config: PPOConfig,
    optimizer: Optimizer = adam,
    loss: Loss | LossModule | None = None,
    advantages: Advantages | None = None,
    axis_name: str | None = None,
) -> Learner:
    """Returns the learner of a policy.

    Args:
      optimizer: a function of the hyperparameters that returns an optax transformation; its output is multiplied by
        -learning_rate.
      loss: a function with the arguments and results of `ppo_loss` (the default); its metrics are logged. Large
        minibatches are split for speed only if the loss is declared with `mean_over_rows`. A `LossModule` has
        additional parameters and a state.
      advantages: a function with the arguments and results of `gae_advantages` (the default).
      axis_name: mesh axis over which environments are sharded; None for one device.

    Raises:
      ValueError: JAX is configured to compute in 64 bits.
    """
    check_precision()
    spec = LearnerSpec(
        policy=policy,
        config=config,
        optimizer=optimizer,
        loss=ppo_loss if loss is None else loss,
        advantages=gae_advantages if advantages is None else advantages,
        axis_name=axis_name,
    )

    def init(key: Array, obs: PyTree, hyperparams: Hyperparams, num_updates: Array | int) -> TrainState:
        """Returns the state before the first update, for observations like obs [B, *obs]."""
        params_key = derive_key(key, "parameters")
        hyperparams = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), hyperparams)
        params = policy.init(params_key, obs)
        loss_params, loss_state = (), ()
        if isinstance(spec.loss, LossModule):
            loss_params, loss_state = check_loss_init(spec.loss.init(derive_key(key, "loss parameters"), obs))
        features = jax.eval_shape(policy.prepare, obs)
        stats = jax.tree.map(lambda x: empty_moments(x.shape[1:]), features) if config.normalize_obs else ()
        return TrainState(
            policy_state=PolicyState(params=params, obs_stats=stats),
            opt_state=optimizer(evaluate_schedules(hyperparams, 0.0)).init(join_params(params, loss_params)),
            hyperparams=hyperparams,
            reward_stats=empty_moments(),
            learning_rate_scale=jnp.ones(()),
            key=derive_key(key, "updates"),
            update=jnp.zeros((), jnp.int32),
            num_updates=jnp.asarray(num_updates, jnp.int32),
            loss_params=loss_params,
            loss_state=loss_state,
        )

    return Learner(init=init, update=functools.partial(_update, spec))


def _update(spec: LearnerSpec, state: TrainState, rollout: Rollout, stats: EpisodeStats) -> tuple[TrainState, Metrics]:
    """Runs one PPO update.

    If anything becomes NaN or infinite, only `update` and `key` change, and metrics["finite"] is False.
    """
    config, schedules = spec.config, state.hyperparams
    state = state.replace(hyperparams=current_hyperparams(state))
    rate = state.hyperparams.learning_rate * state.learning_rate_scale
    batch, moments, loss_state = _make_batch(spec, state, rollout)
    stats, moments = all_reduce((stats, moments), spec.axis_name)
    after, metrics = _run_epochs(spec, state.replace(loss_state=loss_state), rollout, batch, rate)
    after = _update_statistics(spec, after, rollout, stats)
    if config.kl_control == "adapt":
        after = after.replace(learning_rate_scale=_adapt_learning_rate_scale(after, metrics["policy/approx_kl"]))
    results = (after.policy_state, after.opt_state, after.reward_stats, after.loss_params, after.loss_state)
    finite = all_finite((*results, metrics["loss/total"], metrics["grad/norm"]))
    if spec.axis_name is not None and isinstance(spec.loss, LossModule):
        finite = jax.lax.pmin(finite.astype(jnp.int32), spec.axis_name) > 0  # its state may differ between devices
    if spec.policy.has_mask:
        mask = rollout.obs[ACTION_MASK]
        metrics |= {"empty_mask": first_empty_mask(spec.policy.action_spec, mask, config.num_envs, spec.axis_name)}
        finite &= metrics["empty_mask"] < 0
    # A condition instead of a selection per array, which would be one kernel each.
    after = jax.lax.cond(finite, lambda new, old: new, lambda new, old: old, after, state)
    residual, target, value = moments
    metrics |= {"value/mean": value.mean, "value/explained_variance": losses.explained_variance(residual, target)}
    metrics |= episode_metrics(stats) | {"learning_rate": rate, "finite": finite}
    metrics |= schedule_metrics(schedules, state.hyperparams)
    after = after.replace(update=state.update + 1, key=derive_key(state.key, "next update"), hyperparams=schedules)
    return after, metrics


def episode_metrics(stats: EpisodeStats) -> Metrics:
    """Returns the metrics episode/*: scalars, NaN if no episode ended."""
    none = stats.returns.count == 0
    return {
        "episode/return_mean": jnp.where(none, jnp.nan, stats.returns.mean),
        "episode/return_std": jnp.where(none, jnp.nan, stats.returns.std),
        "episode/length_mean": jnp.where(none, jnp.nan, stats.lengths.mean),
        "episode/count": stats.returns.count,
    }


def _make_batch(spec: LearnerSpec, state: TrainState, rollout: Rollout) -> tuple[Batch, list[Moments], PyTree]:
    """Returns the rollout with advantages and targets, leaves [T, N, ...]; the moments of target - value, target
    and value; and the new state of a `LossModule`."""
    reward, loss_state = rollout.reward, state.loss_state
    if spec.config.normalize_reward:
        reward = scale_reward(reward, state.reward_stats)
    if spec.config.clip_reward:
        reward = jnp.sign(reward)
    if isinstance(spec.loss, LossModule) and spec.loss.reward is not None:
        bonus_of = functools.partial(spec.loss.reward, state.loss_params, loss_state)
        returned = call_with(rollout, lambda rollout: bonus_of(rollout, spec.axis_name))
        bonus, loss_state = check_bonus(returned, reward, loss_state)
        reward = reward + bonus
    reset = episode_starts(rollout.done)

    def apply(obs: PyTree) -> tuple[Any, Array]:
        carry = jax.tree.map(lambda x: x[0], rollout.carry)
        return spec.policy.unroll(state.policy_state, obs, carry, reset)[:2]

    settings = (state.hyperparams, spec.config)
    returned = call_with(rollout.replace(reward=reward), lambda rollout: spec.advantages(apply, rollout, *settings))
    advantage, target = check_advantages(returned, reward)
    where = where_active(rollout.active)
    moments = [moments_of(x, where) for x in (target - rollout.value, target, rollout.value)]
    same = {name: getattr(rollout, name) for name in ("obs", "action", "log_prob", "value", "next_obs")}
    return Batch(advantage=advantage, target=target, **same), moments, loss_state


def _run_epochs(
    spec: LearnerSpec, state: TrainState, rollout: Rollout, batch: Batch, rate: Array
) -> tuple[TrainState, Metrics]:
    """Takes num_epochs * num_minibatches gradient steps; metrics are means over the steps that were taken."""
    config = spec.config
    length = config.steps_per_sequence
    num_steps, num_envs = rollout.reward.shape

    def epoch(learned: ParamsAndOptState, keys: tuple[Array, Array]) -> tuple[ParamsAndOptState, Metrics]:
        rows = minibatch_indices(keys[0], num_steps // length, num_envs, config.num_minibatches)
        advantages, active = jax.vmap(functools.partial(take_rows, spec, (batch.advantage, rollout.active)))(rows)
        if config.normalize_advantage:  # all minibatches at once: one collective
            advantages = jax.vmap(functools.partial(_standardize, axis_name=spec.axis_name))(advantages, active)
        weights = jax.tree.map(jax.vmap(functools.partial(_weights, axis_name=spec.axis_name)), active)

        def step(learned: ParamsAndOptState, minibatch: tuple[Any, ...]) -> tuple[ParamsAndOptState, Metrics]:
            rows, advantage, weight, key = minibatch
            samples = make_minibatch(spec, rollout, batch.replace(weight=weight), rows, advantage)
            return gradient_step(spec, state, learned, samples, key, rate)

        step_keys = jax.random.split(keys[1], config.num_minibatches)
        learned, metrics = jax.lax.scan(step, learned, (rows, advantages, weights, step_keys))
        check_kl(config, metrics)
        return learned, jax.tree.map(jnp.mean, metrics)

    strata = local_strata(config, num_envs, spec.axis_name)
    loss_key = derive_key(state.key, "loss")
    if spec.axis_name is not None:  # other draws on each device
        loss_key = jax.random.fold_in(loss_key, jax.lax.axis_index(spec.axis_name))
    keys = (
        epoch_keys(derive_key(state.key, "shuffle"), config, num_steps // length * num_envs, strata),
        jax.random.split(loss_key, config.num_epochs),
    )
    learned = (join_params(state.policy_state.params, state.loss_params), state.opt_state)
    if config.kl_control == "stop":
        learned, metrics = _epochs_until_kl(epoch, learned, keys, state.hyperparams.target_kl)
    else:
        learned, per_epoch = jax.lax.scan(epoch, learned, keys)
        metrics = jax.tree.map(jnp.mean, per_epoch)
    params, loss_params = split_params(learned[0], state.loss_params)
    state = state.replace(
        policy_state=state.policy_state.replace(params=params), opt_state=learned[1], loss_params=loss_params
    )
    return state, metrics


def _standardize(advantage: Array, active: PyTree, axis_name: str | None) -> Array:
    """Returns a minibatch's advantages [B] with mean 0 and variance 1 over the active samples of all devices."""
    moments = all_reduce(moments_of(advantage, where_active(active), num_batch_dims=1), axis_name)
    return losses.standardize(advantage, moments.mean, moments.variance)


def _weights(active: Array, axis_name: str | None) -> Array:
    """Returns the weights [B] f32 of a minibatch's samples, active [B] bool: 0, or 1 / (share of active samples).

    The share is that of all devices. A mean over rows with these weights is the mean over active samples.
    """
    share = jnp.mean(active, dtype=jnp.float32)
    share = share if axis_name is None else jax.lax.pmean(share, axis_name)
    return active.astype(jnp.float32) / jnp.where(share > 0.0, share, 1.0)


def _epochs_until_kl(epoch: Callable, carry: PyTree, keys: PyTree, target_kl: Array | float) -> tuple[PyTree, Metrics]:
    """Runs epochs until an epoch's mean KL exceeds target_kl; metrics are means over the epochs that ran."""
    num_epochs = len(jax.tree.leaves(keys)[0])
    carry, total = epoch(carry, jax.tree.map(lambda x: x[0], keys))

    def is_below_target(loop: tuple[PyTree, Metrics, Array, Array]) -> Array:
        _, _, last_kl, done = loop
        return jnp.logical_and(done < num_epochs, last_kl <= target_kl)

    def body(loop: tuple[PyTree, Metrics, Array, Array]) -> tuple[PyTree, Metrics, Array, Array]:
        carry, total, _, done = loop
        carry, metrics = epoch(carry, jax.tree.map(lambda x: x[done], keys))
        return carry, jax.tree.map(jnp.add, total, metrics), metrics["policy/approx_kl"], done + 1

    start = (carry, total, total["policy/approx_kl"], jnp.ones((), jnp.int32))
    carry, total, _, done = jax.lax.while_loop(is_below_target, body, start)
    return carry, jax.tree.map(lambda x: x / done.astype(jnp.float32), total)


def _update_statistics(spec: LearnerSpec, state: TrainState, rollout: Rollout, stats: EpisodeStats) -> TrainState:
    """Adds the rollout to the running statistics, after the epochs: the first minibatch must see the same normalized
    observations as the policy did."""
    if spec.config.normalize_obs:
        flat = merge_dims(rollout.obs)
        where = where_active(jax.tree.map(jnp.ravel, rollout.active))
        added = jax.tree.map(lambda x: moments_of(x, where, num_batch_dims=1), spec.policy.prepare(flat))
        added = all_reduce(added, spec.axis_name)
        obs_stats = jax.tree.map(lambda old, new: old + new, state.policy_state.obs_stats, added, is_leaf=is_moments)
        state = state.replace(policy_state=state.policy_state.replace(obs_stats=obs_stats))
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


class LearnerSetup(NamedTuple):
    """The parts of an agent that do not depend on how rollouts are collected."""

    policy: Policy
    learner: Learner
    mesh: Mesh
    num_updates: int  # of the whole run


def build_learner(
    env: Any,
    config: PPOConfig,
    total_steps: int,
    network: Network | RecurrentNetwork | None,
    optimizer: Optimizer,
    loss: Loss | LossModule | None,
    advantages: Advantages | None,
    num_devices: int,
) -> LearnerSetup:
    """Validates an agent's arguments and returns the parts that both modes share.

    Args:
      env: an Environment or a HostEnvironment.
      total_steps: environment steps of a run, rounded up to whole updates.
      network: None for the network that the config describes.
      optimizer, loss, advantages: see `make_learner`.
      num_devices: devices over which environments are sharded.

    Raises:
      ValueError: an invalid network, optimizer, loss or advantages, or a number of devices that is not available or
        does not fit.
    """
    check_functions(loss, advantages)
    if network is None:
        network = make_network(config, env.obs_spec, env.action_spec)
    else:
        check_own_options(network, config)
    params = check_network(network, env.obs_spec, env.action_spec)
    check_optimizer(optimizer, params)
    action_spec = jax.tree.map(lambda spec: dataclasses.replace(spec, bounds=config.action_bounds), env.action_spec)
    policy = make_policy(network, env.obs_spec, action_spec, params)
    check_sequences(policy, config)
    mesh = make_mesh(config, num_devices)
    check_agents(env, config, num_devices)
    learner = make_learner(policy, config, optimizer, loss, advantages, AXIS if num_devices > 1 else None)
    num_updates = config.num_updates(check_total_steps(total_steps))
    return LearnerSetup(policy=policy, learner=learner, mesh=mesh, num_updates=num_updates)
