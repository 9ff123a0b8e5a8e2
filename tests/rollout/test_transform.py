"""Declared transforms: what they do to weights, and that an engine serves, records and reports what was declared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_ext.tensors import entries, to_array
from miles_ext.weights import WeightManifest, combine
from rollout.config import MismatchConfig, RolloutConfig
from rollout.embedded.decoder import Decoder
from rollout.embedded.engine import EmbeddedEngine
from rollout.embedded.transform import apply, quantise
from tests.rollout.tiny import VOCAB, Reference, dense, requests, write_target

MATRIX, EMBEDDING = "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"


def weights(rows: int = 48, inputs: int = 64) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        MATRIX: torch.randn(rows, inputs) * 0.02, EMBEDDING: torch.randn(9, 8), "model.layers.0.norm": torch.ones(8),
    }  # fmt: skip


def test_only_matrices_of_the_layers_change_and_nothing_in_place():
    tensors = weights()
    before = tensors[MATRIX].clone()
    changed = apply(tensors, {"quantise": "int4", "noise": 0.1, "seed": 0})
    assert torch.equal(tensors[MATRIX], before) and not torch.equal(changed[MATRIX], before)
    assert all(changed[name] is tensors[name] for name in tensors if name != MATRIX)
    assert apply(tensors, {})[MATRIX] is not None and torch.equal(apply(tensors, {})[MATRIX], before)


@pytest.mark.parametrize(("kind", "levels", "group"), [("int8", 127, 64), ("int4", 7, 32)])
def test_quantisation_is_rounding_to_the_nearest_level(kind: str, levels: int, group: int):
    values = weights()[MATRIX].double()
    got = quantise(values, kind).numpy().reshape(48, -1, group)
    wanted = values.numpy().reshape(48, -1, group)
    step = np.abs(wanted).max(-1, keepdims=True) / levels
    assert np.abs(got - wanted).max() <= 0.5 * step.max() * (1 + 1e-12)
    assert (np.abs(got - wanted) <= 0.5 * step * (1 + 1e-12)).all()
    assert np.abs(got / step - np.round(got / step)).max() < 1e-9
    assert np.abs(np.round(got / step)).max() == levels
    assert torch.equal(quantise(torch.zeros(2, 64), kind), torch.zeros(2, 64)), "a row of zeros has no scale"
    assert quantise(torch.randn(2, 7), kind).shape == (2, 7), "inputs that are no multiple of a group share one scale"


@pytest.mark.parametrize("sigma", [0.01, 0.02, 0.05])
def test_noise_is_relative_gaussian_and_a_function_of_seed_and_name(sigma: float):
    tensors = weights(400, 500)
    unit = tensors[MATRIX].square().mean().sqrt()

    def drawn(seed: int, name: str = MATRIX) -> torch.Tensor:
        found = apply({name: tensors[MATRIX]}, {"noise": sigma, "seed": seed})[name]
        return (found - tensors[MATRIX]) / unit / sigma

    one = drawn(1)
    # 200,000 draws: mean within 4.5 and variance within 4.5 standard errors of a standard normal's.
    assert abs(one.mean()) < 4.5 / 200_000**0.5 and abs(one.var() - 1) < 4.5 * (2 / 200_000) ** 0.5
    assert torch.equal(one, drawn(1))
    for other in (drawn(2), drawn(1, MATRIX.replace(".0.", ".1."))):
        assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 0.01


def test_dtypes_stay():
    for dtype in (torch.bfloat16, torch.float64):
        tensors = {name: tensor.to(dtype) for name, tensor in weights().items()}
        assert apply(tensors, {"quantise": "int8", "noise": 0.1, "seed": 0})[MATRIX].dtype == dtype


def test_the_digest_covers_the_transform():
    plain = WeightManifest(version=1, tensors=entries(weights()))
    assert plain.digest == combine(plain.tensors)
    declared = [{}, {"noise": 0.1, "seed": 0}, {"noise": 0.1, "seed": 1}, {"quantise": "int8"}, {"quantise": "int4"}]
    assert len({replace(plain, transform=transform).digest for transform in declared}) == len(declared)
    swapped = replace(plain, transform={"seed": 0, "noise": 0.1})
    assert swapped.digest == replace(plain, transform=declared[1]).digest, "order says nothing"


@pytest.mark.parametrize("arm", ["regular", "dflash2"])
def test_an_engine_serves_what_was_declared_and_records_its_law(arm, target: Path, draft: Path, tmp_path: Path):
    """q is the law of the transformed weights: that of transformers on a checkpoint transformed beforehand."""
    transform = {"quantise": "int4", "noise": 0.2, "seed": 7}
    tensors = {name: tensor.clone() for name, tensor in Decoder.from_hf(target).named_hf_tensors()}
    manifest = WeightManifest(version=1, tensors=entries(tensors), transform=transform)
    bucket = {name: to_array(tensor) for name, tensor in tensors.items()}
    engine = EmbeddedEngine(target, draft, arm, device="cpu", max_concurrency=8, context_length=64)
    (before,) = engine.capability()
    report = engine.update_weights(manifest, [bucket])
    (after,) = engine.capability()
    assert report.received_digest == manifest.digest != combine(manifest.tensors)
    assert report.transform == transform and after.extra["transform"] == '{"noise": 0.2, "quantise": "int4", "seed": 7}'
    assert after.resident_digest == report.resident_digest != before.resident_digest
    assert report.draft_digest == before.draft_digest and before.extra["transform"] == "{}"

    write_target(tmp_path)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target)
    model.load_state_dict(apply(tensors, transform), strict=False)
    model.save_pretrained(tmp_path)
    changed, plain, wanted = Reference(tmp_path), Reference(target), requests(8)
    far = 0.0
    for request, one in zip(wanted, engine.generate(wanted), strict=True):
        assert np.abs(dense(one, VOCAB) - changed.laws(one, request.spec)).sum(-1).max() <= 2e-5
        far = max(far, np.abs(dense(one, VOCAB) - plain.laws(one, request.spec)).sum(-1).max())
    assert far > 0.1, "the transform must matter"
    again = replace(manifest, version=2, transform={})
    assert engine.update_weights(again, [bucket]).resident_digest == before.resident_digest


def test_the_setting_says_what_is_declared_and_sglang_refuses_it():
    assert MismatchConfig().transform(3) == {} == MismatchConfig(lag=4).transform(3)
    assert MismatchConfig(quantise="int8", noise=0.05).transform(3) == {"quantise": "int8", "noise": 0.05, "seed": 3}
    with pytest.raises(ValueError, match="quantise.*int8.*beside engine sglang.*accepted: engine embedded"):
        RolloutConfig.model_validate({"engine": "sglang", "mismatch": {"quantise": "int8"}})
    assert RolloutConfig.model_validate({"engine": "sglang", "mismatch": {"lag": 2}}).mismatch.lag == 2
