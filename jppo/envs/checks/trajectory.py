"""Random actions, and the recorded steps of environments."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jppo.envs.spaces import ActionSpec, PyTree

_BOUND_PROBABILITY = 0.125  # probability that a component of an action is a bound
COUNTERS = frozenset(
    (
        *("time", "t", "step", "steps", "num_steps", "step_count", "step_counter", "current_step", "elapsed_steps"),
        *("timestep", "timesteps", "episode_step", "episode_length", "frame", "frame_number"),
    )
)


class Trace(NamedTuple):
    """T steps of N environments, in NumPy arrays; F numbers of each observation are recorded.

    With several agents, N counts agents; those of an environment are next to each other.
    """

    obs: np.ndarray  # [T+1, N, F] f32, input of a policy; after the end of an episode, the first of the next episode
    digest: np.ndarray  # [T+1, N] u32, checksum of the whole observation
    final: np.ndarray  # [T, N, F] f32, true next observation
    reward: np.ndarray  # [T, N]
    terminated: np.ndarray  # [T, N] bool
    truncated: np.ndarray  # [T, N] bool
    resets: np.ndarray  # [T, N] i32, number of times that step called reset
    active: np.ndarray  # [T+1, N] bool, false for agents that do not take part in the next step
    counters: dict[str, np.ndarray]  # [T+1, N], state variables that may count the steps of an episode

    def of_agent(self, i: int, num_agents: int) -> "Trace":
        """Returns the trace of agent i of each environment."""
        return Trace(*jax.tree.map(lambda x: x[:, i::num_agents], tuple(self)))

    @property
    def done(self) -> np.ndarray:
        """[T, N] bool, whether an episode ended or an agent did not take part."""
        return self.terminated | self.truncated

    @property
    def ends(self) -> np.ndarray:
        """[T, N] bool, whether an episode ended."""
        return self.done & self.active[:-1]

    @property
    def begins(self) -> np.ndarray:
        """[T, N] bool, whether the next step is the first of an episode of this row."""
        return self.done & self.active[1:]


class Starts(NamedTuple):
    """Observations of R resets."""

    obs: np.ndarray  # [R, F] f32, each with another seed
    digest: np.ndarray  # [R] u32
    following: np.ndarray  # [R] u32, of resets without a seed in one environment; [0] if there were none

    def of_agent(self, i: int, num_agents: int) -> "Starts":
        """Returns the starts of agent i of each environment."""
        return self._replace(obs=self.obs[i::num_agents], digest=self.digest[i::num_agents])


class TraceStep(NamedTuple):
    """One step, with the fields of a Trace; leaves [...] for one environment and [N, ...] for N."""

    obs: np.ndarray
    digest: np.ndarray
    final: np.ndarray
    reward: np.ndarray | float
    terminated: np.ndarray | bool
    truncated: np.ndarray | bool
    resets: np.ndarray | int
    active: np.ndarray | bool
    counters: dict[str, float]


def stack_trace(
    obs: np.ndarray, digest: np.ndarray, active: np.ndarray, counters: dict[str, float], steps: list[TraceStep]
) -> Trace:
    """Returns the trace of a reset and the following steps. Counters that are missing in some steps are removed."""
    names = set(counters).intersection(*(step.counters for step in steps))
    series = {name: [counters[name], *(step.counters[name] for step in steps)] for name in names}
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *(step._replace(counters={}) for step in steps))
    return Trace(**stacked._asdict())._replace(
        obs=np.concatenate([obs[None], stacked.obs]),
        digest=np.concatenate([np.asarray(digest)[None], stacked.digest]),
        active=np.concatenate([active[None], stacked.active]),
        counters={name: np.array(values, np.float64) for name, values in series.items()},
    )


def draw_actions(action_spec: PyTree, seed: int, num_steps: int, num_envs: int, num_agents: int = 1) -> PyTree:
    """Returns random actions, leaves [T, N*M, *shape]; the first `num_alike` environments get the same ones.

    Those of the M agents of an environment are next to each other.
    """
    specs, structure = jax.tree.flatten(action_spec)
    leaves = []
    for number, spec in enumerate(specs):
        agents = [_draw(spec, seed + number + 1000 * i, num_steps, num_envs) for i in range(num_agents)]
        leaves.append(np.stack(agents, axis=2).reshape(num_steps, -1, *spec.shape))
    return jax.tree.unflatten(structure, leaves)


def actions_at(actions: PyTree, *index: Any) -> PyTree:
    """Returns leaf[index] of each leaf of the actions."""
    return jax.tree.map(lambda leaf: leaf[index], actions)


def num_steps_of(actions: PyTree) -> int:
    """Returns the number of steps T of actions [T, ...]."""
    return len(jax.tree.leaves(actions)[0])


def _draw(spec: ActionSpec, seed: int, num_steps: int, num_envs: int) -> np.ndarray:
    """Returns actions [T, N, *shape]; the first `num_alike` environments get the same ones.

    Real numbers are uniform between their bounds or one of them, or normal if they have no bounds.
    """
    rng = np.random.default_rng(seed)
    size = (num_steps, num_envs)
    if spec.num_actions:
        action = rng.integers(spec.num_actions, size=size) + spec.start
    elif spec.nvec:
        drawn = rng.integers(spec.nvec, size=(*size, spec.size)) + np.asarray(spec.start)
        action = drawn.reshape(*size, *spec.shape)
    else:
        low, high = (np.asarray(bound, np.float64).reshape(spec.shape) for bound in (spec.low, spec.high))
        bounded = np.isfinite(high - low)
        unit = rng.uniform(size=(*size, *spec.shape))
        unit = np.where(rng.uniform(size=unit.shape) < _BOUND_PROBABILITY, np.round(unit), unit)
        scaled = np.where(bounded, low, 0) + unit * np.where(bounded, high - low, 0)
        action = np.clip(np.where(bounded, scaled, rng.normal(size=unit.shape)), low, high)
    action[:, : num_alike(num_envs)] = action[:, :1]
    return action.astype(spec.dtype)


def num_alike(num_envs: int) -> int:
    """Returns the number of environments that get the same actions: half of them, but at least two."""
    return min(num_envs, max(2, num_envs // 2))
