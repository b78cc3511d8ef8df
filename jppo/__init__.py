"""Trains PPO policies on the device or with Ray actors.

Each name loads its module on first use, so that `import jppo` takes a few milliseconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0.dev0"

if TYPE_CHECKING:  # the same names as in _MODULES, for type checkers
    from jppo.actors import numpy_policy as numpy_policy
    from jppo.actors.env_runner import EnvRunner as EnvRunner
    from jppo.actors.sebulba import Sebulba as Sebulba
    from jppo.actors.sebulba import make_sebulba as make_sebulba
    from jppo.benchmark.bench import bench as bench
    from jppo.benchmark.report import BenchResult as BenchResult
    from jppo.config import schedules as schedules
    from jppo.config.pbt import PBTConfig as PBTConfig
    from jppo.config.ppo import Hyperparams as Hyperparams
    from jppo.config.ppo import PPOConfig as PPOConfig
    from jppo.config.presets import PRESETS as PRESETS
    from jppo.config.presets import Preset as Preset
    from jppo.config.ray import RayConfig as RayConfig
    from jppo.config.ray import Resources as Resources
    from jppo.config.run import RunConfig as RunConfig
    from jppo.devices.jit import jit as jit
    from jppo.envs import make_env as make_env
    from jppo.envs.base import Environment as Environment
    from jppo.envs.base import Step as Step
    from jppo.envs.checks import check_env as check_env
    from jppo.envs.episodes import EpisodicEnv as EpisodicEnv
    from jppo.envs.episodes import with_limit_and_reset as with_limit_and_reset
    from jppo.envs.gymnasium import make_host_env as make_host_env
    from jppo.errors import ActorsFailed as ActorsFailed
    from jppo.errors import HostFailed as HostFailed
    from jppo.errors import TrainingDiverged as TrainingDiverged
    from jppo.networks.distributions import Categorical as Categorical
    from jppo.networks.distributions import DiagGaussian as DiagGaussian
    from jppo.networks.distributions import Joint as Joint
    from jppo.networks.distributions import MultiCategorical as MultiCategorical
    from jppo.ppo.anakin import Anakin as Anakin
    from jppo.ppo.anakin import make_anakin as make_anakin
    from jppo.ppo.learner import Learner as Learner
    from jppo.ppo.learner import make_learner as make_learner
    from jppo.ppo.losses import LossModule as LossModule
    from jppo.ppo.losses import gae as gae
    from jppo.ppo.losses import gae_advantages as gae_advantages
    from jppo.ppo.losses import mean_over_rows as mean_over_rows
    from jppo.ppo.losses import ppo_loss as ppo_loss
    from jppo.ppo.losses import weighted_mean as weighted_mean
    from jppo.ppo.policy import Network as Network
    from jppo.ppo.policy import RecurrentNetwork as RecurrentNetwork
    from jppo.ppo.types import Batch as Batch
    from jppo.ppo.types import Transition as Transition
    from jppo.runs.display import Picture as Picture
    from jppo.runs.episodes import Evaluation as Evaluation
    from jppo.runs.evaluation import evaluate as evaluate
    from jppo.runs.export import ExportedPolicy as ExportedPolicy
    from jppo.runs.export import export_policy as export_policy
    from jppo.runs.export import load_exported as load_exported
    from jppo.runs.load import load_policy as load_policy
    from jppo.runs.policy import TrainedPolicy as TrainedPolicy
    from jppo.runs.render import play as play
    from jppo.sweeps import tune as tune
    from jppo.sweeps.results import SettingResult as SettingResult
    from jppo.sweeps.results import SweepResult as SweepResult
    from jppo.sweeps.sweep import sweep as sweep
    from jppo.sweeps.sweep_run import SweepRun as SweepRun
    from jppo.training.callback import CallbackEvent as CallbackEvent
    from jppo.training.progress import NullReporter as NullReporter
    from jppo.training.progress import PrintReporter as PrintReporter
    from jppo.training.progress import Reporter as Reporter
    from jppo.training.result import Result as Result
    from jppo.training.train import train as train

_MODULES = {
    "jppo.actors.env_runner": ("EnvRunner",),
    "jppo.actors.sebulba": ("Sebulba", "make_sebulba"),
    "jppo.actors.numpy_policy": ("numpy_policy",),
    "jppo.benchmark.bench": ("bench",),
    "jppo.benchmark.report": ("BenchResult",),
    "jppo.config.pbt": ("PBTConfig",),
    "jppo.config.ppo": ("Hyperparams", "PPOConfig"),
    "jppo.config.presets": ("PRESETS", "Preset"),
    "jppo.config.ray": ("RayConfig", "Resources"),
    "jppo.config.run": ("RunConfig",),
    "jppo.config.schedules": ("schedules",),
    "jppo.devices.jit": ("jit",),
    "jppo.envs": ("make_env",),
    "jppo.envs.base": ("Environment", "Step"),
    "jppo.envs.checks": ("check_env",),
    "jppo.envs.episodes": ("EpisodicEnv", "with_limit_and_reset"),
    "jppo.envs.gymnasium": ("make_host_env",),
    "jppo.errors": ("ActorsFailed", "HostFailed", "TrainingDiverged"),
    "jppo.ppo.anakin": ("Anakin", "make_anakin"),
    "jppo.networks.distributions": ("Categorical", "DiagGaussian", "Joint", "MultiCategorical"),
    "jppo.ppo.learner": ("Learner", "make_learner"),
    "jppo.ppo.losses": ("LossModule", "gae", "gae_advantages", "mean_over_rows", "ppo_loss", "weighted_mean"),
    "jppo.ppo.policy": ("Network", "RecurrentNetwork"),
    "jppo.ppo.types": ("Batch", "Transition"),
    "jppo.runs.display": ("Picture",),
    "jppo.runs.episodes": ("Evaluation",),
    "jppo.runs.evaluation": ("evaluate",),
    "jppo.runs.export": ("ExportedPolicy", "export_policy", "load_exported"),
    "jppo.runs.load": ("load_policy",),
    "jppo.runs.policy": ("TrainedPolicy",),
    "jppo.runs.render": ("play",),
    "jppo.sweeps.results": ("SettingResult", "SweepResult"),
    "jppo.sweeps.sweep": ("sweep",),
    "jppo.sweeps.sweep_run": ("SweepRun",),
    "jppo.sweeps.tune": ("tune",),
    "jppo.training.callback": ("CallbackEvent",),
    "jppo.training.progress": ("NullReporter", "PrintReporter", "Reporter"),
    "jppo.training.result": ("Result",),
    "jppo.training.train": ("train",),
}
_PACKAGES = (
    "actors",
    "benchmark",
    "cli",
    "config",
    "devices",
    "envs",
    "errors",
    "kernels",
    "networks",
    "ppo",
    "runs",
    "sweeps",
    "training",
)
_PUBLIC_MODULES = ("numpy_policy", "schedules", "tune")
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"jppo.{name}")
    if name not in _HOMES:
        hint = importlib.import_module("jppo.config.words").explain(name)
        raise AttributeError(f"module 'jppo' has no attribute {name!r}{hint and '; '}{hint}")
    module = importlib.import_module(_HOMES[name])
    return module if name in _PUBLIC_MODULES else getattr(module, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
