"""Rollouts on the device: a scan over steps of vmapped environments."""

import jax
import jax.numpy as jnp

from jppo.envs.base import Environment
from jppo.networks import Policy
from jppo.spaces import to_env_action
from jppo.statistics import moments_of
from jppo.types import Array, CollectState, EpisodeStats, PolicyState, PyTree, Rollout, Transition


def init_collect(env: Environment, key: Array, env_index: Array) -> CollectState:
    """Resets the environments.

    Args:
      key: of the whole run.
      env_index: [N] i32, global numbers of these environments; each draws from a stream of its own.
    """
    env_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, env_index)
    reset_keys, stream_keys = _split(env_keys, 2)
    obs, env_state = jax.vmap(env.reset)(reset_keys)
    zeros = jnp.zeros(env_index.shape)
    return CollectState(
        env_state=env_state,
        obs=obs,
        key=stream_keys,
        episode_return=zeros,
        episode_length=zeros.astype(jnp.int32),
        discounted_return=zeros,
    )


def collect(
    env: Environment,
    policy: Policy,
    action_bounds: str,
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
      action_bounds: see PPOConfig.
      policy_state: held fixed for the whole rollout.
      gamma: for the discounted returns that scale rewards.

    Returns:
      the new state, the rollout [T, N, ...], and its episode statistics.
    """
    next_key, rollout_key = _split(state.key, 2)
    step_keys = jnp.moveaxis(jax.vmap(lambda key: jax.random.split(key, (num_steps, 2)))(rollout_key), 0, 1)

    def step(state: CollectState, keys: Array) -> tuple[CollectState, tuple[Transition, tuple[Array, Array, Array]]]:
        action_keys, env_keys = keys[:, 0], keys[:, 1]
        distribution, value = policy.apply(policy_state, state.obs)
        action = jax.vmap(lambda row, key: row.sample(seed=key))(distribution, action_keys)
        env_action = to_env_action(env.action_spec, action, action_bounds)
        after = jax.vmap(env.step)(env_keys, state.env_state, env_action)
        cut = jnp.logical_and(after.truncated, jnp.logical_not(after.terminated))
        final_value = _values_where(cut, policy, policy_state, after.final_obs)
        transition = Transition(
            obs=state.obs,
            action=action,
            log_prob=distribution.log_prob(action),
            value=value,
            next_value=final_value,
            reward=after.reward,
            terminated=after.terminated,
            truncated=after.truncated,
        )
        episode = (
            state.episode_return + after.reward,
            state.episode_length + 1,
            gamma * state.discounted_return + after.reward,
        )
        kept = jax.tree.map(lambda x: jnp.where(transition.done, jnp.zeros_like(x), x), episode)
        state = CollectState(
            env_state=after.state,
            obs=after.obs,
            key=state.key,
            episode_return=kept[0],
            episode_length=kept[1],
            discounted_return=kept[2],
        )
        return state, (transition, episode)

    state, (rollout, episodes) = jax.lax.scan(step, state.replace(key=next_key), step_keys)
    last_value = policy.apply(policy_state, state.obs)[1]
    following = jnp.concatenate([rollout.value[1:], last_value[None]])
    rollout = rollout.replace(next_value=jnp.where(rollout.done, rollout.next_value, following))
    stats = EpisodeStats(
        returns=moments_of(episodes[0], rollout.done),
        lengths=moments_of(episodes[1], rollout.done),
        discounted=moments_of(episodes[2]),
    )
    return state, rollout, stats


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
