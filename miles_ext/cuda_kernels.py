# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with the CUDA builds of torch alone, and its kernels are launched by subscript.
"""Triton kernels behind `logprobs`: the one pass over the logits that the forward makes, and the one of the backward.

Both are bound by memory: forward reads each logit once, backward reads it once and writes its gradient once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

LOG2_E = 1.4426950408889634
FORWARD_BLOCK = 8192
BACKWARD_BLOCK = 4096


def row_stats(
    logits: Float[Tensor, "n v"], temperature: float | Tensor, *, entropy: bool
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, " n"]]:
    """(top, total, weighted) of `logprobs.RowStats`, float32 arithmetic, for float32, bfloat16 or float16 logits.

    Exponentials have base 2, as everywhere in `logprobs`; what comes back is in nats.
    """
    n, width = logits.shape
    top, total, weighted = torch.zeros(3, n, dtype=torch.float32, device=logits.device).unbind()
    if n:
        _row_stats[(n,)](
            logits, logits.stride(0), _per_row(LOG2_E / temperature, n, logits), top, total, weighted, width,
            entropy, FORWARD_BLOCK, num_warps=16,
        )  # fmt: skip
    return top / LOG2_E, total, weighted / LOG2_E


def softmax_gradient_(
    out: Float[Tensor, "n v"],
    logits: Float[Tensor, "n v"],
    temperature: float | Tensor,
    lse: Float[Tensor, " n"],
    scale: Float[Tensor, " n"],
) -> None:
    """out = scale / temperature * exp(logits / temperature - lse); `out` may have any float dtype and row stride."""
    n, width = logits.shape
    if n and width:
        _softmax_gradient[(n, triton.cdiv(width, BACKWARD_BLOCK))](
            out, out.stride(0), logits, logits.stride(0), _per_row(LOG2_E / temperature, n, logits),
            lse * LOG2_E, scale / temperature, width, BACKWARD_BLOCK, num_warps=8,
        )  # fmt: skip


def _per_row(value: float | Tensor, n: int, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(torch.float32).contiguous()
    return torch.full((n,), value, dtype=torch.float32, device=like.device)


@triton.jit
def _row_stats(
    logits, stride, scales, top, total, weighted, width, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales + row)
    lane = tl.arange(0, BLOCK)
    # The lowest finite number, not -inf: a shard may hold nothing but -inf, and -inf - -inf would be NaN.
    highest = tl.full((), -3.4028234663852886e38, tl.float32)
    terms = tl.zeros((BLOCK,), tl.float32)
    moments = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + lane < width
        z = tl.load(logits + row * stride + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
        new_highest = tl.maximum(highest, tl.max(z, 0) * scale)
        factor = tl.exp2(highest - new_highest)
        x = z * scale - new_highest
        e = tl.exp2(x)
        if ENTROPY:
            # About the new maximum: sum (x + shift) e = factor (moments + shift terms). 0 times -inf would be NaN.
            shift = tl.maximum(highest - new_highest, -1.0e4)
            moments = factor * (moments + shift * terms) + tl.maximum(x, -1.0e4) * e
        terms = terms * factor + e
        highest = new_highest
    tl.store(top + row, highest)
    tl.store(total + row, tl.sum(terms, 0))
    if ENTROPY:
        tl.store(weighted + row, tl.sum(moments, 0))


@triton.jit
def _softmax_gradient(
    out, out_stride, logits, stride, scales, shifts, factors, width, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < width
    z = tl.load(logits + row * stride + lane, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(factors + row) * tl.exp2(z * tl.load(scales + row) - tl.load(shifts + row))
    tl.store(out + row * out_stride + lane, value.to(out.dtype.element_ty), mask=inside)
