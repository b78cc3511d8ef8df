"""The trained policy with a NumPy interface."""

from typing import Any

import jax
import numpy as np

from jppo.devices.jit import jit
from jppo.ppo.policy import Policy, act
from jppo.ppo.types import Array, PolicyState, PyTree
from jppo.runs.display import html_table, show_record


class TrainedPolicy:
    """Selects actions for NumPy observations.

    Attributes:
      policy: the network with its observation preprocessing.
      state: the network's parameters and the observation statistics.
      obs_spec, action_spec: the environment's spaces.
    """

    def __init__(self, policy: Policy, state: PolicyState) -> None:
        self.policy, self.state = policy, state
        self.obs_spec, self.action_spec = policy.obs_spec, policy.action_spec
        self._key = jax.random.key(0)

        def select_action(state: PolicyState, obs: PyTree, key: Array, sampled: bool) -> Array:
            return act(policy, state, obs, key if sampled else None).env_action

        self._act = jit(select_action, static_argnames="sampled")
        self._value = jit(lambda state, obs: policy.step(state, obs)[1])

    def __repr__(self) -> str:
        return show_record("TrainedPolicy", self._shown)

    def _repr_html_(self) -> str:
        return html_table("TrainedPolicy", self._shown)

    @property
    def _shown(self) -> dict[str, Any]:
        sizes = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
        return {"observation": self.obs_spec, "action": self.action_spec, "num_parameters": sizes}

    def act(self, obs: Any, *, sampled: bool = False, seed: int | None = None) -> np.ndarray:
        """Returns actions for the environment: the most likely ones, or samples.

        Args:
          obs: one observation [*obs] or a batch [B, *obs]; a pytree if the environment's observations are.
          sampled: sample from the policy's distribution.
          seed: seed of the samples; without it, consecutive calls give different samples.

        Raises:
          ValueError: the observation does not have the environment's structure or shape.
        """
        batch, single = as_batch(self.obs_spec, obs)
        if seed is None:
            self._key, key = jax.random.split(self._key)
        else:
            key = jax.random.key(seed)
        actions = np.asarray(self._act(self.state, batch, key, sampled=sampled))
        return actions[0] if single else actions

    def value(self, obs: Any) -> np.ndarray:
        """Returns the value estimates V(obs), [] or [B] f32, in units of the (scaled) training reward."""
        batch, single = as_batch(self.obs_spec, obs)
        values = np.asarray(self._value(self.state, batch))
        return values[0] if single else values


def as_batch(obs_spec: PyTree, obs: Any) -> tuple[PyTree, bool]:
    """Returns observations [B, *obs] in the dtypes of their specs, and whether the input was one observation without B.

    Raises ValueError if the structure or a shape differs from the specs.
    """
    specs, structure = jax.tree.flatten(obs_spec)
    if jax.tree_util.treedef_is_leaf(structure) and isinstance(obs, list | tuple):
        obs = np.asarray(obs)
    given: Any = jax.tree.structure(obs)
    if given != structure:
        raise ValueError(f"the observation has structure {given}; the policy takes {structure}")
    leaves = [np.asarray(leaf, spec.dtype) for leaf, spec in zip(jax.tree.leaves(obs), specs, strict=True)]
    single = leaves[0].shape == specs[0].shape
    leaves = [leaf[None] for leaf in leaves] if single else leaves
    for leaf, spec in zip(leaves, specs, strict=True):
        if leaf.shape[1:] != spec.shape or not leaf.ndim:
            shape = leaf.shape[1:] if single else leaf.shape
            raise ValueError(f"an observation has shape {shape}; the policy takes {spec.shape} or a batch of it")
    return jax.tree.unflatten(structure, leaves), single
