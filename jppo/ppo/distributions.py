"""Action distributions, with distrax's method names, so that a user's distrax objects fit in their place.

Batched by leading dims; `sample(seed=key)` draws the whole batch from one key, and `vmap` gives each row its own.
"""

import math

import jax
import jax.numpy as jnp
from flax import struct

from jppo.devices.jit import materialize_on_cpu
from jppo.ppo.types import Array

_LOG_2PI = math.log(2.0 * math.pi)


class Categorical(struct.PyTreeNode):
    """Over actions 0..A-1, from unnormalised log-probabilities `logits` [..., A]."""

    logits: Array

    def sample(self, *, seed: Array) -> Array:
        """[...] i32, by the Gumbel-max trick; always in range, whatever the logits."""
        noise = jax.random.gumbel(seed, self.logits.shape, self.logits.dtype)
        return jnp.argmax(self.logits + noise, axis=-1).astype(jnp.int32)

    def log_prob(self, action: Array) -> Array:
        """[...] f32, of actions [...] int; NaN for an action that there is not."""
        log_probs, action = self._log_probs(), jnp.asarray(action)
        number = jnp.arange(len(log_probs)).reshape(-1, *[1] * action.ndim)
        chosen = jnp.sum(jnp.where(number == action[None], log_probs, 0.0), axis=0)
        return jnp.where((action >= 0) & (action < len(log_probs)), chosen, jnp.nan)

    def entropy(self) -> Array:
        """[...] f32, in nats; a logit of -inf counts as probability 0."""
        log_probs = self._log_probs()
        probs = jnp.exp(log_probs)
        finite = jnp.where(probs > 0.0, log_probs, 0.0)  # before the product, so that its gradient is finite too
        return -jnp.sum(probs * finite, axis=0)

    def mode(self) -> Array:
        """[...] i32, the most likely action (the first of equals)."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def _log_probs(self) -> Array:
        """[A, ...]: sums over a few actions are then over whole rows of the batch, not within each of its rows."""
        return jax.nn.log_softmax(materialize_on_cpu(jnp.moveaxis(self.logits, -1, 0)), axis=0)


class DiagGaussian(struct.PyTreeNode):
    """Independent normals: `mean` and `log_std`, both [..., A]."""

    mean: Array
    log_std: Array

    def sample(self, *, seed: Array) -> Array:
        """[..., A] f32."""
        noise = jax.random.normal(seed, self.mean.shape, self.mean.dtype)
        return self.mean + jnp.exp(self.log_std) * noise

    def log_prob(self, action: Array) -> Array:
        """[...] f32, summed over the A dimensions, of actions [..., A]."""
        z = (action - self.mean) * jnp.exp(-self.log_std)
        return jnp.sum(-0.5 * (z * z + _LOG_2PI) - self.log_std, axis=-1)

    def entropy(self) -> Array:
        """[...] f32, in nats."""
        return jnp.sum(self.log_std + 0.5 * (1.0 + _LOG_2PI), axis=-1)

    def mode(self) -> Array:
        """[..., A] f32."""
        return self.mean
