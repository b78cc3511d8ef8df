"""Measures whether the default test suite detects faults: applies one fault at a time and runs the tests.

    python tests/seeded_faults.py                       # every fault
    python tests/seeded_faults.py --only gae advantage  # faults with one of these words in their name
    python tests/seeded_faults.py --output results.md   # also write the table of results to a file

The faults are in seeded_faults.toml. The working tree is copied to a temporary directory, and each fault replaces one
piece of text in the copy. A fault is caught if a test fails that passes without it. The exit code is 1 if a fault is
not caught.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COPIED = ("jppo", "tests", "examples", "docs", "README.md", "CONTRIBUTING.md", "mkdocs.yml", "pyproject.toml")
FAULTS = Path(__file__).with_suffix(".toml")
TIME_LIMIT = 900.0  # seconds per fault; a hanging test counts as caught


class Fault(NamedTuple):
    """A change of one file in jppo/ that a test should detect."""

    name: str
    file: str
    old: str  # occurs once in the file
    new: str
    tests: list[str]  # test files, or tests (file.py::name)


class Outcome(NamedTuple):
    """The result of one fault."""

    fault: Fault
    failed: str  # the first test that failed; "" if none did
    is_caught: bool  # that test passes without the fault


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="faults with one of these words")
    parser.add_argument("--output", type=Path, help="write the table of results to this file")
    args = parser.parse_args()
    faults = [Fault(**fields) for fields in tomllib.loads(FAULTS.read_text())["fault"]]
    chosen = [fault for fault in faults if any(word.lower() in fault.name.lower() for word in args.only)]
    with tempfile.TemporaryDirectory(prefix="jppo-faults-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        if stale := [text for fault in chosen if (text := describe_mismatch(tree, fault))]:
            sys.exit("correct these faults in seeded_faults.toml:\n" + "\n".join(stale))
        outcomes: list[Outcome] = []
        passing: set[str] = set()
        for fault in chosen:
            outcomes.append(measure(tree, fault, passing))
            print(row(outcomes[-1]), flush=True)
    missed = [outcome.fault.name for outcome in outcomes if not outcome.is_caught]
    print(f"caught {len(outcomes) - len(missed)} of {len(outcomes)}; missed: {', '.join(missed) or 'none'}")
    if args.output:
        header = "| fault | file | caught by |\n|---|---|---|\n"
        args.output.write_text(header + "".join(row(outcome) + "\n" for outcome in outcomes))
    return 1 if missed else 0


def copy_tree(tree: Path) -> None:
    """Copies the files for the tests."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name)


def describe_mismatch(tree: Path, fault: Fault) -> str:
    """Returns a message unless the fault's text occurs exactly once; otherwise ''."""
    path = tree / "jppo" / fault.file
    if not path.exists():
        return f"{fault.name}: there is no file jppo/{fault.file}"
    count = path.read_text().count(fault.old)
    return "" if count == 1 else f"{fault.name}: jppo/{fault.file} contains {fault.old!r} {count} times"


def measure(tree: Path, fault: Fault, passing: set[str]) -> Outcome:
    """Runs the tests with the fault and, if one fails, that test without the fault.

    Args:
      passing: tests that are known to pass without a fault; is extended.
    """
    path = tree / "jppo" / fault.file
    original = path.read_text()
    path.write_text(original.replace(fault.old, fault.new))
    try:
        failed = first_failure(tree, fault.tests)
    finally:
        path.write_text(original)
    if "::" in failed and failed not in passing and not first_failure(tree, [failed]):
        passing.add(failed)
    return Outcome(fault, failed, bool(failed) and ("::" not in failed or failed in passing))


def first_failure(tree: Path, tests: Sequence[str]) -> str:
    """Returns the name of the first test that fails, or ''."""
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
    command += [f"tests/{name}" for name in tests]
    env = os.environ | {"PYTHONPATH": str(tree), "JAX_COMPILATION_CACHE_DIR": str(tree / "compiled")}
    try:
        done = subprocess.run(
            command, cwd=tree, env=env, capture_output=True, text=True, timeout=TIME_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"time limit of {TIME_LIMIT:.0f} s"
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.MULTILINE)
    if failed is None:
        sys.exit(f"pytest failed without a test:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return re.sub(r"\[.*", "", failed[1])


def row(outcome: Outcome) -> str:
    """Returns a row of the table."""
    result = f"`{outcome.failed}`" if outcome.failed else "**missed**"
    if outcome.failed and not outcome.is_caught:
        result = f"**unknown**: {result} also fails without the fault"
    return f"| {outcome.fault.name} | `{outcome.fault.file}` | {result} |"


if __name__ == "__main__":
    sys.exit(main())
