"""sglang's own speculative mask capture: OVERFLOW where it would cut a support short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def around_build_output(original: Callable[..., Any], capture: Any, **arguments: Any) -> Any:
    """The width is the server's cap, not the largest top_k: the law keeps ties, so a row may hold more than top_k."""
    from sglang.srt.layers.logits_processor import SamplingMaskStatus
    from sglang.srt.runtime_context import get_exec

    if capture.target_probs is None:
        return original(capture, **arguments)
    cap = get_exec().features.sampling_mask_max_tokens
    capture.max_top_k = min(cap, capture.target_probs.shape[-1])
    output = original(capture, **arguments)
    counts = (capture.target_probs.index_select(0, capture.batch_indices) > 0).sum(-1)
    over = (counts > cap) & (output.statuses == int(SamplingMaskStatus.OK))
    if capture.greedy_mask is not None:
        over &= ~capture.greedy_mask.index_select(0, capture.batch_indices)[:, None]
    output.statuses = torch.where(over, int(SamplingMaskStatus.OVERFLOW), output.statuses).to(output.statuses.dtype)
    return output
