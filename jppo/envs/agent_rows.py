"""Adapter for environments with PettingZoo's parallel API: their agents share one policy.

Row e*M + i is agent i of environment e.
"""

import copy
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, create_empty_array, iterate

from jppo.envs.contract import BrokenContractError, describe_returned
from jppo.envs.gymnasium_spaces import stack
from jppo.envs.spaces import ACTION_MASK, PyTree
from jppo.errors import Refused


def is_parallel_env(env: Any) -> bool:
    """Returns whether an object has PettingZoo's parallel API."""
    return all(hasattr(env, name) for name in ("possible_agents", "observation_space", "action_space", "step"))


class AgentRows:
    """A vector environment whose rows are the M agents of each of E environments, with SAME_STEP autoreset.

    An environment resets in the step in which its last agent ends. Inactive agents, those that ended earlier or do not
    exist yet, have observations of zeros (masks of ones), reward 0 and terminated = True.

    Attributes:
      active: [E*M] bool, the agents that take part in the next step.
      envs: the environments.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, name: str, makers: list[Callable[[], Any]]) -> None:
        """Makes one environment per function.

        Raises:
          ValueError: the agents have different spaces, or there is no agent.
        """
        self.envs = [make() for make in makers]
        env = self.envs[0]
        self._name, self._agents = name, list(env.possible_agents)
        self.single_observation_space = _common_space(name, "observation", env.observation_space, self._agents)
        self.single_action_space = _common_space(name, "action", env.action_space, self._agents)
        self.num_envs, self.render_mode = len(self.envs) * len(self._agents), getattr(env, "render_mode", None)
        self.active = np.zeros(self.num_envs, bool)
        self._blank = create_empty_array(self.single_observation_space, 1)
        if isinstance(self._blank, dict) and ACTION_MASK in self._blank:
            self._blank[ACTION_MASK] = np.ones_like(self._blank[ACTION_MASK])
        self._blank = jax.tree.map(lambda leaf: leaf[0], self._blank)
        self._action_space = batch_space(self.single_action_space, self.num_envs)

    @property
    def num_agents(self) -> int:
        """Number of agents M of each environment."""
        return len(self._agents)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        """Resets each environment with the seed of its first row. Returns the observations and {}."""
        seeds = [None] * self.num_envs if seed is None else seed
        rows = [row for e in range(len(self.envs)) for row in self._begin(e, seeds[e * self.num_agents])]
        return self._joined(rows), {}

    def step(self, actions: Any) -> Any:
        """Steps all environments. The infos contain final_obs, by row, if agents ended."""
        rows_of_actions = actions if isinstance(actions, np.ndarray) else list(iterate(self._action_space, actions))
        reward, truncated, terminated = np.zeros(self.num_envs), np.zeros(self.num_envs, bool), ~self.active
        final: dict[int, PyTree] = {}
        rows: list[PyTree] = []
        for e, env in enumerate(self.envs):
            number = {agent: e * self.num_agents + i for i, agent in enumerate(self._agents)}
            live = list(env.agents)
            returned = env.step({agent: rows_of_actions[number[agent]] for agent in live})
            if not isinstance(returned, tuple) or len(returned) != 5:
                problem = f"{self._name}: step returned {describe_returned(returned)}"
                raise BrokenContractError(problem, "return obs, rewards, terminations, truncations, infos")
            obs, rewards, ends, cuts, _ = returned
            for agent in live:
                if not all(agent in values for values in (obs, rewards, ends, cuts)):
                    problem = f"{self._name}: step returned no observation, reward or flag of the agent {agent}"
                    raise BrokenContractError(problem, "return those of all agents that took part in the step")
                i = number[agent]
                reward[i], terminated[i], truncated[i] = float(rewards[agent]), ends[agent], cuts[agent]
                over = terminated[i] or truncated[i]
                if over == (agent in env.agents):
                    what = "terminated or was truncated, but is still in agents"
                    what = what if over else "left agents without being terminated or truncated"
                    remedy = "remove an agent from agents in the step in which it ends, and only then"
                    raise BrokenContractError(f"{self._name}: the agent {agent} {what}", remedy)
                if over:
                    final[i] = copy.deepcopy(obs[agent])
            rows += self._rows(e, obs) if env.agents else self._begin(e, None)
        return self._joined(rows), reward, terminated, truncated, {"final_obs": final} if final else {}

    def render(self) -> Any:
        """Returns the pictures of all environments."""
        return [env.render() for env in self.envs]

    def close(self) -> None:
        """Closes all environments."""
        for env in self.envs:
            env.close()

    def _begin(self, e: int, seed: int | None) -> list[PyTree]:
        """Resets environment e and returns the observations of its agents."""
        returned = self.envs[e].reset(seed=seed)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise BrokenContractError(
                f"{self._name}: reset returned {describe_returned(returned)}", "return obs, infos"
            )
        obs, infos = returned
        if any(ACTION_MASK in info for info in infos.values()):
            problem = f"{self._name}: the infos of reset have an action_mask"
            raise BrokenContractError(problem, "make it a leaf of a Dict of observations", check="masks")
        if not self.envs[e].agents:
            problem = f"{self._name}: no agent takes part after reset"
            raise BrokenContractError(problem, "add at least one agent to agents in reset")
        return self._rows(e, obs)

    def _rows(self, e: int, obs: dict[Any, PyTree]) -> list[PyTree]:
        """Notes which agents of environment e are active and returns their observations, and blank ones of others."""
        live = set(self.envs[e].agents)
        if not live.issubset(self._agents):
            problem = f"{self._name}: the agents {sorted(live - set(self._agents))} are not in possible_agents"
            raise BrokenContractError(problem, "list all agents in possible_agents")
        start = e * self.num_agents
        self.active[start : start + self.num_agents] = [agent in live for agent in self._agents]
        if missing := [agent for agent in live if agent not in obs]:
            problem = f"{self._name}: the observation of the agent {missing[0]} is missing"
            raise BrokenContractError(problem, "return the observations of all agents in agents")
        return [obs[agent] if agent in live else self._blank for agent in self._agents]

    def _joined(self, rows: list[PyTree]) -> PyTree:
        out = create_empty_array(self.single_observation_space, self.num_envs)
        try:
            return stack(self.single_observation_space, rows, out)
        except ValueError as error:
            problem = f"{self._name}: an observation does not fit {self.single_observation_space}: {error.args[0]}"
            raise BrokenContractError(problem, "return observations of this space", check="spaces") from error


def _common_space(name: str, kind: str, space_of: Callable[[Any], Any], agents: list[Any]) -> Any:
    """Returns the space of all agents. Raises ValueError if they have different ones."""
    if not agents:
        raise Refused(f"{name}: possible_agents is empty")
    first = space_of(agents[0])
    for agent in agents[1:]:
        if (other := space_of(agent)) != first:
            raise Refused(
                f"{name}: the agents {agents[0]} and {agent} have different {kind} spaces, {first} and {other}; one "
                "policy for all agents needs equal spaces (SuperSuit's pad_observations_v0 and pad_action_space_v0 "
                "make them equal)"
            )
    return first
