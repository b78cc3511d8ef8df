"""Rollouts on the device: a scan over the steps of vmapped environments."""

import jax
import jax.numpy as jnp

from jppo.envs.base import Environment
from jppo.ppo.normalization import moments_of
from jppo.ppo.policy import Policy, act
from jppo.ppo.types import Array, CollectState, Episode, EpisodeStats, PolicyState, PyTree, Rollout, Transition


def init_collect(env: Environment, key: Array, env_index: Array) -> CollectState:
    """Resets N environments.

    Args:
      key: the run's key.
      env_index: [N] i32, global numbers of these environments; each draws from its own stream.
    """
    reset_keys, stream_keys = env_keys(key, env_index)
    obs, env_state = jax.vmap(env.reset)(reset_keys)
    episode = Episode.beginning(len(env_index))
    return CollectState(env_state=env_state, obs=obs, key=stream_keys, episode=episode)


def env_keys(key: Array, env_index: Array) -> tuple[Array, Array]:
    """Returns a key for the first reset and a key stream, [N] each, for the environments with these global numbers."""
    keys = _split(jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, env_index), 2)
    return keys[0], keys[1]


def rollout_keys(streams: Array, num_steps: int) -> tuple[Array, Array, Array]:
    """Returns the streams [N] after a rollout, and its keys for actions and for environment steps, [T, N] each."""
    next_streams, rollout_streams = _split(streams, 2)
    keys = jnp.moveaxis(jax.vmap(lambda key: jax.random.split(key, (num_steps, 2)))(rollout_streams), 0, 1)
    return next_streams, keys[:, :, 0], keys[:, :, 1]


def collect(
    env: Environment,
    policy: Policy,
    num_steps: int,
    policy_state: PolicyState,
    state: CollectState,
    gamma: Array | float,
) -> tuple[CollectState, Rollout, EpisodeStats]:
    """Steps N environments `num_steps` times with a fixed policy.

    Truncation costs one pass of the network over the final observations, and only at steps at which some episode was
    truncated (under `vmap`, where a condition becomes a selection, at every step).

    Args:
      policy_state: constant during the rollout.
      gamma: discount of the returns that scale rewards.

    Returns:
      the new state, the rollout [T, N, ...], and its episode statistics.
    """
    next_streams, action_keys, step_keys = rollout_keys(state.key, num_steps)

    def step(state: CollectState, keys: tuple[Array, Array]) -> tuple[CollectState, tuple[Transition, Episode]]:
        action_key, step_key = keys
        chosen = act(policy, policy_state, state.obs, action_key)
        after = jax.vmap(env.step)(step_key, state.env_state, chosen.env_action)
        needs_value = jnp.logical_and(after.truncated, jnp.logical_not(after.terminated))
        final_value = _values_where(needs_value, policy, policy_state, after.final_obs)
        transition = Transition(
            obs=state.obs,
            action=chosen.action,
            log_prob=chosen.log_prob,
            value=chosen.value,
            next_value=final_value,
            reward=after.reward,
            terminated=after.terminated,
            truncated=after.truncated,
        )
        episode = state.episode.after(after.reward, gamma)
        restarted = episode.restarted(transition.done)
        state = CollectState(env_state=after.state, obs=after.obs, key=state.key, episode=restarted)
        return state, (transition, episode)

    state, (rollout, episodes) = jax.lax.scan(step, state.replace(key=next_streams), (action_keys, step_keys))
    last_value = policy.apply(policy_state, state.obs)[1]
    next_value = successor_values(rollout.value, last_value, rollout.next_value, rollout.done)
    return state, rollout.replace(next_value=next_value), episode_stats(episodes, rollout.done)


def successor_values(value: Array, last_value: Array, final_value: Array, done: Array) -> Array:
    """Returns V of each step's true successor, [T, N] f32: V(s_{t+1}), or the final observation's value where done.

    Args:
      value: [T, N] f32, V(s_t).
      last_value: [N] f32, V of the observation after the last step.
      final_value: [T, N] f32, V of final observations where an episode was truncated, 0 where it terminated.
      done: [T, N] bool.
    """
    return jnp.where(done, final_value, jnp.concatenate([value[1:], last_value[None]]))


def episode_stats(episodes: Episode, done: Array) -> EpisodeStats:
    """Returns the episode statistics of a rollout.

    Args:
      episodes: progress after each step, leaves [T, N].
      done: [T, N] bool.
    """
    return EpisodeStats(
        returns=moments_of(episodes.returns, done),
        lengths=moments_of(episodes.lengths, done),
        discounted=moments_of(episodes.discounted),
    )


def _values_where(needed: Array, policy: Policy, policy_state: PolicyState, obs: PyTree) -> Array:
    """Returns V(obs) where needed and 0 elsewhere, [N] f32; runs the network only if some value is needed."""

    def evaluate(obs: PyTree) -> Array:
        return jnp.where(needed, policy.apply(policy_state, obs)[1], 0.0)

    def skip(obs: PyTree) -> Array:
        return jnp.zeros(needed.shape)

    return jax.lax.cond(needed.any(), evaluate, skip, obs)


def _split(keys: Array, num: int) -> Array:
    """Returns keys [num, N] split from keys [N]."""
    return jnp.moveaxis(jax.vmap(lambda key: jax.random.split(key, num))(keys), 0, 1)
