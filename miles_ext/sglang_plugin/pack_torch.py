"""Writes packed rows with torch alone: the CPU's version, and the reference of `pack_kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from miles_ext.law import head
from miles_ext.records import Status

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def pack_heads(
    probs: Float[Tensor, "n v"],
    sampled: Int[Tensor, " n"],
    committed: Bool[Tensor, " n"],
    rows: Int[Tensor, " r"],
    sizes: Int[Tensor, " r"],
    meta: Int[Tensor, "r 3"],
    entries: Int[Tensor, "r k 2"],
) -> None:
    """Meta and entries of the `rows` of n that record a head. sizes: their head sizes, at most k."""
    mine = probs.index_select(0, rows)
    ids, logprobs = head(mine, entries.shape[1])
    lengths = torch.where(committed[rows], sizes, 0)
    _write_meta(meta, lengths, _sampled(mine, sampled[rows]), torch.zeros_like(lengths))
    entries[..., 0], entries[..., 1] = ids, _bits(logprobs)


def pack_supports(
    probs: Float[Tensor, "n v"],
    sampled: Int[Tensor, " n"],
    committed: Bool[Tensor, " n"],
    rows: Int[Tensor, " r"],
    sizes: Int[Tensor, " r"],
    meta: Int[Tensor, "r 3"],
    entries: Int[Tensor, "c 2"],
) -> None:
    """Meta and entries, back to back, of the `rows` of n that record a complete support. sizes: entries allowed."""
    mine = probs.index_select(0, rows)
    positive = (mine > 0) & committed[rows][:, None]
    counts = positive.sum(-1)
    overflow = counts > sizes
    overflow |= torch.where(overflow, 0, counts).cumsum(0) > len(entries)
    lengths = torch.where(overflow, 0, counts)
    where = torch.nonzero_static(positive & ~overflow[:, None], size=len(entries), fill_value=0)
    _write_meta(meta, lengths, _sampled(mine, sampled[rows]), overflow.long() * int(Status.OVERFLOW))
    entries[:, 0], entries[:, 1] = where[:, 1], _bits(mine[where[:, 0], where[:, 1]].log())


def _sampled(probs: Tensor, ids: Tensor) -> Tensor:
    return probs.gather(1, ids.long()[:, None])[:, 0].log()


def _write_meta(meta: Tensor, lengths: Tensor, sampled_logprobs: Tensor, status: Tensor) -> None:
    meta[:, 0], meta[:, 1] = lengths, _bits(sampled_logprobs)
    meta[:, 2] = torch.where(sampled_logprobs.isfinite(), status, int(Status.INVALID))


def _bits(logprobs: Tensor) -> Tensor:
    return logprobs.float().contiguous().view(torch.int32)
