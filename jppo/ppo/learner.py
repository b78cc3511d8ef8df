"""One PPO update: advantages, then epochs of minibatches. The rollouts of both modes are its input."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jppo.config.checks import check_function, check_total_steps
from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.devices.mesh import AXIS, make_mesh
from jppo.envs.base import merge_dims
from jppo.envs.spaces import Array, PyTree
from jppo.errors import Refused
from jppo.kernels.finite import all_finite
from jppo.networks.actor_critic import make_network
from jppo.ppo import losses
from jppo.ppo.checks.network import check_network
from jppo.ppo.checks.settings import (
    check_agents,
    check_functions,
    check_own_options,
    check_precision,
    check_sequences,
)
from jppo.ppo.checks.update import check_update, checked_advantages, checked_loss, checked_optimizer
from jppo.ppo.losses import Advantages, Loss, LossModule, as_module, gae_advantages, ppo_loss
from jppo.ppo.minibatches import (
    LearnerSpec,
    Optimizer,
    adam,
    epoch_keys,
    gradient_step,
    local_strata,
    make_minibatch,
    minibatch_indices,
    take_rows,
    trained_params,
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
      policy: network, preparation of observations, and action space.
      config: settings; those of rollouts are not used.
      optimizer: a function of the update's hyperparameters, f32 scalars, that returns an optax transformation, such as
        `lambda h: optax.adam(h.learning_rate)`. It sees the parameters {"network": ..., "loss": ...}.
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
        loss=as_module(ppo_loss if loss is None else loss),
        advantages=gae_advantages if advantages is None else advantages,
        axis_name=axis_name,
    )
    return Learner(init=functools.partial(_init, spec), update=functools.partial(_update, spec))


def _init(spec: LearnerSpec, key: Array, obs: PyTree, hyperparams: Hyperparams, num_updates: Array | int) -> TrainState:
    """Returns the state before the first update, for observations like obs [B, *obs]."""
    hyperparams = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), hyperparams)
    params = spec.policy.init(derive_key(key, "parameters"), obs)
    loss_params, loss_state = jax.tree.map(jnp.asarray, spec.loss.init(derive_key(key, "loss parameters"), obs))
    features = jax.eval_shape(spec.policy.prepare, obs)
    stats = jax.tree.map(lambda x: empty_moments(x.shape[1:]), features) if spec.config.normalize_obs else ()
    state = TrainState(
        policy_state=PolicyState(params=params, obs_stats=stats),
        opt_state=(),
        hyperparams=hyperparams,
        reward_stats=empty_moments(),
        learning_rate_scale=jnp.ones(()),
        key=derive_key(key, "updates"),
        update=jnp.zeros((), jnp.int32),
        num_updates=jnp.asarray(num_updates, jnp.int32),
        loss_params=loss_params,
        loss_state=loss_state,
    )
    return state.replace(opt_state=spec.optimizer(current_hyperparams(state)).init(trained_params(state)))


def _update(spec: LearnerSpec, state: TrainState, rollout: Rollout, stats: EpisodeStats) -> tuple[TrainState, Metrics]:
    """Runs one PPO update.

    If anything becomes NaN or infinite, only `update` and `key` change, and metrics["finite"] is False.
    """
    config, hyperparams = spec.config, current_hyperparams(state)
    # Advantages and value targets of the whole rollout.
    batch, moments, loss_state = _make_batch(spec, hyperparams, state, rollout)
    stats, moments = all_reduce((stats, moments), spec.axis_name)
    # Epochs of gradient steps.
    after, metrics = _run_epochs(spec, hyperparams, state.replace(loss_state=loss_state), rollout, batch)
    # Statistics for the next rollout; not earlier, since the policy that acted did not know them.
    after = _update_statistics(spec, after, rollout, stats)
    if config.kl_control == "adapt":
        scale = _adapt_learning_rate_scale(hyperparams, state.learning_rate_scale, metrics["policy/approx_kl"])
        after = after.replace(learning_rate_scale=scale)
    # Keep the old state if anything is not finite. A condition, because a selection would be one kernel per array.
    changed = (after.policy_state, after.opt_state, after.reward_stats, after.loss_params, after.loss_state)
    finite = all_finite((*changed, metrics["loss/total"], metrics["grad/norm"]))
    if spec.axis_name is not None and jax.tree.leaves(loss_state):  # which may differ between devices
        finite = jax.lax.pmin(finite.astype(jnp.int32), spec.axis_name) > 0
    after = jax.lax.cond(finite, lambda new, old: new, lambda new, old: old, after, state)
    residual, target, value = moments
    metrics |= {"value/mean": value.mean, "value/explained_variance": losses.explained_variance(residual, target)}
    metrics |= episode_metrics(stats) | {"learning_rate": jnp.asarray(hyperparams.learning_rate), "finite": finite}
    metrics |= schedule_metrics(state.hyperparams, hyperparams)
    return after.replace(update=state.update + 1, key=derive_key(state.key, "next update")), metrics


def episode_metrics(stats: EpisodeStats) -> Metrics:
    """Returns the metrics episode/*: scalars, NaN if no episode ended."""
    none = stats.returns.count == 0
    return {
        "episode/return_mean": jnp.where(none, jnp.nan, stats.returns.mean),
        "episode/return_std": jnp.where(none, jnp.nan, stats.returns.std),
        "episode/length_mean": jnp.where(none, jnp.nan, stats.lengths.mean),
        "episode/count": stats.returns.count,
    }


def _make_batch(
    spec: LearnerSpec, hyperparams: Hyperparams, state: TrainState, rollout: Rollout
) -> tuple[Batch, list[Moments], PyTree]:
    """Returns the rollout with advantages and targets, leaves [T, N, ...]; the moments of target - value, target
    and value; and the new state of the loss."""
    reward = rollout.reward
    if spec.config.normalize_reward:
        reward = scale_reward(reward, state.reward_stats)
    if spec.config.clip_reward:
        reward = jnp.sign(reward)
    bonus, loss_state = spec.loss.reward(state.loss_params, state.loss_state, rollout, spec.axis_name)  # type: ignore[misc]
    reward = reward + jnp.asarray(bonus, jnp.float32)

    def apply(obs: PyTree) -> tuple[Any, Array]:
        carry = jax.tree.map(lambda x: x[0], rollout.carry)
        return spec.policy.unroll(state.policy_state, obs, carry, episode_starts(rollout.done))[:2]

    estimates = spec.advantages(apply, rollout.replace(reward=reward), hyperparams, spec.config)
    advantage, target = (jnp.asarray(x, jnp.float32) for x in estimates)
    where = where_active(rollout.active)
    moments = [moments_of(x, where) for x in (target - rollout.value, target, rollout.value)]
    same = {name: getattr(rollout, name) for name in ("obs", "action", "log_prob", "value", "next_obs")}
    return Batch(advantage=advantage, target=target, **same), moments, loss_state


def _run_epochs(
    spec: LearnerSpec, hyperparams: Hyperparams, state: TrainState, rollout: Rollout, batch: Batch
) -> tuple[TrainState, Metrics]:
    """Takes num_epochs * num_minibatches gradient steps; metrics are means over the steps that were taken."""
    config, length = spec.config, spec.config.steps_per_sequence
    num_steps, num_envs = rollout.reward.shape

    def epoch(state: TrainState, keys: tuple[Array, Array]) -> tuple[TrainState, Metrics]:
        rows = minibatch_indices(keys[0], num_steps // length, num_envs, config.num_minibatches)
        # Advantages of all minibatches at once, so that devices exchange their moments once.
        taken = jax.vmap(lambda rows: take_rows((batch.advantage, rollout.active), rows, length))(rows)
        advantages, active = jax.tree.map(lambda x: x.reshape(config.num_minibatches, -1), taken)
        if config.normalize_advantage:
            advantages = jax.vmap(functools.partial(_standardize, axis_name=spec.axis_name))(advantages, active)
        weights = jax.tree.map(jax.vmap(functools.partial(_weights, axis_name=spec.axis_name)), active)

        def step(state: TrainState, minibatch: tuple[Any, ...]) -> tuple[TrainState, Metrics]:
            rows, advantage, weight, key = minibatch
            samples = make_minibatch(spec, rollout, batch.replace(weight=weight), rows, advantage)
            return gradient_step(spec, hyperparams, state, samples, key)

        step_keys = jax.random.split(keys[1], config.num_minibatches)
        state, metrics = jax.lax.scan(step, state, (rows, advantages, weights, step_keys))
        return state, jax.tree.map(jnp.mean, metrics)

    strata = local_strata(config, num_envs, spec.axis_name)
    loss_key = derive_key(state.key, "loss")
    if spec.axis_name is not None:  # other draws on each device
        loss_key = jax.random.fold_in(loss_key, jax.lax.axis_index(spec.axis_name))
    keys = (
        epoch_keys(derive_key(state.key, "shuffle"), config, num_steps // length * num_envs, strata),
        jax.random.split(loss_key, config.num_epochs),
    )
    if config.kl_control == "stop":
        return _epochs_until_kl(epoch, state, keys, hyperparams.target_kl)
    state, per_epoch = jax.lax.scan(epoch, state, keys)
    return state, jax.tree.map(jnp.mean, per_epoch)


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


def _adapt_learning_rate_scale(hyperparams: Hyperparams, scale: Array, kl: Array) -> Array:
    """Returns the learning-rate scale after an update with this KL: divided by 1.5 if kl > 2 * target_kl, multiplied by
    1.5 if kl < target_kl / 2, within [0.01, 100]. All are f32 scalars."""
    target = hyperparams.target_kl
    scale = jnp.where(kl > 2.0 * target, scale / _LR_FACTOR, scale)
    scale = jnp.where(kl < 0.5 * target, scale * _LR_FACTOR, scale)
    return jnp.clip(scale, *_LR_SCALE_RANGE)


# (policy, config, axis_name) -> a learner with another update; axis_name as for `make_learner`
LearnerFactory = Callable[[Policy, PPOConfig, str | None], Learner]


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
    learner: LearnerFactory | None,
    num_devices: int,
) -> LearnerSetup:
    """Validates an agent's arguments and returns the parts that both modes share.

    Args:
      env: an Environment or a HostEnvironment.
      total_steps: environment steps of a run, rounded up to whole updates.
      network: None for the network that the config describes.
      optimizer, loss, advantages: see `make_learner`.
      learner: None for `make_learner`.
      num_devices: devices over which environments are sharded.

    Raises:
      ValueError: an invalid network, optimizer, loss or advantages; a `learner` together with one of the last three;
        or a number of devices that is not available or does not fit.
    """
    check_functions(loss, advantages)
    if network is None:
        network = make_network(config, env.obs_spec, env.action_spec)
    else:
        check_own_options(network, config)
    params = check_network(network, env.obs_spec, env.action_spec)
    action_spec = jax.tree.map(lambda spec: dataclasses.replace(spec, bounds=config.action_bounds), env.action_spec)
    policy = make_policy(network, env.obs_spec, action_spec, params)
    check_sequences(policy, config)
    mesh = make_mesh(config, num_devices)
    check_agents(env, config, num_devices)
    has_own_parts = optimizer is not adam or loss is not None or advantages is not None
    if learner is not None and has_own_parts:
        raise Refused("learner replaces optimizer, loss and advantages; pass them to the learner's own code")
    if has_own_parts:
        checked: dict[str, Any] = {
            "optimizer": checked_optimizer(optimizer),
            "loss": checked_loss(as_module(loss or ppo_loss), policy, config),
            "advantages": checked_advantages(advantages or gae_advantages, policy),
        }
        check_update(lambda config: make_learner(policy, config, **checked), policy, config, env.num_agents)
    axis_name = AXIS if num_devices > 1 else None
    if learner is None:
        made = make_learner(policy, config, optimizer, loss, advantages, axis_name)
    else:
        check_function("learner", learner, "policy, config, axis_name")
        check_update(lambda config: learner(policy, config, None), policy, config, env.num_agents)
        made = learner(policy, config, axis_name)
    return LearnerSetup(
        policy=policy,
        learner=made,
        mesh=mesh,
        num_updates=config.num_updates(check_total_steps(total_steps)),
    )
