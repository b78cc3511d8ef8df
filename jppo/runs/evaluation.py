"""Evaluates a policy over whole episodes."""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jppo.config.checks import check_int, check_seed, names_module
from jppo.config.run import MAX_STEPS
from jppo.devices.jit import jit
from jppo.envs.backends import choose_backend
from jppo.envs.base import Environment, reset_rows, step_rows
from jppo.envs.contract import BrokenContractError
from jppo.envs.gymnasium import HostEnvironment, make_host_env
from jppo.envs.gymnax import make_env
from jppo.envs.masks import lacks_legal_action
from jppo.envs.spaces import ACTION_MASK, ObsSpec
from jppo.errors import EMPTY_MASK
from jppo.ppo.keys import derive_key
from jppo.ppo.policy import Policy, act, reset_carry
from jppo.ppo.types import Array, PolicyState, PyTree
from jppo.runs.display import html_table, show_record
from jppo.runs.load import load_run, needs_env
from jppo.runs.policy import TrainedPolicy, row_without_legal_action
from jppo.runs.run_dir import read_config

_MAX_EPISODES = 1_000_000
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


def evaluate(
    env_or_run: Any,
    policy: Any = None,
    *,
    num_episodes: int = 100,
    seed: int = 0,
    sampled: bool = False,
    max_steps: int = MAX_STEPS,
) -> Evaluation:
    """Plays `num_episodes` whole episodes, each from its own reset, so that short episodes are not over-represented.

    On-device environments play all episodes in parallel; on the host, at most 16 environments run side by side.

        result = jppo.train("CartPole-v1", run_dir="runs/first")
        jppo.evaluate(result)                        # the environment and the policy of a run
        jppo.evaluate("runs/first")                  # the same from its directory
        jppo.evaluate("CartPole-v1", result.policy)  # any environment with the same spaces
        jppo.evaluate("CartPole-v1", "runs/first")
        jppo.evaluate(MyEnv, "runs/own")             # a run of a custom environment

    Args:
      env_or_run: without `policy`, a result of `jppo.train`, a run of a sweep, its policy or a run directory. With
        `policy`, an environment, as for `jppo.train`.
      policy: a `jppo.TrainedPolicy`, or a result, run of a sweep or run directory that contains one.
      seed: seed of the environments and of the sampled actions.
      sampled: sample actions instead of taking the most likely ones.
      max_steps: episodes longer than this are cut and reported as unfinished. A host environment stops after such an
        episode, so that the result may have fewer than num_episodes.

    Raises:
      ValueError: num_episodes is outside 1 to 1,000,000, seed or max_steps is invalid, env_or_run or policy is
        something else, the environment and the policy have different spaces, or an action_mask marks no legal action.
    """
    if check_int("num_episodes", num_episodes) > _MAX_EPISODES:
        raise ValueError(f"num_episodes = {num_episodes} must be from 1 to {_MAX_EPISODES:,}")
    seed, max_steps = check_seed(seed), check_int("max_steps", max_steps)
    env, policy = open_policy(env_or_run, policy, "jppo.evaluate")
    if isinstance(env, HostEnvironment):
        return make_host_player(env, policy.policy, sampled)(policy.state, num_episodes, seed, max_steps)
    num_episodes = -(-num_episodes // env.num_agents) * env.num_agents
    keys = jax.random.split(derive_key(jax.random.key(seed), "evaluation"), num_episodes)
    play = jit(make_player(env, policy.policy, sampled, max_steps))
    *episodes, stuck = map(np.asarray, play(policy.state, keys))
    check_legal_actions(env.name, stuck)
    return Evaluation(*episodes)


def open_policy(env_or_run: Any, policy: Any, function: str) -> tuple[Any, TrainedPolicy]:
    """Returns the environment and the policy that the arguments of a function name, see `evaluate`.

    Raises:
      ValueError: an argument is something else, or the environment and the policy have different spaces.
    """
    if policy is None:
        return _open_run("env_or_run", env_or_run, function)
    if not isinstance(policy, str | Path | TrainedPolicy):
        policy = _open_run("policy", policy, function)[1]
    env = _open_env(env_or_run, policy)
    if isinstance(policy, str | Path):
        policy = _open_run("policy", policy, function, env)[1]
    _check_spaces(env, policy)
    return env, policy


def _open_run(name: str, run: Any, function: str, env: Any = None) -> tuple[Any, TrainedPolicy]:
    """Returns the environment and the policy of a result, a run of a sweep or a run directory.

    Args:
      env: the environment of a run directory, if its config.json describes none.
    """
    if isinstance(run, str | Path):
        run = load_run(run, env=env if needs_env(Path(run)) else None)
    if isinstance(run, TrainedPolicy):
        if run.env is None:
            raise ValueError(f"this TrainedPolicy has no environment; use {function}(env, policy)")
        return run.env, run
    policy = getattr(run, "policy", None)
    if isinstance(policy, TrainedPolicy) and hasattr(run, "agent"):
        return run.agent.env, policy
    kinds = "a result of jppo.train, a run of a sweep, its policy or a run directory"
    raise ValueError(
        f"{name} is a {type(run).__name__}; it must be {kinds}{' (or pass a policy)' * (name != 'policy')}"
    )


def _open_env(env: Any, policy: Any) -> Any:
    """Returns an environment. A module:name has the backend of the policy's run directory."""
    if isinstance(env, Environment | HostEnvironment):
        return env
    if hasattr(env, "agent") and hasattr(env, "policy"):  # a result
        return env.agent.env
    is_run_dir = names_module(env) and isinstance(policy, str | Path)
    backend = read_config(Path(policy))["backend"] if is_run_dir else choose_backend(env)
    if backend == "device":
        return make_env(env)
    return make_host_env(env)


def _check_spaces(env: Any, policy: TrainedPolicy) -> None:
    """Raises ValueError if an environment's spaces differ from those of the policy in structure, shapes or categories.

    Bounds and dtypes of numbers may differ: the policy acts within its own bounds.
    """

    def essence(spec: Any) -> tuple[Any, ...]:
        if isinstance(spec, ObsSpec):
            return spec.shape, spec.num_categories, spec.start, spec.dtype == "uint8"
        return spec.shape, spec.num_actions, spec.nvec, spec.start if not spec.is_box else 0

    for kind, own, other in (
        ("observations", policy.obs_spec, env.obs_spec),
        ("actions", policy.action_spec, env.action_spec),
    ):
        if jax.tree.map(essence, own) != jax.tree.map(essence, other):
            raise ValueError(f"{env.name} has other {kind} than the policy: {other}; the policy was trained for {own}")


def make_player(
    env: Environment, policy: Policy, sampled: bool, max_steps: int = MAX_STEPS
) -> Callable[[PolicyState, Array], tuple[Array, Array, Array, Array]]:
    """Returns a pure function that plays one episode per key [E] in parallel. With M agents, each plays its own.

    It returns the fields of `Evaluation`, and the step [E] i32 at which no action was legal, or -1.
    """

    def play(state: PolicyState, episode_keys: Array) -> tuple[Array, Array, Array, Array]:
        def step(loop: _Loop) -> _Loop:
            stuck = loop.stuck
            if policy.has_mask:
                empty = lacks_legal_action(policy.action_spec, loop.obs[ACTION_MASK]) & ~loop.done
                stuck = jnp.where(empty, loop.step, stuck)
            keys = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, loop.step + 1), 2))(episode_keys)
            chosen = act(policy, state, loop.obs, keys[:, 0] if sampled else None, loop.carry)
            after = step_rows(env, keys[:, 1], loop.env_state, chosen.env_action)
            return _Loop(
                env_state=after.state,
                obs=after.obs,
                returns=loop.returns + jnp.where(loop.done, 0.0, after.reward),
                lengths=loop.lengths + jnp.where(loop.done, 0, 1),
                done=loop.done | after.terminated | after.truncated,
                step=loop.step + 1,
                carry=chosen.carry,
                stuck=stuck,
            )

        obs, env_state = reset_rows(env, jax.vmap(lambda key: jax.random.fold_in(key, 0))(episode_keys))
        zeros = jnp.zeros(len(episode_keys))
        start = _Loop(
            env_state=env_state,
            obs=obs,
            returns=zeros,
            lengths=zeros.astype(jnp.int32),
            done=zeros > 0.0,
            step=jnp.zeros((), jnp.int32),
            carry=policy.initial_carry(len(episode_keys)),
            stuck=jnp.full(len(episode_keys), -1, jnp.int32),
        )

        def continues(loop: _Loop) -> Array:
            return ~loop.done.all() & (loop.step < max_steps) & (loop.stuck < 0).all()

        end = jax.lax.while_loop(continues, step, start)
        return end.returns, end.lengths, end.done, end.stuck

    return play


def check_legal_actions(env_name: str, stuck: np.ndarray) -> None:
    """Raises ValueError if an episode had a step without a legal action.

    Args:
      stuck: [E] i32, the result of `make_player`.
    """
    if (stuck >= 0).any():
        episode = int(np.argmax(stuck))
        raise_no_legal_action(env_name, f"episode {episode}", int(stuck[episode]))


def make_host_player(env: HostEnvironment, policy: Policy, sampled: bool) -> Callable[..., Evaluation]:
    """Returns a function that plays episodes on the host: (state, num_episodes, seed, max_steps) -> Evaluation.

    Its keyword argument before_step is a function that is called before each step and may raise an exception to end it.
    Each environment, or each agent, plays a fixed number of episodes, one after the other, and stops after an episode
    that max_steps cuts. Agents that never took part are left out.
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
) -> Evaluation:
    num_envs = min(num_episodes, _HOST_ENVS)
    num_envs = -(-num_envs // env.num_agents) * env.num_agents
    num_episodes = max(num_episodes, num_envs)
    share = np.array([len(range(i, num_episodes, num_envs)) for i in range(num_envs)])
    key = derive_key(jax.random.key(seed), "evaluation")
    envs, carry, ended = env.make(_seeds(seed, num_envs)), policy.initial_carry(num_envs), np.zeros(num_envs, bool)
    episodes: list[list[tuple[float, int, bool]]] = [[] for _ in range(num_envs)]
    total, length, obs, step = np.zeros(num_envs), np.zeros(num_envs, int), envs.reset(), 0
    waited, active = np.zeros(num_envs, int), envs.active.copy()
    with contextlib.closing(envs):
        while share.any():
            before_step()
            if (row := row_without_legal_action(policy, obs, share > 0)) is not None:
                raise_no_legal_action(env.name, f"environment {row}", step)
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


def raise_no_legal_action(env_name: str, where: str, step: int) -> NoReturn:
    """Raises ValueError for a mask without legal actions."""
    raise BrokenContractError(f"{env_name}: action_mask marks no legal action in {where} at step {step}", EMPTY_MASK)


def _seeds(seed: int, count: int) -> list[int]:
    """Returns independent 31-bit seeds of the environments."""
    return (np.random.SeedSequence(seed).generate_state(count) >> 1).tolist()


class _Loop(NamedTuple):
    env_state: PyTree
    obs: PyTree
    returns: Array
    lengths: Array
    done: Array
    step: Array
    carry: PyTree
    stuck: Array  # [E] i32, step at which no action was legal; -1 if there was none
