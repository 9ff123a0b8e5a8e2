import numpy as np
import pytest
import torch

from miles_ext.errors import CheckpointError
from tests.trainer.rollouts import make_model, make_rollout
from trainer import checkpoint
from trainer.config import TrainerConfig
from trainer.worker import TrainerWorker

CONFIG = TrainerConfig(lr=1e-3, warmup_steps=5)


@pytest.fixture(scope="module")
def rollouts(target):
    return [make_rollout(target, groups=2, seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def saved(target, rollouts, tmp_path_factory):
    """A folder saved after two of four steps, and the worker that went on to the end."""
    worker = TrainerWorker(CONFIG, target, 0)
    root = tmp_path_factory.mktemp("checkpoints")
    for rollout in rollouts[:2]:
        worker.train(rollout, temperature=1.0)
    worker.export(2, "float32")
    worker.save(root / "step-2")
    metrics = [worker.train(rollout, temperature=1.0) for rollout in rollouts[2:]]
    return root, worker, metrics, torch.rand(4)


def weights(worker):
    return {name: tensor.clone() for name, tensor in worker.backend.export_hf()}


def without_rss(metrics):
    return [{key: value for key, value in step.items() if key != "perf/train_rss_mb"} for step in metrics]


def test_resuming_equals_never_having_stopped_bit_for_bit(target, rollouts, saved):
    root, uninterrupted, metrics, draws = saved
    resumed = TrainerWorker(CONFIG, target, 99)
    assert checkpoint.latest(root) == root / "step-2"
    assert resumed.load(root / "step-2") == 2 == resumed.version
    again = [resumed.train(rollout, temperature=1.0) for rollout in rollouts[2:]]
    assert without_rss(again) == without_rss(metrics)
    assert torch.equal(torch.rand(4), draws)
    end = weights(resumed)
    for name, tensor in weights(uninterrupted).items():
        assert torch.equal(tensor, end[name]), name


@pytest.mark.parametrize("damage", ["contents", "shard", "metadata", "bit"])
def test_an_incomplete_checkpoint_is_refused_and_changes_nothing(target, rollouts, tmp_path, damage):
    worker = TrainerWorker(CONFIG, target, 0)
    folder = tmp_path / "step-0"
    worker.save(folder)
    if damage == "bit":
        shard = next(folder.glob("*.distcp"))
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    else:
        next(folder.glob({"contents": "contents.json", "shard": "*.distcp", "metadata": ".metadata"}[damage])).unlink()
    worker.train(rollouts[0], temperature=1.0)
    before = weights(worker)
    with pytest.raises(CheckpointError, match="no complete checkpoint" if damage == "contents" else "is damaged"):
        worker.load(folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(worker).items())


def test_a_checkpoint_of_another_model_is_refused(saved, tmp_path):
    other = TrainerWorker(CONFIG, make_model(tmp_path / "other", layers=3), 0)
    with pytest.raises(CheckpointError, match="does not fit"):
        other.load(saved[0] / "step-2")


def test_a_crash_while_saving_leaves_the_earlier_one(target, rollouts, tmp_path, monkeypatch):
    worker = TrainerWorker(CONFIG, target, 0)
    worker.save(tmp_path / "step-1")
    before = weights(worker)
    worker.train(rollouts[0], temperature=1.0)
    for broken in ("_digest", "_replace"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, broken, _crash)
            with pytest.raises(OSError, match="disk full"):
                worker.save(tmp_path / "step-2")
        assert checkpoint.latest(tmp_path) == tmp_path / "step-1" and not (tmp_path / "step-2").exists()
    worker.load(tmp_path / "step-1")
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(worker).items())
    worker.save(tmp_path / "step-2")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-2"]


def test_saving_again_under_one_name_replaces_it(target, rollouts, tmp_path):
    worker = TrainerWorker(CONFIG, target, 0)
    worker.save(tmp_path / "same")
    worker.train(rollouts[0], temperature=1.0)
    worker.save(tmp_path / "same")
    fresh = TrainerWorker(CONFIG, target, 0)
    fresh.load(tmp_path / "same")
    assert all(np.array_equal(one, weights(worker)[name]) for name, one in weights(fresh).items())


def test_nothing_saved_yet_is_no_checkpoint(tmp_path):
    assert checkpoint.latest(tmp_path) is None


def _crash(*_):
    raise OSError("disk full")
