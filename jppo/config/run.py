"""Settings of a run that do not change what it computes: run directory, checkpoints and loggers."""

import dataclasses
import math
import numbers


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
    """The same arguments give the same policy, bit for bit, on the same kind of machine. Slower on a GPU."""

    def __post_init__(self) -> None:
        seconds, count = self.checkpoint_seconds, self.max_checkpoints
        is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
        if not (is_number and 0.0 <= float(seconds) < math.inf):
            raise ValueError(f"checkpoint_seconds = {seconds!r} must be a number of at least 0")
        if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < 1:
            raise ValueError(f"max_checkpoints = {count!r} must be a whole number of at least 1")
        for name in ("resume", "wandb", "deterministic"):
            value = getattr(self, name)
            if not (isinstance(value, bool) or (name == "deterministic" and value is None)):
                raise ValueError(f"{name} = {value!r} must be True or False")
