"""megatron-core on one GPU with NCCL and nothing replaced, against the torch backend on the same GPU."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.trainer.rollouts import make_model, make_rollout
from trainer import checkpoint
from trainer.backends.torch import TorchBackend
from trainer.config import TrainerConfig
from trainer.step import train_step

pytestmark = [pytest.mark.cuda, pytest.mark.megatron]
BOUNDS = {"float64": 1e-6, "float32": 1e-5, "bfloat16": 1e-2}  # transformers' norms round to float32 in float64 too


@pytest.fixture
def alone():
    """The one-rank process groups that a backend makes are gone after a test."""
    yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def exported(backend):
    return {name: tensor.detach().cpu().clone() for name, tensor in backend.export_hf()}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_three_steps_equal_those_of_torch(alone, tmp_path, dtype):
    from trainer.backends.megatron import MegatronBackend

    target = make_model(tmp_path / "model", num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    rollout = make_rollout(target, noise=0.3, masked=True)
    settings = TrainerConfig(lr=1e-3, eps=1e-3, micro_tokens=20, chunk_tokens=7, device="cuda")
    config = settings.model_copy(update={"dtype": dtype})
    tested = MegatronBackend(config.model_copy(update={"backend": "megatron"}), target)
    reference = TorchBackend(config, target)
    assert tested.device.type == "cuda" and next(tested.model.parameters()).is_cuda
    for step in range(3):
        probe = tmp_path / "audit" if step == 2 else None
        found = train_step(tested, rollout, config, temperature=1.0, step=step, probe=probe)
        expected = train_step(reference, rollout, config, temperature=1.0, step=step)
        for name, value in expected.items():
            assert np.isclose(found[name], value, rtol=100 * BOUNDS[dtype], atol=10 * BOUNDS[dtype]), (step, name)
    assert (tmp_path / "audit" / "probe.safetensors").is_file()
    weights = exported(tested)
    for name, weight in exported(reference).items():
        assert (weights[name].double() - weight.double()).abs().max() < BOUNDS[dtype], name

    checkpoint.save(tested, tmp_path / "step", 3)
    train_step(tested, rollout, config, temperature=1.0)
    after = exported(tested)
    assert checkpoint.load(tested, tmp_path / "step") == 3
    assert all(torch.equal(weight, weights[name]) for name, weight in exported(tested).items())
    train_step(tested, rollout, config, temperature=1.0)
    for name, weight in exported(tested).items():
        assert (weight.double() - after[name].double()).abs().max() < BOUNDS[dtype], name
