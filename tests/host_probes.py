"""Gymnasium environments for tests, at the top of a module so that other processes can import them; and what makes
their runners start sooner."""

import collections

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from jppo.actors import env_runner


class Counting(gymnasium.Env):
    """Observations [seed, episode, time], scaled, that name themselves, so a successor is known: time + 1/4.

    An episode takes 2 to 4 steps, by its seed. Kind seed % 4: 0 is truncated, 1 terminated, 2 both, 3 in turn. The
    reward is the number of the step, from 0, plus half the action.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}  # noqa: RUF012
    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.seed, self.episode, self.time = 0, -1, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.seed, self.episode = seed % 48, -1
        self.episode, self.time = self.episode + 1, 0
        return self.see(), self.info()

    def step(self, action):
        assert self.action_space.contains(action), action
        reward = self.time + 0.5 * float(np.sum(action))
        self.time += 1
        kind, over = self.seed % 4, self.time >= 2 + self.seed % 3
        kind = self.episode % 2 if kind == 3 else kind
        return self.see(), reward, over and kind in (1, 2), over and kind in (0, 2), self.info()

    def see(self):
        return np.array([self.seed / 48, self.episode / 8, self.time / 4], np.float64)

    def info(self):
        return {}

    def render(self):
        return np.full((64, 48, 3), 40 * self.time, np.uint8)


class Reusing(Counting):
    """Shows everything in one array, which it overwrites."""

    def see(self):
        self.shown = getattr(self, "shown", np.zeros(3))
        self.shown[:] = super().see()
        return self.shown


class Chatty(Counting):
    """Tells things of other shapes, types and names from step to step, and from seed to seed."""

    def info(self):
        return {
            "path": np.zeros(self.time + self.seed % 5),
            "odd" if self.time % 2 else "even": [str(self.time)] * self.time,
        }


class Listing(Counting):
    """Shows lists where its space has arrays."""

    def see(self):
        return super().see().tolist()


class Parts(Counting):
    """Shows a Dict, in another order than its keys', with a Tuple and values that do not count from 0."""

    observation_space = spaces.Dict(
        where=spaces.Box(0, np.inf, (1,), np.float64),
        picture=spaces.Box(0, 255, (2, 2), np.uint8),
        both=spaces.Tuple([spaces.Discrete(9, start=-1), spaces.MultiBinary(1)]),
        age=spaces.Box(0, np.inf, (1,), np.float64),
    )
    action_space = spaces.Discrete(3, start=4)

    def see(self):
        shown = collections.OrderedDict(where=np.array([self.seed / 48 + self.episode / 8]))
        shown["picture"] = np.full((2, 2), self.time, np.uint8)
        shown["both"] = (self.time - 1, np.array([self.time % 2], np.int8))
        shown["age"] = np.array([self.time / 4])
        return shown


class Continuous(Counting):
    """A box of actions, bounded."""

    action_space = spaces.Box(np.array([-2.0, 0.5]), np.array([2.0, 3.0]), dtype=np.float64)


class Failing(Counting):
    """Raises in its second episode."""

    def step(self, action):
        if self.episode == 1:
            raise ArithmeticError("the simulator broke")
        return super().step(action)


class NaNReward(Counting):
    """Never ends; every reward is 1, the one of step 20 NaN."""

    def step(self, action):
        self.time += 1
        return self.see(), np.nan if self.time == 20 else 1.0, False, False, {}


def same_step(num_envs):
    """A vector of Counting that resets in the step that ends an episode."""
    return SyncVectorEnv([Counting] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def disabled(num_envs):
    """A vector of Counting that resets what it is told to."""
    return SyncVectorEnv([Counting] * num_envs, copy=False, autoreset_mode=AutoresetMode.DISABLED)


def disabled_parts(num_envs):
    """A vector of Parts that resets what it is told to."""
    return SyncVectorEnv([Parts] * num_envs, autoreset_mode=AutoresetMode.DISABLED)


def next_step(num_envs):
    """A vector of Counting with Gymnasium's own default."""
    return SyncVectorEnv([Counting] * num_envs)


def two_whatever(num_envs):
    """A vector that is not as wide as it is asked to be."""
    return same_step(2)


INSTANCE = Counting()


def share_programs(patch):
    """Has runners with equal programs compile them once."""
    compiled, compile_programs = {}, env_runner._compile

    def once(spec, num_envs):
        what = (spec.env.name, spec.network, spec.action_spec, spec.num_steps, str(spec.policy_shapes), num_envs)
        if what not in compiled:
            compiled[what] = compile_programs(spec, num_envs)
        return compiled[what]

    patch.setattr(env_runner, "_compile", once)


class Guessing(gymnasium.Env):
    """Episodes of one step that all begin alike, so that no reset can be told from another."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), float(action), True, False, {}
