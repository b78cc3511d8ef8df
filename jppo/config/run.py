"""Settings of a run that do not change its updates: files, logging, evaluation, callbacks and early stopping."""

import dataclasses
import math
import numbers
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jppo.config.checks import check_bool, check_function, check_int, check_non_negative, check_path, set_int, to_float
from jppo.errors import Refused

EVAL_EPISODES = 16  # default
MAX_STEPS = 100_000  # default maximum length of an evaluated episode
EVAL_MAX_STEPS = 10_000  # the same for evaluations during training
MAX_FRAMES = 2000  # default maximum length of an episode of a GIF; memory holds all frames, up to 0.25 MB each
EVALUATION_DETAILS = ("eval_episodes", "eval_sampled", "eval_max_steps")
EVALUATION_FIELDS = ("eval_every", *EVALUATION_DETAILS, "stop_at_return")
EVENT_FIELDS = (*EVALUATION_FIELDS, "callback", "callback_every")
SWEEP_FIELDS = (*EVALUATION_FIELDS, "progress")
SAVED_FIELDS = (*EVALUATION_FIELDS, "video")
"""Fields that config.json contains if they are set, so that a resumed run uses them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How a run is saved, shown, logged, evaluated and ended."""

    run_dir: str | Path | None = None
    """Directory for config.json, metrics.jsonl, TensorBoard events, checkpoints, the policy and summary.json. If it
    contains a run, that run is resumed from its newest checkpoint: missing arguments come from the previous run, and
    the others must be equal to the previous run's. Default: nothing is saved."""
    resume: bool = False
    """Require that the run directory already contains a run, and resume it."""
    checkpoint_seconds: float = 60.0
    """Seconds between two checkpoints; the end of a run always writes one."""
    max_checkpoints: int = 2
    """Number of most recent checkpoints to keep."""
    wandb: bool = False
    """Log to Weights & Biases as well (pip install 'jppo[wandb]'); needs a run directory."""
    deterministic: bool | None = None
    """The same arguments give the same policy, bit for bit, on the same kind of machine. Slower on a GPU. Default: False; a resumed run keeps its value."""  # noqa: E501
    log_every: int | None = None
    """Number of updates whose means form one line of metrics.jsonl and one entry of the metrics. Default: 1."""
    force: bool = False
    """Start a run even if it needs more memory than is free according to an estimate."""
    eval_every: int | None = None
    """Number of updates between two evaluations of the policy on whole episodes. Default: 0, no evaluation."""
    eval_episodes: int | None = None
    """Number of episodes of an evaluation. Default: 16."""
    eval_sampled: bool | None = None
    """Evaluations sample actions instead of taking the most likely ones. Default: False."""
    eval_max_steps: int | None = None
    """Evaluations cut episodes that are longer than this. Default: 10,000."""
    stop_at_return: float | None = None
    """End the run when the mean return reaches this value: the mean of an evaluation if eval_every is set, otherwise of
    about the last 100 episodes. Default: no such end."""
    callback: Callable[[Any], Any] | None = None
    """A function of a `jppo.CallbackEvent`, which may change the state, stop the run or log numbers, see
    docs/callbacks.md. An exception in it ends the run; the run so far is saved."""
    callback_every: int = 1
    """Number of updates between two calls of the callback."""
    video: bool | None = None
    """Write an episode of the final policy to video.gif in the run directory. Default: False."""
    progress: Any = "none"
    """"auto" or True shows a progress bar (or lines if the output is not a terminal), "none" or False shows nothing; or
    a `jppo.Reporter`."""

    def __post_init__(self) -> None:
        if self.run_dir is not None:
            object.__setattr__(self, "run_dir", check_path("run_dir", self.run_dir))
        check_non_negative("checkpoint_seconds", self.checkpoint_seconds)
        for name in ("max_checkpoints", "callback_every"):
            object.__setattr__(self, name, check_int(name, getattr(self, name)))
        for name in ("log_every", "eval_every", "eval_episodes", "eval_max_steps"):
            set_int(self, name, 0 if name == "eval_every" else 1)
        if self.callback is not None:
            check_function("callback", self.callback, "event")
        value = 0.0 if self.stop_at_return is None else self.stop_at_return
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(to_float(value)):
            raise Refused(f"stop_at_return = {value!r} must be a number")
        for name in ("resume", "wandb", "force"):
            check_bool(name, getattr(self, name))
        for name in ("deterministic", "eval_sampled", "video"):
            if getattr(self, name) is not None:
                check_bool(name, getattr(self, name))

    def check_evaluations(self) -> None:
        """Raises ValueError for a setting of evaluations without `eval_every`."""
        for name in EVALUATION_DETAILS:
            if (value := getattr(self, name)) and not self.eval_every:
                raise Refused(f"{name} = {value} without evaluations has no effect; set eval_every or leave out {name}")
