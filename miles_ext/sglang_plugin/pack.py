"""Packs the rows of one step into one flat device array, without asking the device anything.

Layout, int32: meta of the captured rows [r, 3] (length, bits of the sampled logprob, status), the entries of head
rows [h, K, 2], then the entries of complete rows [c, 2]; an entry is (id, bits of its logprob). Complete rows are
packed back to back, so the length of the last part is known to the device only: a guessed prefix travels with the
step, and what exceeds it (rare: ties far beyond top_k) is fetched from `Packed.beyond`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_ext.sglang_plugin.plan import COMPLETE, HEAD, BatchPlan

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

TIE_SLACK = 14  # entries a row that ties at the cutoff may add before the prefix is too short
STEP_ENTRIES = 1 << 23  # most complete entries of one step (64 MiB); a row that does not fit overflows


@dataclass(frozen=True)
class Packed:
    """One step's rows: `flat` travels to the host, `beyond` stays on the device.

    head_rows, complete_rows: batch row numbers (row = request * block + position), in the order of the meta rows.
    prefix: complete entries that `flat` holds.
    """

    flat: Int[Tensor, " m"]
    beyond: Int[Tensor, "c 2"]
    head_rows: NDArray[np.int64]
    complete_rows: NDArray[np.int64]
    head_size: int
    prefix: int


def pack(
    probs: Float[Tensor, "n v"], sampled: Int[Tensor, " n"], committed: Bool[Tensor, " n"], plan: BatchPlan
) -> Packed:
    """Rows of the requests that capture, from the very tensor they were drawn from.

    probs: the law of every row, n = len(plan) * block. sampled: the committed token of each row. committed: rows that
    hold one; the others come out empty. A row with more entries than its request allows, or that does not fit in the
    step, is OVERFLOW and empty; a row whose token has no finite logprob is INVALID.
    """
    if probs.is_cuda:
        from miles_ext.sglang_plugin import pack_kernels as writer
    else:
        from miles_ext.sglang_plugin import pack_torch as writer
    block, vocabulary = probs.shape[0] // len(plan), probs.shape[1]
    heads, supports = _part(plan, HEAD, block, probs.device), _part(plan, COMPLETE, block, probs.device)
    h, c, k = len(heads.host), len(supports.host), heads.width
    capacity = min(c * min(supports.width, vocabulary), STEP_ENTRIES)
    prefix = min(_guess(plan, vocabulary) * block, capacity)
    edges = np.cumsum([3 * h, 3 * c, 2 * h * k, 2 * prefix]).tolist()
    buffer = torch.empty(edges[2] + 2 * capacity, dtype=torch.int32, device=probs.device)
    if h:
        meta, entries = buffer[: edges[0]].view(h, 3), buffer[edges[1] : edges[2]].view(h, k, 2)
        writer.pack_heads(probs, sampled, committed, heads.rows, heads.sizes, meta, entries)
    if c:
        meta, entries = buffer[edges[0] : edges[1]].view(c, 3), buffer[edges[2] :].view(-1, 2)
        writer.pack_supports(probs, sampled, committed, supports.rows, supports.sizes, meta, entries)
    return Packed(buffer[: edges[3]], buffer[edges[3] :].view(-1, 2), heads.host, supports.host, k, prefix)


@dataclass(frozen=True)
class _Part:
    """Rows of one kind, their numbers on the host and on the device. sizes: entries allowed. width: the largest."""

    host: NDArray[np.int64]
    rows: Tensor
    sizes: Tensor
    width: int


def _part(plan: BatchPlan, kind: int, block: int, device: torch.device) -> _Part:
    key = (kind, block)
    if key not in plan.device_cache:
        requests = np.flatnonzero(plan.capture == kind)
        host = (requests[:, None] * block + np.arange(block)).ravel()
        sizes = plan.size[requests].repeat(block)
        on_device = (torch.from_numpy(array).to(device, non_blocking=True) for array in (host, sizes))
        plan.device_cache[key] = _Part(host, *on_device, width=int(sizes.max(initial=0)))
    return plan.device_cache[key]


def _guess(plan: BatchPlan, vocabulary: int) -> int:
    """Complete entries of one position of every capturing request, if ties at the cutoff are few."""
    mine = plan.capture == COMPLETE
    most = np.minimum(plan.size[mine], vocabulary)
    return int(np.minimum(plan.top_k[mine] + TIE_SLACK, most).sum())
