"""How actors choose actions: by NumPy where the network is one of jppo's that it knows, else by a compiled program.

A compiled call for a few rows takes 15 us on a core that does nothing else, but up to 140 between an environment's
steps; NumPy's operations are there quicker by far (docs/performance.md).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jppo.actors.numpy_params import to_numpy_params
from jppo.actors.numpy_policy import NumpyPolicy
from jppo.devices.jit import jit
from jppo.ppo.networks import ActorCritic
from jppo.ppo.policy import Policy, act
from jppo.ppo.types import Array, PolicyState, PyTree

# (obs leaves [n, ...], a step's draws [n, ...]) -> the policy's actions [n, ...], and what the environments take
Act = Callable[[list[np.ndarray], np.ndarray], tuple[np.ndarray, np.ndarray]]


class Acting(NamedTuple):
    """One way to choose actions. Both choose the same ones, but for rounding."""

    draw: Callable[[Array], Array]  # keys [T, n] -> what the actions are drawn with [T, n, ...], to be compiled
    compile: Callable[[PolicyState, PyTree, Any], Callable[[PolicyState], Act]]  # (shapes of: policy, obs, draws)


def make_acting(policy: Policy) -> Acting:
    """NumPy for jppo's own dense networks where JAX computes on a CPU, else a compiled program."""
    network = policy.network
    known = type(network) is ActorCritic and network.kind == "mlp" and jax.default_backend() == "cpu"
    return (_by_numpy if known else _by_xla)(policy)


def _by_numpy(policy: Policy) -> Acting:
    def draw(keys: Array) -> Array:
        """What jppo's distributions draw."""
        action_spec = policy.action_spec
        noise, size = jax.random.normal, action_spec.size
        if action_spec.num_actions:
            noise, size = jax.random.gumbel, action_spec.num_actions
        return jax.vmap(jax.vmap(lambda key: noise(key, (size,), jnp.float32)))(keys)

    leaf_specs = tuple(jax.tree.leaves(policy.obs_spec))  # in whatever containers they come

    def prepare(policy_state: PolicyState) -> Act:
        network: Any = policy.network
        form = to_numpy_params(network, policy_state, leaf_specs, policy.action_spec)
        return functools.partial(_act_by_numpy, NumpyPolicy(*form))

    def compile_(policy_shapes: PolicyState, obs: PyTree, draws: Any) -> Callable[[PolicyState], Act]:
        blank = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), policy_shapes)
        prepare(blank)  # what JAX has to compile for it
        return prepare

    return Acting(draw, compile_)


def _act_by_numpy(policy: NumpyPolicy, leaves: list[np.ndarray], noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    action = policy.choose(leaves, noise)
    return action, policy.to_env(action)


def _by_xla(policy: Policy) -> Acting:
    structure = jax.tree.structure(policy.obs_spec)

    def choose(policy_state: PolicyState, leaves: list[Array], key_data: Array) -> tuple[Array, Array]:
        keys = jax.random.wrap_key_data(key_data)
        chosen = act(policy, policy_state, jax.tree.unflatten(structure, leaves), keys)
        return chosen.action, chosen.env_action

    def compile_(policy_shapes: PolicyState, obs: PyTree, draws: Any) -> Callable[[PolicyState], Act]:
        compiled = jit(choose).lower(policy_shapes, jax.tree.leaves(obs), draws).compile()
        return lambda policy_state: functools.partial(_act_by_xla, compiled, jax.device_put(policy_state))

    return Acting(jax.random.key_data, compile_)


def _act_by_xla(
    compiled: Any, policy_state: PolicyState, leaves: list[np.ndarray], key_data: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    action, env_action = compiled(policy_state, leaves, key_data)
    return np.asarray(action), np.asarray(env_action)
