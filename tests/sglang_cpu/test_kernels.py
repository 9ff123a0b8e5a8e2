"""The Triton kernels of law, draw and packing, without a GPU: in Triton's interpreter, against the torch versions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang


def test_the_kernels_do_what_torch_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang_cpu.interpret_kernels"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=280,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert counts == {
        "written_cases": "46", "random_laws": "56", "laws_found_by_bisecting": "12", "draws": "1200", "bonuses": "4",
        "packed_rows": "36",
    }  # fmt: skip
