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
    arm = tmp_path / "quickstart" / "regular-s0"
    with nothing_left_behind():
        folder = kill_after_steps(2, arm, tmp_path)
        deadline = time.monotonic() + 30
        while folder.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not folder.exists(), "the leash of the killed driver removes its Ray"
    with nothing_left_behind():
        done = call("run", *SETTINGS, "--output_dir", tmp_path, "--resume", "auto", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "arm regular-s0 goes on after step" in done.stdout
    assert prompts_trained(arm) == list(range(16))
    assert [json.loads(line)["step"] for line in (arm / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3]
    line = json.loads((arm / "resumes.jsonl").read_text())
    assert line["version"] == line["step"] + 2


def kill_after_steps(steps: int, arm: Path, output_dir: Path) -> Path:
    """The folder of the Ray that the killed driver had."""
    words = [sys.executable, "-m", "experiments", "run", *SETTINGS, "--output_dir", str(output_dir), *SMALL]
    process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (arm / "metrics.jsonl").is_file() or len((arm / "metrics.jsonl").read_text().splitlines()) < steps:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0") for child in children]
    (folder,) = [words[3] for words in commands if words[1:3] == ["-m", "experiments.leash"]]
    process.send_signal(signal.SIGKILL)
    process.wait()
    return Path(folder)
