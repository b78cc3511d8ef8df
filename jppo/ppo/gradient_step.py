"""The samples of a minibatch, and a gradient step on it: gradient, mean over devices, clipping, optimizer."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.flatten_util import ravel_pytree

from jppo.config.ppo import PPOConfig
from jppo.envs.base import merge_dims
from jppo.ppo.advantages import Advantages
from jppo.ppo.checks.loss import call_with, check_loss
from jppo.ppo.checks.observations import check_rows
from jppo.ppo.kernels.flat_gradient import pack
from jppo.ppo.kernels.microbatches import accumulate_gradients, count_microbatches, split_minibatch
from jppo.ppo.losses import Loss, LossModule
from jppo.ppo.minibatches import take_sequences
from jppo.ppo.optimizer import Optimizer, apply_gradient
from jppo.ppo.policy import Policy, episode_starts
from jppo.ppo.types import Apply, Array, Batch, Metrics, PolicyState, PyTree, Rollout, TrainState

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
