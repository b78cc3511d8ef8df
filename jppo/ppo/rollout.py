"""Rollouts on the device: a scan over the steps of vmapped environments."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jppo.envs.base import Environment, merge_dims, reset_rows, step_rows
from jppo.envs.spaces import Array, PyTree
from jppo.ppo.normalization import moments_of, where_active
from jppo.ppo.policy import Policy, act, reset_carry, select_rows
from jppo.ppo.types import CollectState, Episode, EpisodeStats, PolicyState, Rollout, Transition, derive_key


def init_collect(env: Environment, key: Array, env_index: Array, carry: PyTree = ()) -> CollectState:
    """Resets N environments, or N/M environments with M agents each.

    Args:
      key: the run's key.
      env_index: [N] i32, global numbers of these environments (or agents); each draws from its own stream.
      carry: initial carry of a recurrent network, leaves [N, ...].
    """
    reset_keys, stream_keys = env_keys(key, env_index)
    obs, env_state = reset_rows(env, reset_keys)
    episode = Episode.beginning(len(env_index))
    active = jnp.ones(len(env_index), bool) if env.num_agents > 1 else ()
    return CollectState(env_state=env_state, obs=obs, key=stream_keys, episode=episode, carry=carry, active=active)


def stagger(
    env: Environment,
    policy: Policy,
    policy_state: PolicyState,
    state: CollectState,
    gamma: Array | float,
    max_age: int,
    ages: Array,
) -> CollectState:
    """Steps environment i `ages[i]` times, so that episodes of the same length do not end at the same step.

    Bharthulwar et al. (2025), "Staggered environment resets improve massively parallel on-policy reinforcement
    learning". The transitions are discarded, but count in the returns and lengths of the first episodes.

    Args:
      state: [N] environments, just reset.
      max_age: upper limit of the ages.
      ages: [N] i32.
    """

    def step(t: Array, state: CollectState) -> Any:
        after = collect(env, policy, 1, policy_state, state, gamma)[0]
        return select_rows(t < ages, after, state)

    return jax.lax.fori_loop(0, max_age, step, state)


def env_keys(key: Array, env_index: Array) -> tuple[Array, Array]:
    """Returns a key for the first reset and a key stream, [N] each, for the environments with these global numbers."""
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, env_index)
    return _derive_each(keys, "reset"), _derive_each(keys, "stream")


def rollout_keys(streams: Array, num_steps: int) -> tuple[Array, Array, Array]:
    """Returns the streams [N] after a rollout, and its keys for actions and for environment steps, [T, N] each."""
    rollout_streams = _derive_each(streams, "rollout")
    keys = jnp.moveaxis(jax.vmap(lambda key: jax.random.split(key, (num_steps, 2)))(rollout_streams), 0, 1)
    return _derive_each(streams, "next rollout"), keys[:, :, 0], keys[:, :, 1]


def collect(
    env: Environment,
    policy: Policy,
    num_steps: int,
    policy_state: PolicyState,
    state: CollectState,
    gamma: Array | float,
    *,
    sequence_length: int | None = None,
    keep_next_obs: bool = False,
) -> tuple[CollectState, Rollout, EpisodeStats]:
    """Steps N environments `num_steps` times with a fixed policy.

    Truncation costs one pass of the network over the final observations, and only at steps at which some episode was
    truncated (under `vmap`, where a condition becomes a selection, at every step). A recurrent network evaluates a
    final observation with the carry after the episode's last step, and starts the next episode with the initial carry.

    Args:
      policy_state: constant during the rollout.
      gamma: discount of the returns that scale rewards.
      sequence_length: steps between two stored carries of a recurrent network; None for one at the start.
      keep_next_obs: store the true successor observations, too.

    Returns:
      the new state, the rollout [T, N, ...], and its episode statistics.
    """
    next_streams, *keys = rollout_keys(state.key, num_steps)

    def step(state: CollectState, keys: list[Array]) -> tuple[CollectState, tuple[Transition, Episode]]:
        action_key, step_key = keys
        chosen = act(policy, policy_state, state.obs, action_key, state.carry)
        after = step_rows(env, step_key, state.env_state, chosen.env_action)
        chex.assert_equal_shape([after.reward, after.terminated, after.truncated, chosen.value])
        needs_value = jnp.logical_and(after.truncated, jnp.logical_not(after.terminated))
        final_value = _values_where(needs_value, policy, policy_state, after.final_obs, chosen.carry)
        transition = Transition(
            obs=state.obs,
            action=chosen.action,
            log_prob=chosen.log_prob,
            value=chosen.value,
            next_value=final_value,
            reward=after.reward,
            terminated=after.terminated,
            truncated=after.truncated,
            next_obs=after.final_obs if keep_next_obs else (),
            active=state.active,
        )
        episode = state.episode.after(after.reward, gamma)
        state = CollectState(
            env_state=after.state,
            obs=after.obs,
            key=state.key,
            episode=episode.restarted(transition.done),
            carry=reset_carry(policy, chosen.carry, transition.done),
            active=after.active,
        )
        return state, (transition, episode)

    state = state.replace(key=next_streams)
    if policy.is_recurrent:
        state, (rollout, episodes) = _scan_sequences(step, state, keys, sequence_length or num_steps)
    else:
        state, (rollout, episodes) = jax.lax.scan(step, state, keys)
    last_value = policy.step(policy_state, state.obs, state.carry)[1]
    next_value = successor_values(rollout.value, last_value, rollout.next_value, rollout.done)
    return state, rollout.replace(next_value=next_value), episode_stats(episodes, rollout.done, rollout.active)


def _scan_sequences(
    step: Callable, state: CollectState, keys: PyTree, length: int
) -> tuple[CollectState, tuple[Transition, Episode]]:
    """Scans `step` over all steps and stores the carry before every `length`-th step in the rollout."""

    def sequence(state: CollectState, keys: PyTree) -> tuple[CollectState, tuple[Transition, Episode]]:
        end, (transitions, episodes) = jax.lax.scan(step, state, keys)
        return end, (transitions.replace(carry=state.carry), episodes)

    keys = jax.tree.map(lambda x: x.reshape(-1, length, *x.shape[1:]), keys)
    state, (rollout, episodes) = jax.lax.scan(sequence, state, keys)
    return state, (merge_dims(rollout.replace(carry=())).replace(carry=rollout.carry), merge_dims(episodes))


def successor_values(value: Array, last_value: Array, final_value: Array, done: Array) -> Array:
    """Returns V of each step's true successor, [T, N] f32: V(s_{t+1}), or the final observation's value where done.

    Args:
      value: [T, N] f32, V(s_t).
      last_value: [N] f32, V of the observation after the last step.
      final_value: [T, N] f32, V of final observations where an episode was truncated, 0 where it terminated.
      done: [T, N] bool.
    """
    return jnp.where(done, final_value, jnp.concatenate([value[1:], last_value[None]]))


def episode_stats(episodes: Episode, done: Array, active: PyTree = ()) -> EpisodeStats:
    """Returns the statistics of a rollout for the progress after each step, leaves [T, N]; see `Transition`."""
    where = where_active(active)
    ended = done if where is None else done & where
    return EpisodeStats(
        returns=moments_of(episodes.returns, ended),
        lengths=moments_of(episodes.lengths, ended),
        discounted=moments_of(episodes.discounted, where),
    )


def _values_where(needed: Array, policy: Policy, policy_state: PolicyState, obs: PyTree, carry: PyTree) -> Array:
    """Returns V(obs) where needed and 0 elsewhere, [N] f32; runs the network only if some value is needed."""

    def evaluate(obs: PyTree, carry: PyTree) -> Array:
        return jnp.where(needed, policy.step(policy_state, obs, carry)[1], 0.0)

    def skip(obs: PyTree, carry: PyTree) -> Array:
        return jnp.zeros(needed.shape)

    return jax.lax.cond(needed.any(), evaluate, skip, obs, carry)


def _derive_each(keys: Array, purpose: str) -> Array:
    """Returns a key [N] for one purpose of each key [N]."""
    return jax.vmap(lambda key: derive_key(key, purpose))(keys)
