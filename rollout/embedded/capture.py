"""Records the laws of committed tokens: kept on the device as they were sampled from, packed a few thousand rows at a
time, and sorted into responses once at the end. Nothing here happens once a token.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_ext.law import head
from miles_ext.records import SupportKind, SupportRows

PACK_ENTRIES = 1 << 20  # law entries held unpacked, 4 MiB of float32
Ints = NDArray[np.int64]


class SupportLog:
    """Support rows of one kind for the requests of one call. head_sizes: int64 [requests], read for heads only."""

    def __init__(self, kind: SupportKind, head_sizes: Ints) -> None:
        self.kind: SupportKind = kind
        self.head_sizes = head_sizes
        self._laws: list[Tensor] = []
        self._held = 0
        # A row: the request it belongs to, its response index, its token.
        self._owner: list[Ints] = []
        self._position: list[Ints] = []
        self._token: list[Ints] = []
        self._ids: list[NDArray[np.int32]] = []
        self._logprobs: list[NDArray[np.float32]] = []
        self._lengths: list[Ints] = []
        self._sampled: list[NDArray[np.float32]] = []

    def add(self, probs: Tensor, flat: Ints, owner: Ints, position: Ints, token: Ints) -> None:
        """Keep rows `flat` of the laws [R, V]: of `token` at response index `position` of request `owner`."""
        if len(flat) < len(probs):
            probs = probs.index_select(0, torch.from_numpy(flat).to(probs.device, non_blocking=True))
        self._laws.append(probs)
        self._owner.append(owner)
        self._position.append(position)
        self._token.append(token)
        self._held += probs.numel()
        if self._held >= PACK_ENTRIES:
            self._pack()

    def _pack(self) -> None:
        probs = torch.cat(self._laws)
        steps = len(self._laws)
        self._laws, self._held = [], 0
        tokens = np.concatenate(self._token[-steps:])
        chosen = probs.gather(1, torch.from_numpy(tokens[:, None]).to(probs.device)).log()[:, 0]
        if self.kind == "head":
            sizes = self.head_sizes[np.concatenate(self._owner[-steps:])]
            ids, logprobs = head(probs, int(sizes.max()))
            if (sizes < sizes.max()).any():
                kept = torch.arange(ids.shape[1]) < torch.from_numpy(sizes[:, None])
                ids, logprobs = ids[kept.to(ids.device)], logprobs[kept.to(ids.device)]
            lengths = sizes
        else:
            kept = probs > 0
            ids, logprobs = kept.nonzero()[:, 1].int(), probs[kept].log()
            lengths = kept.sum(-1).cpu().numpy()
        self._ids.append(ids.flatten().cpu().numpy())
        self._logprobs.append(logprobs.flatten().float().cpu().numpy())
        self._lengths.append(lengths)
        self._sampled.append(_sampled(self._ids[-1], self._logprobs[-1], lengths, tokens, chosen.float().cpu().numpy()))

    def rows(self, status: NDArray[np.uint8]) -> list[SupportRows]:
        """Rows of every request, in the order of its tokens; none where nothing of this kind was captured.

        status: uint8 [requests], of each response's last token. Where it is not OK that token was not added: it gets
        an empty row.
        """
        if self._laws:
            self._pack()
        if not self._owner:
            empty = SupportRows.empty(self.kind)
            return [_with_failure(empty, one) if one else empty for one in status]
        owner, position = np.concatenate(self._owner), np.concatenate(self._position)
        order = np.lexsort((position, owner))
        lengths = np.concatenate(self._lengths)
        entries = _entries_in_order(lengths, order)
        ids, logprobs = np.concatenate(self._ids)[entries], np.concatenate(self._logprobs)[entries]
        everything = SupportRows(
            token_ids=ids,
            logprobs=logprobs,
            offsets=np.concatenate([[0], np.cumsum(lengths[order])]),
            sampled_logprobs=np.concatenate(self._sampled)[order],
            kind=self.kind,
            status=np.zeros(len(order), np.uint8),
        )
        ends = np.searchsorted(owner[order], np.arange(len(status)), side="right").tolist()
        parts = [everything[first:last] for first, last in zip([0, *ends[:-1]], ends, strict=True)]
        return [_with_failure(part, one) if one else part for part, one in zip(parts, status, strict=True)]


def _entries_in_order(lengths: Ints, order: Ints) -> Ints:
    """Indices of the entries of rows `order`, one row after another; row r has lengths[r] entries in a flat array."""
    starts = np.cumsum(lengths) - lengths
    lengths = lengths[order]
    return np.arange(lengths.sum()) + np.repeat(starts[order] - (np.cumsum(lengths) - lengths), lengths)


def _sampled(
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    lengths: Ints,
    tokens: Ints,
    otherwise: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Log-probability of each row's token: the support's own entry, or `otherwise` where a head lacks the token."""
    hit = np.flatnonzero(ids == np.repeat(tokens, lengths))
    row = np.searchsorted(np.cumsum(lengths), hit, side="right")
    sampled = otherwise.copy()
    sampled[row] = logprobs[hit]
    return sampled


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
