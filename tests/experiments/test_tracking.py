import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import tracking
from experiments.tracking import Tracker, default_mode, read_metrics


def make(path: Path, **kwargs) -> Tracker:
    kwargs = {"wandb_mode": "disabled", **kwargs}
    return Tracker(path, experiment="exp", arm="dflash2", seed=3, config={"lr": 1e-3}, **kwargs)


def test_every_line_is_on_disk_before_the_next_call(tmp_path):
    tracker = make(tmp_path)
    tracker.log(0, {"train/loss": 1.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 0, "train/loss": 1.5}
    tracker.finish()


def test_values_that_are_not_finite_are_written_and_counted(tmp_path):
    tracker = make(tmp_path)
    tracker.log(0, {"train/loss": math.nan, "train/lr": math.inf, "perf/step_time": -math.inf, "sc/head_mass": 1.0})
    tracker.finish()
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert line["train/loss"] == "nan" and line["train/lr"] == "inf" and line["non_finite"] == 3
    assert tracker.non_finite == 3
    series = read_metrics(tmp_path)
    assert math.isnan(series["train/loss"][0]) and series["perf/step_time"][0] == -math.inf


def test_a_name_without_namespace_is_refused(tmp_path):
    tracker = make(tmp_path)
    with pytest.raises(ValueError, match="'reward'.*accepted: .*rollout"):
        tracker.log(0, {"reward": 1.0})
    with pytest.raises(ValueError, match="train"):
        tracker.log(0, {"train": 1.0})


def test_resume_appends_and_the_last_value_of_a_step_counts(tmp_path):
    for value in (1.0, 2.0):
        tracker = make(tmp_path)
        tracker.log(4, {"train/loss": value})
        tracker.finish()
    assert read_metrics(tmp_path)["train/loss"] == {4: 2.0}


def test_a_line_cut_by_a_crash_is_left_out_and_garbage_is_not(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "train/loss": 1.0}\n{"step": 1, "train/lo')
    assert read_metrics(tmp_path) == {"train/loss": {0: 1.0}}
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "tra\n{"step": 1, "train/loss": 1.0}\n')
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        read_metrics(tmp_path)


def test_mode_follows_the_environment(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert default_mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert default_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert default_mode() == "disabled"
    monkeypatch.setenv("WANDB_MODE", "shared")
    with pytest.raises(ValueError, match="'shared'.*accepted: offline"):
        default_mode()


def test_startup_does_not_wait_for_wandb():
    code = "import sys, experiments.tracking; print('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_offline_run_is_written_named_and_resumed(tmp_path):
    first = make(tmp_path, wandb_mode="offline", tags=("quick",))
    started = time.monotonic()
    first.log(0, {"rollout/raw_reward": 0.5, "train/loss": math.nan, "sc/head_mass": 1.0})
    assert time.monotonic() - started < 1.0
    first.finish()
    second = make(tmp_path, wandb_mode="offline", wandb_id=first.wandb_id)
    second.log(1, {"rollout/raw_reward": 0.6})
    second.finish(failed=True)
    assert not first.wandb_error and not second.wandb_error
    runs = sorted(path for path in first.wandb_dir.glob("offline-run-*") if path.is_dir())
    assert len(runs) == 2 and all(path.name.endswith(first.wandb_id) for path in runs)
    stored = b"".join(path.read_bytes() for path in runs[0].glob("*.wandb"))
    for word in (b"exp-dflash2-s3", b"rollout/raw_reward", b"rollout/step", b"train/step", b"quick", b"sc/*"):
        assert word in stored, word


def test_a_broken_wandb_is_said_once_and_the_jsonl_goes_on(tmp_path, monkeypatch, capsys):
    class Broken:
        Settings = dict

        @staticmethod
        def init(**kwargs):
            raise OSError("no disk left")

    monkeypatch.setitem(sys.modules, "wandb", Broken)
    tracker = make(tmp_path, wandb_mode="offline")
    for step in range(3):
        tracker.log(step, {"train/loss": float(step)})
    tracker.finish()
    assert "no disk left" in tracker.wandb_error
    assert capsys.readouterr().err.count("W&B stopped") == 1
    assert read_metrics(tmp_path)["train/loss"] == {0: 0.0, 1: 1.0, 2: 2.0}


def test_a_hanging_wandb_is_left_behind(tmp_path, monkeypatch, capsys):
    class Hanging:
        Settings = dict

        @staticmethod
        def init(**kwargs):
            time.sleep(5)

    monkeypatch.setitem(sys.modules, "wandb", Hanging)
    monkeypatch.setattr(tracking, "_FINISH_TIMEOUT_S", 0.1)
    tracker = make(tmp_path, wandb_mode="offline")
    tracker.finish()
    assert "did not finish" in tracker.wandb_error and "W&B stopped" in capsys.readouterr().err
