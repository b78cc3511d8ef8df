"""The mean return at which the program of a run stops."""

import jax.numpy as jnp
from flax import struct

from jppo.config.ppo import PPOConfig
from jppo.envs.spaces import Array
from jppo.ppo.types import Metrics

RECENT_EPISODES = 100  # number of episodes of the recent mean return


class ReturnTarget(struct.PyTreeNode, kw_only=True):
    """The returns of the recent episodes, and the mean return at which training stops.

    The recent episodes are those of the last updates that together have at least `RECENT_EPISODES`, W below.
    """

    finite: Array  # [] bool, whether all updates so far were finite
    reached: Array  # [] bool
    value: Array  # [] f32, the return to reach
    counts: Array  # [W] f32, episodes of the last updates in which an episode ended, newest first; 0: no such update
    means: Array  # [W] f32, their mean returns
    total: Array  # [] f32, episodes so far

    @property
    def running(self) -> Array:
        """Whether to continue, [] bool."""
        return self.finite & ~self.reached

    def after(self, metrics: Metrics, config: PPOConfig) -> "ReturnTarget":
        """Returns the record after an update. It cannot reach the target before enough episodes have ended."""
        count, mean = metrics["episode/count"], metrics["episode/return_mean"]
        ended = count > 0.0
        counts = jnp.where(ended, jnp.roll(self.counts, 1).at[0].set(count), self.counts)
        means = jnp.where(ended, jnp.roll(self.means, 1).at[0].set(mean), self.means)
        weights = jnp.where(jnp.cumsum(counts) - counts < RECENT_EPISODES, counts, 0.0)
        total = self.total + count
        reached = (total >= count_needed_episodes(config)) & (jnp.sum(weights * means) >= self.value * jnp.sum(weights))
        return self.replace(finite=metrics["finite"], reached=reached, counts=counts, means=means, total=total)


def count_needed_episodes(config: PPOConfig) -> int:
    """Returns the number of episodes that must end before a mean return counts.

    The first episodes that end are shorter than the average, so this is at least one episode per environment.
    """
    return max(RECENT_EPISODES, config.num_envs)
