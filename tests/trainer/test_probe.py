import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.trainer.reference import token_loss
from tests.trainer.rollouts import make_rollout
from trainer import probe as probing
from trainer.backends.torch import TorchBackend
from trainer.config import EstimatorSettings, TrainerConfig
from trainer.step import train_step


def read(folder):
    with safe_open(folder / "probe.safetensors", "numpy") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, json.loads(opened.metadata()["probe"])


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_the_probe_holds_the_gradient_of_the_last_update(target, tmp_path, reduction):
    settings = EstimatorSettings(mode="tis", tis_clip=1.3)
    config = TrainerConfig(
        estimator=settings, lr=1e-3, dtype="float64", micro_tokens=30, chunk_tokens=4, reduction=reduction
    )
    rollout = make_rollout(target, temperature=0.7, noise=0.4, masked=True, seed=2)
    backend = TorchBackend(config, target)
    train_step(backend, rollout, config, temperature=0.7, step=5, probe=tmp_path)
    columns, about = read(tmp_path)
    assert about == {"temperature": 0.7, "estimator": settings.model_dump(), "step": 5, "updates": 1}

    half = range(4, 8)
    everyone = [(i, t) for i in half for t in np.flatnonzero(rollout[i].loss_mask)]
    assert sorted(zip(columns["trajectory"], columns["token"], strict=True)) == everyone
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float64).eval()
    for place, (index, t) in enumerate(zip(columns["trajectory"], columns["token"], strict=True)):
        completion = rollout[index].completion
        prefix = [*completion.prompt_ids.tolist(), *completion.response_ids[:t].tolist()]
        logits = model(torch.tensor([prefix])).logits[0, -1].detach().requires_grad_()
        token_loss(logits, rollout[index], t, float(columns["advantage"][place]), settings, 0.7).backward()
        expected = logits.grad.numpy() * columns["scale"][place]
        assert np.allclose(columns["logit_grad"][place], expected, rtol=2e-6, atol=1e-9)
        tokens = int(rollout[index].loss_mask.sum())
        share = len(everyone) if reduction == "token_mean" else tokens * len(half)
        assert np.isclose(columns["scale"][place], 1 / share)


def test_probing_changes_nothing_and_is_bounded(target, rollout, tmp_path, monkeypatch):
    monkeypatch.setattr(probing, "MAX_TOKENS", 5)
    config = TrainerConfig(micro_tokens=20)
    plain, probed = TorchBackend(config, target), TorchBackend(config, target)
    assert train_step(plain, rollout, config, temperature=1.0) == train_step(
        probed, rollout, config, temperature=1.0, probe=tmp_path
    )
    columns, _ = read(tmp_path)
    assert columns["logit_grad"].shape == (5, 24) and len(set(columns["trajectory"])) > 1
