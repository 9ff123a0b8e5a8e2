# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
"""Writes packed rows on a GPU in one launch a kind: the number of launches bounds a small model's step, not their work.

The same rows as `pack_torch`, which stays the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_ext.records import Status
from miles_ext.select_kernels import (
    LOWEST,
    bound_of_lanes,
    gather,
    key_of,
    lane_maxima,
    least_key_by_count,
    least_key_of_row,
    load_block,
    value_of,
)
from miles_ext.sglang_plugin import pack_torch
from miles_ext.sglang_plugin.pack import UNCOMMITTED as HOST_UNCOMMITTED

if TYPE_CHECKING:
    from jaxtyping import Float, Int

OK, OVERFLOW, INVALID = (tl.constexpr(int(status)) for status in Status)
UNCOMMITTED = tl.constexpr(HOST_UNCOMMITTED)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
LANES = 4096
ROOM = 4096  # gathered values of one row at most; more (ties) are found by bisecting the whole row
LARGEST_HEAD = 1024  # heads are ranked by comparing all pairs; larger ones are left to torch
OTHERS = 32  # entries compared with all others at a time
WARPS = 16


def pack_heads(
    probs: Float[Tensor, "n v"],
    sampled: Int[Tensor, " n"],
    committed: Int[Tensor, " b"] | None,
    rows: Int[Tensor, " r"],
    sizes: Int[Tensor, " r"],
    meta: Int[Tensor, "r 3"],
    entries: Int[Tensor, "r k 2"],
) -> None:
    """See `pack_torch.pack_heads`; among ties at the last place the lowest ids are kept."""
    r, k, _ = entries.shape
    if k > LARGEST_HEAD:
        return pack_torch.pack_heads(probs, sampled, committed, rows, sizes, meta, entries)
    width = triton.next_power_of_2(k)
    scratch = torch.empty(r, 2, ROOM + width, dtype=torch.int32, device=probs.device)
    _heads[(r,)](
        probs, probs.stride(0), sampled, committed, _block(committed, probs), rows, sizes, meta, entries, scratch,
        probs.shape[1], k, LANES, ROOM, width, OTHERS, num_warps=WARPS,
    )  # fmt: skip


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
    """See `pack_torch.pack_supports`."""
    _supports[(len(rows),)](
        probs, probs.stride(0), sampled, committed, _block(committed, probs), rows, sizes, meta, entries, beyond,
        entries.shape[1], beyond.shape[1], probs.shape[1], LANES, num_warps=WARPS,
    )  # fmt: skip


def _block(committed: Tensor | None, probs: Tensor) -> int:
    return 1 if committed is None else len(probs) // len(committed)


@triton.jit
def _is_held(committed, source, block):
    held = source >= 0
    if committed is not None:
        held = source % block < tl.load(committed + source // block)
    return held


@triton.jit
def _write_meta(meta, row, length, logprob, status, held):
    finite = (logprob == logprob) & (tl.abs(logprob) != float("inf"))
    status = tl.where(held, tl.where(finite, status, INVALID), UNCOMMITTED)
    tl.store(meta + row * 3, tl.where(status == OK, length, 0).to(tl.int32))
    tl.store(meta + row * 3 + 1, logprob.to(tl.int32, bitcast=True))
    tl.store(meta + row * 3 + 2, status)
    return status


@triton.jit
def _write_entries(entries, place, ids, value, kept):
    tl.store(entries + place * 2, ids.to(tl.int32), mask=kept)
    tl.store(entries + place * 2 + 1, tl.log(value).to(tl.int32, bitcast=True), mask=kept)


# Counts that change between batches are not worth a compilation each.
@triton.jit(do_not_specialize=["block", "k"])
def _heads(
    probs, stride, sampled, committed, block, rows, sizes, meta, entries, scratch, vocabulary, k,
    LANES: tl.constexpr, ROOM: tl.constexpr, WIDTH: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    source = tl.load(rows + row)
    base = probs + source * stride
    held = _is_held(committed, source, block)
    logprob = tl.log(tl.load(base + tl.load(sampled + source), mask=held, other=1.0))
    status = _write_meta(meta, row, tl.load(sizes + row), logprob, OK, held)
    if status == OK:
        keys_of = scratch + row.to(tl.int64) * (2 * (ROOM + WIDTH))
        ids_of, best_keys = keys_of + ROOM, keys_of + 2 * ROOM
        best_ids = best_keys + WIDTH
        best, _ = lane_maxima(base, vocabulary, LANES)
        high = key_of(tl.max(best, 0))
        bound = bound_of_lanes(best, k)
        count = gather(base, vocabulary, bound, high, keys_of, ids_of, tl.zeros((), tl.int32), ROOM, LANES)
        tl.debug_barrier()
        if count > ROOM:
            bound = least_key_of_row(base, vocabulary, k, bound, high, LANES)
            count = gather(base, vocabulary, bound + 1, high, keys_of, ids_of, tl.zeros((), tl.int32), ROOM, LANES)
            count = tl.minimum(gather(base, vocabulary, bound, bound, keys_of, ids_of, count, k, LANES), k)
            tl.debug_barrier()
        # The k largest of the gathered, of those that tie for the last places the first
        place = tl.arange(0, ROOM)
        inside = place < count
        keys, ids = tl.load(keys_of + place, mask=inside, other=LOWEST), tl.load(ids_of + place, mask=inside, other=0)
        last = least_key_by_count(keys, k, bound, high, 0)
        above, tied = inside & (keys > last), (inside & (keys == last)).to(tl.int32)
        free = k - tl.sum(above.to(tl.int32), 0)
        chosen = above | ((tied > 0) & (tl.cumsum(tied, 0) <= free))
        to = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(best_keys + to, keys, mask=chosen)
        tl.store(best_ids + to, ids, mask=chosen)
        tl.debug_barrier()
        # Likeliest first: an entry's place is the number of entries before it
        at = tl.arange(0, WIDTH)
        mine = at < k
        key, token = tl.load(best_keys + at, mask=mine, other=LOWEST), tl.load(best_ids + at, mask=mine, other=0)
        rank = tl.zeros((WIDTH,), tl.int32)
        for first in range(0, k, OTHERS):
            other = first + tl.arange(0, OTHERS)
            other_key = tl.load(best_keys + other, mask=other < k, other=LOWEST)
            other_id = tl.load(best_ids + other, mask=other < k, other=2147483647)
            tie = (other_key[None, :] == key[:, None]) & (other_id[None, :] < token[:, None])
            rank += tl.sum(((other_key[None, :] > key[:, None]) | tie).to(tl.int32), 1)
        _write_entries(entries + row * k * 2, rank, token, tl.maximum(value_of(key), TINY), mine)


@triton.jit(do_not_specialize=["block", "width", "more"])
def _supports(
    probs, stride, sampled, committed, block, rows, sizes, meta, entries, beyond, width, more, vocabulary,
    LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    source = tl.load(rows + row)
    base = probs + source * stride
    here, there = entries + row.to(tl.int64) * width * 2, beyond + row.to(tl.int64) * more * 2
    held = _is_held(committed, source, block)
    count = tl.zeros((), tl.int32)
    if held:
        for first in range(0, vocabulary, LANES):
            ids, _, value = load_block(base, first, vocabulary, LANES)
            kept = value > 0
            found = tl.sum(kept.to(tl.int32), 0)
            if found > 0:
                place = count + tl.cumsum(kept.to(tl.int32), 0) - 1
                _write_entries(here, place, ids, value, kept & (place < width))
                _write_entries(there, place - width, ids, value, kept & (place >= width) & (place < width + more))
                count += found
    over = (count > tl.load(sizes + row)) | (count > width + more)
    logprob = tl.log(tl.load(base + tl.load(sampled + source), mask=held, other=1.0))
    _write_meta(meta, row, count, logprob, tl.where(over, OVERFLOW, OK), held)
