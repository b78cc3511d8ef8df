"""`jppo doctor`."""

import dataclasses
import json
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Check the installation and show how to fix its problems.

    The exit code is 1 if there is a problem.

    A missing optional package is not a problem.
    """

    json: bool = False
    """Print one line of JSON instead of text."""

    num_devices: ClassVar[None] = None  # as in `jppo train`, JAX gets one CPU device per core

    def run(self) -> int:
        from jppo.cli.diagnosis import diagnose

        findings = []
        for finding in diagnose():
            findings.append(finding)
            if not self.json:
                print(f"{'!' if finding.problem else ' '} {finding.name:<13}{finding.text}", flush=True)
        problems = [finding for finding in findings if finding.problem]
        if self.json:
            print(json.dumps([finding._asdict() for finding in findings]))
        else:
            for finding in problems:
                print("", finding.problem, f"  {finding.fix}", sep="\n")
            print(f"\n{len(problems)} problem{'s' * (len(problems) != 1)}")
        return 1 if problems else 0
