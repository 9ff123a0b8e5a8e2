"""The custom loss in a tensor-parallel and a context-parallel group of two processes, against the float64 reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_two_ranks(miles_source: Path, tmp_path: Path):
    """`ranks.py` says what is compared; its output shows the largest difference of each case."""
    script = Path(__file__).with_name("ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(miles_source), str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][-3000:] + outputs[1][-3000:]
    cases = [line for line in outputs[0].splitlines() if line.startswith(("tp 2", "cp 2"))]
    print("\n".join(cases))
    assert len(cases) == 10
