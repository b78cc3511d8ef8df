"""A trial of Ray Tune: an ordinary run that reports its updates and saves its run directory as Tune's checkpoint."""

import dataclasses
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from ray import tune

from jppo.config.overrides import CONFIG_NAMES, HYPERPARAM_NAMES, suggest_setting, take_network
from jppo.config.ray import RayConfig
from jppo.envs.backends import choose_backend
from jppo.errors import Refused, TrainingDiverged
from jppo.runs.run_dir import read_metrics
from jppo.training.evaluator import METRICS
from jppo.training.hooks import RunHooks
from jppo.training.progress import PrintReporter
from jppo.training.run import train_with_settings
from jppo.training.settings import RunSettings

METRIC = "return_mean"


def train_trial(settings: RunSettings, space: dict[str, Any], checkpoint_updates: int) -> None:
    """Trains one trial, from its start or from Tune's checkpoint.

    Args:
      settings: the run without the trial's point in the search space.
      space: the trial's point in the search space.
      checkpoint_updates: updates between two checkpoints; 0: only the last update saves one.

    Raises:
      FloatingPointError: the run diverged.
    """
    if settings.ray is None and choose_backend(settings.env, settings.backend) == "ray":
        settings = dataclasses.replace(settings, ray=RayConfig(num_actors=0))
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        if (checkpoint := tune.get_checkpoint()) is not None:
            with checkpoint.as_directory() as saved:
                shutil.copytree(saved, run_dir)
        first_call = 1 if settings.run.callback is None else settings.run.callback_every
        hooks = TrialHooks(run_dir, checkpoint_updates, bool(settings.run.eval_every), first_call)
        run = dataclasses.replace(settings.run, run_dir=run_dir, max_checkpoints=1, progress=PrintReporter())
        try:
            train_with_settings(dataclasses.replace(apply_space(space, settings), run=run), hooks)
        except TrainingDiverged as error:
            hooks.report()
            raise FloatingPointError(str(error)) from None  # Ray cannot pickle the result of a run
        except Exception as error:
            hooks.report()
            if hasattr(error, "result"):  # of an actor, an evaluation or a callback that failed
                error.result = None
            raise
        hooks.report(with_checkpoint=True)


class TrialHooks(RunHooks):
    """Reports every update of a run to Tune.

    Tune needs each metric in each report. So a report has the newest value of a metric that only some updates have,
    those of evaluations and of the callback; NaN before the first value.
    """

    def __init__(
        self,
        run_dir: Path,
        checkpoint_updates: int,
        evaluates: bool = False,
        first_call: int = 1,
    ) -> None:
        """
        Args:
          evaluates: whether the run has evaluations.
          first_call: update of the callback's first call, which shows the names of its numbers. Updates before it are
            reported after it, or with a checkpoint.
        """
        self._run_dir, self.checkpoint_updates, self._first_call = run_dir, checkpoint_updates, first_call
        before = read_metrics(run_dir) if run_dir.exists() else {}
        self._newest: dict[str, Any] = {f"eval/{name}": math.nan for name in METRICS} if evaluates else {}
        self._newest |= {name: _newest(column) for name, column in before.items()}
        self._unreported: list[dict[str, Any]] = []  # a checkpoint may follow the last one

    def on_updates(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["update"] > self._first_call:
                self.report()
            self._newest |= row
            self._unreported.append(dict(self._newest))

    def on_checkpoint(self, update: int) -> None:
        self.report(with_checkpoint=True)

    def report(self, with_checkpoint: bool = False) -> None:
        """Reports the updates that are not reported yet. Tune may end the trial here with SystemExit.

        Args:
          with_checkpoint: report the last one with the run directory as a checkpoint.
        """
        rows, self._unreported = self._unreported, []
        missing = dict.fromkeys(self._newest, math.nan)
        for row in rows:
            saves = with_checkpoint and row is rows[-1]
            tune.report(missing | row, checkpoint=tune.Checkpoint.from_directory(self._run_dir) if saves else None)


def _newest(column: np.ndarray) -> float:
    """Returns the last value of a metric except NaN; NaN before the first value."""
    values = column[~np.isnan(column)]
    return float(values[-1]) if len(values) else math.nan


def apply_space(space: dict[str, Any], settings: RunSettings) -> RunSettings:
    """Returns the settings of a run with the values of a trial.

    Raises:
      ValueError: the search space has an unknown name.
    """
    names = (*CONFIG_NAMES, *HYPERPARAM_NAMES, "seed")
    for name in space:
        if name not in names:
            raise Refused(f"the search space has an unknown setting {name!r}{suggest_setting(name, names)}")
    network, overrides = take_network(settings.network, settings.overrides)
    values = dict(space)
    seed = values.pop("seed", settings.seed)
    return dataclasses.replace(
        settings, network=network, overrides=overrides | values, searched=frozenset(values), seed=seed
    )
