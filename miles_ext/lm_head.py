"""From hidden states to the loss without ever holding [n, v] logits.

`head_loss` makes and consumes the logits of a chunk of tokens at a time, gradient included. `support_head` multiplies
only the head's rows of the recorded supports, which is all that complete supports need, and gives what
`logprobs.support_logits` gives.

With a vocabulary-parallel weight the gradient of `hidden` is this rank's share: the caller's column-parallel region
sums it over the group, as for any such layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles_ext.logprobs import SupportLogits, VocabShard, local_columns, working_dtype
from miles_ext.segments import Segments

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def head_loss(
    hidden: Tensor, head: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], chunk: int,
    loss_fn: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Loss (a scalar, float64) of head(hidden [n, h]) -> [n, v] summed over rows, `chunk` of them at a time, and the
    metric sums, None without rows.

    loss_fn: (logits of these rows, which rows) -> (loss, sums [k]); it may consume its logits. parameters: what the
    head's gradient goes to. Collectives of a sharded head and loss run for each chunk, all within forward.
    """
    found: list[Tensor] = []
    loss = _HeadLoss.apply(hidden, head, chunk, loss_fn, found, *parameters)
    return loss, torch.stack(found).sum(0) if found else None


class _HeadLoss(torch.autograd.Function):
    """Head and loss of each chunk, forward and backward at once: no more than one chunk of logits ever exists."""

    @staticmethod
    def forward(ctx, hidden, head, chunk, loss_fn, found, *parameters):
        # Chunks add up in working precision: bfloat16 sums would lose what later chunks bring.
        wide = [torch.zeros_like(tensor, dtype=working_dtype(tensor)) for tensor in parameters]
        of_hidden = torch.zeros_like(hidden)
        total = hidden.new_zeros((), dtype=torch.float64)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, min(start + chunk, len(hidden)))
            with torch.enable_grad():
                part = hidden[rows].detach().requires_grad_()
                loss, sums = loss_fn(head(part), rows)
                of_part, *of_parameters = torch.autograd.grad(loss, (part, *parameters))
            of_hidden[rows] = of_part
            for gradient, more in zip(wide, of_parameters, strict=True):
                gradient += more
            total += loss.detach()
            found.append(sums)
        ctx.save_for_backward(
            of_hidden, *(gradient.to(tensor.dtype) for gradient, tensor in zip(wide, parameters, strict=True))
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        of_hidden, *of_parameters = (gradient * upstream.to(gradient.dtype) for gradient in ctx.saved_tensors)
        return of_hidden, None, None, None, None, *of_parameters


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
