"""Puts Miles on the path of these tests: the unpacked wheel, or the source tree that MILES_SOURCE names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

import fetch
import stand_ins


@pytest.fixture(scope="session")
def miles_source() -> Path:
    source = Path(os.environ.get("MILES_SOURCE") or fetch.unpacked())
    assert (source / "miles" / "__init__.py").is_file(), f"no Miles in {source}: run make setup, or mend MILES_SOURCE"
    return source


@pytest.fixture(scope="package", autouse=True)
def miles(miles_source: Path):
    """Imported for these tests alone: other tests must not find a Miles, or the stand-ins of what it imports."""
    before = set(sys.modules)
    finder = stand_ins.install(str(miles_source))
    yield
    sys.meta_path.remove(finder)
    sys.path.remove(str(miles_source))
    for name in set(sys.modules) - before:
        if name.split(".")[0] in {"miles", "miles_plugins"} or isinstance(sys.modules[name], stand_ins.Shell):
            del sys.modules[name]
        elif name.startswith("miles_ext.miles_adapter"):
            del sys.modules[name]
