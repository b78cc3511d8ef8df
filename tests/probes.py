"""Environments with gymnax's API that each test one part of PPO, so that a failure shows which part is broken."""

import os
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces

NO_LIMIT = 1_000_000
Array = jax.Array


@struct.dataclass
class ProbeState:
    time: Array  # [] i32, steps since the reset
    cue: Array  # [] f32, drawn at the reset


class Probe(environment.Environment):
    """Value only: one step, one observation, reward 1, so V = 1."""

    length = 1  # steps to termination
    limit = NO_LIMIT  # steps to truncation
    continuous = False
    obs_size = 1

    def cue(self, key: Array) -> Array:
        return jnp.zeros(())

    def reward(self, state: ProbeState, action: Array) -> Array:
        return jnp.ones(())

    def get_obs(self, state: ProbeState, params: Any = None, key: Any = None) -> Array:
        return state.cue[None]

    def is_terminated(self, state: ProbeState, params: Any) -> Array:
        return state.time >= self.length

    def reset_env(self, key: Array, params: Any) -> tuple[Any, ProbeState]:
        state = ProbeState(time=jnp.zeros((), jnp.int32), cue=self.cue(key))
        return self.get_obs(state), state

    def step_env(self, key: Array, state: ProbeState, action: Array, params: Any) -> tuple:
        after = state.replace(time=state.time + 1)
        return self.get_obs(after), after, self.reward(state, action), self.is_terminated(after, params), {}

    @property
    def default_params(self) -> environment.EnvParams:
        return environment.EnvParams(max_steps_in_episode=self.limit)

    def action_space(self, params: Any = None) -> Any:
        return spaces.Box(-1.0, 1.0, (2,)) if self.continuous else spaces.Discrete(2)

    def observation_space(self, params: Any = None) -> Any:
        return spaces.Box(-jnp.inf, jnp.inf, (self.obs_size,))


class ObsValue(Probe):
    """The value depends on the observation: cue +1 or -1, reward = cue."""

    def cue(self, key: Array) -> Array:
        return jax.random.rademacher(key, (), jnp.float32)

    def reward(self, state: ProbeState, action: Array) -> Array:
        return state.cue


class DelayedReward(Probe):
    """Reward 1 after two steps: V = gamma, then 1."""

    length = 2

    def get_obs(self, state: ProbeState, params: Any = None, key: Any = None) -> Array:
        return state.time.astype(jnp.float32)[None]

    def reward(self, state: ProbeState, action: Array) -> Array:
        return state.time.astype(jnp.float32)


class ActionReward(Probe):
    """The reward is 1 for action 1 and -1 for action 0; the observation is constant."""

    def reward(self, state: ProbeState, action: Array) -> Array:
        return jnp.where(action == 1, 1.0, -1.0)


class ObsActionReward(ObsValue):
    """The reward is 1 if the action matches the cue, otherwise -1."""

    def reward(self, state: ProbeState, action: Array) -> Array:
        return jnp.where((action == 1) == (state.cue > 0.0), 1.0, -1.0)


class Moving(ObsActionReward):
    """Changes the working directory."""

    length = 3

    def reset(self, *args: Any) -> Any:
        os.chdir("/")
        return super().reset(*args)


class BoxActionReward(ObsValue):
    """The reward is 0, its maximum, if the first action is half the cue and the second minus half the cue."""

    continuous = True

    def reward(self, state: ProbeState, action: Array) -> Array:
        best = jnp.stack([0.5 * state.cue, -0.5 * state.cue])
        return -jnp.sum(jnp.square(action - best))


class TimeLimit(Probe):
    """Reward 1 at each step; truncated every 5 steps, never terminated: V = 1 / (1 - gamma)."""

    length = NO_LIMIT
    limit = 5


class BoxTimeLimit(TimeLimit):
    """TimeLimit with continuous actions."""

    continuous = True


class NaNReward(TimeLimit):
    """Never ends. The reward is 1, but NaN in step 20."""

    limit = NO_LIMIT

    def reward(self, state: ProbeState, action: Array) -> Array:
        return jnp.where(state.time == 20, jnp.nan, 1.0)


class Counting(Probe):
    """Observations [cue, kind, time] identify episode and step, so tests know the true successor.

    Episodes of kind 0 are truncated after 5 steps, of kind 1 terminated after 3, of kind 2 both after 5.
    """

    limit = 5
    obs_size = 3

    def cue(self, key: Array) -> Array:
        return jax.random.uniform(key)

    def get_obs(self, state: ProbeState, params: Any = None, key: Any = None) -> Array:
        return jnp.stack([state.cue, _kind(state).astype(jnp.float32), state.time.astype(jnp.float32)])

    def reward(self, state: ProbeState, action: Array) -> Array:
        return state.time.astype(jnp.float32) + 0.5 * action.astype(jnp.float32)

    def is_terminated(self, state: ProbeState, params: Any) -> Array:
        return state.time >= jnp.asarray([NO_LIMIT, 3, 5])[_kind(state)]


class Masked(TimeLimit):
    """Six actions, of which the mask changes with each step. An illegal action ends the episode with the reward -1."""

    empty_at = NO_LIMIT  # time at which no action is legal

    def get_obs(self, state: ProbeState, params: Any = None, key: Any = None) -> dict[str, Array]:
        mask = ((jnp.arange(6) + state.time) % 3 == 0) & (state.time != self.empty_at)
        return {"time": state.time.astype(jnp.float32)[None], "action_mask": mask}

    def step_env(self, key: Array, state: ProbeState, action: Array, params: Any) -> tuple:
        legal = (action + state.time) % 3 == 0
        after = state.replace(time=state.time + 1)
        return self.get_obs(after), after, jnp.where(legal, 1.0, -1.0), ~legal, {}

    def action_space(self, params: Any = None) -> Any:
        return spaces.Discrete(6)

    def observation_space(self, params: Any = None) -> Any:
        time = spaces.Box(0, jnp.inf, (1,))
        return spaces.Dict({"time": time, "action_mask": spaces.Box(0, 1, (6,), jnp.bool_)})


class DictCounting(Counting):
    """Counting with a dict of two dtypes as observation."""

    def get_obs(self, state: ProbeState, params: Any = None, key: Any = None) -> dict[str, Array]:
        return {"cue": state.cue[None], "time": jnp.full((2, 2), state.time, jnp.uint8)}


def _kind(state: ProbeState) -> Array:
    return jnp.floor(state.cue * 3.0).astype(jnp.int32)


class Lever(Probe):
    """Episodes of five steps; action 1 is rewarded. The cue is random, so evaluations depend on their keys."""

    length = NO_LIMIT
    limit = 5

    def cue(self, key):
        return jax.random.normal(key)

    def reward(self, state, action):
        return jnp.where(action == 1, 1.0, 0.0) + 0.01 * state.cue
