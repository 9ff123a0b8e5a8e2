"""One pass over the logits: log-sum-exp, the sampled logit and the logits of a support, with their closed-form
gradient. Works on one vocabulary shard of a tensor-parallel group as on the whole vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles_ext.segments import Segments

if TYPE_CHECKING:
    from jaxtyping import Float, Int

CPU_CHUNK_BYTES = 1 << 20  # of one working buffer: about a core's L2
DEVICE_CHUNK_BYTES = 1 << 28


@dataclass(frozen=True)
class VocabShard:
    """The columns that this rank owns: ids start ... start + columns of its logits.

    group: process group whose ranks hold the other shards (None: the logits are the whole vocabulary).
    real_vocab: ids at or above it are padding, which gets no mass and no gradient (None: no padding).
    """

    group: dist.ProcessGroup | None = None
    start: int = 0
    real_vocab: int | None = None

    def columns(self, width: int) -> int:
        """How many of `width` local columns are not padding."""
        return width if self.real_vocab is None else min(max(self.real_vocab - self.start, 0), width)


class SupportLogits(NamedTuple):
    """Logits divided by the temperature, float32 (float64 for float64 logits), replicated over the group.

    sampled: [n]. support: [nnz]. lse: [n] log-sum-exp over the vocabulary, or None where not asked for.
    entropy: [n] of the whole law in nats, no gradient, or None.
    """

    sampled: Float[Tensor, " n"]
    support: Float[Tensor, " nnz"]
    lse: Float[Tensor, " n"] | None
    entropy: Float[Tensor, " n"] | None


def support_logits(
    logits: Float[Tensor, "n v"],
    sampled: Int[Tensor, " n"],
    token_ids: Int[Tensor, " nnz"],
    rows: Segments,
    temperature: float | Float[Tensor, " n"] = 1.0,
    *,
    shard: VocabShard | None = None,
    normalise: bool = True,
    entropy: bool = False,
) -> SupportLogits:
    """Sampled logit, support logits and log-sum-exp of each token, differentiable in the logits.

    sampled: global ids int64 [n]. token_ids: global ids int64 [nnz], unique within a row. rows: their layout.
    temperature: > 0, one number or one a token. normalise: False leaves the log-sum-exp out; the vocabulary is then
    not read at all, forward or backward.

    Forward communicates one MAX [n] and one packed SUM (without `normalise`, the SUM only). Backward communicates
    nothing: upstream gradients are replicated, and each rank fills its own columns. Saved for backward: the logits
    themselves and O(n + nnz) numbers.
    """
    shard = shard or VocabShard()
    if entropy and not normalise:
        raise ValueError("entropy of the whole law needs normalise=True")
    return SupportLogits(
        *_SupportLogits.apply(logits, sampled, token_ids, rows, temperature, shard, normalise, entropy)
    )


class _SupportLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, sampled, token_ids, rows, temperature, shard, normalise, entropy):
        everyone = torch.arange(len(sampled), device=sampled.device)
        real = shard.columns(logits.shape[1])
        stats = row_stats(logits[:, :real], temperature, entropy=entropy) if normalise else None
        at_sampled, at_support, lse, entropies = combine(
            gather(logits, everyone, sampled, shard),
            gather(logits, rows.index, token_ids, shard),
            stats, rows, temperature, shard, entropy=entropy,
        )  # fmt: skip
        ctx.save_for_backward(logits, sampled, token_ids, at_sampled, at_support, lse)
        ctx.rows, ctx.temperature, ctx.shard = rows, temperature, shard
        ctx.set_materialize_grads(False)
        if entropies is not None:
            ctx.mark_non_differentiable(entropies)
        return at_sampled, at_support, lse, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstream):
        logits, sampled, token_ids, at_sampled, at_support, lse = ctx.saved_tensors
        outputs = SupportLogits(at_sampled, at_support, lse, None)
        g_sampled, g_support, g_lse = upstream[:3]
        grad = logit_gradient(
            logits, sampled, token_ids, ctx.rows, ctx.temperature, ctx.shard,
            outputs=outputs, g_sampled=g_sampled, g_support=g_support, g_lse=g_lse,
        )  # fmt: skip
        return grad, None, None, None, None, None, None, None


def combine(
    raw_sampled: Float[Tensor, " n"],
    raw_support: Float[Tensor, " nnz"],
    stats: RowStats | None,
    rows: Segments,
    temperature: float | Tensor,
    shard: VocabShard,
    *,
    entropy: bool,
) -> SupportLogits:
    """Local gathers and sums of one shard into the group's result: one MAX [n], then one SUM of everything packed."""
    parts = [raw_sampled, raw_support]
    top = None
    if stats is not None:
        top = stats.top
        if shard.group is not None:
            top = top.clone()
            dist.all_reduce(top, dist.ReduceOp.MAX, group=shard.group)
            stats = stats.relative_to(top)
        parts += [stats.total, stats.weighted] if entropy else [stats.total]
    if shard.group is not None:
        packed = torch.cat(parts)
        dist.all_reduce(packed, group=shard.group)
        parts = list(packed.split([len(part) for part in parts]))
    return SupportLogits(
        sampled=parts[0] / temperature,
        support=divide_entries(parts[1], temperature, rows),
        lse=None if top is None else top + parts[2].log(),
        entropy=parts[2].log() - parts[3] / parts[2] if entropy else None,
    )


def reduce_over(
    group: dist.ProcessGroup, stats: Tensor | None, gathered: Tensor, *, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Sums of a GPU's pass (`cuda_kernels.scan`; base 2) over the splits and ranks of the vocabulary.

    stats [3, n, splits] and gathered become (stats [3, n, 1], gathered) of the whole vocabulary: one MAX [n] and one
    packed SUM; the SUM only, for None.
    """
    if stats is None:
        dist.all_reduce(gathered, group=group)
        return gathered.new_empty(3, 0, 1), gathered
    tops = stats[0]
    top = tops.amax(1)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    shift = (tops - top[:, None]).clamp_min(-1e4)
    factor = shift.exp2()
    sums = [(factor * stats[1]).sum(1)]
    if entropy:
        sums.append((factor * (stats[2] + shift * stats[1])).sum(1))
    packed = torch.cat([gathered, *sums])
    dist.all_reduce(packed, group=group)
    n = len(top)
    parts = packed.split([len(gathered), *[n] * len(sums)])
    return torch.stack([top, *parts[1:], *[top] * (2 - len(sums))])[:, :, None], parts[0]


def logit_gradient(
    logits: Float[Tensor, "n v"],
    sampled: Int[Tensor, " n"],
    token_ids: Int[Tensor, " nnz"],
    rows: Segments,
    temperature: float | Tensor,
    shard: VocabShard,
    *,
    outputs: SupportLogits,
    g_sampled: Tensor | None,
    g_support: Tensor | None,
    g_lse: Tensor | None,
) -> Float[Tensor, "n v"]:
    """Gradient in the raw logits: (g_sampled 1[j = y] + g_support 1[j in S] + g_lse p_j) / temperature.

    The few entries that carry more than the softmax term are computed whole in working precision and then written
    once: adding them to a softmax term that was already rounded to bfloat16 would lose 1 - p for likely tokens.
    """
    n, width = logits.shape
    real = shard.columns(width)
    # One spare element takes the writes of ids that another rank owns: no mask, so no device synchronisation.
    blank = torch.zeros if g_lse is None else torch.empty
    flat = blank(n * width + 1, dtype=logits.dtype, device=logits.device)
    grad = flat[: n * width].view(n, width)
    ids = rows.fold(token_ids)
    at_sampled = torch.zeros_like(outputs.sampled) if g_sampled is None else g_sampled
    at_support = rows.fold(torch.zeros_like(outputs.support) if g_support is None else g_support)
    at_sampled = at_sampled + rows.sum(torch.where(ids == rows.spread(sampled), at_support, 0.0))
    if g_lse is not None:
        assert outputs.lse is not None
        softmax_gradient_(grad[:, :real], logits[:, :real], temperature, outputs.lse, g_lse)
        grad[:, real:] = 0
        at_sampled = at_sampled + g_lse * (outputs.sampled - outputs.lse).exp()
        at_support = at_support + rows.spread(g_lse) * (rows.fold(outputs.support) - rows.spread(outputs.lse)).exp()
    everyone = torch.arange(n, device=logits.device)
    # Support first: the sampled token may be one of its entries, and its own value holds both terms.
    for row, ids, value in (
        (rows.index, token_ids, divide_entries(at_support.reshape(-1), temperature, rows)),
        (everyone, sampled, at_sampled / temperature),
    ):
        column, owned = local_columns(ids, shard, width)
        slot = row * width + column
        slot = slot if owned is None else torch.where(owned, slot, n * width)
        flat.index_copy_(0, slot, value.to(flat.dtype))
    return grad


def working_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def divide_entries(entries: Tensor, temperature: float | Tensor, rows: Segments) -> Tensor:
    if not isinstance(temperature, Tensor):
        return entries / temperature
    return (rows.fold(entries) / rows.spread(temperature)).reshape(-1)


def local_columns(ids: Tensor, shard: VocabShard, width: int) -> tuple[Tensor, Tensor | None]:
    """Local column of each global id, and which ids are owned here (None: all of them)."""
    column = ids - shard.start
    if shard.group is None:
        return column, None
    return column.clamp(0, width - 1), (column >= 0) & (column < width)


def gather(logits: Tensor, row: Tensor, ids: Tensor, shard: VocabShard) -> Tensor:
    """Raw logits at (row, id) in working precision, 0 where another rank owns the id."""
    column, owned = local_columns(ids, shard, logits.shape[1])
    if logits.is_contiguous():
        found = logits.view(-1).index_select(0, row * logits.shape[1] + column)  # 3 times as fast as by two indices
    else:
        found = logits[row, column]
    found = found.to(working_dtype(logits))
    return found if owned is None else torch.where(owned, found, 0.0)


class RowStats(NamedTuple):
    """About each row's own maximum of z = logits / temperature: total = sum exp(z - top), weighted = sum of
    (z - top) exp(z - top)."""

    top: Tensor
    total: Tensor
    weighted: Tensor

    def relative_to(self, top: Tensor) -> RowStats:
        """The same sums about another, larger maximum."""
        shift = self.top - top
        factor = shift.exp()
        weighted = torch.where(factor > 0, factor * (self.weighted + shift * self.total), 0.0)
        return RowStats(top, torch.where(factor > 0, factor * self.total, 0.0 * top), weighted)


def row_stats(logits: Float[Tensor, "n v"], temperature: float | Tensor, *, entropy: bool) -> RowStats:
    """Reads each logit once, in chunks of rows that stay in cache."""
    n, width = logits.shape
    work = working_dtype(logits)
    top, total, weighted = logits.new_zeros(3, n, dtype=work).unbind()
    if width == 0:
        return RowStats(top.fill_(-torch.inf), total, weighted)
    step = rows_per_chunk(width, logits)
    buffer = logits.new_empty(min(step, n), width, dtype=work)
    unit = exponent_unit(work)
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        z = logits[part]
        x = buffer[: len(z)]
        if z.dtype != work:
            z = x.copy_(z)
        scale = unit / (temperature[part, None] if isinstance(temperature, Tensor) else temperature)
        highest = z.amax(-1, keepdim=True) * scale
        # A shard may hold nothing but -inf: -inf - -inf would be NaN.
        exponents(z, scale, highest.clamp_min(torch.finfo(work).min), out=x)
        terms = power_(x.clone() if entropy else x)
        top[part] = highest[:, 0] / unit
        torch.sum(terms, -1, out=total[part])
        if entropy:
            # A term of exponent -1e4 is 0 already; 0 times -inf would be NaN.
            weighted[part] = x.clamp_min_(-1e4).mul_(terms).sum(-1) / unit
    return RowStats(top, total, weighted)


def softmax_gradient_(
    out: Float[Tensor, "n v"],
    logits: Float[Tensor, "n v"],
    temperature: float | Tensor,
    lse: Float[Tensor, " n"],
    scale: Float[Tensor, " n"],
) -> None:
    """out = scale / temperature * exp(logits / temperature - lse), in place and in chunks of rows."""
    n, width = logits.shape
    work = working_dtype(logits)
    step = rows_per_chunk(width, logits)
    unit = exponent_unit(work)
    shift, factor = (lse * unit)[:, None], (scale / temperature)[:, None]
    buffer = None if out.dtype == work else logits.new_empty(min(step, n), width, dtype=work)
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        target = out[part]
        x = target if buffer is None else buffer[: len(target)]
        z = logits[part] if buffer is None else x.copy_(logits[part])
        heat = temperature[part, None] if isinstance(temperature, Tensor) else temperature
        power_(exponents(z, unit / heat, shift[part], out=x)).mul_(factor[part])
        if buffer is not None:
            target.copy_(x)


def exponent_unit(dtype: torch.dtype) -> float:
    """1 / log(base) of the exponentials in use: base 2 in float32, whose kernel is over twice as fast on CPUs; e in
    float64."""
    return 1.0 if dtype == torch.float64 else math.log2(math.e)


def exponents(z: Tensor, scale: float | Tensor, shift: Tensor, out: Tensor) -> Tensor:
    """out = z * scale - shift, in one pass that leaves z * scale unrounded."""
    if isinstance(scale, Tensor):
        return torch.addcmul(-shift, z, scale, out=out)
    return torch.add(-shift, z, alpha=scale, out=out)


def power_(x: Tensor) -> Tensor:
    return x.exp_() if x.dtype == torch.float64 else x.exp2_()


def rows_per_chunk(width: int, like: Tensor) -> int:
    size = CPU_CHUNK_BYTES if like.device.type == "cpu" else DEVICE_CHUNK_BYTES
    return max(1, size // (max(width, 1) * torch.finfo(working_dtype(like)).bits // 8))
