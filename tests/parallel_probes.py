"""Environments with several agents whose observations and rewards are known, for the host and for the device."""

import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from jppo.envs.base import Environment, Step
from jppo.envs.spaces import ActionSpec, ObsSpec

LIMIT = 5  # steps of an episode


class Team:
    """A parallel environment: "a" terminates at step 2, "b" is there for the whole episode, "c" comes after step 1.

    The time limit truncates "b" and "c". Observations are [number of the agent, episode, time]; rewards are
    10*agent + time before the step.
    """

    possible_agents = ("a", "b", "c")
    render_mode = None

    def __init__(self):
        self.episode = -1

    def observation_space(self, agent):
        return spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.seed = seed
        self.episode, self.time, self.agents = self.episode + 1, 0, ["a", "b"]
        return self.see(), {}

    def step(self, actions):
        assert list(actions) == self.agents
        before, self.time = self.agents, self.time + 1
        rewards = {agent: 10 * self.possible_agents.index(agent) + self.time - 1 for agent in before}
        ends = {agent: agent == "a" and self.time == 2 for agent in before}
        cuts = dict.fromkeys(before, self.time == LIMIT)
        seen = self.see()
        self.agents = [agent for agent in before if not (ends[agent] or cuts[agent])]
        if self.time == 1:
            self.agents = [*self.agents, "c"]
            seen = self.see()
        return seen, rewards, ends, cuts, {agent: {} for agent in before}

    def see(self):
        number = self.possible_agents.index
        return {agent: np.array([number(agent), self.episode, self.time], np.float32) for agent in self.agents}

    def close(self):
        pass


class Uneven(Team):
    """Its agents have different observation spaces."""

    def observation_space(self, agent):
        return spaces.Box(0, 1, (3 + (agent == "b"),))


class Immortal(Team):
    """Does not remove agents that terminated."""

    def step(self, actions):
        seen, rewards, ends, cuts, infos = super().step(actions)
        self.agents = list(actions)
        return seen, rewards, ends, cuts, infos


class Vanishing(Team):
    """Removes an agent that neither terminated nor was truncated."""

    def step(self, actions):
        seen, rewards, ends, cuts, infos = super().step(actions)
        self.agents = self.agents[1:]
        return seen, rewards, ends, cuts, infos


class Masked(Team):
    """Only the action with the agent's parity is legal."""

    def observation_space(self, agent):
        return spaces.Dict(observation=super().observation_space(agent), action_mask=spaces.MultiBinary(2))

    def see(self):
        masks = {agent: np.arange(2, dtype=np.int8) == self.possible_agents.index(agent) % 2 for agent in self.agents}
        return {
            agent: {"observation": obs, "action_mask": masks[agent].astype(np.int8)}
            for agent, obs in super().see().items()
        }

    def step(self, actions):
        assert all(action == self.possible_agents.index(agent) % 2 for agent, action in actions.items())
        return super().step(actions)


def duo(end=2):
    """Returns an on-device environment of two agents: the first terminates at step `end`, the second is truncated.

    Observations are [agent, time], rewards are 10*agent + time before the step.
    """
    agents = jnp.arange(2, dtype=jnp.int32)

    def see(time):
        return jnp.stack([agents, jnp.broadcast_to(time, 2)], axis=-1).astype(jnp.float32)

    def reset(key):
        time = jnp.zeros((), jnp.int32)
        return see(time), time

    def step(key, time, action):
        after, active = time + 1, (agents == 1) | (time < end)
        over = after == LIMIT
        rewards = jnp.where(active, 10 * agents + time, 0).astype(jnp.float32)
        terminated = ~active | ((agents == 0) & (after == end))
        start = jnp.where(over, 0, after)
        return Step(
            obs=see(start),
            state=start,
            reward=rewards,
            terminated=terminated,
            truncated=active & over,
            final_obs=see(after),
            active=over | (agents == 1) | (after < end),
        )

    return Environment("duo", reset, step, ObsSpec((2,), "float32"), ActionSpec((), "int32", 2), num_agents=2)
