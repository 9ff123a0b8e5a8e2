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
COARSE = tl.constexpr(1 << 17)  # keys that a bound may lie below the best bound: 2 % of a value or less
STAGES = tl.constexpr(3)  # blocks of a row on their way at once


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
def least_key_by_count(keys, k, low, high, slack):
    """`least_key` with weight 1 a key, or a key at most `slack` below it and not below `low`. Fewer than 2**16 keys.

    Three thresholds a step, whose counts are one sum of 64 bits: a step costs what its sum costs.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    while high - low > slack:
        quarter = (high - low + 3) >> 2
        first, second, third = low + quarter - 1, low + 2 * quarter - 1, low + 3 * quarter - 1
        counted = (keys > first.to(tl.int32)).to(tl.int64)
        counted += (keys > second.to(tl.int32)).to(tl.int64) << 16
        counted += (keys > third.to(tl.int32)).to(tl.int64) << 32
        counts = tl.sum(counted, 0)
        at_first, at_second, at_third = (counts & 65535) < k, ((counts >> 16) & 65535) < k, (counts >> 32) < k
        low = tl.where(at_third, low, tl.minimum(third + 1, high))
        low = tl.where(at_third & (at_second == 0), second + 1, low)
        low = tl.where(at_second & (at_first == 0), first + 1, low)
        high = tl.where(at_third, tl.minimum(third, high), high)
        high = tl.where(at_second, tl.minimum(second, high), high)
        high = tl.where(at_first, first, high)
    return low.to(tl.int32)


@triton.jit
def bound_of_lanes(best, k):
    """A key that the k-th largest value of the row reaches or exceeds: that of the k-th largest of the group maxima,
    or a little less."""
    return least_key_by_count(key_of(best), k, tl.full((), LOWEST, tl.int32), key_of(tl.max(best, 0)), COARSE)


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
    for first in tl.range(0, vocabulary, LANES, num_stages=STAGES):
        _, _, value = load_block(base, first, vocabulary, LANES)
        unfit |= ((value != value) | (value == float("inf"))).to(tl.int32)
        best = tl.maximum(best, value)
    return best, tl.max(unfit, 0)


@triton.jit
def gather(base, vocabulary, low, high, keys_of, ids_of, count, room, LANES: tl.constexpr):
    """Append keys in [low, high] and their ids, in order of ids and while there is room. The count after it."""
    for first in tl.range(0, vocabulary, LANES, num_stages=STAGES):
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
    for first in tl.range(0, vocabulary, LANES, num_stages=STAGES):
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
