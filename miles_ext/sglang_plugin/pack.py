"""Packs the rows of one step into one flat device array, without asking the device anything.

Layout, int32: meta of the captured rows [r, 3] (length, bits of the sampled logprob, status), the entries of head
rows [h, K, 2], then those of complete rows [c, S, 2]; an entry is (id, bits of its logprob). S is a guess of the
longest support, so that the host knows what travels; entries behind it (rare: ties far beyond top_k) are fetched from
`Packed.beyond`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_ext.sglang_plugin.plan import COMPLETE, HEAD, BatchPlan

if TYPE_CHECKING:
    from jaxtyping import Float, Int

TIE_SLACK = 14  # entries a row that ties at the cutoff may add before some stay behind
STEP_ENTRIES = 1 << 23  # most complete entries of one step (64 MiB), shared evenly; a longer row overflows
UNCOMMITTED = -1  # status of a position that holds no token


@dataclass(frozen=True)
class Packed:
    """One step's rows: `flat` travels to the host, `beyond` stays on the device.

    head_rows, complete_rows: batch row numbers (row = request * block + position), in the order of the meta rows.
    stride: entries of a complete row that `flat` holds.
    """

    flat: Int[Tensor, " m"]
    beyond: Int[Tensor, "c e 2"]
    head_rows: NDArray[np.int64]
    complete_rows: NDArray[np.int64]
    head_size: int
    stride: int


def pack(
    probs: Float[Tensor, "n v"], sampled: Int[Tensor, " n"], committed: Int[Tensor, " b"] | None, plan: BatchPlan
) -> Packed:
    """Rows of the requests that capture, from the very tensor they were drawn from.

    probs: the law of every row, n = len(plan) * block. sampled: the committed token of each row. committed: how many
    positions of each request hold one (None: all); the others come out empty. A row with more entries than its request
    allows, or than its share of the step, is OVERFLOW and empty; a row whose token has no finite logprob is INVALID
    and empty.
    """
    if probs.is_cuda:
        from miles_ext.sglang_plugin import pack_kernels as writer
    else:
        from miles_ext.sglang_plugin import pack_torch as writer
    block, vocabulary = probs.shape[0] // len(plan), probs.shape[1]
    heads, supports = _part(plan, HEAD, block, probs.device), _part(plan, COMPLETE, block, probs.device)
    h, c, k = len(heads.host), len(supports.host), heads.width
    width = min(supports.width, vocabulary, STEP_ENTRIES // max(c, 1))
    stride = min(supports.guess, width)
    edges = list(accumulate([3 * h, 3 * c, 2 * h * k, 2 * c * stride, 2 * c * (width - stride)]))
    buffer = torch.empty(edges[4], dtype=torch.int32, device=probs.device)
    beyond = buffer[edges[3] :].view(c, width - stride, 2)
    if h:
        meta, entries = buffer[: edges[0]].view(h, 3), buffer[edges[1] : edges[2]].view(h, k, 2)
        writer.pack_heads(probs, sampled, committed, heads.rows, heads.sizes, meta, entries)
    if c:
        meta, entries = buffer[edges[0] : edges[1]].view(c, 3), buffer[edges[2] : edges[3]].view(c, stride, 2)
        writer.pack_supports(probs, sampled, committed, supports.rows, supports.sizes, meta, entries, beyond)
    return Packed(buffer[: edges[3]], beyond, heads.host, supports.host, k, stride)


@dataclass(frozen=True)
class _Part:
    """Rows of one kind, their numbers on the host and on the device. sizes: entries allowed. width: the largest.
    guess: the longest support, if ties at the cutoff are few."""

    host: NDArray[np.int64]
    rows: Tensor
    sizes: Tensor
    width: int
    guess: int


def _part(plan: BatchPlan, kind: int, block: int, device: torch.device) -> _Part:
    key = (kind, block)
    if key not in plan.device_cache:
        requests = np.flatnonzero(plan.capture == kind)
        host = (requests[:, None] * block + np.arange(block)).ravel()
        sizes = plan.size[requests].repeat(block)
        on_device = (torch.from_numpy(array).to(device, non_blocking=True) for array in (host, sizes))
        guess = int(plan.top_k[requests].max(initial=0)) + TIE_SLACK
        plan.device_cache[key] = _Part(host, *on_device, width=int(sizes.max(initial=0)), guess=guess)
    return plan.device_cache[key]
