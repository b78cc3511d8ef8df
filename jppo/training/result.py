"""The result of a training run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jppo.config.checks import check_path
from jppo.config.words import refuse_attribute
from jppo.ppo.anakin import AnakinState
from jppo.ppo.types import TrainState
from jppo.runs.curves import RETURN, GroupMetrics
from jppo.runs.display import Picture, html_table, show_record
from jppo.runs.plots import draw_metrics
from jppo.runs.policy import TrainedPolicy
from jppo.runs.writer import write_run
from jppo.training.settings import Agent


class Result(NamedTuple):
    """The result of a run."""

    metrics: dict[str, np.ndarray]
    """One array [updates] per metric, including "update" and "env_steps"; NaN if no episode ended in an update."""
    policy: TrainedPolicy
    """The trained policy."""
    summary: dict[str, Any]
    """Content of summary.json."""
    state: AnakinState | TrainState
    """The whole training state; with Ray actors, the learner's."""
    agent: Agent
    """The initialization and update functions of the run."""
    run_dir: Path | None
    """The run directory, or None if nothing was saved."""
    settings: dict[str, Any]
    """Content of config.json."""

    @property
    def status(self) -> str:
        """How the run ended: finished, interrupted, diverged, failed, solved or stopped, as in summary.json."""
        return str(self.summary["status"])

    def __repr__(self) -> str:
        return show_record("Result", self._displayed)

    def _repr_html_(self) -> str:
        return html_table("Result", self._displayed)

    def save(self, run_dir: str | Path) -> None:
        """Writes the run directory of a run that had none, for `jppo eval`, `jppo plot`, `jppo.load_policy` and others.

        It has no checkpoints, so the run cannot be resumed, and no best policy.

        Raises:
          ValueError: the directory contains files, or a file cannot be written.
        """
        path = check_path("run_dir", run_dir).absolute()
        write_run(path, self.settings, self.metrics, self.policy.state, self.summary | {"run_dir": str(path)})

    def plot(self, *, metrics: Sequence[str] = (RETURN,), x: str = "steps") -> Picture:
        """Draws metrics of the run. A notebook shows the picture, and `result.plot().save("learning.png")` saves it.

        Args:
          metrics: names in `Result.metrics`; each gets a panel.
          x: "steps" or "minutes" (without compiling).

        Raises:
          ValueError: an unknown metric, or a metric without a value.
        """
        env = self.summary["env"]
        group = GroupMetrics(env=env, settings="", names=["the run"], runs=[self.metrics])
        return Picture(draw_metrics([group], metrics, x), "png", f"{env}: {', '.join(metrics)} over {x}")

    @property
    def _displayed(self) -> dict[str, Any]:
        names = ("env", "status", "steps", "updates", "return_mean", "run_dir")
        return {name: self.summary[name] for name in names}


Result.__getattr__ = refuse_attribute  # type: ignore[attr-defined]  # in the class, it would hide typos from mypy
