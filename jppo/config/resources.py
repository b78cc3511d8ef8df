"""Resources that Ray reserves for trials of Ray Tune."""

import dataclasses

from jppo.config.checks import check_non_negative


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources that Ray reserves for each trial of Ray Tune.

    Attributes:
      cpus: number of CPUs, which is also the number of threads of the process.
      gpus: number of GPUs. A fraction also limits the share of the GPU's memory. With 0, the process uses the CPU.

    Raises:
      ValueError: a number is negative or not finite.
    """

    cpus: float = 1.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        check_non_negative("cpus", self.cpus)
        check_non_negative("gpus", self.gpus)
