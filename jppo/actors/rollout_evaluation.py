"""Evaluates a rollout that a runner has recorded: log-probabilities, values and episode statistics."""

from typing import Any

import jax

from jppo.envs.base import merge_dims
from jppo.envs.spaces import Array, PyTree
from jppo.ppo.policy import Policy, episode_starts
from jppo.ppo.rollout import episode_stats, successor_values
from jppo.ppo.types import Episode, EpisodeStats, PolicyState

_EVALUATION_ROWS = 4096  # samples per pass of the network after a rollout; limits the memory of image networks


def evaluate_rollout(
    policy: Policy,
    policy_state: PolicyState,
    steps: Any,
    last_obs: PyTree,
    last_carry: PyTree,
    final_value: Array,
    start: Episode,
    gamma: Array,
) -> tuple[dict[str, Array], EpisodeStats, Episode]:
    """Evaluates a recorded rollout in one compiled call, which is faster than one call per step.

    Args:
      steps: a Rollout without log_prob, value and next_value.
      last_obs, last_carry: [n, ...], observations and carry after the last step.
      final_value: [T, n] f32, V of final observations where an episode was truncated, 0 elsewhere.
      start: the episodes before the first step.

    Returns:
      log_prob, value and next_value, [T, n] each; the episode statistics; the episodes after the last step.
    """

    shape = steps.reward.shape
    if policy.is_recurrent:
        carry, reset = jax.tree.map(lambda x: x[0], steps.carry), episode_starts(steps.done)
        distribution, value, _ = policy.unroll(policy_state, steps.obs, carry, reset)
        log_prob = distribution.log_prob(merge_dims(steps.action))
        log_prob, value = log_prob.reshape(shape), value.reshape(shape)
    else:
        log_prob, value = _evaluate_in_blocks(policy, policy_state, steps)
    last_value = policy.step(policy_state, last_obs, last_carry)[1]
    next_value = successor_values(value, last_value, final_value, steps.done)

    def step(episode: Episode, outcome: tuple[Array, Array]) -> tuple[Episode, Episode]:
        after = episode.after(outcome[0], gamma)
        return after.restarted(outcome[1]), after

    end, episodes = jax.lax.scan(step, start, (steps.reward, steps.done))
    values = {"log_prob": log_prob, "value": value, "next_value": next_value}
    return values, episode_stats(episodes, steps.done, steps.active), end


def _evaluate_in_blocks(policy: Policy, policy_state: PolicyState, steps: Any) -> tuple[Array, Array]:
    """Returns log_prob and value, [T, n] each, of a feed-forward network."""

    def evaluate(step: tuple[PyTree, PyTree]) -> tuple[Array, Array]:
        distribution, value, _ = policy.step(policy_state, step[0])
        return distribution.log_prob(step[1]), value

    rows = max(1, _EVALUATION_ROWS // steps.reward.shape[1])
    return jax.lax.map(evaluate, (steps.obs, steps.action), batch_size=min(rows, len(steps.reward)))
