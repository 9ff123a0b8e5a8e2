# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
"""Triton kernels behind `law` and `sample` on a GPU, each one launch: for a small model a step costs what it launches.

`law.py` stays the definition. Masses: exponentials of the gathered values and all sums are float64, exponentials of the
others float32, so a nucleus may differ from a float64 reading only where the mass before a token is within 1e-6 of p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_ext.select_kernels import (
    LOWEST,
    STAGES,
    bound_of_lanes,
    gather,
    key_of,
    lane_maxima,
    least_key,
    least_key_by_count,
    least_key_of_row,
    load_block,
    middle_of,
    value_of,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Int

LANES = 4096  # values at once, and groups of which the maxima bound a cutoff
ROOM = 4096  # gathered values at most; more are found by bisecting the whole row
REACH = 2048  # a top-k up to here is bounded by the group maxima
NUCLEUS = 1024  # a nucleus without top-k is first looked for among this many
WARPS = 16


def filter_rows(
    logits: Float[Tensor, "n v"],
    probs: Float[Tensor, "n v"],
    rows: Int[Tensor, " r"],
    temperature: Float[Tensor, " r"],
    top_k: Int[Tensor, " r"],
    top_p: Float[Tensor, " r"],
    joint: bool,
) -> None:
    """Write the law of the `rows` of n that a filter (or temperature 0) touches into probs, float32.

    logits: float32, bfloat16 or float16, unit stride in a row. temperature, top_p: float64. top_k: int64 in [1, v].
    """
    r, v = len(rows), logits.shape[1]
    scratch = torch.empty(r, 2, ROOM, dtype=torch.int32, device=logits.device)
    _law[(r,)](
        logits, logits.stride(0), probs, probs.stride(0), rows, temperature, top_k, top_p, scratch, v,
        joint, LANES, ROOM, REACH, NUCLEUS, num_warps=WARPS,
    )  # fmt: skip


def draw_rows(probs: Float[Tensor, "n v"], uniforms: Float[Tensor, " n"], ids: Int[Tensor, " n"]) -> None:
    """One token of positive mass a row, inverting its distribution function in float64; 0 for a row without a law."""
    n, v = probs.shape
    _draw[(n,)](probs, probs.stride(0), uniforms, ids, v, LANES, num_warps=WARPS)


def mend_bonus(probs: Float[Tensor, "n v"], correct: Int[Tensor, " b"], bonus: Int[Tensor, " b"], block: int) -> None:
    """Put the likeliest token in the place of a bonus without mass at its position, row = request * block + correct."""
    _mend[(len(bonus),)](probs, probs.stride(0), correct, bonus, block, probs.shape[1], LANES, num_warps=WARPS)


@triton.jit
def _fill(out, value, vocabulary, LANES: tl.constexpr):
    for first in range(0, vocabulary, LANES):
        ids = first + tl.arange(0, LANES)
        tl.store(out + ids, tl.full((LANES,), value, tl.float32), mask=ids < vocabulary)


@triton.jit
def _first_of(base, vocabulary, wanted, LANES: tl.constexpr):
    """The lowest id that holds the value `wanted`."""
    found = tl.full((LANES,), 2147483647, tl.int32)
    for first in range(0, vocabulary, LANES):
        ids, inside, value = load_block(base, first, vocabulary, LANES)
        found = tl.minimum(found, tl.where(inside & (value == wanted), ids, 2147483647))
    return tl.min(found, 0)


@triton.jit
def _mass(base, vocabulary, low, high, top, heat, LANES: tl.constexpr):
    """Mass, the largest value having 1, of the values with a key in (low, high]; float64 sum of float32 terms."""
    mass = tl.zeros((LANES,), tl.float64)
    for first in tl.range(0, vocabulary, LANES, num_stages=STAGES):
        _, inside, value = load_block(base, first, vocabulary, LANES)
        key = key_of(value)
        counted = inside & (key > low) & (key <= high)
        mass += tl.where(counted, tl.exp((value - top) / heat), 0.0).to(tl.float64)
    return tl.sum(mass, 0)


@triton.jit
def _law(
    logits, logits_stride, probs, probs_stride, rows, temperatures, top_ks, top_ps, scratch, vocabulary,
    JOINT: tl.constexpr, LANES: tl.constexpr, ROOM: tl.constexpr, REACH: tl.constexpr, NUCLEUS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    row = tl.load(rows + at).to(tl.int64)
    base, out = logits + row * logits_stride, probs + row * probs_stride
    heat, p = tl.load(temperatures + at), tl.load(top_ps + at)
    k = tl.load(top_ks + at).to(tl.int32)
    best, unfit = lane_maxima(base, vocabulary, LANES)
    top = tl.max(best, 0)
    if (unfit > 0) | (top == float("-inf")):
        _fill(out, float("nan"), vocabulary, LANES)
    elif heat == 0.0:
        chosen = _first_of(base, vocabulary, top, LANES)
        _fill(out, 0.0, vocabulary, LANES)
        tl.debug_barrier()
        tl.store(out + chosen, 1.0)
    else:
        reach = tl.where(k <= REACH, k, NUCLEUS)
        bound = bound_of_lanes(best, reach)
        keys_of = scratch + at.to(tl.int64) * (2 * ROOM)
        ids_of = keys_of + ROOM
        count = gather(base, vocabulary, bound, key_of(top), keys_of, ids_of, tl.zeros((), tl.int32), ROOM, LANES)
        done = 0
        if (count <= ROOM) & ((k >= vocabulary) | (k <= count)):
            tl.debug_barrier()
            done = _law_of_gathered(
                base, out, keys_of, ids_of, count, bound, top, heat, k, p, vocabulary, JOINT, LANES, ROOM
            )
        if done == 0:
            _law_of_row(base, out, top, heat, k, p, vocabulary, JOINT, LANES)


@triton.jit
def _law_of_gathered(
    base, out, keys_of, ids_of, count, bound, top, heat, k, p, vocabulary,
    JOINT: tl.constexpr, LANES: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The law from the gathered values, which hold the whole top-k. 0 where a nucleus without top-k reaches beyond."""
    place = tl.arange(0, ROOM)
    inside = place < count
    keys, high = tl.load(keys_of + place, mask=inside, other=LOWEST), key_of(top)
    mass = tl.where(inside, tl.exp((value_of(keys).to(tl.float64) - top.to(tl.float64)) / heat), 0.0)
    cut = bound
    if k < vocabulary:
        cut = least_key_by_count(keys, k, bound, high, 0)
    done = 1
    if p < 1.0:
        total = tl.sum(tl.where(keys >= cut, mass, 0.0), 0)
        if JOINT or k >= vocabulary:
            every = tl.sum(mass, 0)
            total = every + _mass(base, vocabulary, LOWEST - 1, bound - 1, top, heat.to(tl.float32), LANES)
            if (k >= vocabulary) & (every < p * total):
                done = 0
        cut = least_key(keys, tl.where(keys >= cut, mass, 0.0), p * total, cut, high)
    if done == 1:
        kept = inside & (keys >= cut)
        total = tl.sum(tl.where(kept, mass, 0.0), 0)
        _fill(out, 0.0, vocabulary, LANES)
        tl.debug_barrier()
        tl.store(out + tl.load(ids_of + place, mask=inside, other=0), (mass / total).to(tl.float32), mask=kept)
    return done


@triton.jit
def _law_of_row(base, out, top, heat, k, p, vocabulary, JOINT: tl.constexpr, LANES: tl.constexpr):
    """The same from the whole row, read once a bit of the cutoff: wide nuclei, large top-k, thousands of ties."""
    heat32, highest, cut = heat.to(tl.float32), key_of(top), tl.full((), LOWEST, tl.int32)
    if k < vocabulary:
        cut = least_key_of_row(base, vocabulary, k, cut, highest, LANES)
    if p < 1.0:
        measured = LOWEST - 1 if JOINT else cut - 1
        limit = p * _mass(base, vocabulary, measured, highest, top, heat32, LANES)
        high = highest
        while cut < high:
            middle = middle_of(cut, high)
            enough = _mass(base, vocabulary, middle, highest, top, heat32, LANES) < limit
            high = tl.where(enough, middle, high)
            cut = tl.where(enough, cut, middle + 1)
    total = _mass(base, vocabulary, cut - 1, highest, top, heat32, LANES)
    for first in range(0, vocabulary, LANES):
        ids, inside, value = load_block(base, first, vocabulary, LANES)
        mass = tl.where(key_of(value) >= cut, tl.exp((value - top) / heat32), 0.0)
        tl.store(out + ids, (mass.to(tl.float64) / total).to(tl.float32), mask=inside)


@triton.jit
def _draw(probs, stride, uniforms, ids_out, vocabulary, LANES: tl.constexpr):
    row = tl.program_id(0)
    base = probs + row.to(tl.int64) * stride
    masses = tl.zeros((LANES,), tl.float64)
    for first in tl.range(0, vocabulary, LANES, num_stages=STAGES):
        _, inside, value = load_block(base, first, vocabulary, LANES)
        masses += tl.where(inside & (value > 0), value, 0.0).to(tl.float64)
    target = tl.load(uniforms + row) * tl.sum(masses, 0)
    # The first token of positive mass at which the running sum exceeds the target; the last of all where rounding
    # leaves the sum at the target.
    before = tl.zeros((), tl.float64)
    chosen, last, first = 2147483647, 0, 0
    while (first < vocabulary) & (chosen == 2147483647):
        ids, inside, value = load_block(base, first, vocabulary, LANES)
        mass = tl.where(inside & (value > 0), value, 0.0).to(tl.float64)
        here = tl.sum(mass, 0)
        last = tl.maximum(last, tl.max(tl.where(mass > 0, ids, 0), 0))
        if before + here > target:
            above = (before + tl.cumsum(mass, 0) > target) & (mass > 0)
            chosen = tl.min(tl.where(above, ids, 2147483647), 0)
        before += here
        first += LANES
    tl.store(ids_out + row, tl.where(chosen == 2147483647, last, chosen))


@triton.jit(do_not_specialize=["block"])
def _mend(probs, stride, correct, bonus, block, vocabulary, LANES: tl.constexpr):
    request = tl.program_id(0)
    base = probs + (request * block + tl.load(correct + request)).to(tl.int64) * stride
    token = tl.load(bonus + request)
    if tl.load(base + token) <= 0.0:
        best, _ = lane_maxima(base, vocabulary, LANES)
        tl.store(bonus + request, _first_of(base, vocabulary, tl.max(best, 0), LANES).to(token.dtype))
