"""The whole thing as a Ray job, and that nothing stays behind however it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.comparison import compare
from tests.experiments.cli import ROOT, SMALL, call, environment, listening, manifest, nothing_left_behind

pytestmark = [pytest.mark.ray, pytest.mark.slow]
QUICKSTART = "experiments/configs/quickstart.yaml"


def test_a_job_runs_both_arms_into_this_folder_and_leaves_no_process(tmp_path):
    with nothing_left_behind():
        done = call("submit", QUICKSTART, "--steps", "2", "--output_dir", tmp_path, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "quickstart"
    assert "[regular-s0 2/2] reward" in done.stdout and "[dflash2-s0 2/2] reward" in done.stdout
    assert f"report: {run_dir / 'report.html'}" in done.stdout
    assert "paired: same initial weights and same prompts in all arms" in done.stdout

    comparison = json.loads((run_dir / "comparison.json").read_text())
    assert comparison["pairing"]["paired"] and {arm["state"] for arm in comparison["arms"]} == {"finished"}
    assert compare(run_dir) == comparison
    for arm in ("regular-s0", "dflash2-s0"):
        assert manifest(run_dir / arm)["failure"] == ""
        assert list((run_dir / arm / "wandb").glob("offline-run-*/*.wandb"))
        assert json.loads((run_dir / arm / "audit.json").read_text())["rows"]
    assert call("audit", run_dir).returncode == 0


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [("submit", signal.SIGINT, 130), ("submit", signal.SIGTERM, 143), ("run", signal.SIGTERM, 143)],
)
def test_an_interruption_stops_everything_and_keeps_the_work(command, number, code, tmp_path):
    arm = tmp_path / "quickstart" / "regular-s0"
    with nothing_left_behind():
        process = start(command, "--steps", "500", "--output_dir", tmp_path)
        wait_for(arm / "metrics.jsonl", process)
        assert listening() == {"127.0.0.1"}
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == code, out + err
    assert "Traceback" not in out + err
    assert manifest(arm)["failure"] == "interrupted"
    assert (arm / "metrics.jsonl").read_text().endswith("\n")


def start(command: str, *arguments: str | Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "experiments", command, QUICKSTART, *map(str, arguments), *SMALL]
    return subprocess.Popen(
        words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=heed_interruptions,
    )  # fmt: skip


def heed_interruptions() -> None:
    """A shell starts what runs in its background deaf to SIGINT, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(file: Path, process: subprocess.Popen[str], timeout_s: float = 200) -> None:
    """Until the file holds something."""
    deadline = time.monotonic() + timeout_s
    while not (file.exists() and file.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{file} did not appear; {os.listdir(file.parents[2])}"
        time.sleep(0.2)
