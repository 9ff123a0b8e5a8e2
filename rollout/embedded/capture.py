"""Records the laws of committed tokens: kept on the device as they were sampled from, packed a few thousand rows at a
time, and sorted into responses once at the end. Nothing here happens once a token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_ext.law import head
from miles_ext.records import SupportKind, SupportRows

PACK_ENTRIES = 1 << 20  # law entries held unpacked, 4 MiB of float32
Ints = NDArray[np.int64]


class SupportLog:
    """Support rows of one kind for the requests of one call.

    head_sizes: int64 [requests], read for heads only. tokens: int32 [requests, T], the committed tokens, which the
    caller fills in before it adds their laws.
    """

    def __init__(self, kind: SupportKind, head_sizes: Ints, tokens: NDArray[np.int32]) -> None:
        self.kind: SupportKind = kind
        self.head_sizes, self.tokens = head_sizes, tokens
        self._laws: list[Tensor] = []
        self._steps: list[tuple[Ints, Ints, Ints]] = []  # requests, first response index, rows recorded
        self._held = 0
        self._packed: list[_Packed] = []

    def add(self, probs: Tensor, requests: Ints, start: Ints, count: Ints) -> None:
        """Keep the first count[b] laws of probs [B, w, V]: tokens start[b], start[b] + 1, ... of requests[b]."""
        if not count.any():
            return  # a law that could not be recorded, and no other beside it
        width = probs.shape[1]
        laws = probs.view(-1, probs.shape[-1])
        recorded = np.arange(width) < count[:, None]
        if not recorded.all():
            flat = torch.from_numpy(np.flatnonzero(recorded))
            laws = laws.index_select(0, flat.to(probs.device, non_blocking=True))
        self._laws.append(laws)
        self._steps.append((requests, start, count))
        self._held += laws.numel()
        if self._held >= PACK_ENTRIES:
            self._pack()

    def _pack(self) -> None:
        probs = torch.cat(self._laws)
        requests, start, count = (np.concatenate(part) for part in zip(*self._steps, strict=True))
        self._laws, self._steps, self._held = [], [], 0
        owner = np.repeat(requests, count)
        position = np.arange(len(owner)) + np.repeat(start - (np.cumsum(count) - count), count)
        tokens = torch.from_numpy(self.tokens[owner, position, None].astype(np.int64)).to(probs.device)
        if self.kind == "complete":
            ids, logprobs, lengths, sampled = _complete(probs, tokens)
        else:
            ids, logprobs, lengths, sampled = _heads(probs, tokens, self.head_sizes[owner])
        self._packed.append(
            _Packed(
                owner,
                position,
                ids.cpu().numpy(),
                logprobs.float().cpu().numpy(),
                lengths,
                sampled.float().cpu().numpy(),
            )
        )

    def rows(self, status: NDArray[np.uint8]) -> list[SupportRows]:
        """Rows of every request, in the order of its tokens; none where nothing of this kind was captured.

        status: uint8 [requests], of each response's last token. Where it is not OK that token was not added: it gets
        an empty row.
        """
        if self._laws:
            self._pack()
        if not self._packed:
            parts = [SupportRows.empty(self.kind)] * len(status)
        else:
            packed = _Packed(*(np.concatenate(part) for part in zip(*self._packed, strict=True)))
            order = np.lexsort((packed.position, packed.owner))
            lengths = packed.lengths[order]
            everything = SupportRows(
                token_ids=_reorder(packed.ids, packed.lengths, order),
                logprobs=_reorder(packed.logprobs, packed.lengths, order),
                offsets=np.concatenate([[0], np.cumsum(lengths)]),
                sampled_logprobs=packed.sampled[order],
                kind=self.kind,
                status=np.zeros(len(order), np.uint8),
            )
            ends = np.searchsorted(packed.owner[order], np.arange(len(status)), side="right").tolist()
            parts = [everything[first:last] for first, last in zip([0, *ends[:-1]], ends, strict=True)]
        return [_with_failure(part, one) if one else part for part, one in zip(parts, status, strict=True)]


class _Packed(NamedTuple):
    """Rows in the order they were committed: owner, position, lengths and sampled [n], ids and logprobs [nnz]."""

    owner: Ints
    position: Ints
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    lengths: Ints
    sampled: NDArray[np.float32]


def _complete(probs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Ints, Tensor]:
    """Every entry of positive mass in order of ids, and the log-probability of `tokens` [n, 1], an entry itself."""
    kept = probs > 0
    if kept.all():
        ids = torch.arange(probs.shape[1], dtype=torch.int32, device=probs.device).expand(len(probs), -1)
        logs = probs.log()
        return ids.flatten(), logs.flatten(), np.full(len(probs), probs.shape[1]), logs.gather(1, tokens)[:, 0]
    row, ids = kept.nonzero().unbind(-1)
    logs = probs[row, ids].log()  # only now: the logarithm of zero is slow
    return ids.int(), logs, kept.sum(-1).cpu().numpy(), logs[ids == tokens[row, 0]]


def _heads(probs: Tensor, tokens: Tensor, sizes: Ints) -> tuple[Tensor, Tensor, Ints, Tensor]:
    """The sizes[i] likeliest entries of row i, and the log-probability of `tokens` [n, 1]: the entry's own, if it has
    one."""
    ids, logprobs = head(probs, int(sizes.max()))
    hit = ids == tokens
    inside = torch.where(hit, logprobs, 0.0).sum(-1)
    sampled = torch.where(hit.any(-1), inside, probs.gather(1, tokens)[:, 0].log())
    if (sizes == ids.shape[1]).all():
        return ids.flatten(), logprobs.flatten(), sizes, sampled
    kept = (torch.arange(ids.shape[1]) < torch.from_numpy(sizes[:, None])).to(ids.device)
    return ids[kept], logprobs[kept], sizes, sampled


def _reorder(entries: NDArray, lengths: Ints, order: Ints) -> NDArray:
    """Flat entries of rows `order`, one row after another; row r has lengths[r] entries."""
    if (lengths == lengths[0]).all():
        return entries.reshape(len(lengths), -1)[order].ravel()
    starts = np.cumsum(lengths) - lengths
    lengths = lengths[order]
    shift = starts[order] - (np.cumsum(lengths) - lengths)
    return entries[np.arange(len(entries)) + np.repeat(shift, lengths)]


def _with_failure(rows: SupportRows, status: int) -> SupportRows:
    """The rows and an empty one after them, of a token whose law could not be recorded."""
    one = SupportRows(
        token_ids=rows.token_ids[:0],
        logprobs=rows.logprobs[:0],
        offsets=np.zeros(2, np.int64),
        sampled_logprobs=np.full(1, np.nan, np.float32),
        kind=rows.kind,
        status=np.array([status], np.uint8),
    )
    return SupportRows.concatenate([rows, one])
