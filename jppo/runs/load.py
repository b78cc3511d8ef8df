"""Loads the policy of a run from its directory."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jppo.config.checks import names_module
from jppo.envs.backends import choose_backend
from jppo.errors import Refused
from jppo.ppo.anakin import make_anakin
from jppo.ppo.policy import Network
from jppo.ppo.types import PolicyState
from jppo.runs import run_dir as runs
from jppo.runs.checkpoints import Checkpoint, latest_checkpoint
from jppo.runs.files import read_json
from jppo.runs.leaves import LeafMismatch
from jppo.runs.policy import TrainedPolicy


class LoadedRun(NamedTuple):
    """The agent and the trained policy of a run."""

    agent: Any  # Anakin, or Sebulba if the run used actors
    policy_state: PolicyState
    settings: dict[str, Any]  # config.json

    @property
    def policy(self) -> TrainedPolicy:
        """Returns the policy with its NumPy interface."""
        return TrainedPolicy(self.agent.policy, self.policy_state, self.agent.env)


def load_policy(
    run_dir: str | Path, *, network: Network | None = None, env: Any = None, trust_env: bool = False, best: bool = False
) -> TrainedPolicy:
    """Loads the final policy of a run or, if the run did not finish, the policy of its newest checkpoint.

    Args:
      network, env, trust_env, best: see `load_run`.

    Raises:
      ValueError: see `load_run`.
    """
    return load_run(run_dir, network=network, env=env, trust_env=trust_env, best=best).policy


def load_run(
    run_dir: str | Path, *, network: Network | None = None, env: Any = None, trust_env: bool = False, best: bool = False
) -> LoadedRun:
    """Rebuilds the agent of a run from config.json and loads its policy, or that of its newest checkpoint.

    Args:
      network: the network of the run, if it is the user's own object.
      env: the environment of the run as for `jppo.train`, if it is the user's own. "module:name" imports that module.
      trust_env: if config.json names the environment as module:name, import that module, which may run any code.
      best: load the best policy so far instead of the newest one (docs/evaluation.md).

    Raises:
      ValueError: the directory contains no run, no policy and no checkpoint, or damaged files; or the run's own network
        or environment is not passed, or `env` has other spaces; or config.json names a module that the arguments do
        not allow to import.
    """
    run_dir = Path(run_dir)
    settings = runs.read_config(run_dir)
    if settings.get("network") == "custom" and network is None:
        raise Refused(f"{run_dir} was trained with a custom network; pass it: jppo.load_policy(run_dir, network=...)")
    is_env_passed = env is not None
    if not is_env_passed:
        env = _check_env_name(run_dir, settings, trust_env)
    config, _ = runs.config_of(settings, run_dir)
    backend = settings["backend"] if isinstance(env, str) else choose_backend(env)
    agent: Any
    if backend == "ray":
        from jppo.actors.sebulba import make_sebulba  # an on-device run does not need the actors package

        agent = make_sebulba(env, config, network=network)
        like = jax.eval_shape(agent.init, jax.random.key(0)).policy_state
    else:
        agent = make_anakin(env, config, network=network)
        like = jax.eval_shape(agent.init, jax.random.key(0)).train.policy_state
    try:
        return LoadedRun(agent, _policy_state(run_dir, like, best), settings)
    except ValueError as error:
        if is_env_passed and isinstance(error.__cause__ or error, LeafMismatch):
            raise Refused(
                f"{agent.env.name} does not fit the policy in {run_dir}, which was trained in {settings['env']} with "
                "other observations or actions; pass the environment of the run"
            ) from None
        raise


def needs_env(run_dir: Path) -> bool:
    """Returns whether config.json of a run describes no environment that can be made without importing a module."""
    settings = runs.read_config(run_dir)
    return settings.get("environment") == "custom" or names_module(settings["env"])


def _check_env_name(run_dir: Path, settings: dict[str, Any], trust_env: bool) -> str:
    """Returns the environment's name in config.json.

    Raises:
      ValueError: the environment is the user's own object, or its name would import a module that is not trusted.
    """
    name = settings["env"]
    if settings.get("environment") == "custom":
        raise Refused(
            f"{run_dir} was trained in a custom environment, {name}; name it with --env module:name on the command "
            "line; in Python, use jppo.load_policy(run_dir, env=...) or jppo.evaluate(env, run_dir)"
        )
    if names_module(name) and not trust_env:
        raise Refused(
            f"{run_dir} was trained in {name}, which would import a module; if you trust it, use --env {name}, "
            f"in Python load_policy(run_dir, trust_env=True)"
        )
    return name


def _policy_state(run_dir: Path, like: Any, best: bool) -> PolicyState:
    no_policy = f"{run_dir} has no policy: its run did not finish and has no checkpoint"

    def newest_checkpoint() -> Checkpoint | None:
        return latest_checkpoint(run_dir, lambda text: warnings.warn(text, stacklevel=5))

    has_best, has_final = ((run_dir / name).exists() for name in (runs.BEST, runs.POLICY))
    if best:
        if not has_best and not has_final and newest_checkpoint() is None:
            raise Refused(no_policy)
        return runs.load_policy_state(run_dir, like, best=True)
    damage: ValueError | None = None
    if has_final:
        try:
            return runs.load_policy_state(run_dir, like)
        except ValueError as error:
            if isinstance(error.__cause__, LeafMismatch):
                raise  # the file is not damaged, and a checkpoint does not fit either
            damage = error
    checkpoint = newest_checkpoint()
    if checkpoint is None:
        raise damage or Refused(no_policy)
    if damage is not None:
        warnings.warn(
            f"{damage}; the policy of the newest checkpoint, after update {checkpoint.update}, is used", stacklevel=4
        )
    return checkpoint.restore(runs.on_one_device(like), ".train.policy_state")


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Returns summary.json of a finished run; {} if the file is missing or damaged."""
    try:
        summary = read_json(run_dir / "summary.json")
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}
