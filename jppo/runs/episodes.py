"""Plays whole episodes, on the device and on the host."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jppo.config.run import MAX_STEPS
from jppo.devices.jit import jit
from jppo.envs.base import Environment, reset_rows, step_rows
from jppo.envs.contract import BrokenContractError
from jppo.envs.gymnasium import HostEnvironment
from jppo.envs.masks import lacks_legal_action
from jppo.envs.spaces import ACTION_MASK, Array, PyTree
from jppo.errors import EMPTY_MASK
from jppo.ppo.policy import Policy, act, reset_carry
from jppo.ppo.types import PolicyState, derive_key
from jppo.runs.display import html_table, show_record
from jppo.runs.policy import row_without_legal_action

_HOST_ENVS = 16  # environments that run side by side on the host


class Evaluation(NamedTuple):
    """Results of the evaluated episodes, NumPy arrays over E episodes."""

    returns: np.ndarray  # [E] f32, undiscounted
    lengths: np.ndarray  # [E] i32, steps
    finished: np.ndarray  # [E] bool; False if the episode was cut at max_steps

    def __repr__(self) -> str:
        return show_record("Evaluation", self.summary())

    def _repr_html_(self) -> str:
        return html_table("Evaluation", self.summary())

    def summary(self) -> dict[str, Any]:
        """Returns mean, std, min and max of the returns, the mean length, and the number of unfinished episodes."""
        return {
            "episodes": len(self.returns),
            "return_mean": float(self.returns.mean()),
            "return_std": float(self.returns.std()),
            "return_min": float(self.returns.min()),
            "return_max": float(self.returns.max()),
            "length_mean": float(self.lengths.mean()),
            "unfinished": int((~self.finished).sum()),
        }


class DeviceEpisodes(NamedTuple):
    """E parallel episodes on the device. With M agents, each agent has its own."""

    keys: Array  # [E]
    env_state: PyTree
    obs: PyTree  # [E, *obs]
    carry: PyTree
    step: Array  # [] i32, number of steps so far
    returns: Array  # [E] f32
    lengths: Array  # [E] i32
    done: Array  # [E] bool
    stuck: Array  # [E] i32, first step at which no action was legal; -1 if there was none


def start_episodes(env: Environment, policy: Policy, keys: Array) -> DeviceEpisodes:
    """Resets the environments with one key per episode, [E]."""
    obs, env_state = reset_rows(env, jax.vmap(lambda key: jax.random.fold_in(key, 0))(keys))
    zeros = jnp.zeros(len(keys))
    return DeviceEpisodes(
        keys=keys,
        env_state=env_state,
        obs=obs,
        carry=policy.initial_carry(len(keys)),
        step=jnp.zeros((), jnp.int32),
        returns=zeros,
        lengths=zeros.astype(jnp.int32),
        done=zeros > 0.0,
        stuck=jnp.full(len(keys), -1, jnp.int32),
    )


def step_episodes(
    env: Environment, policy: Policy, sampled: bool, state: PolicyState, episodes: DeviceEpisodes
) -> DeviceEpisodes:
    """Takes one step in each environment. The results of finished episodes stay the same."""
    if policy.has_mask:
        empty = lacks_legal_action(policy.action_spec, episodes.obs[ACTION_MASK]) & ~episodes.done
        first = empty & (episodes.stuck < 0)
        episodes = episodes._replace(stuck=jnp.where(first, episodes.step, episodes.stuck))
    keys = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, episodes.step + 1), 2))(episodes.keys)
    chosen = act(policy, state, episodes.obs, keys[:, 0] if sampled else None, episodes.carry)
    after = step_rows(env, keys[:, 1], episodes.env_state, chosen.env_action)
    return episodes._replace(
        env_state=after.state,
        obs=after.obs,
        carry=chosen.carry,
        step=episodes.step + 1,
        returns=episodes.returns + jnp.where(episodes.done, 0.0, after.reward),
        lengths=episodes.lengths + jnp.where(episodes.done, 0, 1),
        done=episodes.done | after.terminated | after.truncated,
    )


def make_player(
    env: Environment, policy: Policy, sampled: bool, max_steps: int = MAX_STEPS
) -> Callable[[PolicyState, Array], tuple[Array, Array, Array, Array]]:
    """Returns a pure function that plays one episode per key [E] in parallel.

    It returns the fields of `Evaluation`, and the step [E] i32 at which no action was legal, or -1.
    """

    def continues(episodes: DeviceEpisodes) -> Array:
        return ~episodes.done.all() & (episodes.step < max_steps) & (episodes.stuck < 0).all()

    def play(state: PolicyState, keys: Array) -> tuple[Array, Array, Array, Array]:
        step = functools.partial(step_episodes, env, policy, sampled, state)
        end = jax.lax.while_loop(continues, step, start_episodes(env, policy, keys))
        return end.returns, end.lengths, end.done, end.stuck

    return play


def check_legal_actions(env_name: str, stuck: np.ndarray) -> None:
    """Raises ValueError if an episode had a step without a legal action.

    Args:
      stuck: [E] i32, see `DeviceEpisodes`.
    """
    if (stuck >= 0).any():
        episode = int(np.argmax(stuck))
        _raise_no_legal_action(env_name, f"episode {episode}", int(stuck[episode]))


def make_host_player(env: HostEnvironment, policy: Policy, sampled: bool) -> Callable[..., Evaluation]:
    """Returns a function that plays episodes on the host: (state, num_episodes, seed, max_steps) -> Evaluation.

    Each environment, or each agent, plays a fixed number of episodes, one after the other, and stops after an episode
    that max_steps cuts. Agents that never took part are left out.

    The function has two keyword arguments. before_step is called before each step and may raise an exception to end it.
    draw is called with a picture before each step. With draw, one environment plays one episode: it is reset with
    `seed`, and agents that join later are left out.
    """

    def select_action(state: PolicyState, obs: PyTree, key: Array, carry: PyTree, done: Array) -> tuple[PyTree, PyTree]:
        chosen = act(policy, state, obs, key if sampled else None, reset_carry(policy, carry, done))
        return chosen.env_action, chosen.carry

    return functools.partial(_play_on_host, env, policy, jit(select_action))


def _play_on_host(
    env: HostEnvironment,
    policy: Policy,
    select: Callable[..., Any],
    state: PolicyState,
    num_episodes: int,
    seed: int,
    max_steps: int = MAX_STEPS,
    before_step: Callable[[], None] = lambda: None,
    draw: Callable[[np.ndarray], None] | None = None,
) -> Evaluation:
    num_envs = min(num_episodes, _HOST_ENVS)
    num_envs = -(-num_envs // env.num_agents) * env.num_agents
    num_episodes = max(num_episodes, num_envs)
    share = np.array([len(range(i, num_episodes, num_envs)) for i in range(num_envs)])
    key = derive_key(jax.random.key(seed), "evaluation")
    seeds = [seed] * num_envs if draw else _seeds(seed, num_envs)
    episodes: list[list[tuple[float, int, bool]]] = [[] for _ in range(num_envs)]
    with contextlib.closing(env.make(seeds, render=draw is not None)) as envs:
        obs, step, carry, ended = envs.reset(), 0, policy.initial_carry(num_envs), np.zeros(num_envs, bool)
        total, length, waited = np.zeros(num_envs), np.zeros(num_envs, int), np.zeros(num_envs, int)
        active = envs.active.copy()
        share = share * active if draw else share
        while share.any():
            before_step()
            if draw:
                draw(envs.render())
            if (row := row_without_legal_action(policy, obs, share > 0)) is not None:
                _raise_no_legal_action(env.name, f"environment {row}", step)
            action, carry = select(state, obs, jax.random.fold_in(key, step), carry, ended)
            after = envs.step(jax.tree.map(np.asarray, action))
            total, length, obs, step = total + after.reward, length + active, after.obs, step + 1
            ended = (after.terminated | after.truncated) & active
            waited, active = np.where(ended, 0, waited + 1), envs.active.copy()
            over = ended | (waited >= max_steps)
            for i in np.flatnonzero(over & (share > 0) & (length > 0)):
                episodes[i].append((total[i], length[i], ended[i]))
            share = np.where(ended, np.maximum(share - 1, 0), np.where(over, 0, share))
            total, length = np.where(ended, 0.0, total), np.where(ended, 0, length)
    returns, lengths, finished = zip(*(episode for of_one in episodes for episode in of_one), strict=True)
    return Evaluation(np.array(returns, np.float32), np.array(lengths, np.int32), np.array(finished))


def _raise_no_legal_action(env_name: str, where: str, step: int) -> NoReturn:
    raise BrokenContractError(f"{env_name}: action_mask marks no legal action in {where} at step {step}", EMPTY_MASK)


def _seeds(seed: int, count: int) -> list[int]:
    """Returns independent 31-bit seeds of the environments."""
    return (np.random.SeedSequence(seed).generate_state(count) >> 1).tolist()
