"""`jppo export`."""

import dataclasses
from pathlib import Path

import tyro


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a trained policy as one file to use elsewhere: for NumPy alone, or as a program for JAX and other users of
    XLA."""

    run_dir: tyro.conf.Positional[Path]
    """A run directory made by `jppo train`."""
    output: tyro.conf.Positional[Path]
    """The file: name.npz for jppo.actors.numpy_policy.load, name.stablehlo for jppo.load_exported."""

    def run(self) -> int:
        from jppo.runs.export import export_policy

        path = export_policy(self.run_dir, self.output)
        loader = "numpy_policy.load" if path.suffix.lower() == ".npz" else "load_exported"
        print(f"wrote {path}, {path.stat().st_size:,} bytes; jppo.{loader} reads it")
        return 0
