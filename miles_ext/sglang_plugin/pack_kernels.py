"""Writes packed rows on a GPU in one launch or two: the number of launches bounds a small model's step, not their work.

The same rows as `pack_torch`, which stays the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_ext.records import Status

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

OK, OVERFLOW, INVALID = (tl.constexpr(int(status)) for status in Status)
BLOCK = 4096
LENGTHS = 1024


def pack_heads(
    probs: Float[Tensor, "n v"],
    sampled: Int[Tensor, " n"],
    committed: Bool[Tensor, " n"],
    rows: Int[Tensor, " r"],
    sizes: Int[Tensor, " r"],
    meta: Int[Tensor, "r 3"],
    entries: Int[Tensor, "r k 2"],
) -> None:
    """See `pack_torch.pack_heads`."""
    mine = probs if len(rows) == len(probs) else probs.index_select(0, rows)
    values, ids = mine.topk(entries.shape[1], dim=-1, sorted=True)
    tiny, width = torch.finfo(torch.float32).tiny, triton.next_power_of_2(entries.shape[1])
    _launch(
        _head, len(rows), values, ids, probs, sampled, committed, rows, sizes, meta, entries, probs.stride(0),
        entries.shape[1], tiny, WIDTH=width,
    )  # fmt: skip


def pack_supports(
    probs: Float[Tensor, "n v"],
    sampled: Int[Tensor, " n"],
    committed: Bool[Tensor, " n"],
    rows: Int[Tensor, " r"],
    sizes: Int[Tensor, " r"],
    meta: Int[Tensor, "r 3"],
    entries: Int[Tensor, "c 2"],
) -> None:
    """See `pack_torch.pack_supports`."""
    counts = torch.empty(len(rows), dtype=torch.int32, device=probs.device)
    r, v, stride = len(rows), probs.shape[1], probs.stride(0)
    _launch(_count, r, probs, sampled, committed, rows, sizes, counts, meta, stride, v, BLOCK=BLOCK)
    _launch(_write, r, probs, rows, counts, meta, entries, stride, len(entries), v, BLOCK=BLOCK, LENGTHS=LENGTHS)


def _launch(kernel: Any, programs: int, *arguments: Any, **constants: int) -> None:
    kernel[(programs,)](*arguments, **constants)


@triton.jit
def _write_meta(meta, row, length, logprob, status):
    finite = (logprob == logprob) & (tl.abs(logprob) != float("inf"))
    tl.store(meta + row * 3, length)
    tl.store(meta + row * 3 + 1, logprob.to(tl.int32, bitcast=True))
    tl.store(meta + row * 3 + 2, tl.where(finite, status, INVALID))


@triton.jit
def _write_entries(entries, place, ids, value, kept):
    tl.store(entries + place * 2, ids.to(tl.int32), mask=kept)
    tl.store(entries + place * 2 + 1, tl.log(value).to(tl.int32, bitcast=True), mask=kept)


@triton.jit
def _head(values, ids, probs, sampled, committed, rows, sizes, meta, entries, stride, width, tiny, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    source = tl.load(rows + row)
    place = row * width + tl.arange(0, WIDTH)
    inside = tl.arange(0, WIDTH) < width
    value = tl.maximum(tl.load(values + place, mask=inside, other=1.0), tiny)
    _write_entries(entries, place, tl.load(ids + place, mask=inside, other=0), value, inside)
    logprob = tl.log(tl.load(probs + source * stride + tl.load(sampled + source)))
    length = tl.where(tl.load(committed + source), tl.load(sizes + row), 0).to(tl.int32)
    _write_meta(meta, row, length, logprob, OK)


@triton.jit
def _count(probs, sampled, committed, rows, sizes, counts, meta, stride, vocabulary, BLOCK: tl.constexpr):
    """Entries of each row, 0 for a row that is not committed or has too many."""
    row = tl.program_id(0)
    source = tl.load(rows + row)
    base = probs + source * stride
    found = tl.zeros((), tl.int32)
    if tl.load(committed + source):
        for first in range(0, vocabulary, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            found += tl.sum((tl.load(base + ids, mask=ids < vocabulary, other=0.0) > 0).to(tl.int32))
    over = found > tl.load(sizes + row)
    length = tl.where(over, 0, found)
    tl.store(counts + row, length)
    logprob = tl.log(tl.load(base + tl.load(sampled + source)))
    _write_meta(meta, row, length, logprob, tl.where(over, OVERFLOW, OK))


@triton.jit
def _write(
    probs, rows, counts, meta, entries, stride, capacity, vocabulary, BLOCK: tl.constexpr, LENGTHS: tl.constexpr
):
    """Each row's entries after those of the rows before it."""
    row = tl.program_id(0)
    length = tl.load(counts + row)
    start = tl.zeros((), tl.int32)
    for first in range(0, row, LENGTHS):
        before = first + tl.arange(0, LENGTHS)
        start += tl.sum(tl.load(counts + before, mask=before < row, other=0))
    if start + length > capacity:
        tl.store(meta + row * 3, 0)
        if tl.load(meta + row * 3 + 2) == OK:
            tl.store(meta + row * 3 + 2, OVERFLOW)
    elif length > 0:
        base = probs + tl.load(rows + row) * stride
        for first in range(0, vocabulary, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            value = tl.load(base + ids, mask=ids < vocabulary, other=0.0)
            kept = value > 0
            _write_entries(entries, start + tl.cumsum(kept.to(tl.int32), 0) - 1, ids, value, kept)
            start += tl.sum(kept.to(tl.int32))
