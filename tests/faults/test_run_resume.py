"""Which run is continued, and from which checkpoint: nothing that was finished or is whole is ever overwritten."""

import fcntl
import json

import pytest

from experiments import checkpoints
from experiments.config import dump
from experiments.resume import opened
from miles_ext.errors import CheckpointError
from tests.faults import local

pytestmark = pytest.mark.faults


@pytest.fixture
def config(models, tmp_path, monkeypatch):
    local.in_process(monkeypatch)
    return local.settings(models, tmp_path)


def interrupted(config, monkeypatch, step: int = 4):
    """The run, ended in the sampling of a step; its arm folder."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(local.LocalPool, "generate", local.at_call(step + 1, interrupt, local.LocalPool.generate))
        local.run(config)
    return config.run_dir / "dflash2-s5"


def test_a_finished_arm_is_not_run_again(config):
    folder, _ = local.run(config)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    _, said = local.run(config)
    assert said == ["arm dflash2-s5 is finished and not run again"]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_never_makes_a_new_run_beside_a_finished_one(config):
    for name in ("exp", "exp-2", "exp-3"):
        with opened(config) as made:
            assert made.name == name and made.run_dir.is_dir()


def test_auto_continues_the_last_of_its_name_and_a_path_the_one_it_names(config):
    with opened(config, "auto") as made:
        assert made.name == "exp", "nothing to continue: a new run"
    with opened(config):
        pass
    with opened(config, "auto") as made:
        assert made.name == "exp-2"
    with opened(config, str(config.output_dir / "exp")) as made:
        assert made.name == "exp"
    assert sorted(path.name for path in config.output_dir.iterdir()) == ["exp", "exp-2"]


@pytest.mark.parametrize("resume", ["auto", "PATH"])
def test_other_settings_are_refused_and_named(config, resume):
    with opened(config):
        pass
    other = config.model_copy(update={"steps": 7, "trainer": config.trainer.model_copy(update={"lr": 2e-2})})
    resume = str(config.run_dir) if resume == "PATH" else resume
    words = "steps was 5 and is 7; trainer.lr was 0.01 and is 0.02"
    with pytest.raises(ValueError, match=words), opened(other, resume):
        pass
    assert (config.run_dir / "config.yaml").read_text() == dump(config)


def test_settings_that_no_step_depends_on_may_change(config):
    with opened(config):
        pass
    every = config.checkpoint.model_copy(update={"every": 1})
    with opened(config.model_copy(update={"checkpoint": every}), "auto") as made:
        assert "every: 1" in (made.run_dir / "config.yaml").read_text()


def test_a_folder_that_is_no_run_is_refused(config, tmp_path):
    with pytest.raises(ValueError, match="no config.yaml there; accepted: auto, never"), opened(config, str(tmp_path)):
        pass


def test_two_drivers_cannot_write_one_run(config):
    with opened(config) as made:
        with pytest.raises(ValueError, match="is being written by another process"), opened(config, "auto"):
            pass
        with (made.run_dir / "config.yaml").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_damaged_checkpoint_is_said_and_an_earlier_one_used(config, monkeypatch, tmp_path):
    whole, _ = local.run(config.model_copy(update={"output_dir": tmp_path / "whole"}))
    folder = interrupted(config, monkeypatch)
    shard = next((folder / "checkpoints" / "step-000004").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    _, said = local.run(config)
    assert f"step-000004 is damaged: ['{shard.name}'] are missing or changed" in said[0]
    assert said[1] == "arm dflash2-s5 goes on after step 2 of 5"
    assert local.evidence(folder) == local.evidence(whole)


def test_what_came_after_the_checkpoint_is_gone_before_a_step_is_made_again(config, monkeypatch):
    folder = interrupted(config, monkeypatch, step=3)
    assert len(list((folder / "rollouts").iterdir())) == 3
    interrupted(config, monkeypatch, step=-1)  # the first generation of the continued run
    kept = sorted(file.name for file in (folder / "rollouts").iterdir())
    assert kept == ["step-000000.safetensors", "step-000001.safetensors"]
    assert [len((folder / name).read_text().splitlines()) for name in ("metrics.jsonl", "handoffs.jsonl")] == [2, 3]
    assert (folder / "audit").is_dir(), "the audited step lies before the checkpoint"


@pytest.mark.parametrize("damage", ["point", "contents", "stray", "record"])
def test_without_a_whole_checkpoint_nothing_is_thrown_away(config, monkeypatch, damage):
    folder = interrupted(config, monkeypatch)
    for saved in (folder / "checkpoints").glob("step-*"):
        if damage == "point":
            (saved / "run.json").write_text("{}")
        elif damage == "contents":
            (saved / "contents.json").write_text("[]")
        elif damage == "stray":
            (saved / "planted").write_text("not listed")
    if damage == "record":
        metrics = folder / "metrics.jsonl"
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[1:]))
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"}
    with pytest.raises(CheckpointError, match="has 2 checkpoints and none to go on from"):
        checkpoints.newest(folder, lambda line: None)
    _, said = local.run(config)
    assert "FAILED: CheckpointError" in said[-1]
    found = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"}
    assert found == kept


def test_weights_other_than_those_handed_over_last_are_refused(config, monkeypatch):
    folder = interrupted(config, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(local.LocalTrainer, "load", lambda trainer, path: 5)  # the initial weights stay
        _, said = local.run(config)
    assert "FAILED: CheckpointError" in said[-1] and "when they were handed over" in said[-1]
    local.run(config)
    assert local.evidence(folder)


def test_wandb_goes_on_under_the_same_id(config, monkeypatch):
    config = config.model_copy(update={"wandb_mode": "offline"})
    folder = interrupted(config, monkeypatch, step=1)  # before the first checkpoint
    first = json.loads((folder / "run.json").read_text())["wandb_id"]
    interrupted(config, monkeypatch, step=4)
    local.run(config)
    runs = {path.name.split("-")[3] for path in (folder / "wandb").glob("offline-run-*")}
    assert runs == {first} == {json.loads((folder / "checkpoints/step-000005/run.json").read_text())["wandb_id"]}
