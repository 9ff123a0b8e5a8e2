"""The Triton kernels without a GPU: in Triton's interpreter, against the torch versions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.sglang_cpu.{program}"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=900,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_kernels_do_what_torch_does() -> None:
    counts = dict(line.split() for line in run("interpret_kernels").splitlines())
    assert counts == {
        "written_cases": "46", "random_laws": "56", "laws_found_by_bisecting": "12", "draws": "1200", "bonuses": "4",
        "packed_rows": "36",
    }  # fmt: skip


def test_the_kernels_of_the_estimator_do_what_torch_does() -> None:
    assert run("interpret_estimator").split() == ["72"]
