"""cases.yaml names every test of its files, and no other: the list of injected faults is the tests themselves."""

import re
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parent
CASES = yaml.safe_load((FOLDER / "cases.yaml").read_text())


@pytest.mark.parametrize("file", sorted({path.name for path in FOLDER.glob("test_[rt]*.py")} & CASES.keys()))
def test_every_case_is_listed(file):
    found = re.findall(r"^def (test_\w+)", (FOLDER / file).read_text(), re.MULTILINE)
    assert sorted(found) == sorted(CASES[file])


def test_there_are_enough_cases_and_each_has_a_file():
    assert all((FOLDER / file).is_file() for file in CASES)
    assert sum(map(len, CASES.values())) >= 25
