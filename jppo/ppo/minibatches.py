"""The minibatches of an epoch: a random permutation of the rows of a rollout, cut into equal parts.

With a recurrent network, the shuffled units are sequences of steps instead of single samples.

The shuffle is stratified: the environments are cut into strata (PPOConfig.num_strata), each is shuffled separately, and
minibatch m is the union of every stratum's m-th slice. A device that holds whole strata forms its part of every
minibatch alone, and the minibatches are the same sets of samples on any number of devices.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.flatten_util import ravel_pytree

from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.envs.base import merge_dims
from jppo.envs.spaces import Array, PyTree
from jppo.kernels.flat_gradient import flatten, pack, unpack
from jppo.kernels.microbatches import accumulate_gradients, num_microbatches, num_sequence_microbatches, split_minibatch
from jppo.kernels.permutation import divmod_u32, permute_index, round_keys
from jppo.ppo.checks.loss import call_with, check_loss
from jppo.ppo.checks.observations import check_rows
from jppo.ppo.losses import Advantages, Loss, LossModule
from jppo.ppo.policy import Policy, episode_starts
from jppo.ppo.types import Apply, Batch, Metrics, PolicyState, Rollout, TrainState


def epoch_keys(key: Array, config: PPOConfig, num_rows: int, strata: Array) -> Array:
    """Draws the round keys of each epoch of an update, [num_epochs, S, rounds, 2] u32.

    Args:
      key: one per update, the same on every device.
      num_rows: rows of this device's rollout, T*N.
      strata: [S] i32, global numbers of this rollout's strata, in the order of its environments.
    """
    return round_keys(key, (config.num_epochs, config.effective_strata), num_rows // strata.shape[0])[:, strata]


def minibatch_indices(keys: Array, num_steps: int, num_envs: int, num_minibatches: int) -> Array:
    """Returns the rows of an epoch's minibatches in a rollout flattened from [T, N] to [T*N].

    The result is [num_minibatches, rows] i32 and contains each row once.

    Args:
      keys: [S, rounds, 2] u32, one epoch of `epoch_keys`.
      num_steps, num_envs: T and N of this device's rollout.
      num_minibatches: divides T*N/S.
    """
    num_strata = keys.shape[0]
    envs = num_envs // num_strata
    size = num_steps * envs
    position = jnp.arange(size, dtype=jnp.uint32).reshape(num_minibatches, -1)

    def rows_of(keys: Array, first: Array) -> Array:
        step, env = divmod_u32(permute_index(keys, position, size), envs)
        return step * jnp.uint32(num_envs) + first + env

    rows = jax.vmap(rows_of, out_axes=1)(keys, envs * jnp.arange(num_strata, dtype=jnp.uint32))
    return rows.reshape(num_minibatches, -1).astype(jnp.int32)


def take_sequences(tree: PyTree, rows: Array, length: int) -> PyTree:
    """Returns sequences of a rollout: leaves [L, M, ...] of leaves [T, N, ...].

    Args:
      rows: [M] i32, indices of `minibatch_indices` for T/L "steps" and N environments: sequence k of environment n has
        the index k*N + n.
      length: L.
    """

    def take(x: Array) -> Array:
        num_envs = x.shape[1]
        sequences = x.reshape(-1, length, *x.shape[1:])
        return jax.vmap(lambda step: step[rows // num_envs, rows % num_envs], in_axes=1)(sequences)

    return jax.tree.map(take, tree)


def local_strata(config: PPOConfig, num_envs: int, axis_name: str | None) -> Array:
    """Returns the global numbers of the strata that this device's `num_envs` environments form, [S] i32."""
    count = config.effective_strata * num_envs // config.num_envs
    first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * count
    return first + jnp.arange(count, dtype=jnp.int32)


Optimizer = Callable[[Hyperparams], optax.GradientTransformation]


def adam(hyperparams: Hyperparams) -> optax.GradientTransformation:
    """Returns the default optimizer: Adam's direction, which the learner multiplies by -learning_rate.

    Kingma and Ba (2015), "Adam: A method for stochastic optimization".
    """
    return flatten(optax.scale_by_adam(eps=hyperparams.adam_eps))


def apply_gradient(
    optimizer: optax.GradientTransformation,
    params: PyTree,
    opt_state: PyTree,
    gradient: PyTree,
    max_grad_norm: Array | float,
    learning_rate: Array | float,
) -> tuple[PyTree, PyTree, Array]:
    """Takes one step against a gradient with clipped norm.

        g <- g * min(1, max_grad_norm / ||g||),    params <- params - learning_rate * optimizer(g)

    Pascanu, Mikolov and Bengio (2013), "On the difficulty of training recurrent neural networks", algorithm 1.

    Args:
      gradient: float32, in the form that `kernels.flat_gradient.pack` returns.

    Returns:
      params and opt_state after the step, and the norm before clipping.
    """
    norm = jnp.sqrt(jnp.asarray(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(gradient)), jnp.float32))
    scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-12))
    clipped = unpack(jax.tree.map(lambda leaf: leaf * scale, gradient), params)
    clipped = jax.tree.map(lambda leaf, param: leaf.astype(param.dtype), clipped, params)
    direction, opt_state = optimizer.update(clipped, opt_state, params)

    def step(param: Array, direction: Array) -> Array:  # in float32, even if the parameter has fewer bits
        moved = param.astype(jnp.float32) - learning_rate * direction.astype(jnp.float32)
        return moved.astype(param.dtype)

    return jax.tree.map(step, params, direction), opt_state, norm


ParamsAndOptState = tuple[PyTree, PyTree]


class LearnerSpec(NamedTuple):
    """The arguments of `make_learner`, for the functions of one update."""

    policy: Policy
    config: PPOConfig
    optimizer: Optimizer
    loss: Loss | LossModule
    advantages: Advantages
    axis_name: str | None


class Minibatch(struct.PyTreeNode, kw_only=True):
    """The samples of one gradient step."""

    samples: Batch  # [B, ...]
    carry: PyTree = ()  # of a recurrent network at the start of the M sequences, [M, ...]; B = L*M
    reset: PyTree = ()  # [L, M] bool, True where an episode starts; () for feed-forward networks


def take_rows(spec: LearnerSpec, tree: PyTree, rows: Array) -> PyTree:
    """Returns leaves [B, ...] of leaves [T, N, ...]; rows are indices of samples or, in a recurrent run, sequences."""
    if not spec.policy.is_recurrent:
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[rows], tree)
    return merge_dims(take_sequences(tree, rows, spec.config.steps_per_sequence))


def make_minibatch(spec: LearnerSpec, rollout: Rollout, batch: Batch, rows: Array, advantage: Array) -> Minibatch:
    """Returns the samples of a gradient step with their standardized advantages [B]."""
    samples = take_rows(spec, batch.replace(weight=()), rows).replace(advantage=advantage, weight=batch.weight)
    if not spec.policy.is_recurrent:
        return Minibatch(samples=samples)
    carry = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[rows], rollout.carry)
    reset = take_sequences(episode_starts(rollout.done), rows, spec.config.steps_per_sequence)
    return Minibatch(samples=samples, carry=carry, reset=reset)


def gradient_step(
    spec: LearnerSpec, state: TrainState, learned: ParamsAndOptState, minibatch: Minibatch, key: Array, rate: Array
) -> tuple[ParamsAndOptState, Metrics]:
    """Takes one gradient step on a minibatch: gradient, mean over devices, clipping, optimizer."""
    trained, opt_state = learned

    def loss_of(trained: PyTree, minibatch: Minibatch) -> tuple[Array, Metrics]:
        params, loss_params = split_params(trained, state.loss_params)
        apply = _make_apply(spec, state.policy_state.replace(params=params), minibatch)
        loss: Any = spec.loss
        if isinstance(spec.loss, LossModule):
            loss = functools.partial(spec.loss.apply, loss_params, state.loss_state)
        settings = (state.hyperparams, spec.config, key)
        return check_loss(call_with(minibatch.samples, lambda batch: loss(apply, batch, *settings)))

    def gradient_of(minibatch: Minibatch) -> tuple[Metrics, PyTree]:
        (total, metrics), gradient = jax.value_and_grad(loss_of, has_aux=True)(trained, minibatch)
        return metrics | {"loss/total": total}, pack(gradient)

    count = count_microbatches(spec.policy, spec.loss, loss_of, trained, minibatch, spec.axis_name)
    zero = jax.tree.map(jnp.zeros_like, pack(trained))
    metrics, gradient = accumulate_gradients(gradient_of, minibatch, count, zero, spec.axis_name, split_minibatch)
    if spec.axis_name is not None:
        metrics = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), metrics)  # metrics may be bool or int
        joined, restore = ravel_pytree((gradient, metrics))  # one collective instead of one per array
        gradient, metrics = restore(jax.lax.pmean(joined, spec.axis_name))
    optimizer, max_norm = spec.optimizer(state.hyperparams), state.hyperparams.max_grad_norm
    trained, opt_state, norm = apply_gradient(optimizer, trained, opt_state, gradient, max_norm, rate)
    return (trained, opt_state), metrics | {"grad/norm": norm}


def _make_apply(spec: LearnerSpec, policy_state: PolicyState, minibatch: Minibatch) -> Apply:
    """Returns the loss's function `apply`: obs [B, *obs] -> distribution, value [B]."""
    if not spec.policy.is_recurrent:
        return lambda obs: spec.policy.step(policy_state, obs)[:2]
    carry, reset = minibatch.carry, minibatch.reset

    def apply(obs: PyTree) -> tuple[Any, Array]:
        check_rows(obs, reset.size)
        sequences = jax.tree.map(lambda x: x.reshape(*reset.shape, *x.shape[1:]), obs)
        return spec.policy.unroll(policy_state, sequences, carry, reset)[:2]

    return apply


def join_params(params: PyTree, loss_params: PyTree) -> PyTree:
    """Returns all parameters that the optimizer trains: the network's alone if the loss has none."""
    return {"network": params, "loss": loss_params} if jax.tree.leaves(loss_params) else params


def split_params(joined: PyTree, loss_params: PyTree) -> tuple[PyTree, PyTree]:
    """Reverses `join_params`."""
    return (joined["network"], joined["loss"]) if jax.tree.leaves(loss_params) else (joined, loss_params)


def count_microbatches(
    policy: Policy,
    user_loss: Loss | LossModule,
    loss: Callable[..., Any],
    params: PyTree,
    minibatch: Any,
    axis_name: str | None,
) -> int:
    """Returns the number of equal microbatches to split a minibatch into; 1 unless the loss is a mean over rows.

    Args:
      loss: (params, minibatch) -> a scalar and metrics, of the policy's network and the loss `user_loss`.
      minibatch: a `Minibatch`.
      axis_name: mesh axis of the devices, each of which has as many rows; None for one device.
    """
    if not getattr(user_loss.apply if isinstance(user_loss, LossModule) else user_loss, "mean_over_rows", False):
        return 1
    if policy.is_recurrent:
        return num_sequence_microbatches(loss, params, minibatch, minibatch.reset.shape[1], axis_name)
    return num_microbatches(loss, params, minibatch, axis_name)
