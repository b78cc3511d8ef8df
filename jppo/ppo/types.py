"""The records that rollout, learner and actors exchange.

Shape legend: T steps per rollout, N environments, B = T*N flattened samples, A actions, D devices.
"""

import dataclasses
import operator
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jppo.config import schedules
from jppo.config.ppo import Hyperparams
from jppo.config.schedules import Schedule
from jppo.envs.spaces import Array, PyTree
from jppo.ppo.normalization import Moments

Metrics = dict[str, Array]
# obs [B, *obs], or a pytree of them -> distribution, value [B]
Apply = Callable[[PyTree], tuple[Any, Array]]

for _record in (Hyperparams, *schedules.KINDS):
    jax.tree_util.register_dataclass(_record)


class Transition(struct.PyTreeNode, kw_only=True):
    """One step of N environments; a `Rollout` when its leaves are stacked to [T, N, ...]."""

    obs: PyTree  # [T, N, *obs], the environment's dtype: the policy's input before normalization
    action: PyTree  # [T, N, *act]: the distribution's sample, before any clip, squash or scale
    log_prob: Array  # [T, N] f32, of the behaviour policy
    value: Array  # [T, N] f32, of the behaviour policy
    next_value: Array  # [T, N] f32: V of the true successor, never of the reset observation; 0 where terminated
    reward: Array  # [T, N] f32, unscaled
    terminated: Array  # [T, N] bool: the episode ended; no bootstrap
    truncated: Array  # [T, N] bool: the episode was cut off (a time limit); bootstraps from next_value
    next_obs: PyTree = ()  # [T, N, *obs], the true successor, if PPOConfig.keep_next_obs; else ()
    carry: PyTree = ()  # [T/L, N, ...]: a recurrent network's carry at the start of each sequence of L steps; else ()
    active: PyTree = ()  # [T, N] bool, with several agents: this one takes part; if not, terminated is True. Else ()

    @property
    def done(self) -> Array:
        """[T, N] bool: the next observation belongs to another episode."""
        return jnp.logical_or(self.terminated, self.truncated)


Rollout = Transition


class Batch(struct.PyTreeNode, kw_only=True):
    """Samples of a rollout for the loss; leaves [B, ...]. With a recurrent network, B = L*M: L steps of M sequences."""

    obs: PyTree  # [B, *obs], as in `Transition`
    action: PyTree  # [B, *act], as in `Transition`
    log_prob: Array  # [B] f32, of the behaviour policy
    value: Array  # [B] f32, of the behaviour policy
    advantage: Array  # [B] f32, standardized over the minibatch if PPOConfig.normalize_advantage
    target: Array  # [B] f32, for the value: advantage (not standardized) + value
    next_obs: PyTree = ()  # [B, *obs], the true successor, if PPOConfig.keep_next_obs; else ()
    weight: PyTree = ()  # [B] f32 with mean 1 over the minibatch, 0 for inactive agents; () without `Transition.active`


class EpisodeStats(struct.PyTreeNode, kw_only=True):
    """Episode statistics of a rollout; the stats of two rollouts (other devices, other actors) add with `+`."""

    returns: Moments  # undiscounted returns of the episodes that ended
    lengths: Moments  # their lengths in steps
    discounted: Moments  # discounted return so far, one sample per step: the scale for rewards

    def __add__(self, other: "EpisodeStats") -> "EpisodeStats":
        return jax.tree.map(operator.add, self, other, is_leaf=lambda node: isinstance(node, Moments))


class PolicyState(struct.PyTreeNode, kw_only=True):
    """The arrays that a policy needs to act."""

    params: PyTree  # the network's parameters
    obs_stats: PyTree  # Moments per observation leaf (shape of the leaf); () if observations are not normalized


class TrainState(struct.PyTreeNode, kw_only=True):
    """The arrays that the learner needs to continue a run."""

    policy_state: PolicyState
    opt_state: PyTree
    hyperparams: Hyperparams  # f32 scalars, or schedules of f32 scalars
    reward_stats: Moments  # of the discounted return
    learning_rate_scale: Array  # [] f32, changed by kl_control="adapt"
    key: Array  # [] key, split by every update
    update: Array  # [] i32, number of updates so far
    num_updates: Array  # [] i32, number of updates of the whole run, for schedules
    loss_params: PyTree = ()  # of a `LossModule`; () for other losses
    loss_state: PyTree = ()  # likewise


class Episode(struct.PyTreeNode, kw_only=True):
    """Progress of each environment's current episode."""

    returns: Array  # [N] f32, undiscounted return so far
    lengths: Array  # [N] i32, steps so far
    discounted: Array  # [N] f32, rewards so far, each discounted by its age

    @classmethod
    def beginning(cls, num_envs: int) -> "Episode":
        """Returns the progress of N environments that were just reset."""
        zeros = jnp.zeros(num_envs)
        return cls(returns=zeros, lengths=zeros.astype(jnp.int32), discounted=zeros)

    def after(self, reward: Array, gamma: Array | float) -> "Episode":
        """Returns the progress after one more step with rewards [N] f32."""
        return Episode(
            returns=self.returns + reward, lengths=self.lengths + 1, discounted=gamma * self.discounted + reward
        )

    def restarted(self, done: Array) -> "Episode":
        """Returns the progress with zeros where done, [N] bool."""
        return jax.tree.map(lambda x: jnp.where(done, jnp.zeros_like(x), x), self)


class CollectState(struct.PyTreeNode, kw_only=True):
    """State of N environments between two rollouts. Every leaf has the leading dim N.

    With M agents per environment, N counts agents, and env_state has the leading dim N/M.
    """

    env_state: PyTree
    obs: PyTree  # [N, *obs]
    key: Array  # [N] keys: one stream per environment, so that draws do not depend on how environments are sharded
    episode: Episode
    carry: PyTree = ()  # [N, ...] of a recurrent network, for the next step; () for feed-forward networks
    active: PyTree = ()  # [N] bool, see `Transition`


def derive_key(key: Array, purpose: str) -> Array:
    """Returns a key for one purpose, such as "loss"; different purposes and different keys give different results."""
    return jax.random.fold_in(key, zlib.crc32(purpose.encode()))


def evaluate_schedules(hyperparams: Hyperparams, progress: Array | float) -> Hyperparams:
    """Returns the hyperparameters with the value of each schedule at a progress in [0, 1]."""
    values = {name: x(progress) if isinstance(x, Schedule) else x for name, x in vars(hyperparams).items()}
    return Hyperparams(**values)


def current_hyperparams(state: TrainState) -> Hyperparams:
    """Returns the values of the next update; its progress is update / num_updates, at most 1.

    The learning rate is multiplied by state.learning_rate_scale.
    """
    now = evaluate_schedules(state.hyperparams, jnp.minimum(1.0, state.update / state.num_updates))
    return dataclasses.replace(now, learning_rate=now.learning_rate * state.learning_rate_scale)


def schedule_metrics(hyperparams: Hyperparams, current: Hyperparams) -> Metrics:
    """Returns the metrics hyperparams/*: the current value of each schedule.

    The learning rate is left out, because it is the metric "learning_rate".
    """
    names = [name for name, value in vars(hyperparams).items() if isinstance(value, Schedule)]
    return {f"hyperparams/{name}": getattr(current, name) for name in names if name != "learning_rate"}
