"""The law in the installed sglang's own functions: regular sampler, both verifiers, speculative capture."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from miles_ext.sglang_plugin import verifier
from miles_ext.sglang_plugin.rows import encode
from miles_ext.sglang_plugin.settings import ORDER_VARIABLE
from miles_ext.wire import unpack
from tests.sglang_cpu.stand_ins import (
    CAP,
    CASE_IDS,
    CASES,
    case_request,
    deliver,
    request,
    run_sampler,
    sampling_info,
)

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("plugin")]
BLOCK = 3


@pytest.fixture(params=CASES, ids=CASE_IDS)
def case(request: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv(ORDER_VARIABLE, request.param["filter_order"])
    return request.param


def expected(case: dict[str, Any]) -> torch.Tensor:
    dense = torch.zeros(len(case["logits"]), dtype=torch.float64)
    dense[torch.tensor(case["support"])] = torch.tensor(case["probs"], dtype=torch.float64)
    return dense


def assert_law(probs: torch.Tensor, case: dict[str, Any]) -> None:
    """probs [..., v]: exact support and 1e-6 in every row."""
    wanted = expected(case)
    for row in probs.double().reshape(-1, len(wanted)):
        assert ((row > 0) == (wanted > 0)).all()
        assert (row - wanted).abs().max() < 1e-6


def decoded(req: Any) -> Any:
    return unpack(encode([req.sc_rows.take()]))


def test_regular_sampler_and_its_capture(case: dict[str, Any]) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    reqs = [case_request(case) for _ in range(4)]
    logits = torch.tensor([case["logits"]] * 4, dtype=torch.float32)
    ids, output = run_sampler(reqs, logits)
    deliver(output.auxiliary_device_output, reqs, ForwardMode.DECODE)
    for token, req in zip(ids.tolist(), reqs, strict=True):
        rows, _ = decoded(req)
        rows.check(np.array([token]), logits.shape[1])
        dense = torch.zeros(logits.shape[1])
        dense[torch.from_numpy(rows.token_ids.astype(np.int64))] = torch.from_numpy(np.exp(rows.logprobs))
        assert_law(dense, case)


def test_target_only_verifier(case: dict[str, Any]) -> None:
    from sglang.srt.speculative import dflash_utils

    logits = torch.tensor([case["logits"]] * (2 * BLOCK), dtype=torch.float32)
    info = sampling_info([case_request(case)] * 2, logits.shape[1])
    seen: dict[str, torch.Tensor] = {}

    def kernel(**arguments: Any) -> None:
        seen["probs"] = arguments["target_probs"].clone()
        arguments["accept_token_num"].zero_()
        arguments["accept_index"].zero_()
        arguments["predicts"].zero_()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dflash_utils, "tree_speculative_sampling_target_only", kernel)
        candidates = torch.zeros(2, BLOCK, dtype=torch.int64)
        dflash_utils.compute_dflash_sampling_correct_drafts_and_bonus(
            candidates=candidates, next_token_logits=logits, sampling_info=info, max_top_k=case["top_k"] or None,
            threshold_single=1.0, threshold_acc=1.0,
        )  # fmt: skip
    assert seen["probs"].shape == (2, BLOCK, logits.shape[1])
    assert_law(seen["probs"], case)


def test_chain_verifier(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([case["logits"]] * (2 * BLOCK), dtype=torch.float32)
    info = sampling_info([case_request(case)] * 2, logits.shape[1])
    flags = info.need_top_k_sampling, info.need_top_p_sampling
    step, seen, bonus = run_chain(logits, info, bonus=0, monkeypatch=monkeypatch)
    assert_law(seen, case)
    assert step.probs is not None and torch.equal(step.probs.view_as(seen), seen)  # what the capture will pack
    assert (info.need_top_k_sampling, info.need_top_p_sampling) == flags


def test_a_bonus_outside_the_support_is_put_right(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]] * (2 * BLOCK))
    info = sampling_info([request(top_k=2)] * 2, 4)
    assert run_chain(logits, info, bonus=3, monkeypatch=monkeypatch)[2].tolist() == [1, 1]
    assert run_chain(logits, info, bonus=2, monkeypatch=monkeypatch)[2].tolist() == [2, 2]


def run_chain(
    logits: torch.Tensor, info: Any, bonus: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[verifier.VerifyStep, torch.Tensor, torch.Tensor]:
    """The accept step, the law that the kernel was given, and the bonus tokens; the kernel draws `bonus` at once."""
    from sglang.kernels.ops.speculative.dspark import dspark_accept

    seen: dict[str, torch.Tensor] = {}

    def kernel(**arguments: Any) -> None:
        seen["probs"] = arguments["target_probs"].clone()
        arguments["accept_token_num"].zero_()
        arguments["accept_index"].zero_()
        arguments["predicts"].fill_(bonus)

    step = verifier.VerifyStep()
    monkeypatch.setattr(dspark_accept, "chain_speculative_sampling_triton", kernel)
    monkeypatch.setattr(verifier, "_step", step)
    _, drawn, _ = dspark_accept.accept_sampling(
        candidates=torch.zeros(2, BLOCK, dtype=torch.int64), target_logits=logits,
        draft_probs=torch.zeros(2, BLOCK - 1, logits.shape[1]), sampling_info=info,
        draft_input=SimpleNamespace(max_top_k=None, uniform_top_k_value=None), gamma=BLOCK - 1,
        verify_num_draft_tokens=BLOCK,
    )  # fmt: skip
    return step, seen["probs"], drawn


def test_stock_speculative_mask(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    capture = stock_capture(case, monkeypatch, cap=CAP)
    output = capture.build_output(out_tokens=torch.full((1, BLOCK), case["support"][0]), commit_lens=torch.tensor([2]))
    assert (output.statuses == 0).all()
    for length, ids, logprobs in zip(output.lengths[0], output.token_ids[0], output.support_logprobs[0], strict=True):
        assert sorted(ids[:length].tolist()) == case["support"]
        dense = torch.zeros(len(case["logits"])).index_copy(0, ids[:length].long(), logprobs[:length].exp())
        assert_law(dense, case)


def test_stock_speculative_mask_overflows_instead_of_cutting(monkeypatch: pytest.MonkeyPatch) -> None:
    tied = {"logits": [0.0] * 8, "temperature": 1.0, "top_k": 3, "top_p": 1.0, "filter_order": "top_k_first"}
    output = stock_capture(tied, monkeypatch, cap=4).build_output(
        out_tokens=torch.zeros(1, BLOCK, dtype=torch.int64), commit_lens=torch.tensor([1])
    )
    assert (output.statuses == 1).all()


def stock_capture(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch, cap: int) -> Any:
    from sglang.srt import runtime_context
    from sglang.srt.speculative.spec_sampling_mask import SpeculativeSamplingMaskCapture

    features = SimpleNamespace(sampling_mask_max_tokens=cap)
    monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(features=features))
    logits = torch.tensor([case["logits"]] * BLOCK, dtype=torch.float32)
    info = sampling_info([case_request(case)], logits.shape[1])
    info.sampling_mask_batch_indices = info.sampling_support_logprobs_capture_indices = torch.tensor([0])
    info.sampling_mask_top_ks = [case["top_k"] or len(case["logits"])]
    return SpeculativeSamplingMaskCapture.from_logits(
        info, next_token_logits=logits, draft_input=SimpleNamespace(max_top_k=case["top_k"], uniform_top_k_value=None),
        draft_token_num=BLOCK, bs=1,
    )  # fmt: skip


def test_identities_hold_in_a_mixed_batch_when_mass_rounds_above_one() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 3000, generator=generator)
    reqs = [request(), request(top_k=3000, top_p=1.0), request(top_p=0.9), request(top_k=50)]
    _, output = run_sampler(reqs, logits)
    packed = output.auxiliary_device_output.packed
    lengths = packed.flat[:12].view(4, 3)[:, 0].tolist()
    assert lengths[:2] == [3000, 3000]
    assert 0 < lengths[2] < 3000
    assert lengths[3] == 50


def test_greedy_rows_beside_sampled_ones_take_the_argmax() -> None:
    logits = torch.zeros(2, 8)
    logits[:, 3] = logits[:, 6] = 5.0
    for _ in range(20):
        ids, _ = run_sampler([request("none", top_k=1), request("none")], logits)
        assert ids[0] == 3


def test_stock_mask_of_the_regular_sampler_keeps_ties() -> None:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    from tests.sglang_cpu.stand_ins import sampler

    logits = torch.tensor([[3, 2, 1, 1, 1, 0.0]])
    output = LogitsProcessorOutput(next_token_logits=logits)
    info = sampling_info([request("none", top_k=3)], 6)
    info.sampling_mask_batch_indices = info.sampling_support_logprobs_capture_indices = torch.tensor([0])
    sampler()(output, info, False, [0], [None], torch.zeros(1, dtype=torch.int64))
    mask = output.sampling_mask_output
    assert sorted(mask.token_ids[0, : mask.lengths[0]].tolist()) == [0, 1, 2, 3, 4]
    assert torch.isclose(mask.support_logprobs[0, :5].exp().sum(), torch.tensor(1.0))


def test_returned_logprobs_stay_those_of_the_unfiltered_law() -> None:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    from tests.sglang_cpu.stand_ins import sampler

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    output = LogitsProcessorOutput(next_token_logits=logits.clone())
    info = sampling_info([request("none", top_k=4, temperature=0.5)], 50)
    ids = sampler()(output, info, True, [0], [None], torch.zeros(1, dtype=torch.int64))
    wanted = torch.log_softmax(logits / 0.5, -1)[0, ids[0]]
    assert torch.isclose(output.next_token_logprobs[0], wanted, atol=1e-6)
