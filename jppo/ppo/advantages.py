"""Generalized advantage estimation."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.ppo.types import Apply, Array, Rollout

# (apply, rollout, hyperparams, config) -> advantages and value targets, [T, N] f32 each
Advantages = Callable[[Apply, Rollout, Hyperparams, PPOConfig], tuple[Array, Array]]


def gae_advantages(apply: Apply, rollout: Rollout, hyperparams: Hyperparams, config: PPOConfig) -> tuple[Array, Array]:
    """Returns the default advantages, `gae`, and value targets, advantage + value; [T, N] f32 each.

    Args:
      apply: evaluates the current network: `obs [T, N, *obs] -> (distribution [T*N], value [T*N])`; unused here.
      rollout: its rewards are scaled if config.normalize_reward, and include the bonus of a `LossModule`.
    """
    ends = rollout.terminated, rollout.truncated
    decay = hyperparams.gamma, hyperparams.gae_lambda
    advantage = gae(rollout.reward, rollout.value, rollout.next_value, *ends, *decay)
    return advantage, advantage + rollout.value


def gae(
    reward: Array,
    value: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array,
    gamma: Array | float,
    gae_lambda: Array | float,
) -> Array:
    """Returns advantages A_t, [T, N] f32.

        delta_t = r_t + gamma * (1 - terminated_t) * V(s_{t+1}) - V(s_t)
        A_t     = delta_t + gamma * lambda * (1 - done_t) * A_{t+1},    done = terminated or truncated

    Schulman et al. (2016), "High-dimensional continuous control using generalized advantage estimation", eq. 16.
    The paper has no time limits. Here `next_value` is V of the true successor, so a truncated episode bootstraps from
    the state in which it was cut off, and no advantage crosses the cut. Reward r_t follows the action at t.

    Args:
      reward, value, next_value: [T, N] f32.
      terminated, truncated: [T, N] bool.
      gamma, gae_lambda: scalars in [0, 1].
    """
    chex.assert_rank(reward, 2)
    chex.assert_equal_shape([reward, value, next_value, terminated, truncated])
    delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
    decay = jnp.where(jnp.logical_or(terminated, truncated), 0.0, gamma * gae_lambda)

    def backward(advantage: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        delta_t, decay_t = step
        advantage = delta_t + decay_t * advantage
        return advantage, advantage

    # Unrolled, because a step of the loop costs more than its arithmetic.
    _, advantages = jax.lax.scan(backward, jnp.zeros_like(delta[0]), (delta, decay), reverse=True, unroll=8)
    return advantages
