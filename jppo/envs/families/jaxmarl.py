"""Adapter for JaxMARL, tested with 0.2.0 (https://github.com/FLAIROx/JaxMARL).

All agents share one policy, except the prey of MPE_simple_facmac, which JaxMARL moves. JaxMARL does not report
truncation. The adapter puts the time limits of MPE, SMAX, jaxnav and switch_riddle out of reach and truncates instead.
Overcooked's observations depend on the limit, so it ends its episodes itself at `max_steps`, which the adapter reports
as truncation. Agents that ended stay inactive until the episode ends, except in SMAX: there, dead units get the rewards
of their team, so they stay active. Their only legal action is to stop.
"""

import contextlib
import functools
import importlib
import inspect
import io
import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from jppo.config.checks import did_you_mean
from jppo.envs.action_spaces import action_spec_of
from jppo.envs.base import Environment, Step, strip_weak_types
from jppo.envs.families import can_draw_family
from jppo.envs.resets import make_restart
from jppo.envs.spaces import ACTION_MASK, Array, PyTree, obs_leaf_spec
from jppo.errors import Refused

_nowhere = io.StringIO()  # JaxMARL prints which parts it lacks; one of its modules restores sys.__stdout__
with contextlib.redirect_stdout(_nowhere), mock.patch.object(sys, "__stdout__", _nowhere):
    import jaxmarl

_NEVER = 2**30  # steps
_HAS_PLAIN_LIMIT = ("MPE_", "SMAX", "HeuristicEnemySMAX", "jaxnav", "switch_riddle")  # the limit only ends episodes
_ENDS_TOGETHER = ("SMAX", "HeuristicEnemySMAX")  # dead units get rewards until the battle ends
_HAS_NO_ARGUMENT = ("MPE_simple_facmac_", "switch_riddle")  # their classes have only the attribute max_steps
_EXCLUDED = (  # one agent, errors or dicts as observations, more arguments, or further packages
    *("MPE_simple_v3", "storm", "LearnedPolicyEnemySMAX", "JaxRobotarium"),
    *("ant_", "halfcheetah_", "hopper_", "humanoid_", "walker2d_"),
)


class AgentsState(NamedTuple):
    """The state of an environment and the progress of its episode."""

    env_state: PyTree
    time: Array  # [] i32
    ended: Array  # [M] bool


def names() -> tuple[str, ...]:
    """Returns the names of the environments."""
    return tuple(sorted(name for name in jaxmarl.registered_envs if not name.startswith(_EXCLUDED)))


def make(name: str, max_steps_in_episode: int | None = None, **options: Any) -> Environment:
    """Returns an environment.

    Args:
      max_steps_in_episode: time limit; JaxMARL's own one when None.
      **options: arguments of JaxMARL's class. The scenario of SMAX, e.g. "2s3z", and the layout of overcooked, e.g.
        "coord_ring", may be names.

    Raises:
      ValueError: the agents have different spaces, an option is unknown, or there is an option pool.
    """
    if "pool" in options:  # MPE would ignore it
        raise Refused(f"jaxmarl:{name} has no pool of initial states; leave it out")
    for option, objects in _named_objects(name).items():
        if isinstance(value := options.get(option), str):
            if value not in objects:
                raise Refused(f"jaxmarl:{name} has no {option} {value!r}; {did_you_mean(value, objects)}")
            options[option] = objects[value]
    if options and name.startswith("MPE_"):
        _check_mpe_options(name, options)
    limit = max_steps_in_episode
    if has_own_limit := name.startswith(_HAS_PLAIN_LIMIT):
        limit = limit or jaxmarl.make(name, **options).max_steps
        options |= {} if name.startswith(_HAS_NO_ARGUMENT) else {"max_steps": _NEVER}
    elif limit is not None:
        options |= {"max_steps": limit}
    source = jaxmarl.make(name, **options)
    if name.startswith(_HAS_NO_ARGUMENT):
        source.max_steps = _NEVER
    limit = limit or getattr(source, "max_steps", None)
    agents = list(source.adversaries if name.startswith("MPE_simple_facmac_") else source.agents)
    idle = {agent: jnp.zeros(source.action_space(agent).shape) for agent in source.agents if agent not in agents}
    action_space = _common_space(name, "action", source.action_space, agents)
    obs_space = _common_space(name, "observation", source.observation_space, agents)
    action_spec = action_spec_of(name, action_space)
    observe = _observer(source, agents, masks=hasattr(action_space, "n"))

    def begin(key: Array) -> tuple[PyTree, PyTree]:
        obs, env_state = source.reset(key)
        env_state = strip_weak_types(env_state)
        return observe(obs, env_state, jnp.zeros(len(agents), bool)), env_state

    restart = make_restart(begin)

    def reset(key: Array) -> tuple[PyTree, AgentsState]:
        obs, env_state = begin(key)
        return obs, AgentsState(env_state, jnp.zeros((), jnp.int32), jnp.zeros(len(agents), bool))

    def step(key: Array, state: AgentsState, action: Array) -> Step:
        step_key, reset_key = jax.random.split(key)
        actions = {agent: action[i] for i, agent in enumerate(agents)} | idle
        obs, env_state, rewards, dones, _ = source.step_env(step_key, state.env_state, actions)
        time, active = state.time + 1, ~state.ended
        ends = ["__all__"] * len(agents) if name.startswith(_ENDS_TOGETHER) else agents
        done = jnp.stack([jnp.asarray(dones[agent], bool).reshape(()) | dones["__all__"] for agent in ends])
        at_limit = jnp.asarray(False) if limit is None else time >= limit
        is_own_end = done if has_own_limit else done & ~at_limit
        truncated = active & at_limit & ~is_own_end
        ended = state.ended | done
        over = jnp.asarray(dones["__all__"], bool).reshape(()) | at_limit | ended.all()
        final_obs = observe(obs, env_state, ended)
        next_obs, env_state = restart(over, reset_key, final_obs, strip_weak_types(env_state))
        ended = jnp.where(over, False, ended)
        reward = jnp.stack([jnp.asarray(rewards[agent], jnp.float32).reshape(()) for agent in agents])
        return Step(
            obs=next_obs,
            state=AgentsState(env_state, jnp.where(over, 0, time), ended),
            reward=jnp.where(active, reward, 0.0),
            terminated=~active | is_own_end,
            truncated=truncated,
            final_obs=final_obs,
            active=~ended,
        )

    shapes = jax.eval_shape(reset, jax.random.key(0))[0]
    return Environment(
        name=name,
        reset=reset,
        step=step,
        obs_spec=_obs_spec_of(name, obs_space, shapes),
        action_spec=action_spec,
        source=source,
        num_agents=len(agents),
        render=_renderer(name, source),
    )


def _obs_spec_of(name: str, space: Any, obs: PyTree) -> PyTree:
    """Returns the spec of observations [M, ...]. Ignores the Discrete that Hanabi declares for arrays of flags."""
    if isinstance(obs, dict):
        return {key: _obs_spec_of(name, None if key == ACTION_MASK else space, leaf) for key, leaf in obs.items()}
    shape = tuple(obs.shape[1:])
    declared = space if getattr(space, "shape", None) == shape else None
    return obs_leaf_spec(f"jaxmarl:{name}", declared, shape, obs.dtype)


def _observer(source: Any, agents: list[str], masks: bool) -> Any:
    """Returns a function of JaxMARL's observations, the state and which agents ended: (...) -> leaves [M, ...].

    Observations are dicts with an `action_mask` if the environment has masks. Ended agents may take any action.
    """
    legal_actions = getattr(source, "get_legal_moves", source.get_avail_actions)  # the former in Hanabi
    try:
        jax.eval_shape(legal_actions, jax.eval_shape(source.reset, jax.random.key(0))[1])
    except NotImplementedError:
        masks = False

    def observe(obs: dict[str, Array], state: PyTree, ended: Array) -> PyTree:
        stacked = strip_weak_types(jnp.stack([obs[agent] for agent in agents]))
        if stacked.dtype == jnp.uint8:  # numbers, not colours, which jppo divides by 255
            stacked = stacked.astype(jnp.float32)
        if not masks:
            return stacked
        avail = legal_actions(state)
        legal = jnp.stack([avail[agent] for agent in agents]).astype(bool)
        return {"observation": stacked, ACTION_MASK: legal | ended[:, None]}

    return observe


def _named_objects(name: str) -> dict[str, dict[str, Any]]:
    """Returns JaxMARL's objects that options of an environment may name: option -> name -> object."""
    if name in _ENDS_TOGETHER:
        return {"scenario": jaxmarl.environments.smax.smax_env.MAP_NAME_TO_SCENARIO}
    if name == "overcooked":
        return {"layout": jaxmarl.environments.overcooked.overcooked_layouts}
    return {}


def _check_mpe_options(name: str, options: dict[str, Any]) -> None:
    """Raises ValueError for an option that no class of the environment has. JaxMARL would ignore it."""
    classes = type(jaxmarl.make(name)).__mro__
    functions = [vars(base)["__init__"] for base in classes if "__init__" in vars(base)]
    known = {parameter for function in functions for parameter in inspect.signature(function).parameters}
    if unknown := sorted(set(options) - known):
        known -= {"self", "args", "kwargs"}
        raise Refused(f"jaxmarl:{name} has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}")


def _common_space(name: str, kind: str, space_of: Any, agents: list[str]) -> Any:
    """Returns the space of all agents. Raises ValueError if they have different ones."""
    first = space_of(agents[0])
    for agent in agents[1:]:
        if _essence(other := space_of(agent)) != _essence(first):
            raise Refused(
                f"jaxmarl:{name}: the agents {agents[0]} and {agent} have different {kind} spaces, {_essence(first)} "
                f"and {_essence(other)}; one policy for all agents needs equal spaces"
            )
    nvec = getattr(first, "num_categories", None)  # of JaxMARL's MultiDiscrete
    return first if nvec is None else spaces.MultiDiscrete(np.asarray(nvec))


def _essence(space: Any) -> tuple[Any, ...]:
    sizes = [np.ravel(getattr(space, part, ())).tolist() for part in ("shape", "n", "num_categories")]
    return type(space).__name__, *itertools.chain(*sizes)


def _renderer(name: str, source: Any) -> Callable[[AgentsState], Any] | None:
    """Returns a function that draws a state with matplotlib, or None."""
    if not can_draw_family(f"jaxmarl:{name}"):
        return None

    @functools.cache
    def canvas() -> Any:
        figure = importlib.import_module("matplotlib.figure").Figure((5, 5))  # SMAX confuses the sides of others
        figure.add_subplot()
        return importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)

    def draw(agents: AgentsState) -> Any:
        state: Any = jax.device_get(agents.env_state)
        (axes,) = canvas().figure.axes
        if name.startswith("jaxnav"):
            axes.clear()
            source.init_render(axes, state, lidar=False)
            canvas().draw()
            return np.array(canvas().buffer_rgba())[..., :3]  # a copy, because the next drawing overwrites the buffer
        state = getattr(state, "state", state)  # HeuristicEnemySMAX also has a state of the enemy's policy
        units = getattr(source, "all_agents", source.agents)
        actions = dict(zip(units, state.prev_attack_actions, strict=True))
        return source.init_render(axes, (None, state, actions), 0, int(state.step)).get_array()[..., :3]

    return draw
