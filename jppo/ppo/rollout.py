"""Rollouts on the device: a scan over steps of vmapped environments."""

import jax
import jax.numpy as jnp

from jppo.envs.base import Environment
from jppo.ppo.normalization import moments_of
from jppo.ppo.policy import Policy, act
from jppo.ppo.types import Array, CollectState, Episode, EpisodeStats, PolicyState, PyTree, Rollout, Transition


def init_collect(env: Environment, key: Array, env_index: Array) -> CollectState:
    """Resets the environments.

    Args:
      key: of the whole run.
      env_index: [N] i32, global numbers of these environments; each draws from a stream of its own.
    """
    reset_keys, stream_keys = env_keys(key, env_index)
    obs, env_state = jax.vmap(env.reset)(reset_keys)
    episode = Episode.beginning(len(env_index))
    return CollectState(env_state=env_state, obs=obs, key=stream_keys, episode=episode)


def env_keys(key: Array, env_index: Array) -> tuple[Array, Array]:
    """A key for the first reset and a key stream, [N] each, of the environments with these global numbers."""
    keys = _split(jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, env_index), 2)
    return keys[0], keys[1]


def rollout_keys(streams: Array, num_steps: int) -> tuple[Array, Array, Array]:
    """The streams [N] after a rollout, and its keys for actions and for the environments' own draws, [T, N] each."""
    following, rollout = _split(streams, 2)
    keys = jnp.moveaxis(jax.vmap(lambda key: jax.random.split(key, (num_steps, 2)))(rollout), 0, 1)
    return following, keys[:, :, 0], keys[:, :, 1]


def episode_stats(episodes: Episode, done: Array) -> EpisodeStats:
    """Statistics of a rollout from where every episode stood after each step; all leaves [T, N]."""
    return EpisodeStats(
        returns=moments_of(episodes.returns, done),
        lengths=moments_of(episodes.lengths, done),
        discounted=moments_of(episodes.discounted),
    )


def collect(
    env: Environment,
    policy: Policy,
    num_steps: int,
    policy_state: PolicyState,
    state: CollectState,
    gamma: Array | float,
) -> tuple[CollectState, Rollout, EpisodeStats]:
    """Steps N environments `num_steps` times with a fixed policy.

    Truncation costs one critic pass over the final observations, and only at steps where some episode was truncated
    (under `vmap`, where a condition becomes a selection, at every step)
    (docs/performance.md compares the alternatives).

    Args:
      policy_state: held fixed for the whole rollout.
      gamma: for the discounted returns that scale rewards.

    Returns:
      the new state, the rollout [T, N, ...], and its episode statistics.
    """
    next_key, action_keys, envs_keys = rollout_keys(state.key, num_steps)

    def step(state: CollectState, keys: tuple[Array, Array]) -> tuple[CollectState, tuple[Transition, Episode]]:
        action_key, env_key = keys
        chosen = act(policy, policy_state, state.obs, action_key)
        after = jax.vmap(env.step)(env_key, state.env_state, chosen.env_action)
        cut = jnp.logical_and(after.truncated, jnp.logical_not(after.terminated))
        final_value = _values_where(cut, policy, policy_state, after.final_obs)
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

    state, (rollout, episodes) = jax.lax.scan(step, state.replace(key=next_key), (action_keys, envs_keys))
    last_value = policy.apply(policy_state, state.obs)[1]
    following = jnp.concatenate([rollout.value[1:], last_value[None]])
    rollout = rollout.replace(next_value=jnp.where(rollout.done, rollout.next_value, following))
    return state, rollout, episode_stats(episodes, rollout.done)


def _values_where(needed: Array, policy: Policy, policy_state: PolicyState, obs: PyTree) -> Array:
    """[N] f32: V(obs) where needed, 0 elsewhere; no work when nothing is needed, unless under `vmap`."""

    def evaluate(obs: PyTree) -> Array:
        return jnp.where(needed, policy.apply(policy_state, obs)[1], 0.0)

    def skip(obs: PyTree) -> Array:
        return jnp.zeros(needed.shape)

    return jax.lax.cond(needed.any(), evaluate, skip, obs)


def _split(keys: Array, num: int) -> Array:
    """[num, N] keys from [N] keys."""
    return jnp.moveaxis(jax.vmap(lambda key: jax.random.split(key, num))(keys), 0, 1)
