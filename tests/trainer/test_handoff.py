import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from miles_ext.errors import WeightError
from miles_ext.tensors import entries, from_array
from tests.trainer.rollouts import make_model
from trainer.backends.torch import TorchBackend
from trainer.config import TrainerConfig
from trainer.handoff import export
from trainer.step import train_step


def received(manifest, buckets):
    """What an engine sees: tensors by name, each exactly once."""
    names = [name for bucket in buckets for name in bucket]
    assert len(names) == len(set(names))
    return {name: from_array(a, manifest.tensors[name].dtype) for bucket in buckets for name, a in bucket.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_the_export_is_the_file_bit_for_bit(tmp_path, tied):
    target = make_model(tmp_path / "model", tie_word_embeddings=tied)
    stored = load_file(target / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    manifest, buckets = export(TorchBackend(TrainerConfig(), target), 7, "float32")
    assert manifest.version == 7
    manifest.require_received(entries(stored))
    manifest.require_received(entries(received(manifest, buckets)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_the_export_is_cast_to_the_engine(target, dtype):
    manifest, buckets = export(TorchBackend(TrainerConfig(), target), 1, dtype)
    stored = load_file(target / "model.safetensors")
    manifest.require_received(entries({name: tensor.to(getattr(torch, dtype)) for name, tensor in stored.items()}))
    manifest.require_received(entries(received(manifest, buckets)))


def test_buckets_are_bounded(target):
    manifest, buckets = export(TorchBackend(TrainerConfig(), target), 1, "float32", bucket_mb=0.01)
    sizes = [[array.nbytes for array in bucket.values()] for bucket in buckets]
    assert len(buckets) > 3 and all(sum(size) <= 0.01 * 2**20 or len(size) == 1 for size in sizes)
    manifest.require_received(entries(received(manifest, buckets)))


def test_training_on_does_not_change_what_was_exported(target, rollout):
    config = TrainerConfig(lr=1e-2)
    backend = TorchBackend(config, target)
    manifest, buckets = export(backend, 1, "float32")
    train_step(backend, rollout, config, temperature=1.0)
    manifest.require_received(entries(received(manifest, buckets)))
    assert export(backend, 2, "float32")[0].digest != manifest.digest


def test_unknown_dtypes_are_refused(target):
    for dtype in ("int8", "float33"):
        with pytest.raises(WeightError, match=f"export dtype is '{dtype}'"):
            export(TorchBackend(TrainerConfig(), target), 1, dtype)


def test_a_saved_folder_loads_again_bit_for_bit(target, tmp_path):
    backend = TorchBackend(TrainerConfig(), target)
    backend.save_hf(tmp_path / "out")
    again = TorchBackend(TrainerConfig(), tmp_path / "out")
    for (name, one), (other_name, other) in zip(backend.export_hf(), again.export_hf(), strict=True):
        assert name == other_name and np.array_equal(one.numpy(), other.numpy())
