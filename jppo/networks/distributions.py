"""Action distributions with distrax's method names, so that distrax distributions can replace them.

Arrays have any leading batch dims; `sample(seed=key)` draws the whole batch from one key.
"""

import math
from typing import Any, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jppo.envs.masks import unflatten_categories
from jppo.envs.spaces import ActionSpec, Array, PyTree
from jppo.kernels import categorical

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

    def mask(self, legal: Array) -> Self:
        """Returns the distribution with probability 0 for actions that are not legal, [..., A] bool."""
        chex.assert_equal_shape([legal, self.logits])
        return self.replace(logits=jnp.where(legal, self.logits, -jnp.inf))


class MultiCategorical(Categorical):
    """Independent categorical distributions of the K components of an action, with `logits` [..., K, M].

    M is the largest number of categories. A policy gives categories that a component does not have the probability 0;
    `from_flat` sets their logits to -inf. Samples and modes are [..., K] i32.

    log p(a) = sum_k log p_k(a_k)
    """

    @classmethod
    def from_flat(cls, logits: Array, nvec: tuple[int, ...]) -> "MultiCategorical":
        """Returns the distribution for logits [..., sum(nvec)] of all components one after the other."""
        return cls(unflatten_categories(logits, nvec, -jnp.inf))

    def log_prob(self, action: Array) -> Array:
        """Returns log p(action), [...] f32, for actions [..., K] int."""
        return super().log_prob(action).sum(axis=-1)

    def entropy(self) -> Array:
        """Returns the sum of the components' entropies, [...] f32, in nats."""
        return super().entropy().sum(axis=-1)


class Joint(struct.PyTreeNode):
    """Product of independent distributions: `leaves` is a pytree of them, and an action the same pytree of actions."""

    leaves: PyTree

    def sample(self, *, seed: Array) -> PyTree:
        """Returns a sample of each leaf, drawn with keys of its own."""
        leaves, structure = self._flatten()
        keys = jax.random.split(seed, len(leaves))
        samples = [leaf.sample(seed=key) for leaf, key in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(structure, samples)

    def log_prob(self, action: PyTree) -> Array:
        """Returns the sum of the leaves' log-probabilities, [...] f32."""
        leaves, structure = self._flatten()
        actions = structure.flatten_up_to(action)
        return sum((leaf.log_prob(part) for leaf, part in zip(leaves, actions, strict=True)), start=jnp.zeros(()))

    def entropy(self) -> Array:
        """Returns the sum of the leaves' entropies, [...] f32, in nats."""
        return sum((leaf.entropy() for leaf in self._flatten()[0]), start=jnp.zeros(()))

    def mode(self) -> PyTree:
        """Returns the mode of each leaf."""
        leaves, structure = self._flatten()
        return jax.tree.unflatten(structure, [leaf.mode() for leaf in leaves])

    def pairs(self, action_spec: PyTree) -> list[tuple[Any, PyTree]]:
        """Returns each leaf with its part of the action space."""
        leaves, structure = self._flatten()
        return list(zip(leaves, structure.flatten_up_to(action_spec), strict=True))

    def _flatten(self) -> tuple[list[Any], Any]:
        return jax.tree.flatten(self.leaves, is_leaf=lambda node: hasattr(node, "log_prob"))


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


def limit_categories(distribution: Any, action_spec: PyTree) -> Any:
    """Returns a distribution in which the padding of a MultiCategorical's logits has probability 0."""
    if isinstance(distribution, Joint):
        limited = [limit_categories(part, spec) for part, spec in distribution.pairs(action_spec)]
        return Joint(jax.tree.unflatten(distribution._flatten()[1], limited))
    if isinstance(distribution, MultiCategorical) and isinstance(action_spec, ActionSpec):
        nvec = np.array(action_spec.nvec)
        if len(set(action_spec.nvec)) > 1:
            exists = np.arange(nvec.max())[None] < nvec[:, None]  # [K, M]
            return distribution.mask(jnp.broadcast_to(exists, distribution.logits.shape))
    return distribution
