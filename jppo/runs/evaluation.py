"""Evaluates a policy over whole episodes."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from jppo.config.checks import check_int, check_seed
from jppo.config.run import MAX_STEPS
from jppo.devices.jit import jit
from jppo.envs.backends import choose_backend
from jppo.envs.gymnasium import HostEnvironment, make_host_env
from jppo.envs.gymnax import make_env
from jppo.envs.spaces import ObsSpec
from jppo.errors import Refused
from jppo.ppo.types import derive_key
from jppo.runs.episodes import Evaluation, check_legal_actions, make_host_player, make_player
from jppo.runs.load import load_run, needs_env
from jppo.runs.policy import TrainedPolicy

_MAX_EPISODES = 1_000_000


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
        raise Refused(f"num_episodes = {num_episodes} must be from 1 to {_MAX_EPISODES:,}")
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
        trained = _open_policy("env_or_run", env_or_run)
        if trained.env is None:
            raise Refused(f"this TrainedPolicy has no environment; use {function}(env, policy)")
        return trained.env, trained
    is_result = isinstance(getattr(env_or_run, "policy", None), TrainedPolicy)
    env = env_or_run.policy.env if is_result else env_or_run
    if isinstance(policy, str | Path) and needs_env(Path(policy)):
        trained = load_run(policy, env=env).policy
        return trained.env, trained
    trained = _open_policy("policy", policy)
    env = make_env(env) if choose_backend(env) == "device" else make_host_env(env)
    _check_spaces(env, trained)
    return env, trained


def _open_policy(name: str, run: Any) -> TrainedPolicy:
    """Returns the policy of a result, a run of a sweep or a run directory, or `run` if it is a policy.

    Args:
      name: the argument's name, for the error message.
    """
    if isinstance(run, str | Path):
        return load_run(run).policy
    policy = run if isinstance(run, TrainedPolicy) else getattr(run, "policy", None)
    if not isinstance(policy, TrainedPolicy):
        kinds = "a result of jppo.train, a run of a sweep, its policy or a run directory"
        remedy = " (or pass a policy)" if name != "policy" else ""
        raise Refused(f"{name} is a {type(run).__name__}; it must be {kinds}{remedy}")
    return policy


def _check_spaces(env: Any, policy: TrainedPolicy) -> None:
    """Raises ValueError if an environment's spaces differ from those of the policy in structure, shapes or categories.

    Bounds and dtypes of numbers may differ: the policy acts within its own bounds.
    """

    def essence(spec: Any) -> tuple[Any, ...]:
        if isinstance(spec, ObsSpec):
            return spec.shape, spec.num_categories, spec.start, spec.nvec, spec.dtype == "uint8" and spec.high
        return spec.shape, spec.num_actions, spec.nvec, spec.start if not spec.is_box else 0

    for kind, own, other in (
        ("observations", policy.obs_spec, env.obs_spec),
        ("actions", policy.action_spec, env.action_spec),
    ):
        if jax.tree.map(essence, own) != jax.tree.map(essence, other):
            raise Refused(f"{env.name} has other {kind} than the policy: {other}; the policy was trained for {own}")
