"""The whole program on real Ray, its driver killed with SIGKILL and resumed: nothing twice, nothing left behind."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.experiments.cli import ROOT, SMALL, call, environment, nothing_left_behind
from tests.faults.local import prompts_trained

pytestmark = [pytest.mark.faults, pytest.mark.ray, pytest.mark.slow]
SETTINGS = [
    "experiments/configs/quickstart.yaml", "--steps", "4", "--checkpoint.every", "1", "--wandb_mode", "disabled",
    "--arms", "[{name: regular, kind: regular}]",
]  # fmt: skip


def test_a_killed_driver_leaves_nothing_and_is_resumed_on_a_new_ray(tmp_path):
    """Each call has a Ray of its own: the head is another one when the run goes on."""
    arm, before = tmp_path / "quickstart" / "regular-s0", folders()
    with nothing_left_behind():
        kill_after_steps(2, arm, tmp_path)
        deadline = time.monotonic() + 30
        while folders() - before and time.monotonic() < deadline:
            time.sleep(0.2)
        assert folders() == before, "the leash of the killed driver removes its Ray"
    with nothing_left_behind():
        done = call("run", *SETTINGS, "--output_dir", tmp_path, "--resume", "auto", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "arm regular-s0 goes on after step" in done.stdout and folders() == before
    assert prompts_trained(arm) == list(range(16))
    assert [json.loads(line)["step"] for line in (arm / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3]
    line = json.loads((arm / "resumes.jsonl").read_text())
    assert line["version"] == line["step"] + 2


def folders() -> set[Path]:
    return set(Path("/tmp").glob("ray-*"))


def kill_after_steps(steps: int, arm: Path, output_dir: Path) -> None:
    words = [sys.executable, "-m", "experiments", "run", *SETTINGS, "--output_dir", str(output_dir), *SMALL]
    process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (arm / "metrics.jsonl").is_file() or len((arm / "metrics.jsonl").read_text().splitlines()) < steps:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
