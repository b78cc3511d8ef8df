"""Selects the actors' actions: with NumPy for jppo's own dense networks, otherwise with a compiled program.

For a few rows, a compiled call takes 15 us on an idle core but up to 140 us between the steps of an environment, where
NumPy is much faster.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jppo.actors.numpy_params import numpy_obstacle, to_numpy_params
from jppo.actors.numpy_policy import NumpyPolicy
from jppo.devices.jit import jit
from jppo.envs.spaces import ActionSpec, Array, PyTree
from jppo.ppo.policy import Policy, act
from jppo.ppo.types import PolicyState

_MAX_RECURRENT_ENVS = 16  # with 32 environments, both implementations take about the same time

# (obs leaves [n, ...], noise [n, ...], carry [n, ...]) -> the policy's actions, the environments' actions, the carry;
# pytrees with leaves [n, ...]
Act = Callable[[list[np.ndarray], np.ndarray, PyTree], tuple[PyTree, PyTree, PyTree]]


class ActionSelection(NamedTuple):
    """One implementation of action selection. Both implementations select the same actions, up to rounding."""

    sample_noise: Callable[[Array], Array]  # keys [T, n] -> noise [T, n, ...] that the actions are sampled with
    compile: Callable[[PolicyState, PyTree, Any], Callable[[PolicyState], Act]]  # from shapes of policy, obs, noise


def make_action_selection(policy: Policy, num_envs: int) -> ActionSelection:
    """Returns the NumPy implementation for jppo's own dense networks on CPU, otherwise the compiled one.

    Recurrent networks of many environments are compiled, too, because their products are large.
    """
    network: Any = policy.network
    known = not numpy_obstacle(policy) and network.kind == "mlp" and jax.default_backend() == "cpu"
    known = known and network.compute_dtype == "float32"  # NumPy has no bfloat16
    small = not policy.is_recurrent or num_envs <= _MAX_RECURRENT_ENVS
    return (_select_with_numpy if known and small else _select_with_xla)(policy)


def _select_with_numpy(policy: Policy) -> ActionSelection:
    specs: list[ActionSpec] = jax.tree.leaves(policy.action_spec)
    structure: Any = jax.tree.structure(policy.action_spec)

    def sample_noise(keys: Array) -> Array:
        """Samples the noise that jppo's distributions use."""

        def sample(key: Array) -> Array:
            keys = [key] if structure.num_nodes == 1 else jax.random.split(key, len(specs))
            return jnp.concatenate([_noise(spec, key) for spec, key in zip(specs, keys, strict=True)])

        return jax.vmap(jax.vmap(sample))(keys)

    def act(numpy_policy: NumpyPolicy, leaves: list[np.ndarray], noise: np.ndarray, carry: PyTree) -> Any:
        actions, env_actions, carry = numpy_policy.select_action(leaves, noise, carry)
        return structure.unflatten(actions), structure.unflatten(env_actions), carry

    def prepare(policy_state: PolicyState) -> Act:
        return functools.partial(act, NumpyPolicy(*to_numpy_params(policy, policy_state, by_leaf=True)))

    def compile_selection(policy_shapes: PolicyState, obs: PyTree, noise: Any) -> Callable[[PolicyState], Act]:
        blank = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), policy_shapes)
        prepare(blank)  # compiles the JAX functions that it calls
        return prepare

    return ActionSelection(sample_noise, compile_selection)


def _noise(spec: ActionSpec, key: Array) -> Array:
    """Returns the noise for one action array: numbers for each category, or for each real dimension."""
    if spec.is_box:
        return jax.random.normal(key, (spec.size,), jnp.float32)
    if not spec.nvec:
        return jax.random.gumbel(key, (spec.num_actions,), jnp.float32)
    exists = np.arange(max(spec.nvec))[None] < np.array(spec.nvec)[:, None]  # [K, M], see MultiCategorical
    return jax.random.gumbel(key, exists.shape, jnp.float32)[np.nonzero(exists)]


def _select_with_xla(policy: Policy) -> ActionSelection:
    structure = jax.tree.structure(policy.obs_spec)

    def select_action(
        policy_state: PolicyState, leaves: list[Array], key_data: Array, carry: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        keys = jax.random.wrap_key_data(key_data)
        selected = act(policy, policy_state, jax.tree.unflatten(structure, leaves), keys, carry)
        return selected.action, selected.env_action, selected.carry

    def compile_selection(policy_shapes: PolicyState, obs: PyTree, noise: Any) -> Callable[[PolicyState], Act]:
        carry = policy.initial_carry(noise.shape[0])
        compiled = jit(select_action).lower(policy_shapes, jax.tree.leaves(obs), noise, carry).compile()

        def prepare(policy_state: PolicyState) -> Act:
            on_device = jax.device_put(policy_state)
            return lambda *args: jax.tree.map(np.asarray, compiled(on_device, *args))

        return prepare

    return ActionSelection(jax.random.key_data, compile_selection)
