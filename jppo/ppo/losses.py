"""The terms of PPO's objective, each over a batch of samples [B]."""

import jax.numpy as jnp

from jppo.ppo.types import Array, Moments

_EPS = 1e-8


def clipped_surrogate_loss(log_prob: Array, old_log_prob: Array, advantage: Array, clip_eps: Array | float) -> Array:
    """-mean(min(rho * A, clip(rho, 1 - eps, 1 + eps) * A)), rho = pi(a|s) / pi_old(a|s); a scalar.

    Schulman et al. (2017), "Proximal policy optimization algorithms", eq. 7, with the sign of a loss.
    """
    ratio = jnp.exp(log_prob - old_log_prob)
    clipped = jnp.clip(ratio, 1.0 - clip_eps, 1.0 + clip_eps)
    return -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))


def value_loss(value: Array, target: Array) -> Array:
    """mean((V(s) - target)^2) / 2; a scalar."""
    return 0.5 * jnp.mean(jnp.square(value - target))


def clipped_value_loss(value: Array, old_value: Array, target: Array, clip_eps: Array | float) -> Array:
    """mean(max((V - target)^2, (V_clip - target)^2)) / 2, V_clip = V_old + clip(V - V_old, -eps, eps); a scalar.

    Not in the paper: OpenAI baselines' ppo2 has it. eps is in units of the return, so what it does depends on the
    rewards' scale.
    """
    clipped = old_value + jnp.clip(value - old_value, -clip_eps, clip_eps)
    return 0.5 * jnp.mean(jnp.maximum(jnp.square(value - target), jnp.square(clipped - target)))


def approx_kl(log_prob: Array, old_log_prob: Array) -> Array:
    """KL(pi_old || pi) estimated from samples of pi_old: mean((rho - 1) - log rho) >= 0; a scalar.

    Schulman (2020), "Approximating KL divergence", estimator k3: unbiased, low variance.
    """
    log_ratio = log_prob - old_log_prob
    return jnp.mean(jnp.expm1(log_ratio) - log_ratio)


def clip_fraction(log_prob: Array, old_log_prob: Array, clip_eps: Array | float) -> Array:
    """Share of samples whose ratio lies outside 1 +- eps; a scalar in [0, 1]."""
    return jnp.mean(jnp.abs(jnp.expm1(log_prob - old_log_prob)) > clip_eps, dtype=jnp.float32)


def standardize(x: Array, mean: Array, variance: Array) -> Array:
    """(x - mean) / (std + 1e-8), [B]."""
    return (x - mean) / (jnp.sqrt(variance) + _EPS)


def explained_variance(residual: Moments, target: Moments) -> Array:
    """1 - Var(target - V) / Var(target); a scalar <= 1, NaN when the targets do not vary.

    Args:
      residual: moments of target - V(s).
      target: moments of the targets.
    """
    return jnp.where(target.variance > 0.0, 1.0 - residual.variance / target.variance, jnp.nan)
