"""Scores of a fixed policy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jppo.devices.jit import jit
from jppo.envs.base import Environment
from jppo.envs.gymnasium import HostEnvironment
from jppo.ppo.policy import Policy, act
from jppo.ppo.types import Array, PolicyState, PyTree

_MAX_EPISODES = 1_000_000
_HOST_ENVS = 16  # that play at once


class Evaluation(NamedTuple):
    """One entry per episode, in NumPy."""

    returns: np.ndarray  # [E] f32, undiscounted
    lengths: np.ndarray  # [E] i32, steps
    finished: np.ndarray  # [E] bool; False where max_steps came first

    def summary(self) -> dict[str, Any]:
        """Mean, std, min and max of the returns, mean length, and how many episodes did not finish."""
        return {
            "episodes": len(self.returns),
            "return_mean": float(self.returns.mean()),
            "return_std": float(self.returns.std()),
            "return_min": float(self.returns.min()),
            "return_max": float(self.returns.max()),
            "length_mean": float(self.lengths.mean()),
            "unfinished": int((~self.finished).sum()),
        }


def evaluate(
    env: Environment | HostEnvironment,
    policy: Policy,
    state: PolicyState,
    *,
    num_episodes: int = 100,
    seed: int = 0,
    sampled: bool = False,
    max_steps: int = 100_000,
) -> Evaluation:
    """Plays `num_episodes` episodes, each from its own reset to its own end, so that short ones count no more than long
    ones: all side by side, or on the host a few.

    Args:
      sampled: draw actions instead of taking the most likely ones.
      max_steps: episodes longer than this are reported as unfinished. On the host, the environment whose episode it was
        then plays no more of its share, so that there may be fewer than num_episodes.
    """
    if not 1 <= num_episodes <= _MAX_EPISODES:
        raise ValueError(f"num_episodes = {num_episodes} must be from 1 to {_MAX_EPISODES:,}")
    if isinstance(env, HostEnvironment):
        return _evaluate_host(env, policy, state, num_episodes, seed, sampled, max_steps)

    def play(state: PolicyState, episode_keys: Array) -> tuple[Array, Array, Array]:
        def step(loop: _Loop) -> _Loop:
            keys = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, loop.step + 1), 2))(episode_keys)
            env_action = act(policy, state, loop.obs, keys[:, 0] if sampled else None).env_action
            after = jax.vmap(env.step)(keys[:, 1], loop.env_state, env_action)
            return _Loop(
                env_state=after.state,
                obs=after.obs,
                returns=loop.returns + jnp.where(loop.done, 0.0, after.reward),
                lengths=loop.lengths + jnp.where(loop.done, 0, 1),
                done=loop.done | after.terminated | after.truncated,
                step=loop.step + 1,
            )

        obs, env_state = jax.vmap(lambda key: env.reset(jax.random.fold_in(key, 0)))(episode_keys)
        zeros = jnp.zeros(num_episodes)
        start = _Loop(env_state, obs, zeros, zeros.astype(jnp.int32), zeros > 0.0, jnp.zeros((), jnp.int32))
        end = jax.lax.while_loop(lambda loop: ~loop.done.all() & (loop.step < max_steps), step, start)
        return end.returns, end.lengths, end.done

    episode_keys = jax.random.split(jax.random.key(seed), num_episodes)
    return Evaluation(*map(np.asarray, jit(play)(state, episode_keys)))


def _evaluate_host(
    env: HostEnvironment,
    policy: Policy,
    state: PolicyState,
    num_episodes: int,
    seed: int,
    sampled: bool,
    max_steps: int,
) -> Evaluation:
    """The same on the host: each of a few environments plays its share of the episodes, fixed beforehand, one after
    the other; after one that max_steps cut short, it plays no more."""

    def select_action(state: PolicyState, obs: PyTree, key: Array) -> Array:
        return act(policy, state, obs, key if sampled else None).env_action

    num_envs = min(num_episodes, _HOST_ENVS)
    share = np.array([len(range(i, num_episodes, num_envs)) for i in range(num_envs)])
    envs, key, select = env.make(_seeds(seed, num_envs)), jax.random.key(seed), jit(select_action)
    episodes: list[list[tuple[float, int, bool]]] = [[] for _ in range(num_envs)]
    total, length, obs, step = np.zeros(num_envs), np.zeros(num_envs, int), envs.reset(), 0
    while share.any():
        after = envs.step(np.asarray(select(state, obs, jax.random.fold_in(key, step))))
        total, length, obs, step = total + after.reward, length + 1, after.obs, step + 1
        ended = after.terminated | after.truncated
        over = ended | (length >= max_steps)
        for i in np.flatnonzero(over & (share > 0)):
            episodes[i].append((total[i], length[i], ended[i]))
        share = np.where(ended, np.maximum(share - 1, 0), np.where(over, 0, share))
        total, length = np.where(ended, 0.0, total), np.where(ended, 0, length)
    envs.close()
    returns, lengths, finished = zip(*(episode for of_one in episodes for episode in of_one), strict=True)
    return Evaluation(np.array(returns, np.float32), np.array(lengths, np.int32), np.array(finished))


def _seeds(seed: int, count: int) -> list[int]:
    """Of 31 bits, unlike those of neighbouring seeds."""
    return (np.random.SeedSequence(seed).generate_state(count) >> 1).tolist()


class _Loop(NamedTuple):
    env_state: PyTree
    obs: PyTree
    returns: Array
    lengths: Array
    done: Array
    step: Array
