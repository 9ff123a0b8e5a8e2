"""The environment is the one that requirements/ pins, package by package, and nothing else is in it.

This proves which versions run, without a network. It does not prove that an index served the bytes that we saw.
"""

from __future__ import annotations

import re
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import pytest

PACKAGES = sysconfig.get_path("purelib")  # not what a package brings inside itself, such as Ray
FOLDER = Path(__file__).parents[1] / "requirements"
UNPINNED = re.compile(r"miles-ext|pip|setuptools|wheel|triton|nvidia-.*|cuda-.*")
"""Ourselves, the tools of the environment, and what torch's CUDA build brings."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: Path) -> dict[str, str]:
    """{name: version}, of the files too that it includes. ValueError for a line that is no exact pin."""
    found: dict[str, str] = {}
    for line in file.read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            found |= pins(file.parent / line.removeprefix("-r ").strip())
        elif line and not line.startswith("--"):
            match = re.fullmatch(r"([\w.-]+)(\[[\w,]+\])?==([\w.!]+)(\s*;.*)?", line)
            if match is None:
                raise ValueError(f"{file.name}: {line!r} is no exact pin; accepted: name==version")
            found[canonical(match[1])] = match[3]
    return found


def test_what_is_installed_is_what_is_pinned() -> None:
    wanted = pins(FOLDER / "dev.txt")
    assert len(wanted) > 100
    found = distributions(path=[PACKAGES])
    installed = {canonical(one.metadata["Name"]): one.version.partition("+")[0] for one in found}  # 2.13.0+cpu
    differs = {name: (version, wanted.get(name)) for name, version in installed.items() if wanted.get(name) != version}
    wrong = {name: versions for name, versions in differs.items() if not UNPINNED.fullmatch(name)}
    assert not wrong, f"(installed, pinned): {wrong}; run make setup, or pin it in requirements/"
    assert not wanted.keys() - installed.keys()


def test_a_loose_requirement_is_refused(tmp_path: Path) -> None:
    for line in ("numpy", "numpy>=2", "numpy~=2.0", "git+https://example.com/x", "numpy==2.*"):
        (tmp_path / "loose.txt").write_text(f"# one\n{line}\n")
        with pytest.raises(ValueError, match="no exact pin"):
            pins(tmp_path / "loose.txt")
