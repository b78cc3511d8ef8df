"""Settings of a run that do not change what it computes: run directory, checkpoints and loggers."""

import dataclasses

from jppo.config.checks import check_bool, check_int, check_non_negative


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How a run is saved and logged."""

    resume: bool = False
    """Require that the run directory already contains a run, and resume it."""
    checkpoint_seconds: float = 60.0
    """Seconds between two checkpoints; the end of a run always writes one."""
    max_checkpoints: int = 2
    """Number of most recent checkpoints to keep."""
    wandb: bool = False
    """Log to Weights & Biases as well (pip install 'jppo[wandb]'); needs a run directory."""
    deterministic: bool | None = None
    """The same arguments give the same policy, bit for bit, on the same kind of machine. Slower on a GPU. Default: that of the run that is resumed, else False."""  # noqa: E501
    log_every: int | None = None
    """Number of updates whose means form one line of metrics.jsonl and one entry of the metrics. Default: 1."""
    force: bool = False
    """Start a run even if it needs more memory than is free according to the compiler."""

    def __post_init__(self) -> None:
        check_non_negative("checkpoint_seconds", self.checkpoint_seconds)
        check_int("max_checkpoints", self.max_checkpoints)
        check_int("log_every", 1 if self.log_every is None else self.log_every)
        for name in ("resume", "wandb", "force"):
            check_bool(name, getattr(self, name))
        if self.deterministic is not None:
            check_bool("deterministic", self.deterministic)
