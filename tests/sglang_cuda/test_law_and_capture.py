"""The law and the packing on the device: the written cases, agreement with the CPU, and no wait for the device."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from miles_ext.law import law, sample
from miles_ext.sglang_plugin.pack import Packed, pack
from miles_ext.sglang_plugin.plan import plan_of
from miles_ext.sglang_plugin.settings import ORDER_VARIABLE
from tests.sglang_cpu.stand_ins import CASE_IDS, CASES, case_request, request, run_sampler, sampling_info

pytestmark = [pytest.mark.sglang, pytest.mark.cuda, pytest.mark.usefixtures("plugin")]


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_cases(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.dflash_utils import build_speculative_verify_target_probs

    monkeypatch.setenv(ORDER_VARIABLE, case["filter_order"])
    logits = torch.tensor([case["logits"]] * 4, device="cuda")
    info = sampling_info([case_request(case)] * 2, logits.shape[1], "cuda")
    probs = build_speculative_verify_target_probs(next_token_logits=logits, sampling_info=info, draft_token_num=2, bs=2)
    wanted = torch.zeros(logits.shape[1], dtype=torch.float64)
    wanted[torch.tensor(case["support"])] = torch.tensor(case["probs"], dtype=torch.float64)
    for row in probs.view(4, -1).double().cpu():
        assert ((row > 0) == (wanted > 0)).all()
        assert (row - wanted).abs().max() < 1e-6


def test_identities_hold_in_a_mixed_batch() -> None:
    vocabulary = 248_320
    reqs = [request(k=vocabulary), request(k=vocabulary, top_k=vocabulary), request(top_p=0.9), request(top_k=50)]
    _, output = run_sampler(reqs, torch.randn(4, vocabulary, device="cuda"))
    lengths = output.auxiliary_device_output.packed.flat[:12].view(4, 3)[:, 0].tolist()
    assert lengths[:2] == [vocabulary, vocabulary]
    assert lengths[3] == 50


def test_device_rows_are_the_rows_of_the_host() -> None:
    reqs = [request("head", 32), request(top_k=40, top_p=0.9), request(top_p=0.8, temperature=0.5), request("none")]
    plan = plan_of(reqs)
    probs = law(torch.randn(8, 5000, device="cuda") * 3, *plan.repeat(2))
    tokens = sample(probs, torch.rand(8, dtype=torch.float64, device="cuda"))
    committed = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool, device="cuda")
    there = entries(pack(probs, tokens, committed, plan))
    here = entries(pack(probs.cpu(), tokens.cpu(), committed.cpu(), plan_of(reqs)))
    assert np.array_equal(there[0], here[0])
    assert np.allclose(there[1], here[1], atol=1e-6)


def entries(packed: Packed) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and statuses of every row, then ids (as they come) beside logprobs."""
    rows = len(packed.head_rows) + len(packed.complete_rows)
    flat = packed.flat.cpu().numpy()
    meta, rest = flat[: 3 * rows].reshape(-1, 3), flat[3 * rows :]
    total = int(meta[len(packed.head_rows) :, 0].sum())
    heads = len(packed.head_rows) * packed.head_size
    pairs = rest.reshape(-1, 2)[: heads + total]
    exact = np.concatenate([meta[:, [0, 2]].ravel(), pairs[:, 0]])
    return exact, np.concatenate([meta[:, 1], pairs[:, 1]]).astype(np.int32).view(np.float32)


@pytest.mark.parametrize("kind", ["head", "filtered", "top_p"])
def test_sampling_and_packing_never_wait_for_the_device(kind: str) -> None:
    asked = {"head": ("head", 32, {}), "filtered": ("complete", 4096, {"top_k": 50, "top_p": 0.95}),
             "top_p": ("complete", 4096, {"top_p": 0.95})}[kind]  # fmt: skip
    reqs = [request(asked[0], asked[1], **asked[2]) for _ in range(8)]
    logits = torch.randn(8, 50_000, device="cuda")
    run_sampler(reqs, logits)
    info = sampling_info(reqs, 50_000, "cuda")
    plan: Any = info.sc_plan
    uniforms = torch.rand(8, dtype=torch.float64, device="cuda")
    committed = torch.ones(8, dtype=torch.bool, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        probs = law(logits, plan.temperature, plan.top_k, plan.top_p)
        tokens: Tensor = sample(probs, uniforms)
        pack(probs, tokens, committed, plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
