"""Log-probabilities and entropy of categorical distributions with few categories and many rows.

Gain: updates with 2 actions are 1.07 to 1.10 times faster (CPU), since sums over actions are sums of whole rows [B] of
an array [A, B], not sums within each row of an array [B, A].
"""

import jax
import jax.numpy as jnp

from jppo import kernels
from jppo.devices.jit import materialize_on_cpu
from jppo.envs.spaces import Array


def log_prob(logits: Array, action: Array) -> Array:
    """Returns the log-probabilities [...] of actions [...] under logits [..., A]; NaN for actions out of range."""
    return (log_prob_tuned if kernels.ENABLED else log_prob_plain)(logits, action)


def log_prob_plain(logits: Array, action: Array) -> Array:
    """Plain form of `log_prob`."""
    index = jnp.clip(action, 0, logits.shape[-1] - 1)[..., None]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), index, axis=-1)[..., 0]
    return jnp.where((action >= 0) & (action < logits.shape[-1]), chosen, jnp.nan)


def log_prob_tuned(logits: Array, action: Array) -> Array:
    """Tuned form of `log_prob`."""
    log_probs = _log_softmax_first(logits)
    number = jnp.arange(len(log_probs)).reshape(-1, *[1] * action.ndim)
    chosen = jnp.sum(jnp.where(number == action[None], log_probs, 0.0), axis=0)
    return jnp.where((action >= 0) & (action < len(log_probs)), chosen, jnp.nan)


def entropy(logits: Array) -> Array:
    """Returns the entropies [...] in nats of distributions with logits [..., A]; a logit of -inf has probability 0."""
    return (entropy_tuned if kernels.ENABLED else entropy_plain)(logits)


def entropy_plain(logits: Array) -> Array:
    """Plain form of `entropy`."""
    return _entropy(jax.nn.log_softmax(logits), axis=-1)


def entropy_tuned(logits: Array) -> Array:
    """Tuned form of `entropy`."""
    return _entropy(_log_softmax_first(logits), axis=0)


def _entropy(log_probs: Array, axis: int) -> Array:
    probs = jnp.exp(log_probs)
    finite = jnp.where(probs > 0.0, log_probs, 0.0)  # before the product, so that its gradient is finite too
    return -jnp.sum(probs * finite, axis=axis)


def _log_softmax_first(logits: Array) -> Array:
    """Returns log-probabilities [A, ...] for logits [..., A]."""
    return jax.nn.log_softmax(materialize_on_cpu(jnp.moveaxis(logits, -1, 0)), axis=0)
