"""Scores of a fixed policy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jppo.compiling import jit
from jppo.envs.base import Environment
from jppo.networks import Policy
from jppo.spaces import to_env_action
from jppo.types import Array, PolicyState, PyTree

_MAX_EPISODES = 1_000_000


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
    env: Environment,
    policy: Policy,
    state: PolicyState,
    *,
    num_episodes: int = 100,
    seed: int = 0,
    sampled: bool = False,
    action_bounds: str = "clip",
    max_steps: int = 100_000,
) -> Evaluation:
    """Plays `num_episodes` episodes side by side, each from its own reset to its own end, so that short ones count no
    more than long ones.

    Args:
      sampled: draw actions instead of taking the most likely ones.
      max_steps: episodes longer than this are reported as unfinished.
    """
    if not 1 <= num_episodes <= _MAX_EPISODES:
        raise ValueError(f"num_episodes = {num_episodes} must be from 1 to {_MAX_EPISODES:,}: all play at once")

    def play(state: PolicyState, episode_keys: Array) -> tuple[Array, Array, Array]:
        def step(loop: _Loop) -> _Loop:
            keys = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, loop.step + 1), 2))(episode_keys)
            distribution, _ = policy.apply(state, loop.obs)
            sample = jax.vmap(lambda row, key: row.sample(seed=key))
            action = sample(distribution, keys[:, 0]) if sampled else distribution.mode()
            env_action = to_env_action(env.action_spec, action, action_bounds)
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


class _Loop(NamedTuple):
    env_state: PyTree
    obs: PyTree
    returns: Array
    lengths: Array
    done: Array
    step: Array
