"""The Triton packing kernels, without a GPU: in Triton's interpreter, against the torch version."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang


def test_the_kernels_write_what_torch_writes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang_cpu.interpret_kernels"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["31"]
