"""The recorded steps of an environment, and the random actions for them."""

from typing import NamedTuple

import numpy as np

from jppo.envs.spaces import ActionSpec

_EXTREME = 0.125  # share of the actions that are at a bound
COUNTERS = frozenset(
    [
        *("time", "t", "step", "steps", "num_steps", "step_count", "step_counter", "current_step", "elapsed_steps"),
        *("timestep", "timesteps", "episode_step", "episode_length", "frame", "frame_number"),
    ]
)


class Trace(NamedTuple):
    """N environments, T steps each, with F numbers of each observation; NumPy throughout."""

    obs: np.ndarray  # [T+1, N, F] f32, what a policy would see: after the end of an episode that of the next
    digest: np.ndarray  # [T+1, N] u32, of the whole observation
    final: np.ndarray  # [T, N, F] f32, the true successor, as the environment says
    reward: np.ndarray  # [T, N]
    terminated: np.ndarray  # [T, N] bool
    truncated: np.ndarray  # [T, N] bool
    counters: dict[str, np.ndarray]  # [T+1, N], numbers of the state that may count the steps of an episode
    resets: np.ndarray  # [T, N] i32, calls of the environment's reset that it made itself, within the step

    @property
    def done(self) -> np.ndarray:
        """[T, N] bool: an episode ends."""
        return self.terminated | self.truncated


class Starts(NamedTuple):
    """R resets each way."""

    obs: np.ndarray  # [R, F] f32, each with a seed of its own
    digest: np.ndarray  # [R] u32
    following: np.ndarray  # [R] u32, of resets without a seed in one environment; [0] where there are none such


class RaisedError(Exception):
    """Something that the environment raised (its cause), and when."""


def draw_actions(spec: ActionSpec, seed: int, num_steps: int, num_envs: int) -> np.ndarray:
    """[T, N, *shape] actions; the first half of the environments, but at least two, get the same ones.

    Uniform between bounds and often at them, normal where there are none.
    """
    rng = np.random.default_rng(seed)
    size = (num_steps, num_envs)
    if spec.num_actions:
        action = rng.integers(spec.num_actions, size=size) + spec.start
    else:
        low, high = (np.asarray(bound, np.float64).reshape(spec.shape) for bound in (spec.low, spec.high))
        boxed = np.isfinite(high - low)
        unit = rng.uniform(size=(*size, *spec.shape))
        unit = np.where(rng.uniform(size=unit.shape) < _EXTREME, np.round(unit), unit)
        inside = np.where(boxed, low, 0) + unit * np.where(boxed, high - low, 0)
        action = np.clip(np.where(boxed, inside, rng.normal(size=unit.shape)), low, high)
    action[:, : alike(num_envs)] = action[:, :1]
    return action.astype(spec.dtype)


def alike(num_envs: int) -> int:
    """How many environments get the same actions."""
    return min(num_envs, max(2, num_envs // 2))
