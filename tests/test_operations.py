"""docs/operations.md knows every alarm and error of the code, and names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from experiments.alarms import ADVICE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "operations.md").read_text()
SHIPPED = [file for name in ("miles_ext", "rollout", "trainer", "experiments") for file in (ROOT / name).rglob("*.py")]
PROMISES = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def errors() -> set[str]:
    """Exception classes that the code defines for others to see."""
    found = set()
    for file in SHIPPED:
        for node in ast.walk(ast.parse(file.read_text())):
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.ClassDef) and any(base.endswith(("Error", "Exception")) for base in bases):
                found.add(node.name)
    return {name for name in found if not name.startswith("_")}


def test_every_error_is_explained() -> None:
    assert {"EngineError", "WeightError", "ContentError"} <= errors()
    missing = [name for name in sorted(errors()) if f"| `{name}` |" not in PAGE]
    assert not missing, f"docs/operations.md has no row for {missing}"


def test_every_alarm_is_explained() -> None:
    assert len(ADVICE) >= 6
    missing = [name for name in ADVICE if f"| `{name}` |" not in PAGE]
    assert not missing, f"docs/operations.md has no row for {missing}"


@pytest.mark.parametrize(("file", "name"), PROMISES)
def test_every_promise_has_its_test(file: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {name}"


def test_every_fault_test_holds_a_promise() -> None:
    """No row is left out of the table by accident: the tests of faults in rollout workers are all in it."""
    assert len(PROMISES) > 30
    for file in sorted((ROOT / "tests" / "faults").glob("test_rollout_*.py")):
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE):
            assert (f"tests/faults/{file.name}", name) in PROMISES, f"{name} is not in docs/operations.md"


def test_settings_that_the_page_names_exist() -> None:
    reference = (ROOT / "docs" / "configuration.md").read_text()
    for key in set(re.findall(r"`((?:rollout|trainer|sampling)\.[a-z_.]+)`", PAGE)) - {"rollout.server"}:
        assert key in reference, f"{key} is no setting"
