"""A full disk, a clock that jumps, W&B that is not there: each names itself or does not matter, and nothing is lost."""

import errno
import json
import os
import resource
import signal
import sys
import time

import pytest

from experiments import arms, delivery, rollouts, tracking
from tests.faults import local
from trainer import checkpoint

pytestmark = pytest.mark.faults
FOLDER = "dflash2-s5/checkpoints"


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        local.in_process(patch)
        folder, _ = local.run(local.settings(models, tmp_path_factory.mktemp("whole")))
    return local.evidence(folder)


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


WRITES = {
    "rollout": (rollouts, "save_file", 3), "metrics": (tracking, "write_line", 3),
    "handoff": (delivery, "record_handoff", 3), "pointer": (checkpoint, "_write", 3),
    "model": (local.LocalTrainer, "save_hf", 0),
}  # fmt: skip


@pytest.mark.parametrize("what", WRITES)
def test_a_disk_that_is_full_while_something_is_written(what, models, whole, tmp_path, monkeypatch):
    local.in_process(monkeypatch)
    config = local.settings(models, tmp_path)
    where, name, number = WRITES[what]
    with monkeypatch.context() as patch:
        patch.setattr(where, name, local.at_call(number, full, getattr(where, name)))
        folder, said = local.run(config)
    assert said[-1] == "arm dflash2-s5 FAILED: OSError: [Errno 28] No space left on device"
    assert json.loads((folder / "manifest.json").read_text())["failure"]
    local.run(config)
    assert local.evidence(folder) == whole


def test_a_checkpoint_that_the_system_refuses_to_write_leaves_the_one_before(models, whole, tmp_path, monkeypatch):
    """RLIMIT_FSIZE of the process: the write itself fails, in the middle of a file."""
    local.in_process(monkeypatch)
    config = local.settings(models, tmp_path)
    save = checkpoint.save

    def limited(backend, folder, version, beside=None):
        if version == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
        save(backend, folder, version, beside)

    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        monkeypatch.setattr(checkpoint, "save", limited)
        _, said = local.run(config)
        os._exit(7 if "FAILED" in said[-1] and "step-000004" not in os.listdir(config.run_dir / FOLDER) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    folder, said = local.run(config)
    assert said[0] == "arm dflash2-s5 goes on after step 2 of 5"
    assert local.evidence(folder) == whole


def test_a_manifest_that_cannot_be_written_is_said_and_the_arm_is_not_finished(models, whole, tmp_path, monkeypatch):
    local.in_process(monkeypatch)
    config = local.settings(models, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(arms, "write_manifest", local.at_call(0, full, arms.write_manifest))
        folder, said = local.run(config)
    assert "has no manifest: [Errno 28]" in said[-1] and not (folder / "manifest.json").exists()
    local.run(config)
    assert local.evidence(folder) == whole


def test_a_clock_that_jumps_changes_nothing(models, whole, tmp_path, monkeypatch):
    local.in_process(monkeypatch)
    real, jumps = time.time, iter(range(1 << 30))
    monkeypatch.setattr(time, "time", lambda: real() + 86_400 * (-1) ** next(jumps))
    folder, _ = local.run(local.settings(models, tmp_path))
    assert local.evidence(folder) == whole
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= value < 3600 for line in lines for name, value in line.items() if name.endswith("_time"))


@pytest.mark.parametrize("fault", ["unreachable", "slow"])
def test_wandb_that_does_not_answer_holds_up_nothing(fault, models, whole, tmp_path, monkeypatch, capsys):
    class Wandb:
        Settings = dict

        @staticmethod
        def init(**settings):
            if fault == "unreachable":
                raise ConnectionError("no route to host")
            time.sleep(20)

    local.in_process(monkeypatch)
    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    monkeypatch.setattr(tracking, "_FINISH_TIMEOUT_S", 0.1)
    started = time.monotonic()
    folder, _ = local.run(local.settings(models, tmp_path, wandb_mode="online"))
    assert local.evidence(folder) == whole and time.monotonic() - started < 18
    reason = "no route to host" if fault == "unreachable" else "did not finish"
    err = capsys.readouterr().err
    assert err.count("W&B stopped") == 1 and reason in err
