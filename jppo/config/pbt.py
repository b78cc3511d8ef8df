"""Selection among the runs of a sweep: successive halving or population-based training. Standard library only."""

import dataclasses
from typing import Any

from jppo.config.checks import check_int, did_you_mean, to_float
from jppo.errors import Refused

HALVING = "successive_halving"
SELECTIONS = (HALVING, "pbt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PBTConfig:
    """How the runs of a sweep copy each other and change their hyperparameters.

    Jaderberg et al. (2017), "Population based training of neural networks", with truncation selection.
    """

    every: int | None = None
    """Number of updates between two exchanges. Default: a twentieth of the updates."""
    fraction: float = 0.25
    """Fraction of the runs that copy a run of the same fraction of best runs; at most 0.5."""
    resample_probability: float = 0.25
    """Probability that a copied hyperparameter is drawn again instead of multiplied by 0.8 or 1.25."""

    def __post_init__(self) -> None:
        if self.every is not None:
            check_int("pbt.every", self.every)
        for name, limit in (("fraction", 0.5), ("resample_probability", 1.0)):
            value = getattr(self, name)
            if not 0.0 <= to_float(value) <= limit:
                raise Refused(f"pbt.{name} = {value!r} must be a number from 0 to {limit:g}")
        if not self.fraction:
            raise Refused("pbt.fraction = 0 would never replace a run; it must be greater than 0")

    def updates_between_exchanges(self, num_updates: int) -> int:
        """Returns `every`, or its default for a run of `num_updates` updates."""
        return self.every or max(1, num_updates // 20)


def read_selection(selection: Any) -> PBTConfig | str | None:
    """Returns the argument `selection` of a sweep: None, HALVING or a PBTConfig, which also replaces "pbt".

    Raises:
      ValueError: the value is not None, one of SELECTIONS, or a PBTConfig.
    """
    if selection is None or isinstance(selection, PBTConfig):
        return selection
    if isinstance(selection, str) and selection in SELECTIONS:  # an array compares its elements
        return HALVING if selection == HALVING else PBTConfig()
    hint = did_you_mean(str(selection), SELECTIONS)
    raise Refused(f"selection = {selection!r} must be None, a name or a jppo.PBTConfig; {hint}")
