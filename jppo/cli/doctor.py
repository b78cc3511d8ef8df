"""`jppo doctor`."""

import dataclasses
import json
import textwrap


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Check the installation and show how to fix its problems.

    The exit code is 1 if there is a problem.

    A missing optional package is not a problem.
    """

    json: bool = False
    """Print one line of JSON instead of text."""

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
                problem = textwrap.fill(finding.problem, 80, break_long_words=False, break_on_hyphens=False)
                print(f"\n{problem}\n  {finding.fix}")
            print(f"\n{len(problems)} problem{'s' * (len(problems) != 1)}")
        return 1 if problems else 0
