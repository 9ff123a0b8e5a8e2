"""The law and the packing on the device: the written cases, agreement with the CPU, and no wait for the device."""

from typing import Any

import numpy as np
import pytest
import torch

from miles_ext.law import law, sample
from miles_ext.sglang_plugin.batch_law import batch_law
from miles_ext.sglang_plugin.pack import Packed, pack
from miles_ext.sglang_plugin.plan import plan_of
from miles_ext.sglang_plugin.sampler import draw
from miles_ext.sglang_plugin.settings import ORDER_VARIABLE
from tests.sglang_cpu.stand_ins import CASE_IDS, CASES, case_request, request, run_sampler, sampling_info
from tests.sglang_cuda.bench_kernels import (
    BLOCK,
    CAPTURE_LAUNCHES,
    CAPTURES,
    FILTERS,
    SAMPLER_LAUNCHES,
    VERIFIER_LAUNCHES,
    Step,
    measure,
)

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
    committed = torch.tensor([2, 1, 2, 2], device="cuda")
    there = entries(pack(probs, tokens, committed, plan))
    here = entries(pack(probs.cpu(), tokens.cpu(), committed.cpu(), plan_of(reqs)))
    assert np.array_equal(there[0], here[0])
    for mine, other in zip(there[1], here[1], strict=True):
        assert np.array_equal(mine[:, 0], other[:, 0])
        assert np.allclose(mine[:, 1].view(np.float32), other[:, 1].view(np.float32), atol=1e-6)


def entries(packed: Packed) -> tuple[np.ndarray, list[np.ndarray]]:
    """Lengths and statuses of every row, and each row's entries."""
    heads, rows = len(packed.head_rows), len(packed.head_rows) + len(packed.complete_rows)
    flat, beyond = packed.flat.cpu().numpy(), packed.beyond.cpu().numpy()
    meta, rest = flat[: 3 * rows].reshape(-1, 3), flat[3 * rows :]
    split = 2 * heads * packed.head_size
    whole = [*rest[:split].reshape(heads, packed.head_size, 2)]
    whole += [*np.concatenate([rest[split:].reshape(rows - heads, packed.stride, 2), beyond], 1)]
    return meta[:, [0, 2]], [row[:length] for row, length in zip(whole, meta[:, 0], strict=True)]


@pytest.mark.parametrize("positions", [1, BLOCK])
@pytest.mark.parametrize("name", FILTERS)
def test_a_step_launches_few_kernels_and_capture_adds_one(name: str, positions: int) -> None:
    base = SAMPLER_LAUNCHES if positions == 1 else VERIFIER_LAUNCHES
    assert measure(Step(49_152, positions, FILTERS[name], ("none", 0)))[0] <= base
    for asked in CAPTURES[name].values():
        assert measure(Step(49_152, positions, FILTERS[name], asked))[0] <= base + CAPTURE_LAUNCHES


@pytest.mark.parametrize("kind", ["head", "filtered", "top_p"])
def test_sampling_and_packing_never_wait_for_the_device(kind: str) -> None:
    asked = {"head": ("head", 32, {}), "filtered": ("complete", 4096, {"top_k": 50, "top_p": 0.95}),
             "top_p": ("complete", 4096, {"top_p": 0.95})}[kind]  # fmt: skip
    reqs = [request(asked[0], asked[1], **asked[2]) for _ in range(8)]
    logits = torch.randn(8, 50_000, device="cuda")
    run_sampler(reqs, logits)
    info = sampling_info(reqs, 50_000, "cuda")
    plan: Any = info.sc_plan
    torch.cuda.set_sync_debug_mode("error")
    try:
        probs = batch_law(logits, plan)
        pack(probs, draw(probs, None, torch.zeros(8, dtype=torch.int64)), None, plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
