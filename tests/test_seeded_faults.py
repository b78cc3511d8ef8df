"""Tests that each seeded fault still fits the code; `python tests/seeded_faults.py` runs the tests with them."""

import tomllib
from pathlib import Path

from seeded_faults import FAULTS, Fault, describe_mismatch

import jppo


def test_each_fault_replaces_text_that_occurs_once():
    faults = [Fault(**fields) for fields in tomllib.loads(FAULTS.read_text())["fault"]]
    assert [text for fault in faults if (text := describe_mismatch(Path(jppo.__file__).parent.parent, fault))] == []
    assert len({fault.name for fault in faults}) == len(faults) >= 25


def test_each_fault_names_existing_tests():
    tests = Path(__file__).parent
    for fault in (Fault(**fields) for fields in tomllib.loads(FAULTS.read_text())["fault"]):
        for name in fault.tests:
            file, _, function = name.partition("::")
            assert f"def {function}" in (tests / file).read_text(), f"{fault.name}: {name}"
