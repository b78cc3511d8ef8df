"""A correct Gymnasium environment, and variants of it with one fault each."""

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class Sound(gymnasium.Env):
    """A random walk with steps of 0.1 up or down plus noise; terminates beyond 0.5, is truncated after 25 steps."""

    observation_space = spaces.Box(-2.0, 2.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.begin()
        return self.see(), {}

    def begin(self):
        self.place, self.age = self.np_random.uniform(-0.05, 0.05), 0

    def step(self, action):
        self.place += 0.1 * (2 * int(np.sum(action) > 0) - 1) + self.noise()
        self.age += 1
        return self.see(), self.reward(), self.terminated(), self.age >= 25, {}

    def see(self):
        return np.array([self.place, 0.5 * self.place], np.float32)

    def noise(self):
        return self.np_random.normal(0.0, 0.01)

    def reward(self):
        return float(self.place)

    def terminated(self):
        return bool(abs(self.place) > 0.5)


class Raising(Sound):
    def reward(self):
        return 1 / (10 - self.age)


class Exiting(Sound):
    def reward(self):
        raise SystemExit(5)


class Unresettable(Sound):
    def reset(self, *, seed=None, options=None):
        raise ValueError("no observation")


class ObjectObs(Sound):
    def see(self):
        return np.array([None, None])


class RaggedObs(Sound):
    def see(self):
        return [[1.0], [1.0, 2.0]]


class Unclosable(Sound):
    def close(self):
        raise RuntimeError("still open")


class Duck:
    """Lacks `unwrapped`."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2), {}

    def step(self, action):
        return np.zeros(2), 0.0, False, False, {}

    def close(self):
        pass


class Unmakable(Sound):
    def __init__(self):
        raise RuntimeError("no licence")


class OldReset(Sound):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class NoSeed(Sound):
    def reset(self):
        return super().reset()


class FourValues(Sound):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated or truncated, info


class IntFlag(Sound):
    def terminated(self):
        return int(abs(self.place) > 0.5)


class ArrayReward(Sound):
    def reward(self):
        return np.array([self.place])


class NoEnv:
    pass


class OtherShape(Sound):
    """The shape changes within an episode."""

    def see(self):
        return super().see() if self.age < 3 else np.zeros(3, np.float32)


class OutOfBounds(Sound):
    observation_space = spaces.Box(-0.01, 0.01, (2,), np.float32)


class OtherDtype(Sound):
    def see(self):
        return super().see().astype(np.float64)


class LostDigits(Sound):
    """Returns floats for an integer space, but only after the reset."""

    observation_space = spaces.Box(-2, 2, (2,), np.int32)

    def see(self):
        return super().see() if self.age else np.zeros(2, np.int32)


class FifthCategory(Sound):
    observation_space = spaces.Discrete(4)

    def see(self):
        return min(4, round(abs(self.place) * 10) + 1)


class OneAction(Sound):
    action_space = spaces.Discrete(1)


class Unbounded(Sound):
    action_space = spaces.Box(-np.inf, np.inf, (1,))


class NaNReward(Sound):
    def reward(self):
        return np.nan if self.age == 7 else float(self.place)


class InfiniteObs(Sound):
    observation_space = spaces.Box(-np.inf, np.inf, (2,))

    def see(self):
        return np.array([self.place, np.inf if self.age == 7 else 0.0], np.float32)


class Unseeded(Sound):
    def noise(self):
        return np.random.default_rng().normal(0.0, 0.01)


class Leaking(Sound):
    """Keeps a state from earlier episodes that does not depend on the seed."""

    wear = 0.0

    def noise(self):
        self.wear += 1e-4
        return super().noise() + self.wear % 1e-2


class DrawnWhenMade(Sound):
    def __init__(self):
        self.drift = np.random.default_rng().uniform(-0.01, 0.01)

    def noise(self):
        return super().noise() + self.drift


class Certain(Sound):
    def begin(self):
        self.place, self.age = 0.0, 0

    def noise(self):
        return 0.0


class OneStart(Sound):
    """Uses seed 0 for resets without a seed."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=0 if seed is None else seed)


class TerminatedByTime(Sound):
    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        return obs, reward, self.age >= 10, False, info


class ResetsItself(Sound):
    """Resets itself in the last step of an episode."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return (self.reset()[0] if terminated or truncated else obs), reward, terminated, truncated, info


class FinalIsReset(Sound):
    """Returns the first observation of the next episode as the final one, without a call of reset."""

    def step(self, action):
        _, reward, terminated, truncated, info = super().step(action)
        if terminated or truncated:
            self.begin()
        return self.see(), reward, terminated, truncated, info

    def terminated(self):
        return abs(self.place) > 0.5


class HiddenReset(Sound):
    """Hides a termination by calling its reset."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        hidden = terminated and not truncated
        return (self.reset()[0] if hidden else obs), reward, False, truncated, info


class HiddenCount(Sound):
    """Hides a termination; a step counter shows it."""

    def begin(self):
        super().begin()
        self.step_count = 0

    def step(self, action):
        _, reward, terminated, truncated, info = super().step(action)
        self.step_count += 1
        if terminated:
            self.begin()
        return self.see(), reward, False, truncated, info


class HiddenJump(Sound):
    """Hides a termination; only the observations show it."""

    def step(self, action):
        _, reward, terminated, truncated, info = super().step(action)
        if terminated:
            self.place = self.np_random.uniform(-0.05, 0.05)
        return self.see(), reward, False, truncated, info


class CountedJump(HiddenJump):
    """Like HiddenJump, with a counter that is not reset."""

    steps = 0

    def step(self, action):
        self.steps += 1
        return super().step(action)


class Restarting(gymnasium.Wrapper):
    """Resets the wrapped environment without reporting the end of the episode."""

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        hidden = self.env.age == 7 and not terminated
        return (self.env.reset()[0] if hidden else obs), reward, terminated, truncated, info


def restarting():
    return Restarting(Sound())


ONE = Sound()


def the_same():
    return ONE


def vector(num_envs):
    return SyncVectorEnv([Sound] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def next_step(num_envs):
    return SyncVectorEnv([Sound] * num_envs)


class Forgetful(SyncVectorEnv):
    """Uses SAME_STEP but returns no final observations."""

    def step(self, actions):
        return *super().step(actions)[:4], {}


def forgetful(num_envs):
    return Forgetful([Sound] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def raising_vector(num_envs):
    return SyncVectorEnv([Raising] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def refuses_to_be_made():
    raise ValueError("not today")
