"""Loads the policy of a run from its directory."""

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jppo.ppo.anakin import make_anakin
from jppo.ppo.networks import Network
from jppo.ppo.types import PolicyState
from jppo.runs import run_dir as runs
from jppo.runs.checkpoints import latest_checkpoint
from jppo.runs.policy import TrainedPolicy


class LoadedRun(NamedTuple):
    """The agent and the trained policy of a run."""

    agent: Any  # Anakin, or Sebulba if the run used actors
    policy_state: PolicyState
    settings: dict[str, Any]  # config.json

    @property
    def policy(self) -> TrainedPolicy:
        """Returns the policy with its NumPy interface."""
        return TrainedPolicy(self.agent.policy, self.policy_state)


def load_policy(run_dir: str | Path, *, network: Network | None = None, env: Any = None) -> TrainedPolicy:
    """Loads the final policy of a run or, if the run did not finish, the policy of its newest checkpoint.

    Args:
      network, env: the network and environment of the run, if they are the user's own objects.

    Raises:
      ValueError: see `load_run`.
    """
    return load_run(run_dir, network=network, env=env).policy


def load_run(run_dir: str | Path, *, network: Network | None = None, env: Any = None) -> LoadedRun:
    """Rebuilds the agent of a run from config.json and loads its policy, or that of its newest checkpoint.

    Args:
      network, env: the network and environment of the run, if they are the user's own objects.

    Raises:
      ValueError: the directory contains no run, no policy and no checkpoint, or damaged files; or the run's own network
        or environment is not passed.
    """
    run_dir = Path(run_dir)
    settings = runs.read_config(run_dir)
    for name, argument, part, what in (
        ("network", "network", network, "with a network"),
        ("environment", "env", env, "in an environment"),
    ):
        if settings.get(name) == "custom" and part is None:
            raise ValueError(
                f"{run_dir} was trained {what} of its own; rebuild it in Python and give it: "
                f"jppo.load_policy(run_dir, {argument}=...)"
            )
    config, _ = runs.config_of(settings, run_dir)
    env = settings["env"] if env is None else env
    agent: Any
    if settings["backend"] == "ray":
        from jppo.actors.sebulba import make_sebulba  # an on-device run does not need the actors package

        agent = make_sebulba(env, config, network=network)
        like = jax.eval_shape(agent.init, jax.random.key(0)).policy
    else:
        agent = make_anakin(env, config, network=network)
        like = jax.eval_shape(agent.init, jax.random.key(0)).train.policy
    return LoadedRun(agent, _policy_state(run_dir, settings, like), settings)


def _policy_state(run_dir: Path, settings: dict[str, Any], like: Any) -> PolicyState:
    damage: ValueError | None = None
    if runs.has_policy(run_dir):
        try:
            return runs.load_policy_state(run_dir, like)
        except ValueError as error:
            damage = error
    checkpoint = latest_checkpoint(run_dir, lambda text: warnings.warn(text, stacklevel=4))
    if damage is not None:
        if checkpoint is None:
            raise damage
        warnings.warn(
            f"{damage}; that of its newest checkpoint is taken, after update {checkpoint.update}", stacklevel=4
        )
    elif checkpoint is None:
        raise ValueError(f"{run_dir} has no policy: its run did not finish, nor come to a checkpoint")
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like)
    return checkpoint.restore(like, ".train.policy")


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Returns summary.json of a finished run; {} if the file is missing or damaged."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}
