"""The two speculative verifiers under the one law, and the rows of what they commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles_ext.sglang_plugin.batch_law import batch_law, prepare
from miles_ext.sglang_plugin.pack import pack
from miles_ext.sglang_plugin.plan import BatchPlan, plan_for
from miles_ext.sglang_plugin.refusal import DeviceRefusal
from miles_ext.sglang_plugin.rows import DeviceRows
from miles_ext.sglang_plugin.settings import read_settings


@dataclass
class VerifyStep:
    """One accept step: the law that the verifier used, and the rows packed from it."""

    probs: Tensor | None = None
    rows: DeviceRows | DeviceRefusal | None = None


_step: VerifyStep | None = None  # the accept step in progress: its law is kept, every other (a rehearsal) is not


def target_probs(
    *,
    next_token_logits: Tensor,
    sampling_info: Any,
    draft_token_num: int,
    bs: int,
    max_top_k: int | None = None,
    uniform_top_k_value: int | None = None,
    use_sparse_topk: bool = True,
) -> Tensor:
    """The law of every verified position, float32 [bs, draft_token_num, v]. Stands in for sglang's own filters."""
    probs = batch_law(next_token_logits, plan_for(sampling_info), keep=False)
    if _step is not None:
        _step.probs = probs
    return probs.view(bs, draft_token_num, -1)


def around_accept_sampling_core(original: Callable[..., Any], **arguments: Any) -> Any:
    """The chain verifier: filtered and unfiltered requests take the same law."""
    info = arguments["sampling_info"]
    unfiltered = not info.need_top_k_sampling and not info.need_top_p_sampling
    if not unfiltered:
        return original(**arguments)
    # sglang would take another softmax for a batch without filters; this flag sends it through `target_probs`.
    info.need_top_p_sampling = True
    try:
        return original(**arguments)
    finally:
        info.need_top_p_sampling = False


def around_accept_sampling(original: Callable[..., Any], **arguments: Any) -> Any:
    """Keeps the chain kernel's bonus inside the support: rounding may leave its scan at the last id of all."""
    correct_len, bonus, trimmed = original(**arguments)
    if _step is None or _step.probs is None:
        return correct_len, bonus, trimmed
    return correct_len, mended(_step.probs, correct_len, bonus, arguments["verify_num_draft_tokens"]), trimmed


def mended(probs: Tensor, correct: Tensor, bonus: Tensor, block: int) -> Tensor:
    """bonus, with the likeliest token in the place of one that has no mass. probs: [requests * block, v]."""
    if probs.is_cuda:
        from miles_ext.law_kernels import mend_bonus

        mend_bonus(probs, correct, bonus, block)
        return bonus
    rows = torch.arange(len(bonus)) * block + correct.long()
    law_of_bonus = probs.index_select(0, rows)
    supported = law_of_bonus.gather(1, bonus[:, None])[:, 0] > 0
    return torch.where(supported, bonus, law_of_bonus.argmax(-1))


def around_accept_block(original: Callable[..., Any], worker: Any, **arguments: Any) -> Any:
    """Runs sglang's accept step and packs the committed rows from the tensor that it verified with."""
    global _step
    info, bs = arguments["sampling_info"], arguments["bs"]
    if info is not None and not info.is_all_greedy:
        prepare(arguments["next_token_logits"], plan_for(info))
    _step = step = VerifyStep()
    try:
        result = original(worker, **arguments)
    finally:
        _step = None
    _, commit_lens, _, out_tokens, _ = result
    if info is not None and not info.is_all_greedy:
        plan = plan_for(info)
        if step.probs is None:
            if plan.captures or read_settings().strict:
                step.rows = DeviceRefusal()
        elif plan.captures:
            step.rows = pack_step(step.probs, out_tokens, commit_lens, plan, bs)
    # The law may lie in memory borrowed from a CUDA graph: it must be gone before the next replay.
    step.probs = None
    worker.sc_step = step
    return result


def pack_step(probs: Tensor, out_tokens: Tensor, commit_lens: Tensor, plan: BatchPlan, bs: int) -> DeviceRows:
    """probs [bs * block, v], out_tokens [bs, block], commit_lens [bs]."""
    block = out_tokens.shape[1]
    packed = pack(probs.view(bs * block, -1), out_tokens.reshape(-1), commit_lens, plan)
    return DeviceRows(packed, block, verified=True)


def around_forward(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **rest: Any) -> Any:
    """Puts the rows of an accept step beside its result; a prefill brings the sampler's own."""
    worker.sc_step = None
    result = original(worker, batch, *args, **rest)
    if worker.sc_step is not None and result.logits_output is not None:
        result.logits_output.auxiliary_device_output = worker.sc_step.rows
        worker.sc_step = None
    return result
