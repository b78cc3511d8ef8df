"""The minibatches of an epoch: a random permutation of the rows of a rollout, cut into equal parts.

With a recurrent network, the shuffled units are sequences of steps instead of single samples.

The shuffle is stratified: the environments are cut into strata (PPOConfig.num_strata), each is shuffled separately, and
minibatch m is the union of every stratum's m-th slice. A device that holds whole strata forms its part of every
minibatch alone, and the minibatches are the same sets of samples on any number of devices.
"""

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
from jppo.kernels.gradient import flatten, unpack, value_and_grad
from jppo.kernels.permutation import divmod_u32, permute_index, round_keys
from jppo.ppo.losses import Advantages, LossModule, is_mean_over_rows
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


def local_strata(config: PPOConfig, num_envs: int, axis_name: str | None) -> Array:
    """Returns the global numbers of the strata that this device's `num_envs` environments form, [S] i32.

    Args:
      axis_name: mesh axis of the devices; None for one device.
    """
    count = config.effective_strata * num_envs // config.num_envs
    first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * count
    return first + jnp.arange(count, dtype=jnp.int32)


# hyperparameters of the current update -> an optax transformation; its updates are added to the parameters
Optimizer = Callable[[Hyperparams], optax.GradientTransformation]


def adam(hyperparams: Hyperparams) -> optax.GradientTransformation:
    """Returns the default optimizer, Adam. Kingma and Ba (2015), "Adam: A method for stochastic optimization"."""
    return flatten(optax.adam(hyperparams.learning_rate, eps=hyperparams.adam_eps))


class LearnerSpec(NamedTuple):
    """The arguments of `make_learner`, for the functions of one update."""

    policy: Policy
    config: PPOConfig
    optimizer: Optimizer
    loss: LossModule
    advantages: Advantages
    axis_name: str | None


class Minibatch(struct.PyTreeNode, kw_only=True):
    """The rows of one gradient step: M sequences of L steps. A feed-forward network has sequences of one step."""

    samples: Batch  # [L, M, ...]
    reset: Array  # [L, M] bool, True where an episode starts
    carry: PyTree  # [1, M, ...], of a recurrent network before the first step; () for feed-forward networks


def take_rows(tree: PyTree, rows: Array, length: int) -> PyTree:
    """Returns sequences of a rollout: leaves [L, M, ...] of leaves [T, N, ...].

    Args:
      rows: [M] i32, indices of `minibatch_indices` for T/L "steps" and N environments: sequence k of environment n has
        the index k*N + n.
      length: L.
    """

    def take(x: Array) -> Array:
        num_envs, index = x.shape[1], rows[None]
        if length > 1:  # step l of sequence k is step k*L + l of the rollout
            step = (rows // num_envs * length)[None] + jnp.arange(length)[:, None]
            index = step * num_envs + (rows % num_envs)[None]
        return merge_dims(x)[index]

    return jax.tree.map(take, tree)


def make_minibatch(spec: LearnerSpec, rollout: Rollout, batch: Batch, rows: Array, advantage: Array) -> Minibatch:
    """Returns the samples of a gradient step.

    Args:
      batch: leaves [T, N, ...]; its weight is that of the minibatch, [B], or ().
      rows: [M] i32, see `take_rows`.
      advantage: [B] f32, of this minibatch, standardized.
    """
    length = spec.config.steps_per_sequence
    samples, reset = take_rows((batch.replace(weight=()), episode_starts(rollout.done)), rows, length)
    own = jax.tree.map(lambda x: x.reshape(length, -1), {"advantage": advantage, "weight": batch.weight})
    carry = take_rows(rollout.carry, rows, 1)
    return Minibatch(samples=samples.replace(**own), reset=reset, carry=carry)


def gradient_step(
    spec: LearnerSpec, hyperparams: Hyperparams, state: TrainState, minibatch: Minibatch, key: Array
) -> tuple[TrainState, Metrics]:
    """Takes one gradient step on a minibatch.

    Args:
      hyperparams: their current values, f32 scalars; state.hyperparams are the schedules.
      key: for the loss.

    Returns:
      the state after the step; the loss's metrics, "loss/total", and "grad/norm" before clipping.
    """

    def loss_of(params: PyTree, rows: Minibatch) -> tuple[Array, Metrics]:
        policy_state = state.policy_state.replace(params=params["network"])
        apply = _make_apply(spec.policy, policy_state, rows)
        batch = merge_dims(rows.samples)
        total, metrics = spec.loss.apply(params["loss"], state.loss_state, apply, batch, hyperparams, spec.config, key)
        return total, metrics | {"loss/total": total}

    params = trained_params(state)
    is_mean = is_mean_over_rows(spec.loss.apply)
    gradient_of = value_and_grad(loss_of, minibatch, is_mean=is_mean, axis_name=spec.axis_name)
    (_, metrics), gradient = gradient_of(params)
    gradient, metrics = _mean_over_devices((gradient, metrics), spec.axis_name)
    gradient, norm = clip_by_norm(gradient, hyperparams.max_grad_norm)
    updates, opt_state = spec.optimizer(hyperparams).update(unpack(gradient, params), state.opt_state, params)
    # The sum is f32, even if a parameter has fewer bits.
    moved = optax.apply_updates(*optax.tree.cast((params, updates), jnp.float32))
    params = optax.tree.cast_like(moved, params)
    policy_state = state.policy_state.replace(params=params["network"])
    state = state.replace(policy_state=policy_state, loss_params=params["loss"], opt_state=opt_state)
    return state, metrics | {"grad/norm": norm}


def trained_params(state: TrainState) -> PyTree:
    """Returns the parameters that the optimizer trains: {"network": of the policy, "loss": of a `LossModule` or ()}."""
    return {"network": state.policy_state.params, "loss": state.loss_params}


def clip_by_norm(gradient: PyTree, max_norm: Array | float) -> tuple[PyTree, Array]:
    """Returns g * min(1, max_norm / ||g||) and the norm ||g|| of all leaves together, [] f32.

    Pascanu, Mikolov and Bengio (2013), "On the difficulty of training recurrent neural networks", algorithm 1.

    Args:
      gradient: g, a pytree of f32 arrays, or one vector.
      max_norm: a scalar > 0.
    """
    norm = jnp.sqrt(jnp.asarray(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(gradient)), jnp.float32))
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-12))
    return jax.tree.map(lambda leaf: leaf * scale, gradient), norm


def _make_apply(policy: Policy, policy_state: PolicyState, rows: Minibatch) -> Apply:
    """Returns the loss's function `apply`: obs [B, *obs] -> distribution, value [B]."""
    carry = jax.tree.map(lambda x: x[0], rows.carry)

    def apply(obs: PyTree) -> tuple[Any, Array]:
        sequences = jax.tree.map(lambda x: x.reshape(len(rows.reset), -1, *x.shape[1:]), obs)
        return policy.unroll(policy_state, sequences, carry, rows.reset)[:2]

    return apply


def _mean_over_devices(tree: PyTree, axis_name: str | None) -> PyTree:
    """Returns the mean of each leaf over the devices, as f32, with one collective for all leaves."""
    if axis_name is None:
        return tree
    joined, restore = ravel_pytree(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree))  # metrics may be bool
    return restore(jax.lax.pmean(joined, axis_name))
