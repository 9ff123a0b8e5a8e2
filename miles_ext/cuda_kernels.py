# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with the CUDA builds of torch alone, and its kernels are launched by subscript.
"""The three Triton kernels of the estimator on a GPU: read the logits, do each row's arithmetic, write the gradient.

`_scan` reads each logit once and leaves one set of sums a split of the vocabulary, and the logits of the recorded
tokens. `_estimate` turns them into loss, metrics and the factors of the gradient: a row a program, O(support) work.
`_gradient` reads each logit once more and writes the gradient. Nothing waits for the host, nothing is atomic, and the
order of every sum is fixed. Exponentials have base 2; sums over the vocabulary are kept in that unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
MODES = {"none": 0, "tis": 1, "mis": 2}
METRICS = (
    "logprob", "logprob_gap", "weight", "weight_clipped", "support_mass_q", "support_mass_p", "tail_ratio",
    "tail_ratio_bounded", "support_size", "sampled_in_support", "pg_loss", "correction_loss", "correction_norm",
    "correction_tail", "entropy",
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """block: logits that a program holds at a time. warps: of 32 threads a program. programs: as many as the device
    should get at least; fewer rows than that are split along the vocabulary. evict: hint for lines that were read."""

    block: int
    warps: int
    programs: int = 2048
    evict: str = "evict_first"
    stages: int = 1

    def split(self, rows: int, width: int) -> tuple[int, int]:
        """(splits, columns a split); the last split may be shorter."""
        wanted = max(1, min(-(-self.programs // max(rows, 1)), -(-width // self.block)))
        span = -(-max(width, 1) // (wanted * self.block)) * self.block
        return max(1, -(-width // span)), span


# The fastest of 20 each on an H200 (docs/results/estimator.md).
SCAN = Launch(block=4096, warps=8, evict="")
GRADIENT = Launch(block=8192, warps=8, evict="")


def scan(
    logits: Tensor, sampled: Tensor, token_ids: Tensor, offsets: Tensor, temperature: float | Tensor, width: int,
    *, first_id: int, normalise: bool, entropy: bool, widest: int, launch: Launch | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(stats [3, n, splits], gathered [n + nnz]), float32.

    stats: maximum of log2(e) z over the split's share of the first `width` columns, sum 2^(x - max), and the sum of
    (x - max) 2^(x - max) where `entropy`. gathered: raw logits of the sampled tokens, then of the entries; 0 for ids
    that are not among the columns first_id ... first_id + width.
    """
    launch = launch or SCAN
    n = len(logits)
    splits, span = launch.split(n, width) if normalise else (1, max(width, 1))
    stats = logits.new_empty((3, n, splits), dtype=torch.float32)
    gathered = logits.new_empty(n + len(token_ids), dtype=torch.float32)
    if n:
        _scan[(n * splits,)](
            logits, logits.stride(0), temperature, sampled, token_ids, offsets, stats, gathered, n, width, span,
            first_id, splits, isinstance(temperature, Tensor), normalise, entropy, launch.block, _vector(logits),
            _entries_block(widest), launch.evict, launch.stages, num_warps=launch.warps,
        )  # fmt: skip
    return stats, gathered


def estimate(
    stats: Tensor, gathered: Tensor, token_ids: Tensor, logprobs: Tensor, offsets: Tensor, sampled: Tensor,
    sampled_logprobs: Tensor, advantages: Tensor, temperature: float | Tensor, *, mode: str, complete: bool,
    centering: str, entropy: bool, bounds: tuple[float, ...], widest: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss [n], metrics [15, n], factors [3, n], entries [nnz]), float32.

    factors: log2(e) times the log-sum-exp, what multiplies p_j, and the whole gradient of the sampled token. entries:
    the whole gradient of each entry. bounds: tis_clip, mis_low, mis_high and their logs, rho_max, tail_floor.
    """
    n, splits = stats.shape[1:]
    loss = stats.new_empty(n)
    table = stats.new_empty((len(METRICS) + 3, n))
    entries = stats.new_empty(len(token_ids))
    block = _entries_block(widest)
    if n:
        _estimate[(n,)](
            stats, gathered, token_ids, logprobs, offsets, sampled, sampled_logprobs, advantages, temperature,
            loss, table, entries, n, *bounds,
            splits, triton.next_power_of_2(splits), isinstance(temperature, Tensor), MODES[mode], complete,
            centering != "off", centering == "on", entropy, block, num_warps=max(1, block // 256),
        )  # fmt: skip
    return loss, table[: len(METRICS)], table[len(METRICS) :], entries


def gradient(
    out: Tensor, logits: Tensor, temperature: float | Tensor, factors: Tensor, entries: Tensor, upstream: Tensor,
    sampled: Tensor, token_ids: Tensor, offsets: Tensor, width: int, *, first_id: int, normalise: bool, widest: int,
    launch: Launch | None = None,
) -> None:  # fmt: skip
    """Write d loss / d logits times `upstream` [n] into every element of `out` [n, v], which may be `logits`.

    Columns from `width` on are padding and get 0. Without `normalise` only recorded tokens have a gradient, and the
    logits are not read. Recorded tokens are written from float32 values: adding them to a softmax term that was
    already rounded to bfloat16 would lose 1 - p for likely tokens.
    """
    launch = launch or GRADIENT
    n, columns = logits.shape
    splits, span = launch.split(n, columns)
    if n and columns:
        _gradient[(n * splits,)](
            out, out.stride(0), logits, logits.stride(0), temperature, factors, entries, upstream, upstream.stride(0),
            sampled, token_ids, offsets, n, columns, width, span, first_id, splits,
            isinstance(temperature, Tensor), normalise, launch.block, _entries_block(widest), launch.evict,
            launch.stages, num_warps=launch.warps,
        )  # fmt: skip


def _vector(logits: Tensor) -> int:
    """Logits in the 16 bytes that a thread loads at once."""
    return 16 // logits.element_size()


def _entries_block(widest: int) -> int:
    return min(max(triton.next_power_of_2(max(widest, 1)), 32), 1024)


@triton.jit
def _scan(
    logits, stride, temperature, sampled, ids, offsets, stats, gathered, n, width, span, first_id, splits,
    HEAT_PER_ROW: tl.constexpr, NORMALISE: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR: tl.constexpr, ENTRIES: tl.constexpr, EVICT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row, split = program // splits, program % splits
    low = (split * span).to(tl.int32)
    high = tl.minimum(low + span, width)
    source = logits + row * stride
    if NORMALISE:
        if HEAT_PER_ROW:
            scale = LOG2_E / tl.load(temperature + row)
        else:
            scale = LOG2_E / temperature
        # One running maximum for each vector that a thread loads: no exchange between threads inside the loop, and one
        # exponential in VECTOR + 1 goes to the maximum. It starts at the lowest finite number: a shard may hold
        # nothing but -inf, and -inf - -inf would be NaN.
        LANES: tl.constexpr = BLOCK // VECTOR
        lane = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
        highest = tl.full((LANES,), LOWEST, tl.float32)
        total = tl.zeros((LANES,), tl.float32)
        moment = tl.zeros((LANES,), tl.float32)
        for start in tl.range(low, high, BLOCK, num_stages=STAGES):
            column = start + lane
            z = tl.load(source + column, mask=column < high, other=float("-inf"), eviction_policy=EVICT).to(tl.float32)
            new = tl.maximum(highest, tl.max(z, 1) * scale)
            x = z * scale - new[:, None]
            e = tl.exp2(x)
            shift = highest - new
            factor = tl.exp2(shift)
            if ENTROPY:
                # About the new maximum: sum (x + shift) e = factor (moment + shift total). 0 times -inf would be NaN.
                moment = factor * (moment + tl.maximum(shift, -1.0e4) * total) + tl.sum(tl.maximum(x, -1.0e4) * e, 1)
            total = total * factor + tl.sum(e, 1)
            highest = new
        top = tl.max(highest, 0)
        shift = tl.maximum(highest - top, -1.0e4)
        factor = tl.exp2(shift)
        tl.store(stats + program, top)
        tl.store(stats + n * splits + program, tl.sum(total * factor, 0))
        if ENTROPY:
            tl.store(stats + 2 * n * splits + program, tl.sum(factor * (moment + shift * total), 0))
    # Each split serves the recorded tokens among its own columns; the first, which has column 0, also those that are
    # nobody's here.
    entry = tl.arange(0, ENTRIES)
    first, last = tl.load(offsets + row), tl.load(offsets + row + 1)
    for start in range(first, last, ENTRIES):
        inside = start + entry < last
        column = tl.load(ids + start + entry, mask=inside, other=0) - first_id
        here = (column >= 0) & (column < width)
        owned = tl.where(here, column, 0)
        served = inside & (owned >= low) & (owned < tl.maximum(high, 1))
        z = tl.load(source + column, mask=served & here, other=0.0).to(tl.float32)
        tl.store(gathered + n + start + entry, z, mask=served)
    column = tl.load(sampled + row) - first_id
    mine = (column >= low) & (column < high)
    z = tl.load(source + column, mask=mine, other=0.0).to(tl.float32)
    tl.store(gathered + row, z, mask=mine | ((split == 0) & ((column < 0) | (column >= width))))


@triton.jit
def _mass(p, q, clip, low, high, MODE: tl.constexpr):
    """q f(p / q) without forming the ratio."""
    if MODE == 0:
        return q
    if MODE == 1:
        return tl.minimum(p, clip * q)
    return tl.where((low * q <= p) & (p <= high * q), p, 0.0)


@triton.jit
def _estimate(
    stats, gathered, ids, logprobs, offsets, sampled, sampled_logprobs, advantages, temperature, loss, table, entries,
    n, clip, low, high, log_clip, log_low, log_high, rho_max, tail_floor, splits, SPLITS: tl.constexpr,
    HEAT_PER_ROW: tl.constexpr, MODE: tl.constexpr, COMPLETE: tl.constexpr, CENTERING: tl.constexpr,
    APPLIED: tl.constexpr, ENTROPY: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if HEAT_PER_ROW:
        heat = tl.load(temperature + row)
    else:
        heat = temperature
    first, last = tl.load(offsets + row), tl.load(offsets + row + 1)
    token, lq_y = tl.load(sampled + row), tl.load(sampled_logprobs + row)
    z_y = tl.load(gathered + row) / heat
    at = gathered + n
    entry = tl.arange(0, ENTRIES)
    zero = tl.zeros((ENTRIES,), tl.float32)
    entropy = tl.full((), 0.0, tl.float32)
    present = tl.abs(lq_y) < float("inf")
    if COMPLETE:
        highest = tl.full((ENTRIES,), LOWEST, tl.float32)
        for start in range(first, last, ENTRIES):
            z = tl.load(at + start + entry, mask=start + entry < last, other=float("-inf")) / heat
            highest = tl.maximum(highest, z)
        top = tl.max(highest, 0)
        total = zero
        for start in range(first, last, ENTRIES):
            z = tl.load(at + start + entry, mask=start + entry < last, other=float("-inf")) / heat
            total += tl.exp2((z - top) * LOG2_E)
        present = present & (last > first)
        lse = tl.where(last > first, top + tl.log2(tl.sum(total, 0)) * LN_2, z_y)
        lse_2 = lse * LOG2_E
    else:
        split = tl.arange(0, SPLITS)
        source = stats + row * splits + split
        tops = tl.load(source, mask=split < splits, other=LOWEST)
        top = tl.max(tops, 0)
        shift = tl.maximum(tops - top, -1.0e4)
        totals = tl.load(source + n * splits, mask=split < splits, other=0.0)
        total = tl.sum(totals * tl.exp2(shift), 0)
        lse_2 = top + tl.log2(total)
        lse = lse_2 * LN_2
        if ENTROPY:
            moments = tl.load(source + 2 * n * splits, mask=split < splits, other=0.0)
            moment = tl.sum(tl.exp2(shift) * (moments + shift * totals), 0)
            entropy = (tl.log2(total) - moment / total) * LN_2

    lp_y = z_y - lse
    log_ratio = tl.where(present, lp_y - lq_y, 0.0)
    advantage = tl.where(present, tl.load(advantages + row), 0.0)
    if MODE == 0:
        clipped = tl.full((), 0.0, tl.float32)
        weight = tl.full((), 1.0, tl.float32)
    elif MODE == 1:
        clipped = tl.where(log_ratio > log_clip, 1.0, 0.0)
        weight = tl.exp2(tl.minimum(log_ratio, log_clip) * LOG2_E)
    else:
        outside = (log_ratio < log_low) | (log_ratio > log_high)
        clipped = tl.where(outside, 1.0, 0.0)
        weight = tl.where(outside, 0.0, tl.exp2(log_ratio * LOG2_E))

    sum_p, sum_q, sum_plp = zero, zero, zero
    for start in range(first, last, ENTRIES):
        inside = start + entry < last
        lp = tl.load(at + start + entry, mask=inside, other=float("-inf")) / heat - lse
        p = tl.exp2(lp * LOG2_E)
        sum_p += p
        sum_q += tl.exp2(tl.load(logprobs + start + entry, mask=inside, other=float("-inf")) * LOG2_E)
        if COMPLETE and ENTROPY:
            sum_plp += tl.where(p > 0, p * lp, 0.0)
    mass_p, mass_q = tl.sum(sum_p, 0), tl.sum(sum_q, 0)
    one = tl.full((), 1.0, tl.float32)
    rho, unbounded, alpha = one, one, 0.0
    if COMPLETE:
        if ENTROPY:
            entropy = -tl.sum(sum_plp, 0)
    else:
        unbounded = tl.maximum(1 - mass_q, tail_floor) / tl.maximum(1 - mass_p, tail_floor)
        rho = tl.minimum(unbounded, rho_max)
        if MODE == 0:
            alpha = rho
        elif MODE == 1:
            alpha = tl.minimum(clip * rho, 1.0)
        else:
            alpha = tl.where((low * rho <= 1) & (1 <= high * rho), 1.0, 0.0)

    sum_c, sum_clp, hits, sum_c_y, sum_p_y = zero, zero, zero, zero, zero
    for start in range(first, last, ENTRIES):
        inside = start + entry < last
        lp = tl.load(at + start + entry, mask=inside, other=float("-inf")) / heat - lse
        p = tl.exp2(lp * LOG2_E)
        hit = inside & (tl.load(ids + start + entry, mask=inside, other=-1) == token)
        hits += tl.where(hit, 1.0, 0.0)
        sum_p_y += tl.where(hit, p, 0.0)
        if CENTERING:
            q = tl.exp2(tl.load(logprobs + start + entry, mask=inside, other=float("-inf")) * LOG2_E)
            c = _mass(p, q, clip, low, high, MODE) - alpha * p
            sum_c += c
            sum_clp += tl.where(c != 0, c * lp, 0.0)
            sum_c_y += tl.where(hit, c, 0.0)
    c_total = tl.sum(sum_c, 0)
    in_support = tl.sum(hits, 0)
    policy = -advantage * weight * lp_y
    correction = advantage * tl.sum(sum_clp, 0)
    pull = advantage * weight
    at_y = -advantage * weight
    if APPLIED:
        pull = advantage * (weight - c_total)
        at_y += advantage * tl.sum(sum_c_y, 0)
    if COMPLETE:
        at_y += pull * tl.sum(sum_p_y, 0)
    else:
        at_y += pull * tl.exp2(lp_y * LOG2_E)

    squares = zero
    for start in range(first, last, ENTRIES):
        inside = start + entry < last
        lp = tl.load(at + start + entry, mask=inside, other=float("-inf")) / heat - lse
        p = tl.exp2(lp * LOG2_E)
        value = pull * p
        if CENTERING:
            q = tl.exp2(tl.load(logprobs + start + entry, mask=inside, other=float("-inf")) * LOG2_E)
            c = _mass(p, q, clip, low, high, MODE) - alpha * p
            residual = c - c_total * p
            squares += residual * residual
            if APPLIED:
                value += advantage * c
        tl.store(entries + start + entry, value / heat, mask=inside)

    size = tl.abs(advantage) / heat
    norm = size * tl.sqrt(tl.sum(squares, 0))
    tail = size * tl.abs(c_total * (1 - mass_p))
    total_loss = policy
    if APPLIED:
        total_loss = policy + correction
    tl.store(loss + row, total_loss)
    table += row
    tl.store(table, lp_y)
    tl.store(table + n, tl.abs(log_ratio))
    tl.store(table + 2 * n, weight)
    tl.store(table + 3 * n, clipped)
    tl.store(table + 4 * n, mass_q)
    tl.store(table + 5 * n, mass_p)
    tl.store(table + 6 * n, rho)
    tl.store(table + 7 * n, tl.where(unbounded > rho, 1.0, 0.0))
    tl.store(table + 8 * n, (last - first).to(tl.float32))
    tl.store(table + 9 * n, in_support)
    tl.store(table + 10 * n, policy)
    tl.store(table + 11 * n, correction)
    tl.store(table + 12 * n, norm)
    tl.store(table + 13 * n, tail)
    tl.store(table + 14 * n, entropy)
    tl.store(table + 15 * n, lse_2)
    tl.store(table + 16 * n, pull / heat)
    tl.store(table + 17 * n, at_y / heat)


@triton.jit
def _gradient(
    out, out_stride, logits, stride, temperature, factors, entries, upstream, upstream_stride, sampled, ids, offsets,
    n, columns, width, span, first_id, splits, HEAT_PER_ROW: tl.constexpr, NORMALISE: tl.constexpr,
    BLOCK: tl.constexpr, ENTRIES: tl.constexpr, EVICT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row, split = program // splits, program % splits
    low = (split * span).to(tl.int32)
    high = tl.minimum(low + span, columns)
    above = tl.load(upstream + row * upstream_stride)
    target = out + row * out_stride
    source = logits + row * stride
    if HEAT_PER_ROW:
        scale = LOG2_E / tl.load(temperature + row)
    else:
        scale = LOG2_E / temperature
    shift = tl.load(factors + row)
    factor = above * tl.load(factors + n + row)
    lane = tl.arange(0, BLOCK)
    for start in tl.range(low, high, BLOCK, num_stages=STAGES):
        column = start + lane
        if NORMALISE:
            z = tl.load(source + column, mask=column < width, other=float("-inf"), eviction_policy=EVICT)
            value = factor * tl.exp2(z.to(tl.float32) * scale - shift)
        else:
            value = tl.zeros((BLOCK,), tl.float32)
        tl.store(target + column, value.to(out.dtype.element_ty), mask=column < high, eviction_policy=EVICT)
    # Recorded tokens take the place of what the loop wrote, possibly by other threads of this program.
    tl.debug_barrier()
    token = tl.load(sampled + row)
    entry = tl.arange(0, ENTRIES)
    first, last = tl.load(offsets + row), tl.load(offsets + row + 1)
    for start in range(first, last, ENTRIES):
        inside = start + entry < last
        id = tl.load(ids + start + entry, mask=inside, other=0)
        column = id - first_id
        mine = inside & (column >= low) & (column < tl.minimum(high, width)) & (id != token)
        value = above * tl.load(entries + start + entry, mask=mine, other=0.0)
        tl.store(target + column, value.to(out.dtype.element_ty), mask=mine)
    column = token - first_id
    value = above * tl.load(factors + 2 * n + row)
    tl.store(
        target + column, value.to(out.dtype.element_ty),
        mask=(column >= low) & (column < tl.minimum(high, width)),
    )  # fmt: skip
