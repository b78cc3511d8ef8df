"""PPO's objective and its terms, each over a batch of samples [B]."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp

from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.envs.spaces import Array, PyTree
from jppo.ppo.normalization import Moments
from jppo.ppo.types import Apply, Batch, Metrics, Rollout

_EPS = 1e-8

# (apply, batch, hyperparams, config, key) -> scalar, metrics
Loss = Callable[[Apply, Batch, Hyperparams, PPOConfig, Array], tuple[Array, Metrics]]
_Function = TypeVar("_Function", bound=Callable[..., Any])


class LossModule(NamedTuple):
    """A loss with additional parameters, which the optimizer trains together with the network's, and with a state."""

    init: Callable[[Array, PyTree], tuple[PyTree, PyTree]]
    """(key, obs [B, *obs]) -> parameters, state; pytrees of float arrays, () for none."""
    apply: Callable[..., tuple[Array, Metrics]]
    """(params, state, apply, batch, hyperparams, config, key) -> scalar, metrics; see `ppo_loss`."""
    reward: Callable[..., tuple[Array, PyTree]] | None = None
    """(params, state, rollout, axis_name) -> rewards [T, N] that are added to the rollout's before advantages are
    computed, and the new state. axis_name is the mesh axis of the devices, or None. The state must be the same on all
    devices: average what depends on the rollout with jax.lax.pmean."""


def as_module(loss: Loss | LossModule) -> LossModule:
    """Returns any loss as a module with a function `reward`; a plain loss has no parameters and no state."""

    def no_bonus(params: PyTree, state: PyTree, rollout: Rollout, axis_name: str | None) -> tuple[Array, PyTree]:
        return jnp.zeros_like(rollout.reward), state

    if isinstance(loss, LossModule):
        return loss._replace(reward=loss.reward or no_bonus)

    def apply(params: PyTree, state: PyTree, *arguments: Any) -> tuple[Array, Metrics]:
        return loss(*arguments)

    apply.mean_over_rows = is_mean_over_rows(loss)  # type: ignore[attr-defined]
    return LossModule(init=lambda key, obs: ((), ()), apply=apply, reward=no_bonus)


def mean_over_rows(loss: _Function) -> _Function:
    """Declares that a loss function, and each of its metrics, is a mean of terms that each depend on one row only.

    The learner may then compute the gradient of a large minibatch as the mean over equal microbatches, which is faster
    on a CPU. It never splits the minibatches of other losses. All microbatches get the same random key, so do not
    declare a loss that draws noise for each row. Use as a decorator:

        @jppo.mean_over_rows
        def loss(apply, batch, hyperparams, config, key): ...
    """
    loss.mean_over_rows = True  # type: ignore[attr-defined]
    return loss


def is_mean_over_rows(loss: Callable[..., Any]) -> bool:
    """Returns whether a loss was declared with `mean_over_rows`."""
    return getattr(loss, "mean_over_rows", False)


@mean_over_rows
def ppo_loss(
    apply: Apply, batch: Batch, hyperparams: Hyperparams, config: PPOConfig, key: Array
) -> tuple[Array, Metrics]:
    """Returns PPO's loss, a scalar, and metrics, which are scalars and logged as means over the gradient steps.

        loss = policy loss + vf_coef * value loss - ent_coef * mean entropy

    Schulman et al. (2017), "Proximal policy optimization algorithms", eq. 9, with the sign of a loss.

    Args:
      apply: evaluates the network: `obs [B, *obs] -> (distribution, value [B])`. Gradients flow to the parameters. A
        recurrent network evaluates its argument, B = L*M rows, as the steps of the batch's sequences, so it is not for
        batch.next_obs there.
      batch: a minibatch; its advantages are standardized if config.normalize_advantage.
      key: a random key, new for each gradient step and device; unused here.
    """
    distribution, value = apply(batch.obs)
    log_prob = distribution.log_prob(batch.action)
    weight = batch.weight
    policy_loss = clipped_surrogate_loss(log_prob, batch.log_prob, batch.advantage, hyperparams.clip_eps, weight)
    if config.clip_value:
        v_loss = clipped_value_loss(value, batch.value, batch.target, hyperparams.vf_clip_eps, weight)
    else:
        v_loss = value_loss(value, batch.target, weight)
    entropy = weighted_mean(distribution.entropy(), weight)
    total = policy_loss + hyperparams.vf_coef * v_loss - hyperparams.ent_coef * entropy
    measured = jax.lax.stop_gradient(log_prob)
    return total, {
        "loss/policy": policy_loss,
        "loss/value": v_loss,
        "policy/entropy": entropy,
        "policy/approx_kl": approx_kl(measured, batch.log_prob, weight),
        "policy/clip_fraction": clip_fraction(measured, batch.log_prob, hyperparams.clip_eps, weight),
    }


def weighted_mean(x: Array, weight: PyTree = ()) -> Array:
    """Returns mean(weight * x), a scalar, for x [B] and `Batch.weight`: [B], or () for the plain mean."""
    return jnp.mean(x, dtype=jnp.float32) if isinstance(weight, tuple) else jnp.mean(weight * x.astype(jnp.float32))


def clipped_surrogate_loss(
    log_prob: Array, old_log_prob: Array, advantage: Array, clip_eps: Array | float, weight: PyTree = ()
) -> Array:
    """Returns -mean(min(rho * A, clip(rho, 1 - eps, 1 + eps) * A)), rho = pi(a|s) / pi_old(a|s); a scalar.

    Schulman et al. (2017), "Proximal policy optimization algorithms", eq. 7, with the sign of a loss.

    Args:
      log_prob: [B] f32, log pi(a|s) of the policy that is trained.
      old_log_prob: [B] f32, of the policy that acted.
      advantage: [B] f32, A.
      clip_eps: eps, a scalar > 0.
      weight: see `Batch.weight`.
    """
    _check_batch(log_prob, old_log_prob, advantage)
    ratio = jnp.exp(log_prob - old_log_prob)
    clipped = jnp.clip(ratio, 1.0 - clip_eps, 1.0 + clip_eps)
    return -weighted_mean(jnp.minimum(ratio * advantage, clipped * advantage), weight)


def value_loss(value: Array, target: Array, weight: PyTree = ()) -> Array:
    """Returns mean((V(s) - target)^2) / 2, a scalar, for value and target [B] f32 and `Batch.weight`."""
    _check_batch(value, target)
    return 0.5 * weighted_mean(jnp.square(value - target), weight)


def clipped_value_loss(
    value: Array, old_value: Array, target: Array, clip_eps: Array | float, weight: PyTree = ()
) -> Array:
    """Returns the value loss with clipped values, a scalar.

        mean(max((V - target)^2, (V_clip - target)^2)) / 2,    V_clip = V_old + clip(V - V_old, -eps, eps)

    Not in the paper, but in OpenAI baselines' ppo2. eps has the unit of the return, so its effect depends on the scale
    of the rewards.

    Args:
      value: [B] f32, V(s) of the network that is trained.
      old_value: [B] f32, of the network that acted.
      target: [B] f32, see `Batch.target`.
      clip_eps: eps, a scalar > 0.
      weight: see `Batch.weight`.
    """
    _check_batch(value, old_value, target)
    clipped = old_value + jnp.clip(value - old_value, -clip_eps, clip_eps)
    return 0.5 * weighted_mean(jnp.maximum(jnp.square(value - target), jnp.square(clipped - target)), weight)


def approx_kl(log_prob: Array, old_log_prob: Array, weight: PyTree = ()) -> Array:
    """Returns an estimate of KL(pi_old || pi) from samples of pi_old: mean((rho - 1) - log rho) >= 0; a scalar.

    Schulman (2020), "Approximating KL divergence", estimator k3: unbiased, with low variance. The arguments are those
    of `clipped_surrogate_loss`.
    """
    _check_batch(log_prob, old_log_prob)
    log_ratio = log_prob - old_log_prob
    return weighted_mean(jnp.expm1(log_ratio) - log_ratio, weight)


def clip_fraction(log_prob: Array, old_log_prob: Array, clip_eps: Array | float, weight: PyTree = ()) -> Array:
    """Returns the share of samples with a ratio outside 1 +- eps; a scalar in [0, 1].

    The arguments are those of `clipped_surrogate_loss`.
    """
    _check_batch(log_prob, old_log_prob)
    return weighted_mean(jnp.abs(jnp.expm1(log_prob - old_log_prob)) > clip_eps, weight)


def standardize(x: Array, mean: Array, variance: Array) -> Array:
    """Returns (x - mean) / (std + 1e-8), [B], for x [B] and scalar mean and variance."""
    chex.assert_rank([x, mean, variance], [1, 0, 0])
    return (x - mean) / (jnp.sqrt(variance) + _EPS)


def explained_variance(residual: Moments, target: Moments) -> Array:
    """Returns 1 - Var(target - V) / Var(target), a scalar <= 1, for the moments of target - V(s) and of the targets.

    NaN if the targets do not vary.
    """
    return jnp.where(target.variance > 0.0, 1.0 - residual.variance / target.variance, jnp.nan)


def _check_batch(*arrays: Array) -> None:
    """Raises AssertionError unless all arrays have the same shape [B]; [B] and [B, 1] would broadcast silently."""
    chex.assert_rank(arrays, 1)
    chex.assert_equal_shape(arrays)


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
