"""Packs the rows of one step into one flat device array, without asking the device anything.

Layout, int32: meta of the captured rows [r, 3] (length, bits of the sampled logprob, status), the entries of head
rows [h, K, 2], then the entries of complete rows [c, 2]; an entry is (id, bits of its logprob). Complete rows are
packed back to back, so the length of the last part is known to the device only: a guessed prefix travels with the
step and what exceeds it (rare: ties far beyond top_k) is fetched by `Packed.complete_entries`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_ext.law import head
from miles_ext.records import Status
from miles_ext.sglang_plugin.plan import COMPLETE, HEAD, BatchPlan

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

TIE_SLACK = 14  # entries a row that ties at the cutoff may add before the prefix is too short
STEP_ENTRIES = 1 << 23  # most complete entries of one step (128 MiB of scratch); a row that does not fit overflows


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
    block = probs.shape[0] // len(plan)
    head_part = _rows(plan, HEAD, block, probs.device)
    complete_part = _rows(plan, COMPLETE, block, probs.device)
    metas, entries = [], []
    prefix, beyond = 0, torch.empty(0, 2, dtype=torch.int32, device=probs.device)
    if len(head_part.host):
        meta, rows = _pack_heads(head_part, probs, sampled, committed)
        metas.append(meta)
        entries.append(rows.flatten())
    if len(complete_part.host):
        meta, rows = _pack_supports(complete_part, probs, sampled, committed)
        prefix = min(_guess(plan, probs.shape[1]) * block, len(rows))
        metas.append(meta)
        entries.append(rows[:prefix].flatten())
        beyond = rows[prefix:]
    flat = torch.cat([meta.flatten() for meta in metas] + entries)
    return Packed(flat, beyond, head_part.host, complete_part.host, head_part.width, prefix)


@dataclass(frozen=True)
class _Part:
    """Rows of one kind. device: their numbers, or None where that is every row. sizes: entries allowed, a row."""

    host: NDArray[np.int64]
    device: Tensor | None
    sizes: Tensor
    width: int

    def take(self, tensor: Tensor) -> Tensor:
        return tensor if self.device is None else tensor.index_select(0, self.device)


def _rows(plan: BatchPlan, kind: int, block: int, device: torch.device) -> _Part:
    key = (kind, block)
    if key not in plan.device_cache:
        requests = np.flatnonzero(plan.capture == kind)
        host = (requests[:, None] * block + np.arange(block)).ravel()
        sizes = plan.size[requests].repeat(block)
        plan.device_cache[key] = _Part(
            host=host,
            device=None if len(requests) == len(plan) else torch.from_numpy(host).to(device, non_blocking=True),
            sizes=torch.from_numpy(sizes).to(device, non_blocking=True),
            width=int(sizes.max(initial=0)),
        )
    return plan.device_cache[key]


def _pack_heads(part: _Part, probs: Tensor, sampled: Tensor, committed: Tensor) -> tuple[Tensor, Tensor]:
    mine = part.take(probs)
    ids, logprobs = head(mine, part.width)
    sampled_logprobs = _sampled(mine, part.take(sampled))
    lengths = torch.where(part.take(committed), part.sizes, 0)
    return _meta(lengths, sampled_logprobs, torch.zeros_like(lengths)), torch.stack([ids, _bits(logprobs)], -1)


def _pack_supports(part: _Part, probs: Tensor, sampled: Tensor, committed: Tensor) -> tuple[Tensor, Tensor]:
    mine = part.take(probs)
    positive = (mine > 0) & part.take(committed)[:, None]
    counts = positive.sum(-1)
    overflow = counts > part.sizes
    capacity = min(len(part.host) * min(part.width, mine.shape[1]), STEP_ENTRIES)
    overflow |= torch.where(overflow, 0, counts).cumsum(0) > capacity
    lengths = torch.where(overflow, 0, counts)
    where = torch.nonzero_static(positive & ~overflow[:, None], size=capacity, fill_value=0)
    logprobs = mine[where[:, 0], where[:, 1]].log()
    meta = _meta(lengths, _sampled(mine, part.take(sampled)), overflow.long() * int(Status.OVERFLOW))
    return meta, torch.stack([where[:, 1].int(), _bits(logprobs)], -1)


def _sampled(probs: Tensor, ids: Tensor) -> Tensor:
    return probs.gather(1, ids.long()[:, None])[:, 0].log()


def _meta(lengths: Tensor, sampled_logprobs: Tensor, status: Tensor) -> Tensor:
    status = torch.where(sampled_logprobs.isfinite(), status, int(Status.INVALID))
    return torch.stack([lengths.int(), _bits(sampled_logprobs), status.int()], -1)


def _bits(logprobs: Tensor) -> Tensor:
    return logprobs.float().contiguous().view(torch.int32)


def _guess(plan: BatchPlan, vocab_size: int) -> int:
    """Complete entries of one position of every capturing request, if ties at the cutoff are few."""
    mine = plan.capture == COMPLETE
    most = np.minimum(plan.size[mine], vocab_size)
    return int(np.minimum(plan.top_k[mine] + TIE_SLACK, most).sum())
