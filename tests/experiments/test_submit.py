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
from tests.experiments.cli import ROOT, SMALL, alive, call, environment, listening, manifest

pytestmark = [pytest.mark.ray, pytest.mark.slow]
QUICKSTART = "experiments/configs/quickstart.yaml"


def test_a_job_runs_both_arms_into_this_folder_and_leaves_no_process(tmp_path):
    mark = str(tmp_path)
    done = call("submit", QUICKSTART, "--steps", "2", "--output_dir", tmp_path, *SMALL, mark=mark)
    assert done.returncode == 0, done.stdout + done.stderr
    assert alive(mark) == []
    run_dir = tmp_path / "quickstart"
    assert "[regular-s0 2/2] reward" in done.stdout and "[dflash2-s0 2/2] reward" in done.stdout
    assert f"report: {run_dir / 'report.html'}" in done.stdout
    assert "paired: same initial weights and same prompts in all arms" in done.stdout
    assert not list(ROOT.glob("runs/quickstart*/config.yaml.partial"))

    comparison = json.loads((run_dir / "comparison.json").read_text())
    assert comparison["pairing"]["paired"] and {arm["state"] for arm in comparison["arms"]} == {"finished"}
    assert compare(run_dir) == comparison
    for arm in ("regular-s0", "dflash2-s0"):
        assert manifest(run_dir / arm)["failure"] == ""
        assert list((run_dir / arm / "wandb").glob("offline-run-*/*.wandb"))
        assert json.loads((run_dir / arm / "audit.json").read_text())["rows"]
    assert call("audit", run_dir).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_job_is_stopped_and_its_work_is_kept(number, tmp_path):
    mark = str(tmp_path)
    process = start("submit", "--steps", "500", "--output_dir", tmp_path, mark=mark)
    wait_for(tmp_path / "quickstart" / "regular-s0" / "metrics.jsonl", process)
    assert listening(mark) and {address for address in listening(mark)} == {"127.0.0.1"}
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == (130 if number is signal.SIGINT else 143), out + err
    assert "Traceback" not in out + err
    assert alive(mark) == []
    arm = tmp_path / "quickstart" / "regular-s0"
    assert manifest(arm)["failure"] == "interrupted"
    assert (arm / "metrics.jsonl").read_text().endswith("\n")


def test_a_run_outside_of_a_job_ends_as_cleanly(tmp_path):
    mark = str(tmp_path)
    process = start("run", "--steps", "500", "--output_dir", tmp_path, mark=mark)
    wait_for(tmp_path / "quickstart" / "regular-s0" / "metrics.jsonl", process)
    assert {address for address in listening(mark)} == {"127.0.0.1"}
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, out + err
    assert manifest(tmp_path / "quickstart" / "regular-s0")["failure"] == "interrupted"
    assert alive(mark) == []


def start(command: str, *arguments: str | Path, mark: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "experiments", command, QUICKSTART, *map(str, arguments), *SMALL]
    return subprocess.Popen(
        words, cwd=ROOT, env=environment(mark), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(file: Path, process: subprocess.Popen[str], timeout_s: float = 200) -> None:
    """Until the file holds something."""
    deadline = time.monotonic() + timeout_s
    while not (file.exists() and file.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{file} did not appear; {os.listdir(file.parents[2])}"
        time.sleep(0.2)
