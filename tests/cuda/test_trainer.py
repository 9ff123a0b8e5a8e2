"""The trainer on a GPU: the numbers of the CPU in float32, float32 master weights under bfloat16, and resuming."""

import numpy as np
import pytest
import torch

from tests.trainer.rollouts import make_model, make_rollout
from trainer import checkpoint
from trainer.backends.torch import TorchBackend
from trainer.config import TrainerConfig
from trainer.handoff import export
from trainer.step import train_step

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("target") / "model", hidden=64)


@pytest.fixture(scope="module", params=[0, 8], ids=["complete", "head"])
def rollout(request, target):
    return make_rollout(target, temperature=0.7, noise=0.3, masked=True, head_size=request.param)


def trained(target, rollout, steps=2, **settings):
    config = TrainerConfig(lr=1e-3, micro_tokens=40, chunk_tokens=7, **settings)
    backend = TorchBackend(config, target)
    return backend, [train_step(backend, rollout, config, temperature=0.7) for _ in range(steps)]


def test_float32_is_the_cpu_up_to_rounding(target, rollout, tmp_path):
    on_cpu, expected = trained(target, rollout, device="cpu")
    on_gpu, found = trained(target, rollout, device="cuda")
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(np.isclose(mine[key], theirs[key], rtol=2e-3, atol=2e-4) for key in mine)
    for (name, one), (_, other) in zip(on_gpu.export_hf(), on_cpu.export_hf(), strict=True):
        assert torch.allclose(one.cpu(), other, atol=2e-4), name
    config = on_gpu.config
    train_step(on_gpu, rollout, config, temperature=0.7, probe=tmp_path)
    assert (tmp_path / "probe.safetensors").stat().st_size > 1000


def test_bfloat16_computes_low_and_keeps_float32_weights(target, rollout):
    backend, found = trained(target, rollout, device="cuda", dtype="bfloat16")
    _, expected = trained(target, rollout, device="cpu")
    assert all(parameter.dtype == torch.float32 for parameter in backend.parameters.values())
    for mine, theirs in zip(found, expected, strict=True):
        for key in ("train/entropy", "sc/correction_norm", "train/grad_norm"):
            assert np.isclose(mine[key], theirs[key], rtol=0.1), key
    manifest, buckets = export(backend, 1, "bfloat16")
    assert {entry.dtype for entry in manifest.tensors.values()} == {"bfloat16"}
    assert sum(len(bucket) for bucket in buckets) == len(backend.parameters)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_restores_weights_and_moments(target, rollout, tmp_path, dtype):
    backend, _ = trained(target, rollout, steps=1, device="cuda", dtype=dtype)
    checkpoint.save(backend, tmp_path / "one", 1)
    expected = train_step(backend, rollout, backend.config, temperature=0.7)
    again, _ = trained(target, rollout, steps=0, device="cuda", dtype=dtype)
    assert checkpoint.load(again, tmp_path / "one") == 1 and again.updates == 2
    found = train_step(again, rollout, again.config, temperature=0.7)
    assert all(np.isclose(found[key], expected[key], rtol=1e-3, atol=1e-5) for key in found)
