"""jppo: PPO on the device, fast. Everything loads on first use, so the import itself costs nothing."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from jppo.actors.env_runner import EnvRunner as EnvRunner
    from jppo.actors.sebulba import make_sebulba as make_sebulba
    from jppo.benchmark.bench import bench as bench
    from jppo.benchmark.plan import plan as plan
    from jppo.config.ppo import PPOConfig as PPOConfig
    from jppo.config.ppo import RayConfig as RayConfig
    from jppo.config.presets import PRESETS as PRESETS
    from jppo.config.resources import Resources as Resources
    from jppo.devices.jit import jit as jit
    from jppo.envs import make_env as make_env
    from jppo.envs.checks import check_env as check_env
    from jppo.envs.gymnasium import make_host_env as make_host_env
    from jppo.errors import ActorsFailed as ActorsFailed
    from jppo.errors import HostFailed as HostFailed
    from jppo.errors import TrainingDiverged as TrainingDiverged
    from jppo.ppo.anakin import make_anakin as make_anakin
    from jppo.ppo.types import Hyperparams as Hyperparams
    from jppo.runs.evaluation import evaluate as evaluate
    from jppo.runs.export import export_policy as export_policy
    from jppo.runs.export import load_exported as load_exported
    from jppo.runs.load import load_policy as load_policy
    from jppo.sweeps.sweep import sweep as sweep
    from jppo.training.train import train as train

_HOMES = {
    "ActorsFailed": "jppo.errors",
    "EnvRunner": "jppo.actors.env_runner",
    "HostFailed": "jppo.errors",
    "RayConfig": "jppo.config.ppo",
    "make_host_env": "jppo.envs.gymnasium",
    "make_sebulba": "jppo.actors.sebulba",
    "Hyperparams": "jppo.ppo.types",
    "PPOConfig": "jppo.config.ppo",
    "Resources": "jppo.config.resources",
    "PRESETS": "jppo.config.presets",
    "TrainingDiverged": "jppo.errors",
    "bench": "jppo.benchmark.bench",
    "check_env": "jppo.envs.checks",
    "evaluate": "jppo.runs.evaluation",
    "export_policy": "jppo.runs.export",
    "jit": "jppo.devices.jit",
    "load_exported": "jppo.runs.export",
    "load_policy": "jppo.runs.load",
    "make_anakin": "jppo.ppo.anakin",
    "make_env": "jppo.envs",
    "plan": "jppo.benchmark.plan",
    "sweep": "jppo.sweeps.sweep",
    "train": "jppo.training.train",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "tune":  # the module of Ray Tune trainables
        return importlib.import_module("jppo.sweeps.tune")
    if name not in _HOMES:
        raise AttributeError(f"module 'jppo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
