"""`jppo export`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from jppo.cli.arguments import TrainedRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(TrainedRun):
    """Write a trained policy to one file, for use without jppo."""

    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Output file: NAME.npz for NumPy (jppo.numpy_policy.load), NAME.stablehlo for JAX and other XLA programs (jppo.load_exported)."""  # noqa: E501

    def run(self) -> int:
        from jppo.runs.export import check_output_path, export_policy

        check_output_path(self.output)
        path = export_policy(self.load().policy, self.output)
        loader = "jppo.numpy_policy.load" if path.suffix.lower() == ".npz" else "jppo.load_exported"
        print(f"wrote {path} ({path.stat().st_size:,} bytes); load it with {loader}")
        return 0
