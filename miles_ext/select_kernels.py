# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
"""Parts of Triton kernels that find the largest values of a row, exactly, where one program owns a row.

A full vocabulary is read twice. The k-th largest of the maxima of many interleaved groups bounds the k-th largest value
from below, and few values lie above that bound; they are gathered into scratch memory, where bisecting float32 bit
patterns finds a cutoff among registers. Ties are equal bit patterns, so no rank ever parts them.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-2139095041)  # the key of -inf


@triton.jit
def key_of(value):
    """int32 in the order of float32 values; both zeros have one key."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def middle_of(low, high):
    return (low & high) + ((low ^ high) >> 1)  # no sum that could overflow


@triton.jit
def least_key(keys, weights, limit, low, high):
    """The least key in [low, high] above which the weights sum to less than `limit`. Nothing lies above `high`."""
    while low < high:
        middle = middle_of(low, high)
        enough = tl.sum(tl.where(keys > middle, weights, 0), 0) < limit
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit
def least_key_of_lanes(best, k, LANES: tl.constexpr):
    """The key of the k-th largest of the group maxima, which the k-th largest value of the row reaches or exceeds."""
    high = key_of(tl.max(best, 0))
    return least_key(key_of(best), tl.full((LANES,), 1, tl.int32), k, tl.full((), LOWEST, tl.int32), high)


@triton.jit
def load_block(base, first, vocabulary, LANES: tl.constexpr):
    """Ids, which of them are in the row, and their values; -inf beyond the row."""
    ids = first + tl.arange(0, LANES)
    inside = ids < vocabulary
    return ids, inside, tl.load(base + ids, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def lane_maxima(base, vocabulary, LANES: tl.constexpr):
    """The largest value of each of LANES groups, and whether the row has a NaN or +inf."""
    best = tl.full((LANES,), float("-inf"), tl.float32)
    unfit = tl.zeros((LANES,), tl.int32)
    for first in range(0, vocabulary, LANES):
        _, _, value = load_block(base, first, vocabulary, LANES)
        unfit |= ((value != value) | (value == float("inf"))).to(tl.int32)
        best = tl.maximum(best, value)
    return best, tl.max(unfit, 0)


@triton.jit
def gather(base, vocabulary, low, high, keys_of, ids_of, count, room, LANES: tl.constexpr):
    """Append keys in [low, high] and their ids, in order of ids and while there is room. The count after it."""
    for first in range(0, vocabulary, LANES):
        ids, inside, value = load_block(base, first, vocabulary, LANES)
        key = key_of(value)
        kept = inside & (key >= low) & (key <= high)
        found = tl.sum(kept.to(tl.int32), 0)
        if found > 0:
            place = count + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(keys_of + place, key, mask=kept & (place < room))
            tl.store(ids_of + place, ids, mask=kept & (place < room))
            count += found
    return count


@triton.jit
def count_above(base, vocabulary, key, LANES: tl.constexpr):
    """How many values of a row have a larger key."""
    found = tl.zeros((LANES,), tl.int32)
    for first in range(0, vocabulary, LANES):
        _, inside, value = load_block(base, first, vocabulary, LANES)
        found += (inside & (key_of(value) > key)).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def least_key_of_row(base, vocabulary, limit, low, high, LANES: tl.constexpr):
    """`least_key` by counting in the whole row, once a bit: for rows with so many ties that no scratch holds them."""
    while low < high:
        middle = middle_of(low, high)
        enough = count_above(base, vocabulary, middle, LANES) < limit
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low
