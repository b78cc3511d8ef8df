"""A run directory made whole again."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jppo import runs
from jppo.anakin import Anakin, make_anakin
from jppo.config import PPOConfig
from jppo.policy import TrainedPolicy
from jppo.sebulba import Sebulba, make_sebulba
from jppo.types import PolicyState


class LoadedRun(NamedTuple):
    """What a run trained, and in what."""

    agent: Anakin | Sebulba
    policy_state: PolicyState
    settings: dict[str, Any]  # config.json

    @property
    def policy(self) -> TrainedPolicy:
        """Acts on NumPy observations."""
        env = self.agent.env
        bounds = self.agent.config.action_bounds
        return TrainedPolicy(self.agent.policy, self.policy_state, env.obs_spec, env.action_spec, bounds)


def load_run(run_dir: str | Path) -> LoadedRun:
    """Rebuilds a run's environment and network from config.json and reads its policy.

    Raises:
      ValueError: no run there, an unfinished or damaged one, or one with a network or environment of the user's own.
    """
    run_dir = Path(run_dir)
    settings = runs.read_config(run_dir)
    if settings.get("network") == "custom":
        raise ValueError(
            f"{run_dir} was trained with a network of its own; rebuild it in Python for "
            "jppo.evaluate or jppo.export_policy"
        )
    if settings.get("environment") == "custom":
        raise ValueError(
            f"{run_dir} was trained in an environment of its own; rebuild it in Python for "
            "jppo.evaluate or jppo.export_policy"
        )
    try:
        fields = settings["config"] | {"hidden_sizes": tuple(settings["config"]["hidden_sizes"])}
        config = PPOConfig(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{run_dir}/config.json is damaged or of another version of jppo: {error}") from None
    agent: Anakin | Sebulba
    if settings["backend"] == "ray":
        agent = make_sebulba(settings["env"], config)
        like = jax.eval_shape(agent.init, jax.random.key(0)).policy
    else:
        agent = make_anakin(settings["env"], config)
        like = jax.eval_shape(agent.init, jax.random.key(0)).train.policy
    return LoadedRun(agent, runs.load_policy_state(run_dir, like), settings)


def read_summary(run_dir: Path) -> dict[str, Any]:
    """summary.json of a finished run; {} where there is none."""
    path = run_dir / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
