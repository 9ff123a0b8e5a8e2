"""The estimator on a GPU: three kernels a step, and the collectives of a vocabulary-parallel group between them.

Same loss, metrics and gradient as the torch operations of `score_centering`, in float32, for logits in float32,
bfloat16 or float16. Between the logits and their gradient only O(n + nnz) numbers are kept.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles_ext import cuda_kernels
from miles_ext.logprobs import VocabShard, reduce_over

if TYPE_CHECKING:
    from miles_ext.score_centering import EstimatorConfig, SupportTensors


def fused_loss(
    logits: Tensor, support: SupportTensors, advantages: Tensor, cfg: EstimatorConfig, temperature: float | Tensor,
    shard: VocabShard | None, *, consume: bool,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """`score_centering.score_centered_loss` by the kernels of `cuda_kernels`."""
    if isinstance(temperature, Tensor):
        temperature = temperature.to(torch.float32).contiguous()
    loss, table = _Fused.apply(
        logits, support, advantages.to(torch.float32).contiguous(), cfg, temperature, shard or VocabShard(), consume
    )
    names = cuda_kernels.METRICS if cfg.entropy else cuda_kernels.METRICS[:-1]
    return loss, dict(zip(names, table.unbind(), strict=False))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, support, advantages, cfg, temperature, shard, consume):
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        rows, head = support.rows, support.kind == "head"
        entropy = cfg.entropy and head
        width = shard.columns(logits.shape[1])
        stats, gathered = cuda_kernels.scan(
            logits, support.sampled, support.token_ids, rows.offsets, temperature, width,
            first_id=shard.start, normalise=head, entropy=entropy, widest=rows.widest,
        )  # fmt: skip
        if shard.group is not None:
            stats, gathered = reduce_over(shard.group, stats if head else None, gathered, entropy=entropy)
        bounds = (cfg.tis_clip, cfg.mis_low, cfg.mis_high)
        loss, table, factors, entries = cuda_kernels.estimate(
            stats, gathered, support.token_ids, support.logprobs.to(torch.float32), rows.offsets, support.sampled,
            support.sampled_logprobs.to(torch.float32), advantages, temperature, mode=cfg.mode, complete=not head,
            centering=cfg.centering, entropy=cfg.entropy, widest=rows.widest,
            bounds=(*bounds, *map(math.log, bounds), cfg.rho_max, cfg.tail_floor),
        )  # fmt: skip
        ctx.save_for_backward(logits, factors, entries)
        ctx.support, ctx.temperature, ctx.shard, ctx.width, ctx.consume = support, temperature, shard, width, consume
        ctx.mark_non_differentiable(table)
        ctx.set_materialize_grads(False)
        return loss, table

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, _):
        logits, factors, entries = ctx.saved_tensors
        support = ctx.support
        out = logits.detach() if ctx.consume else torch.empty_like(logits)
        cuda_kernels.gradient(
            out, logits, ctx.temperature, factors, entries, upstream, support.sampled, support.token_ids,
            support.rows.offsets, ctx.width, first_id=ctx.shard.start, normalise=support.kind == "head",
            widest=support.rows.widest,
        )  # fmt: skip
        return out, None, None, None, None, None, None
