"""Writes packed rows with torch alone: the CPU's version, and the reference of `pack_kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from miles_ext.law import head
from miles_ext.records import Status
from miles_ext.sglang_plugin.pack import UNCOMMITTED

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def pack_heads(
    probs: Float[Tensor, "n v"],
    sampled: Int[Tensor, " n"],
    committed: Int[Tensor, " b"] | None,
    rows: Int[Tensor, " r"],
    sizes: Int[Tensor, " r"],
    meta: Int[Tensor, "r 3"],
    entries: Int[Tensor, "r k 2"],
) -> None:
    """Meta and entries of the `rows` of n that record a head. sizes: their head sizes, at most k."""
    mine = probs.index_select(0, rows)
    ids, logprobs = head(mine, entries.shape[1])
    held = _held(committed, rows, len(probs))
    _write_meta(meta, sizes, _sampled(mine, sampled[rows]), torch.zeros_like(sizes), held)
    entries[..., 0], entries[..., 1] = ids, _bits(logprobs)


def pack_supports(
    probs: Float[Tensor, "n v"],
    sampled: Int[Tensor, " n"],
    committed: Int[Tensor, " b"] | None,
    rows: Int[Tensor, " r"],
    sizes: Int[Tensor, " r"],
    meta: Int[Tensor, "r 3"],
    entries: Int[Tensor, "r s 2"],
    beyond: Int[Tensor, "r e 2"],
) -> None:
    """Meta and entries, those behind s in `beyond`, of the `rows` of n that record a complete support. sizes: entries
    allowed."""
    mine = probs.index_select(0, rows)
    positive = mine > 0
    counts = positive.sum(-1)
    room = entries.shape[1] + beyond.shape[1]
    overflow = (counts > sizes) | (counts > room)
    held = _held(committed, rows, len(probs))
    _write_meta(meta, counts, _sampled(mine, sampled[rows]), overflow.long() * int(Status.OVERFLOW), held)
    row, ids = (positive & held[:, None] & ~overflow[:, None]).nonzero(as_tuple=True)
    place = positive.cumsum(-1)[row, ids] - 1
    whole = torch.empty(len(rows), room, 2, dtype=torch.int32)
    whole[row, place, 0], whole[row, place, 1] = ids.int(), _bits(mine[row, ids].log())
    entries[:], beyond[:] = whole[:, : entries.shape[1]], whole[:, entries.shape[1] :]


def _held(committed: Tensor | None, rows: Tensor, n: int) -> Bool[Tensor, " r"]:
    if committed is None:
        return torch.ones_like(rows, dtype=torch.bool)
    block = n // len(committed)
    return rows % block < committed[rows // block]


def _sampled(probs: Tensor, ids: Tensor) -> Tensor:
    return probs.gather(1, ids.long()[:, None])[:, 0].log()


def _write_meta(meta: Tensor, lengths: Tensor, sampled_logprobs: Tensor, status: Tensor, held: Tensor) -> None:
    status = torch.where(sampled_logprobs.isfinite(), status, int(Status.INVALID))
    status = torch.where(held, status, UNCOMMITTED)
    meta[:, 0], meta[:, 1], meta[:, 2] = torch.where(status == 0, lengths, 0), _bits(sampled_logprobs), status


def _bits(logprobs: Tensor) -> Tensor:
    return logprobs.float().contiguous().view(torch.int32)
