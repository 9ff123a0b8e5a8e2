"""The host side of capture: one step's rows on their way from the device, and a request's rows until they are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from miles_ext.records import Commit, Status, SupportRows
from miles_ext.sglang_plugin.pack import UNCOMMITTED, Packed
from miles_ext.sglang_plugin.plan import HEAD, capture_of
from miles_ext.wire import pack as pack_wire

ABORTS = {
    Status.OVERFLOW: "the sampling support exceeds the request's k or a step's room; lower top_k or top_p, or raise k",
    Status.INVALID: "a committed token has no finite logprob under its law; the logits are not finite",
}


class RequestRows:
    """Rows of one request that were not sent yet, in two growing arrays: entries int32 [nnz, 2], meta int32 [T, 4]
    (length, bits of the sampled logprob, status, commit)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries, self._nnz = np.empty((0, 2), np.int32), 0
        self._meta, self._tokens = np.empty((0, 4), np.int32), 0

    def __len__(self) -> int:
        return self._tokens

    def append(self, entries: Sequence[NDArray[np.int32]], meta: NDArray[np.int32]) -> None:
        """entries: one array a row."""
        for row in entries:
            end = self._nnz + len(row)
            if end > len(self._entries):
                self._entries = _grown(self._entries, self._nnz, end)
            self._entries[self._nnz : end] = row
            self._nnz = end
        end = self._tokens + len(meta)
        if end > len(self._meta):
            self._meta = _grown(self._meta, self._tokens, end)
        self._meta[self._tokens : end] = meta
        self._tokens = end

    def take(self) -> Piece:
        """What crosses to the process that answers HTTP. It is forgotten here, its room is used again."""
        piece = Piece(self.kind, self._entries[: self._nnz].copy(), self._meta[: self._tokens].copy())
        self._nnz = self._tokens = 0
        return piece


class Piece(NamedTuple):
    """Rows of some tokens of a response."""

    kind: str
    entries: NDArray[np.int32]
    meta: NDArray[np.int32]


def encode(pieces: Sequence[Piece]) -> dict[str, Any]:
    """The value of `meta_info.sc`."""
    entries = np.concatenate([piece.entries for piece in pieces])
    meta = np.concatenate([piece.meta for piece in pieces])
    rows = SupportRows(
        token_ids=np.ascontiguousarray(entries[:, 0]),
        logprobs=np.ascontiguousarray(entries[:, 1]).view(np.float32),
        offsets=np.concatenate([[0], np.cumsum(meta[:, 0], dtype=np.int64)]).astype(np.int64),
        sampled_logprobs=np.ascontiguousarray(meta[:, 1]).view(np.float32),
        kind="head" if pieces[0].kind == "head" else "complete",
        status=meta[:, 2].astype(np.uint8),
    )
    return pack_wire(rows, meta[:, 3].astype(np.uint8))


class DeviceRows:
    """sglang's DeviceAuxiliaryOutput: it copies the rows beside the step's own results and consumes them after commit.

    verified: of a verify step with `block` positions a request, not of a step that samples one.
    """

    def __init__(self, packed: Packed, block: int, verified: bool) -> None:
        self.packed, self.block, self.verified = packed, block, verified

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> HostRows:
        return HostRows(copy_tensor(self.packed.flat), self.packed, self.block, self.verified)


class HostRows:
    """sglang's HostAuxiliaryOutput: hands the visible rows to their requests."""

    def __init__(self, flat: torch.Tensor, packed: Packed, block: int, verified: bool) -> None:
        self.flat, self.packed, self.block, self.verified = flat, packed, block, verified

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        flat, packed = self.flat.numpy(), self.packed
        heads, total = len(packed.head_rows), len(packed.head_rows) + len(packed.complete_rows)
        split = 3 * total + 2 * heads * packed.head_size
        if heads:
            grid = flat[3 * total : split].reshape(heads, packed.head_size, 2)
            self._hand_out(batch, commits, packed.head_rows, flat[: 3 * heads], grid)
        if total > heads:
            grid = flat[split:].reshape(total - heads, packed.stride, 2)
            self._hand_out(batch, commits, packed.complete_rows, flat[3 * heads : 3 * total], grid)

    def _hand_out(self, batch: Any, commits: Sequence[Any], rows: NDArray, flat_meta: NDArray, grid: NDArray) -> None:
        """rows: batch row numbers. flat_meta: [3 r]. grid: entries [r, width, 2], the used ones first."""
        meta = np.empty((len(rows), 4), np.int32)
        meta[:, :3] = flat_meta.reshape(-1, 3)
        if self.verified:
            committed = (meta[:, 2].reshape(-1, self.block) != UNCOMMITTED).sum(1)
            meta[:, 3] = verify_kinds(committed, self.block)
        else:
            meta[:, 3] = sample_kinds(batch)[rows]
        lengths, statuses = meta[:, 0].tolist(), meta[:, 2].tolist()
        for first, row in zip(range(0, len(rows), self.block), rows[:: self.block].tolist(), strict=True):
            commit = commits[row // self.block]
            if commit is None:
                continue
            last = first + len(commit.token_ids)
            request = batch.reqs[row // self.block]
            entries = [self._entries(grid, index, lengths[index]) for index in range(first, last)]
            rows_of(request).append(entries, meta[first:last])
            if any(statuses[first:last]):
                end_early(request, max(statuses[first:last]))

    def _entries(self, grid: NDArray, index: int, length: int) -> NDArray[np.int32]:
        if length <= grid.shape[1]:
            return grid[index, :length]
        more = self.packed.beyond[index, : length - grid.shape[1]].cpu().numpy()
        return np.concatenate([grid[index], more])


def rows_of(request: Any) -> RequestRows:
    """The request's rows, which live on it until they are sent."""
    store = getattr(request, "sc_rows", None)
    if store is None:
        kind, _ = capture_of(request.sampling_params)
        store = request.sc_rows = RequestRows("head" if kind == HEAD else "complete")
    return store


def end_early(request: Any, worst: int) -> None:
    """End a request of which a row failed: what it would say next can train nothing."""
    if not request.finished():
        request.to_finish = _abort(ABORTS[Status(worst)])


def verify_kinds(committed: NDArray[np.integer], block: int) -> NDArray[np.int32]:
    """Commit kind of every position of a verify step, [requests * block], from the tokens each request committed."""
    position = np.arange(block)
    bonus = np.where(committed < block, int(Commit.REJECT_BONUS), int(Commit.FULL_BONUS))[:, None]
    return np.where(position < committed[:, None] - 1, int(Commit.DRAFT), bonus).astype(np.int32).ravel()


def sample_kinds(batch: Any) -> NDArray[np.int32]:
    """Commit kind of every request of a sampled step: a decode row that rides in a prefill batch stays PLAIN."""
    if not batch.forward_mode.is_extend():
        return np.full(len(batch.reqs), int(Commit.PLAIN), np.int32)
    riding = {id(request) for request in batch.decoding_reqs or ()}
    kinds = [Commit.PLAIN if id(request) in riding else Commit.PREFILL for request in batch.reqs]
    return np.array(kinds, np.int32)


def _abort(message: str) -> Any:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    # Without a status code the response keeps its tokens and rows: the client decides, nothing is lost.
    return FINISH_ABORT(message)


def _grown(array: NDArray[np.int32], used: int, wanted: int) -> NDArray[np.int32]:
    grown = np.empty((max(wanted, 2 * len(array)), array.shape[1]), np.int32)
    grown[:used] = array[:used]
    return grown
