"""The interface of on-device environments: pure functions for one environment, batched with `vmap`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jppo.config.checks import find_similar
from jppo.envs.spaces import ActionSpec, Array, PyTree
from jppo.errors import Refused


class Step(NamedTuple):
    """The return value of one step of one environment."""

    obs: PyTree  # the next observation; after the end of an episode, the first of the next episode
    state: PyTree
    reward: Array  # [] f32
    terminated: Array  # [] bool
    truncated: Array  # [] bool
    final_obs: PyTree  # the true next observation, at every step
    active: Any = ()  # [M] bool, the agents that take part in the next step; () for one agent


class Environment(NamedTuple):
    """One environment, which resets itself in the step that ends an episode.

    With M > 1 agents, which share the policy, observations, actions, rewards and flags have the leading dim M. All
    agents take part in the first step of each episode of the environment. An agent that does not take part has
    terminated = True, reward 0 and, if there are action masks, a mask with at least one legal action.
    """

    name: str
    reset: Callable[[Array], tuple[PyTree, PyTree]]  # key -> obs, state
    step: Callable[[Array, PyTree, Array], Step]  # key, state, action -> Step
    obs_spec: PyTree  # ObsSpec leaves
    action_spec: ActionSpec
    source: Any = None  # the original object, for drawing
    params: Any = None
    num_agents: int = 1  # number of agents M
    render: Callable[[PyTree], Any] | None = None  # state -> image [H, W, 3] u8


def replace_fields(params: Any, changes: dict[str, Any]) -> Any:
    """Returns parameters of an environment with other values. Raises ValueError for unknown names."""
    known = getattr(params, "__dict__", {})  # parameters may be None
    if unknown := sorted(set(changes) - set(known)):
        choices = f"choose from {', '.join(sorted(known))}" if known else "the environment has none"
        similar = next(filter(None, (find_similar(name, known) for name in unknown)), None)
        hint = f"did you mean {similar}? " if similar else ""
        raise Refused(f"unknown parameters {', '.join(unknown)}; {hint}{choices}")
    return params.replace(**changes) if changes else params


def strip_weak_types(tree: PyTree) -> PyTree:
    """Removes weak types, which can differ between reset and step and would cause a second compilation."""
    return jax.tree.map(_strip, tree)


def _strip(leaf: Any) -> Array:
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):  # a key has no weak type
        return array
    return jax.lax.convert_element_type(array, array.dtype)


def reset_rows(env: Environment, keys: Array) -> tuple[PyTree, PyTree]:
    """Resets environments. Returns observations [N, ...] and states, [N, ...] or, with M agents, [N/M, ...].

    Args:
      keys: [N], one per row. With M agents, rows are agents, those of an environment next to each other, and an
        environment uses the key of its first agent.
    """
    obs, state = jax.vmap(env.reset)(keys[:: env.num_agents] if env.num_agents > 1 else keys)
    return (merge_dims(obs) if env.num_agents > 1 else obs), state


def step_rows(env: Environment, keys: Array, state: PyTree, action: PyTree) -> Step:
    """Steps environments with actions [N, ...]; rows and keys are those of `reset_rows`.

    Raises:
      ValueError: the reward, terminated or truncated of an environment has a wrong shape.
    """
    agents = env.num_agents
    if agents > 1:
        action = jax.tree.map(lambda x: x.reshape(-1, agents, *x.shape[1:]), action)
    after = jax.vmap(env.step)(keys[::agents] if agents > 1 else keys, state, action)
    wanted = (agents,) if agents > 1 else ()
    for name in ("reward", "terminated", "truncated"):
        if (shape := jnp.shape(getattr(after, name))[1:]) != wanted:
            raise Refused(f"{env.name}: step returned {name} of shape {shape}; it must be {wanted}")
    return merge_dims(after._replace(state=()))._replace(state=after.state) if agents > 1 else after


def merge_dims(tree: PyTree) -> PyTree:
    """Merges the first two dims of all leaves, for example [N/M, M, ...] to [N, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
