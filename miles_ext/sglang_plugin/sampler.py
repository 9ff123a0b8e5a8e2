"""The regular sampler under the one law: ordinary decoding, and the prefill token of every arm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from miles_ext.law import sample
from miles_ext.sglang_plugin.batch_law import batch_law
from miles_ext.sglang_plugin.pack import pack
from miles_ext.sglang_plugin.plan import plan_for
from miles_ext.sglang_plugin.rows import DeviceRows


def around_forward(
    original: Callable[..., Tensor],
    sampler: Any,
    logits_output: Any,
    info: Any,
    return_logprob: bool,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[Any],
    positions: Tensor,
    *,
    logprob_logits: Tensor | None = None,
) -> Tensor:
    """sglang's `Sampler.forward` with the law in the place of its filters; greedy batches stay sglang's own."""
    if info.is_all_greedy or keeps_stock_sampler(sampler, info) or logprob_logits is not None:
        rest = {} if logprob_logits is None else {"logprob_logits": logprob_logits}
        return original(
            sampler, logits_output, info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions, **rest
        )
    plan = plan_for(info)
    logits = sampler._preprocess_logits(logits_output.next_token_logits, info)
    probs = batch_law(logits, plan)
    ids = draw(probs, info.sampling_seed, positions)
    if return_logprob:
        _attach_logprobs(sampler, logits_output, logits, info, top_logprobs_nums, token_ids_logprobs, ids)
    sampler._sync_token_ids_across_tp(ids, info)
    if info.sampling_mask_batch_indices is not None:
        _attach_mask(sampler, logits_output, probs, info, ids)
    if plan.captures:
        logits_output.auxiliary_device_output = DeviceRows(pack(probs, ids, None, plan), block=1, verified=False)
    return ids


def keeps_stock_sampler(sampler: Any, info: Any) -> bool:
    """Modes that the law does not describe. Strict servers refuse such requests at admission."""
    return bool(info.need_min_p_sampling or sampler.use_ascend_backend or sampler.rl_on_policy_target is not None)


def draw(probs: Tensor, seeds: Tensor | None, positions: Tensor) -> Tensor:
    """One token a row, int32 [n], never of zero mass. seeds: of a deterministic server, else None."""
    if seeds is not None:
        from sglang.srt.layers.sampler import multinomial_with_seed

        return multinomial_with_seed(probs.double().log(), seeds, positions).view(-1).int()
    uniforms = torch.rand(len(probs), dtype=torch.float64, device=probs.device)
    if probs.is_cuda:
        from miles_ext.law_kernels import draw_rows

        ids = torch.empty(len(probs), dtype=torch.int32, device=probs.device)
        draw_rows(probs, uniforms, ids)
        return ids
    # A row without a law gives -1; its status is INVALID, and token 0 keeps the embedding in range until it ends.
    return sample(probs, uniforms).clamp_min(0).int()


def _attach_logprobs(
    sampler: Any, logits_output: Any, logits: Tensor, info: Any, top_nums: Any, token_ids: Any, ids: Tensor
) -> None:
    """sglang's own logprobs: of the unfiltered law at the request's temperature."""
    from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB

    scaled = logits if SGLANG_RETURN_ORIGINAL_LOGPROB else logits / info.temperatures
    logprobs = torch.log_softmax(scaled, dim=-1)
    sampler.output_logprob_processor.compute_logprobs(logprobs, top_nums, token_ids, ids).write_output_to(logits_output)


def _attach_mask(sampler: Any, logits_output: Any, probs: Tensor, info: Any, ids: Tensor) -> None:
    """sglang's `return_sampling_mask`, from the law."""
    from sglang.srt.layers.sampler import _SamplingMaskCapture

    rows = info.sampling_mask_batch_indices
    capture = _SamplingMaskCapture(probs.index_select(0, rows), None, None, rows)
    logits_output.sampling_mask_output = sampler._build_sampling_mask_output(
        ids, capture, info.sampling_support_logprobs_capture_indices
    )
