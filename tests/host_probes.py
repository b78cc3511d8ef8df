"""Gymnasium environments with known observations and rewards, which other processes can import."""

import collections

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from jppo.actors import env_runner


class Counting(gymnasium.Env):
    """Its scaled observations [seed, episode, time] identify each step, so tests know the true successor.

    An episode has 2 to 4 steps, depending on the seed. seed % 4 selects its end: 0 truncated, 1 terminated, 2 both,
    3 truncated and terminated alternately. The reward is the number of the step, from 0, plus half the action.
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
    """Returns the same array at each step and overwrites it."""

    def see(self):
        self.shown = getattr(self, "shown", np.zeros(3))
        self.shown[:] = super().see()
        return self.shown


class Chatty(Counting):
    """Its info has other names, types and shapes at each step and for each seed."""

    def info(self):
        return {
            "path": np.zeros(self.time + self.seed % 5),
            "odd" if self.time % 2 else "even": [str(self.time)] * self.time,
        }


class Listing(Counting):
    """Returns observations as lists instead of arrays."""

    def see(self):
        return super().see().tolist()


class Parts(Counting):
    """Has a Dict of observations in unsorted order, with a Tuple, and discrete spaces that do not start at 0."""

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
    """Has bounded continuous actions."""

    action_space = spaces.Box(np.array([-2.0, 0.5]), np.array([2.0, 3.0]), dtype=np.float64)


class Compound(Counting):
    """Has nested actions, and observations of integers and a scalar. `step` raises for actions outside the space."""

    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (2, 2), np.uint8),
        numbers=spaces.MultiDiscrete([9, 5], start=[-1, 0]),
        bits=spaces.MultiBinary(2),
        clock=spaces.Box(0.0, 99.0, ()),
    )
    action_space = spaces.Dict(
        turn=spaces.Discrete(3, start=4),
        arm=spaces.Tuple([spaces.Box(-2.0, 1.0, (2,)), spaces.MultiDiscrete([[2, 3], [4, 1]], start=[[1, 0], [0, 7]])]),
        keys=spaces.MultiBinary(3),
    )

    def see(self):
        return {
            "numbers": np.array([self.time - 1, self.time], np.int64),
            "image": np.full((2, 2), self.time, np.uint8),
            "bits": np.array([self.time % 2, 1], np.int8),
            "clock": np.float32(self.time),
        }

    def step(self, action):
        assert self.action_space.contains(action), action
        self.action_space, space = spaces.Discrete(2), self.action_space
        try:
            return super().step(np.int64(action["keys"][0]))
        finally:
            self.action_space = space


class Failing(Counting):
    """Raises in its second episode."""

    def step(self, action):
        if self.episode == 1:
            raise ArithmeticError("the simulator broke")
        return super().step(action)


class NaNReward(Counting):
    """Never ends. The reward is 1, but NaN in step 20."""

    def step(self, action):
        self.time += 1
        return self.see(), np.nan if self.time == 20 else 1.0, False, False, {}


def same_step(num_envs):
    """Returns a vector of Counting with SAME_STEP resets."""
    return SyncVectorEnv([Counting] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def disabled(num_envs):
    """Returns a vector of Counting without automatic resets."""
    return SyncVectorEnv([Counting] * num_envs, copy=False, autoreset_mode=AutoresetMode.DISABLED)


def disabled_parts(num_envs):
    """Returns a vector of Parts without automatic resets."""
    return SyncVectorEnv([Parts] * num_envs, autoreset_mode=AutoresetMode.DISABLED)


def next_step(num_envs):
    """Returns a vector of Counting with NEXT_STEP resets, Gymnasium's default."""
    return SyncVectorEnv([Counting] * num_envs)


def two_whatever(num_envs):
    """Returns two environments instead of num_envs."""
    return same_step(2)


INSTANCE = Counting()


def share_programs(patch):
    """Makes runners with equal programs share the compiled programs."""
    compiled, compile_programs = {}, env_runner._compile

    def once(spec, num_envs):
        key = (spec.env.name, spec.network, spec.action_spec, spec.num_steps, str(spec.policy_shapes), num_envs)
        if key not in compiled:
            compiled[key] = compile_programs(spec, num_envs)
        return compiled[key]

    patch.setattr(env_runner, "_compile", once)


class Guessing(gymnasium.Env):
    """Episodes of one step with equal first observations. The reward is the action."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), float(action), True, False, {}


class InfoMasked(Counting):
    """Has a mask in the info that marks action (time + seed) % 4 only. `step` raises for other actions."""

    action_space = spaces.Discrete(4, start=1)

    def info(self):
        return {"action_mask": np.eye(4, dtype=np.int8)[(self.time + self.seed) % 4]}

    def step(self, action):
        assert action == 1 + (self.time + self.seed) % 4, "illegal action"
        obs, _, terminated, truncated, info = super().step(action)
        return obs, 1.0, terminated, truncated, info


class MaskedVector(VectorEnv):
    """n environments with random masks and 50 steps per episode. An illegal action ends it with the reward -1."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012
    single_observation_space = spaces.Dict(x=spaces.Box(0.0, 1.0, (2,)), action_mask=spaces.MultiBinary(8))
    single_action_space = spaces.Discrete(8)
    illegal, steps = 0, 0  # of all instances in this process

    def __init__(self, num_envs):
        self.num_envs = num_envs

    def reset(self, *, seed=None, options=None):
        if options is None:
            self.rng, self.time = np.random.default_rng(seed), np.zeros(self.num_envs, int)
        else:
            self.time[options["reset_mask"]] = 0
        return self.see(), {}

    def see(self):
        draws = self.rng.random((self.num_envs, 10), np.float32)
        self.legal = draws[:, 2:] < 0.3
        self.legal[np.arange(self.num_envs), draws[:, 2:].argmax(axis=1)] = True
        return {"x": draws[:, :2], "action_mask": self.legal.astype(np.int8)}

    def step(self, actions):
        legal = self.legal[np.arange(self.num_envs), actions]
        MaskedVector.illegal += int((~legal).sum())
        MaskedVector.steps += self.num_envs
        self.time += 1
        return self.see(), np.where(legal, 1.0, -1.0), ~legal, self.time >= 50, {}


def masked_vector(num_envs):
    return MaskedVector(num_envs)
