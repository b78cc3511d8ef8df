"""Action distributions with distrax's method names, so that distrax distributions can replace them.

Arrays have any leading batch dims; `sample(seed=key)` draws the whole batch from one key.
"""

import math

import chex
import jax
import jax.numpy as jnp
from flax import struct

from jppo.ppo.kernels import categorical
from jppo.ppo.types import Array

_LOG_2PI = math.log(2.0 * math.pi)


class Categorical(struct.PyTreeNode):
    """Distribution over the actions 0..A-1 with unnormalized log-probabilities `logits` [..., A].

    log p(a) = logits_a - log sum_b exp(logits_b)
    """

    logits: Array

    def sample(self, *, seed: Array) -> Array:
        """Returns samples [...] i32 by the Gumbel-max trick; they are in range even for NaN logits."""
        noise = jax.random.gumbel(seed, self.logits.shape, self.logits.dtype)
        return jnp.argmax(self.logits + noise, axis=-1).astype(jnp.int32)

    def log_prob(self, action: Array) -> Array:
        """Returns log p(action), [...] f32, for actions [...] int; NaN for actions out of range."""
        action = jnp.asarray(action)
        chex.assert_rank(action, self.logits.ndim - 1)
        chex.assert_equal_shape_prefix([action, self.logits], action.ndim)
        return categorical.log_prob(self.logits, action)

    def entropy(self) -> Array:
        """Returns -sum_a p(a) log p(a), [...] f32, in nats; a logit of -inf has probability 0."""
        return categorical.entropy(self.logits)

    def mode(self) -> Array:
        """Returns the most likely actions [...] i32 (the first of equals)."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)


class DiagGaussian(struct.PyTreeNode):
    """Independent normal distributions with `mean` and `log_std`, both [..., A].

    log p(a) = sum_i -((a_i - mean_i) / std_i)^2 / 2 - log(2 pi) / 2 - log std_i
    """

    mean: Array
    log_std: Array

    def sample(self, *, seed: Array) -> Array:
        """Returns samples [..., A] f32."""
        noise = jax.random.normal(seed, self.mean.shape, self.mean.dtype)
        return self.mean + jnp.exp(self.log_std) * noise

    def log_prob(self, action: Array) -> Array:
        """Returns log p(action), [...] f32, for actions [..., A]."""
        chex.assert_equal_shape([jnp.asarray(action), self.mean])
        z = (action - self.mean) * jnp.exp(-self.log_std)
        return jnp.sum(-0.5 * (z * z + _LOG_2PI) - self.log_std, axis=-1)

    def entropy(self) -> Array:
        """Returns sum_i log std_i + (1 + log(2 pi)) / 2, [...] f32, in nats."""
        return jnp.sum(self.log_std + 0.5 * (1.0 + _LOG_2PI), axis=-1)

    def mode(self) -> Array:
        """Returns the means [..., A] f32."""
        return self.mean
