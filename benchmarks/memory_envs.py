"""Environments that need a memory: CartPole without velocities and a T-maze, both also for Gymnasium."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnasium import spaces as host_spaces
from gymnax.environments import environment, spaces
from gymnax.environments.classic_control import cartpole

CORRIDOR = 20
AHEAD, LEFT, RIGHT = range(3)
TIME_LIMIT = 3 * CORRIDOR


class HiddenVelocities(cartpole.CartPole):
    """CartPole-v1. The observation is the position and the angle, [2] f32."""

    def get_obs(self, state, params=None, key=None):
        return jnp.stack([state.x, state.theta])

    def observation_space(self, params):
        return spaces.Box(-jnp.inf, jnp.inf, (2,))


class HostHiddenVelocities(gymnasium.ObservationWrapper):
    """Gymnasium's CartPole-v1. The observation is the position and the angle, [2] f32."""

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.observation_space = host_spaces.Box(-np.inf, np.inf, (2,))

    def observation(self, observation):
        return observation[[0, 2]]


@struct.dataclass
class MazeState:
    """Cue (-1 for left, 1 for right), position in the corridor, and number of steps."""

    cue: jax.Array
    position: jax.Array
    time: jax.Array


class TMaze(environment.Environment):
    """A corridor of 20 steps with a junction at its end (Bakker 2002, "Reinforcement learning with long short-term
    memory"). The first observation shows the side of the goal.

    Observation [cue, at_junction], f32; the cue is 0 after the first step. The actions are ahead, left and right. A
    turn at the junction ends the episode with the reward 1 or -1. Any other move against a wall costs 0.1. Without
    memory, the best expected return is 0.
    """

    @property
    def default_params(self):
        return environment.EnvParams(max_steps_in_episode=TIME_LIMIT)

    def reset_env(self, key, params):
        start = jnp.zeros((), jnp.int32)
        state = MazeState(cue=jax.random.rademacher(key, (), jnp.float32), position=start, time=start)
        return self.get_obs(state), state

    def step_env(self, key, state, action, params):
        junction = state.position == CORRIDOR
        turned = junction & (action != AHEAD)
        right = (action == RIGHT) == (state.cue > 0.0)
        moves = ~junction & (action == AHEAD)
        reward = jnp.where(turned, jnp.where(right, 1.0, -1.0), jnp.where(moves, 0.0, -0.1))
        state = state.replace(position=state.position + moves.astype(jnp.int32), time=state.time + 1)
        return self.get_obs(state), state, reward, turned, {}

    def get_obs(self, state, params=None, key=None):
        cue = jnp.where(state.time == 0, state.cue, 0.0)
        return jnp.stack([cue, (state.position == CORRIDOR).astype(jnp.float32)])

    def action_space(self, params=None):
        return spaces.Discrete(3)

    def observation_space(self, params=None):
        return spaces.Box(-1.0, 1.0, (2,))


class HostTMaze(gymnasium.Env):
    """`TMaze` for Gymnasium."""

    observation_space = host_spaces.Box(-1.0, 1.0, (2,))
    action_space = host_spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._cue, self._position, self._time = float(self.np_random.choice([-1, 1])), 0, 0
        return self._observe(), {}

    def step(self, action):
        junction, ahead = self._position == CORRIDOR, action == AHEAD
        turned, moves = junction and not ahead, ahead and not junction
        reward = 0.0 if moves else -0.1
        if turned:
            reward = 1.0 if (action == RIGHT) == (self._cue > 0.0) else -1.0
        self._position, self._time = self._position + moves, self._time + 1
        return self._observe(), reward, turned, self._time >= TIME_LIMIT, {}

    def _observe(self):
        cue = 0.0 if self._time else self._cue
        return np.array([cue, self._position == CORRIDOR], np.float32)
