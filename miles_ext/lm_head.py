"""Support logits straight from hidden states, without ever holding [n, v] logits.

`chunked_head` computes them a chunk of tokens at a time and again in backward; `support_head` multiplies only the
head's rows of the recorded supports, which is all that complete supports need. Both give what
`logprobs.support_logits` gives, so the estimator does not know which was used.

With a vocabulary-parallel weight the gradient of `hidden` is this rank's share: the caller's column-parallel region
sums it over the group, as for any such layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles_ext.logprobs import (
    RowStats,
    SupportLogits,
    VocabShard,
    combine,
    gather,
    local_columns,
    logit_gradient,
    row_stats,
    working_dtype,
)
from miles_ext.segments import Segments

if TYPE_CHECKING:
    from jaxtyping import Float, Int

CHUNK_BYTES = 1 << 26  # of one chunk's logits in working precision: large enough for an efficient matrix product


def chunked_head(
    hidden: Float[Tensor, "n h"],
    weight: Float[Tensor, "v h"],
    sampled: Int[Tensor, " n"],
    token_ids: Int[Tensor, " nnz"],
    rows: Segments,
    temperature: float = 1.0,
    *,
    shard: VocabShard | None = None,
    entropy: bool = False,
    chunk: int | None = None,
) -> SupportLogits:
    """`support_logits(hidden @ weight.T, ...)`, differentiable in hidden and weight.

    chunk: tokens a chunk (default: what fits 64 MiB of logits). Backward recomputes each chunk: one more product.
    The weight gradient is accumulated in working precision (float32 for bfloat16 weights).
    """
    shard = shard or VocabShard()
    chunk = chunk or max(1, CHUNK_BYTES // (len(weight) * torch.finfo(working_dtype(weight)).bits // 8))
    return SupportLogits(
        *_ChunkedHead.apply(hidden, weight, sampled, token_ids, rows, temperature, shard, entropy, chunk)
    )


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, sampled, token_ids, rows, temperature, shard, entropy, chunk):
        real = shard.columns(len(weight))
        at_sampled, at_support, stats = [], [], []
        for start in range(0, len(hidden), chunk):
            stop = min(start + chunk, len(hidden))
            entries, part = rows.part(start, stop)
            logits = hidden[start:stop] @ weight.t()
            everyone = torch.arange(stop - start, device=hidden.device)
            at_sampled.append(gather(logits, everyone, sampled[start:stop], shard))
            at_support.append(gather(logits, part.index, token_ids[entries], shard))
            stats.append(row_stats(logits[:, :real], temperature, entropy=entropy))
        empty = hidden.new_empty(0, dtype=working_dtype(weight))
        outputs = combine(
            torch.cat([empty, *at_sampled]),
            torch.cat([empty, *at_support]),
            RowStats(*(torch.cat([empty, *column]) for column in zip(*stats, strict=True))) if stats
            else RowStats(empty, empty, empty),
            rows, temperature, shard, entropy=entropy,
        )  # fmt: skip
        ctx.save_for_backward(hidden, weight, sampled, token_ids, *outputs[:3])
        ctx.rows, ctx.temperature, ctx.shard, ctx.chunk = rows, temperature, shard, chunk
        if outputs.entropy is not None:
            ctx.mark_non_differentiable(outputs.entropy)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstream):
        hidden, weight, sampled, token_ids, at_sampled, at_support, lse = ctx.saved_tensors
        g_sampled, g_support, g_lse = upstream[:3]
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=working_dtype(weight)) if need_weight else None
        for start in range(0, len(hidden), ctx.chunk):
            tokens = slice(start, min(start + ctx.chunk, len(hidden)))
            entries, part = ctx.rows.part(tokens.start, tokens.stop)
            grad = logit_gradient(
                hidden[tokens] @ weight.t(), sampled[tokens], token_ids[entries], part, ctx.temperature, ctx.shard,
                outputs=SupportLogits(at_sampled[tokens], at_support[entries], lse[tokens], None),
                g_sampled=g_sampled[tokens], g_support=g_support[entries], g_lse=g_lse[tokens],
            )  # fmt: skip
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[tokens])
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[tokens]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 7


def support_head(
    hidden: Float[Tensor, "n h"],
    weight: Float[Tensor, "v h"],
    sampled: Int[Tensor, " n"],
    token_ids: Int[Tensor, " nnz"],
    rows: Segments,
    temperature: float = 1.0,
    *,
    shard: VocabShard | None = None,
    chunk: int = 4096,
) -> SupportLogits:
    """Sampled and support logits from the support's rows of `weight` alone, for complete supports (no log-sum-exp).

    chunk: entries whose weight rows are gathered at a time. Products are summed in working precision. One SUM over
    the group, none in backward.
    """
    shard = shard or VocabShard()
    row = torch.cat([torch.arange(len(sampled), device=sampled.device), rows.index])
    found = _EntryDots.apply(hidden, weight, row, torch.cat([sampled, token_ids]), shard, chunk) / temperature
    return SupportLogits(found[: len(sampled)], found[len(sampled) :], None, None)


class _EntryDots(torch.autograd.Function):
    """hidden[row] . weight[id] for each entry (row, id)."""

    @staticmethod
    def forward(ctx, hidden, weight, row, ids, shard, chunk):
        work = working_dtype(weight)
        column, owned = local_columns(ids, shard, len(weight))
        found = hidden.new_empty(len(ids), dtype=work)
        for start in range(0, len(ids), chunk):
            part = slice(start, start + chunk)
            found[part] = (hidden[row[part]].to(work) * weight[column[part]].to(work)).sum(-1)
        if owned is not None:
            found = torch.where(owned, found, 0.0)
            torch.distributed.all_reduce(found, group=shard.group)
        ctx.save_for_backward(hidden, weight, row, column, owned)
        ctx.chunk = chunk
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        hidden, weight, row, column, owned = ctx.saved_tensors
        if owned is not None:
            upstream = torch.where(owned, upstream, 0.0)
        work = working_dtype(weight)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=work) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=work) if need_weight else None
        for start in range(0, len(row), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            at, column_part, scale = row[part], column[part], upstream[part, None]
            if grad_hidden is not None:
                grad_hidden.index_add_(0, at, scale * weight[column_part].to(work))
            if grad_weight is not None:
                grad_weight.index_add_(0, column_part, scale * hidden[at].to(work))
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None, None, None, None,
        )  # fmt: skip
