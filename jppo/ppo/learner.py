"""One PPO update: advantages, then epochs of minibatches. The rollouts of both modes are its input."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh

from jppo.config.checks import check_total_steps
from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.devices.mesh import AXIS, make_mesh
from jppo.envs.spaces import ACTION_MASK
from jppo.ppo import losses
from jppo.ppo.advantages import Advantages, gae_advantages
from jppo.ppo.hyperparams import current_hyperparams, evaluate_schedules, schedule_metrics
from jppo.ppo.kernels.finite import all_finite
from jppo.ppo.kernels.flat_gradient import pack
from jppo.ppo.kernels.microbatches import accumulate_gradients, num_microbatches
from jppo.ppo.keys import derive_key
from jppo.ppo.losses import Apply, Loss, LossModule, ppo_loss
from jppo.ppo.minibatches import epoch_keys, local_strata, minibatch_indices, take_sequences
from jppo.ppo.network_check import check_network
from jppo.ppo.networks import Network, RecurrentNetwork, make_network
from jppo.ppo.normalization import all_reduce, empty_moments, is_moments, moments_of, scale_reward
from jppo.ppo.optimizer import Optimizer, adam, apply_gradient, check_optimizer
from jppo.ppo.policy import Policy, legal_categories, make_policy
from jppo.ppo.rollout import episode_starts
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
    loss: Loss | LossModule
    advantages: Advantages
    axis_name: str | None


class _Minibatch(struct.PyTreeNode, kw_only=True):
    """The samples of one gradient step."""

    samples: Batch  # [B, ...]
    carry: PyTree = ()  # of a recurrent network at the start of the M sequences, [M, ...]; B = L*M
    reset: PyTree = ()  # [L, M] bool, True where an episode starts; () for feed-forward networks


def build_learner(
    env: Any,
    config: PPOConfig,
    *,
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
      ValueError: an invalid network or optimizer, or a number of devices that is not available or does not fit.
    """
    network = make_network(config, env.obs_spec, env.action_spec) if network is None else network
    params = check_network(network, env.obs_spec, env.action_spec)
    check_optimizer(optimizer, params)
    action_spec = jax.tree.map(lambda spec: dataclasses.replace(spec, bounds=config.action_bounds), env.action_spec)
    policy = make_policy(network, env.obs_spec, action_spec, params)
    _check_sequences(policy, config)
    mesh = make_mesh(config, num_devices)
    learner = make_learner(policy, config, optimizer, loss, advantages, AXIS if num_devices > 1 else None)
    num_updates = config.num_updates(check_total_steps(total_steps))
    return LearnerSetup(policy=policy, learner=learner, mesh=mesh, num_updates=num_updates)


def _check_sequences(policy: Policy, config: PPOConfig) -> None:
    """Raises ValueError if the minibatch unit does not fit the network."""
    if policy.is_recurrent and config.recurrent == "none" and config.sequence_length is None:
        raise ValueError(
            f"the network is recurrent: set sequence_length, the steps of the sequences that minibatches consist of; "
            f"num_steps = {config.num_steps} makes whole rollouts"
        )
    if config.sequence_length is not None and not policy.is_recurrent:
        raise ValueError(
            f"sequence_length = {config.sequence_length} needs a recurrent network; set recurrent to gru or lstm, or "
            "pass a network with initial_carry()"
        )


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
        parameters and a state of its own.
      advantages: a function with the arguments and results of `gae_advantages` (the default).
      axis_name: mesh axis over which environments are sharded; None for one device.

    Raises:
      ValueError: JAX is configured to compute in 64 bits.
    """
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError("jppo computes in 32 bits, JAX in 64 (JAX_ENABLE_X64, or jax_enable_x64): switch that off")
    spec = _LearnerSpec(
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
            loss_params, loss_state = spec.loss.init(derive_key(key, "loss parameters"), obs)
        features = jax.eval_shape(policy.prepare, obs)
        stats = jax.tree.map(lambda x: empty_moments(x.shape[1:]), features) if config.normalize_obs else ()
        return TrainState(
            policy=PolicyState(params=params, obs_stats=stats),
            opt_state=optimizer(evaluate_schedules(hyperparams, 0.0)).init(_join_params(params, loss_params)),
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


def _update(spec: _LearnerSpec, state: TrainState, rollout: Rollout, stats: EpisodeStats) -> tuple[TrainState, Metrics]:
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
    finite = all_finite(
        (
            *(after.policy, after.opt_state, after.reward_stats, after.loss_params, after.loss_state),
            *(metrics["loss/total"], metrics["grad/norm"]),
        )
    )
    if spec.policy.has_mask:
        metrics |= {"empty_mask": _first_empty_mask(spec, rollout.obs)}
        finite &= metrics["empty_mask"] < 0
    # A condition instead of a selection per array, which would be one kernel each.
    after = jax.lax.cond(finite, lambda new, old: new, lambda new, old: old, after, state)
    metrics |= _value_metrics(moments) | episode_metrics(stats) | {"learning_rate": rate, "finite": finite}
    metrics |= schedule_metrics(schedules, state.hyperparams)
    return after.replace(
        update=state.update + 1, key=derive_key(state.key, "next update"), hyperparams=schedules
    ), metrics


def episode_metrics(stats: EpisodeStats) -> Metrics:
    """Returns the metrics episode/*: scalars, NaN if no episode ended."""
    none = stats.returns.count == 0
    return {
        "episode/return_mean": jnp.where(none, jnp.nan, stats.returns.mean),
        "episode/return_std": jnp.where(none, jnp.nan, stats.returns.std),
        "episode/length_mean": jnp.where(none, jnp.nan, stats.lengths.mean),
        "episode/count": stats.returns.count,
    }


def _make_batch(spec: _LearnerSpec, state: TrainState, rollout: Rollout) -> tuple[Batch, dict[str, Moments], PyTree]:
    """Returns the rollout with advantages and targets, leaves [T, N, ...]; moments for the metrics value/*; and the new
    state of a `LossModule`."""
    reward, loss_state = rollout.reward, state.loss_state
    if spec.config.normalize_reward:
        reward = scale_reward(reward, state.reward_stats)
    if isinstance(spec.loss, LossModule) and spec.loss.reward is not None:
        bonus, loss_state = spec.loss.reward(state.loss_params, loss_state, rollout, spec.axis_name)
        chex.assert_equal_shape([bonus, reward])
        reward = reward + bonus
    reset = episode_starts(rollout.done)

    def apply(obs: PyTree) -> tuple[Any, Array]:
        carry = jax.tree.map(lambda x: x[0], rollout.carry)
        return spec.policy.unroll(state.policy, obs, carry, reset)[:2]

    advantage, target = spec.advantages(apply, rollout.replace(reward=reward), state.hyperparams, spec.config)
    chex.assert_equal_shape([advantage, target, reward])
    moments = {
        "residual": moments_of(target - rollout.value),
        "target": moments_of(target),
        "value": moments_of(rollout.value),
    }
    batch = Batch(
        obs=rollout.obs,
        action=rollout.action,
        log_prob=rollout.log_prob,
        value=rollout.value,
        advantage=advantage,
        target=target,
        next_obs=rollout.next_obs,
    )
    return batch, moments, loss_state


def _first_empty_mask(spec: _LearnerSpec, obs: PyTree) -> Array:
    """Returns t*N + n for the first step t and environment n without a legal action, or -1; [] i32. N counts the
    environments of all devices."""
    mask = obs[ACTION_MASK]
    num_steps, num_envs = mask.shape[:2]
    legal = legal_categories(spec.policy.action_spec, mask.reshape(num_steps * num_envs, *mask.shape[2:]))
    empty = jnp.logical_not(legal.any(axis=-1).reshape(num_steps, num_envs, -1).all(axis=-1))
    first_env = 0 if spec.axis_name is None else jax.lax.axis_index(spec.axis_name) * num_envs
    index = spec.config.num_envs * jnp.arange(num_steps)[:, None] + (first_env + jnp.arange(num_envs))[None]
    none = jnp.int32(2**31 - 1)
    first = jnp.min(jnp.where(empty, index.astype(jnp.int32), none))
    first = first if spec.axis_name is None else jax.lax.pmin(first, spec.axis_name)
    return jnp.where(first == none, -1, first)


def _value_metrics(moments: dict[str, Moments]) -> Metrics:
    return {
        "value/mean": moments["value"].mean,
        "value/explained_variance": losses.explained_variance(moments["residual"], moments["target"]),
    }


def _run_epochs(
    spec: _LearnerSpec, state: TrainState, rollout: Rollout, batch: Batch, rate: Array
) -> tuple[TrainState, Metrics]:
    """Takes num_epochs * num_minibatches gradient steps; metrics are means over the steps that were taken."""
    config = spec.config
    length = config.steps_per_sequence
    num_steps, num_envs = rollout.reward.shape

    def epoch(learned: _ParamsAndOptState, keys: tuple[Array, Array]) -> tuple[_ParamsAndOptState, Metrics]:
        rows = minibatch_indices(keys[0], num_steps // length, num_envs, config.num_minibatches)
        advantages = jax.vmap(functools.partial(_take, spec, batch.advantage))(rows)
        if config.normalize_advantage:  # all minibatches at once: one collective
            advantages = jax.vmap(functools.partial(standardize_advantages, axis_name=spec.axis_name))(advantages)

        def step(
            learned: _ParamsAndOptState, minibatch: tuple[Array, Array, Array]
        ) -> tuple[_ParamsAndOptState, Metrics]:
            rows, advantage, key = minibatch
            samples = _make_minibatch(spec, rollout, batch, rows, advantage)
            return _gradient_step(spec, state, learned, samples, key, rate)

        step_keys = jax.random.split(keys[1], config.num_minibatches)
        learned, metrics = jax.lax.scan(step, learned, (rows, advantages, step_keys))
        return learned, jax.tree.map(jnp.mean, metrics)

    strata = local_strata(config, num_envs, spec.axis_name)
    loss_key = derive_key(state.key, "loss")
    if spec.axis_name is not None:  # other draws on each device
        loss_key = jax.random.fold_in(loss_key, jax.lax.axis_index(spec.axis_name))
    keys = (
        epoch_keys(derive_key(state.key, "shuffle"), config, num_steps // length * num_envs, strata),
        jax.random.split(loss_key, config.num_epochs),
    )
    learned = (_join_params(state.policy.params, state.loss_params), state.opt_state)
    if config.kl_control == "stop":
        learned, metrics = _epochs_until_kl(epoch, learned, keys, state.hyperparams.target_kl)
    else:
        learned, per_epoch = jax.lax.scan(epoch, learned, keys)
        metrics = jax.tree.map(jnp.mean, per_epoch)
    params, loss_params = _split_params(learned[0], state.loss_params)
    state = state.replace(policy=state.policy.replace(params=params), opt_state=learned[1], loss_params=loss_params)
    return state, metrics


def _take(spec: _LearnerSpec, tree: PyTree, rows: Array) -> PyTree:
    """Returns leaves [B, ...] of leaves [T, N, ...]; rows are indices of samples or, in a recurrent run, sequences."""
    if not spec.policy.is_recurrent:
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[rows], tree)
    sequences = take_sequences(tree, rows, spec.config.steps_per_sequence)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sequences)


def _make_minibatch(spec: _LearnerSpec, rollout: Rollout, batch: Batch, rows: Array, advantage: Array) -> _Minibatch:
    """Returns the samples of a gradient step with their standardized advantages [B]."""
    samples = _take(spec, batch, rows).replace(advantage=advantage)
    if not spec.policy.is_recurrent:
        return _Minibatch(samples=samples)
    carry = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[rows], rollout.carry)
    reset = take_sequences(episode_starts(rollout.done), rows, spec.config.steps_per_sequence)
    return _Minibatch(samples=samples, carry=carry, reset=reset)


def _join_params(params: PyTree, loss_params: PyTree) -> PyTree:
    """Returns all parameters that the optimizer trains: the network's alone if the loss has none."""
    return {"network": params, "loss": loss_params} if jax.tree.leaves(loss_params) else params


def _split_params(joined: PyTree, loss_params: PyTree) -> tuple[PyTree, PyTree]:
    """Reverses `_join_params`."""
    return (joined["network"], joined["loss"]) if jax.tree.leaves(loss_params) else (joined, loss_params)


def standardize_advantages(advantage: Array, axis_name: str | None) -> Array:
    """Returns a minibatch's advantages [B] with mean 0 and variance 1 over all devices."""
    moments = all_reduce(moments_of(advantage, num_batch_dims=1), axis_name)
    return losses.standardize(advantage, moments.mean, moments.variance)


def _gradient_step(
    spec: _LearnerSpec, state: TrainState, learned: _ParamsAndOptState, minibatch: _Minibatch, key: Array, rate: Array
) -> tuple[_ParamsAndOptState, Metrics]:
    """Takes one gradient step on a minibatch: gradient, mean over devices, clipping, optimizer."""
    trained, opt_state = learned

    def loss_of(trained: PyTree, minibatch: _Minibatch) -> tuple[Array, Metrics]:
        params, loss_params = _split_params(trained, state.loss_params)
        apply = _make_apply(spec, state.policy.replace(params=params), minibatch)
        arguments = (apply, minibatch.samples, state.hyperparams, spec.config, key)
        if isinstance(spec.loss, LossModule):
            return spec.loss.apply(loss_params, state.loss_state, *arguments)
        return spec.loss(*arguments)

    def gradient_of(minibatch: _Minibatch) -> tuple[Metrics, PyTree]:
        (total, metrics), gradient = jax.value_and_grad(loss_of, has_aux=True)(trained, minibatch)
        return metrics | {"loss/total": total}, pack(gradient)

    count = 1
    splits = getattr(spec.loss.apply if isinstance(spec.loss, LossModule) else spec.loss, "mean_over_rows", False)
    if splits and not spec.policy.is_recurrent:
        features = jax.eval_shape(spec.policy.prepare, minibatch.samples.obs)
        count = num_microbatches(spec.policy.network, loss_of, trained, minibatch, features, spec.axis_name)
    zero = jax.tree.map(jnp.zeros_like, pack(trained))
    metrics, gradient = accumulate_gradients(gradient_of, minibatch, count, zero, spec.axis_name)
    if spec.axis_name is not None:
        metrics = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), metrics)  # metrics may be bool or int
        joined, restore = ravel_pytree((gradient, metrics))  # one collective instead of one per array
        gradient, metrics = restore(jax.lax.pmean(joined, spec.axis_name))
    optimizer, max_norm = spec.optimizer(state.hyperparams), state.hyperparams.max_grad_norm
    trained, opt_state, norm = apply_gradient(optimizer, trained, opt_state, gradient, max_norm, rate)
    return (trained, opt_state), metrics | {"grad/norm": norm}


def _make_apply(spec: _LearnerSpec, policy_state: PolicyState, minibatch: _Minibatch) -> Apply:
    """Returns the loss's function `apply`: obs [B, *obs] -> distribution, value [B]."""
    if not spec.policy.is_recurrent:
        return lambda obs: spec.policy.step(policy_state, obs)[:2]
    carry, reset = minibatch.carry, minibatch.reset

    def apply(obs: PyTree) -> tuple[Any, Array]:
        sequences = jax.tree.map(lambda x: x.reshape(*reset.shape, *x.shape[1:]), obs)
        return spec.policy.unroll(policy_state, sequences, carry, reset)[:2]

    return apply


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
