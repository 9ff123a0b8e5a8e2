"""The host side of capture: one step's rows on their way from the device, and one request's rows until it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from miles_ext.records import Commit, Status, SupportRows
from miles_ext.sglang_plugin.pack import Packed
from miles_ext.sglang_plugin.plan import HEAD, capture_of
from miles_ext.wire import pack as pack_wire

ABORTS = {
    Status.OVERFLOW: "the sampling support exceeds the request's k or a step's room; lower top_k or top_p, or raise k",
    Status.INVALID: "a committed token has no finite logprob under its law; the logits are not finite",
}


class RequestRows:
    """Rows of one request in two growing arrays: entries int32 [nnz, 2], meta int32 [T, 4] (length, bits of the sampled
    logprob, status, commit)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries, self._nnz = np.empty((0, 2), np.int32), 0
        self._meta, self._tokens = np.empty((0, 4), np.int32), 0

    def __len__(self) -> int:
        return self._tokens

    def append(self, entries: NDArray[np.int32], meta: NDArray[np.int32]) -> None:
        self._entries = _room(self._entries, self._nnz, len(entries))
        self._meta = _room(self._meta, self._tokens, len(meta))
        self._entries[self._nnz : self._nnz + len(entries)] = entries
        self._meta[self._tokens : self._tokens + len(meta)] = meta
        self._nnz += len(entries)
        self._tokens += len(meta)

    def message(self) -> tuple[str, NDArray[np.int32], NDArray[np.int32]]:
        """What crosses to the process that answers HTTP; `encode` reads it there."""
        return self.kind, self._entries[: self._nnz], self._meta[: self._tokens]


def encode(message: tuple[str, NDArray[np.int32], NDArray[np.int32]]) -> dict[str, Any]:
    """The value of `meta_info.sc`."""
    kind, entries, meta = message
    rows = SupportRows(
        token_ids=np.ascontiguousarray(entries[:, 0]),
        logprobs=np.ascontiguousarray(entries[:, 1]).view(np.float32),
        offsets=np.concatenate([[0], np.cumsum(meta[:, 0], dtype=np.int64)]).astype(np.int64),
        sampled_logprobs=np.ascontiguousarray(meta[:, 1]).view(np.float32),
        kind="head" if kind == "head" else "complete",
        status=meta[:, 2].astype(np.uint8),
    )
    return pack_wire(rows, meta[:, 3].astype(np.uint8))


class DeviceRows:
    """sglang's DeviceAuxiliaryOutput: it copies the rows beside the step's own results and consumes them after commit.

    committed: int32 [requests], tokens that a verify step committed; None for a step that samples one a request.
    """

    def __init__(self, packed: Packed, committed: torch.Tensor | None, block: int) -> None:
        self.packed, self.block, self.verified = packed, block, committed is not None
        # Joined here, on the stream that made both: the copy may run on another.
        self.flat = packed.flat if committed is None else torch.cat([packed.flat, committed.int()])

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> HostRows:
        return HostRows(copy_tensor(self.flat), self.packed, self.block, self.verified)


class HostRows:
    """sglang's HostAuxiliaryOutput: hands the visible rows to their requests."""

    def __init__(self, flat: torch.Tensor, packed: Packed, block: int, verified: bool) -> None:
        self.flat, self.packed, self.block, self.verified = flat, packed, block, verified

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        flat, packed = self.flat.numpy(), self.packed
        if self.verified:
            flat, committed = flat[: -len(commits)], flat[-len(commits) :]
            kinds = verify_kinds(committed, self.block)
        else:
            kinds = sample_kinds(batch)
        heads, supports = len(packed.head_rows), len(packed.complete_rows)
        meta = np.empty((heads + supports, 4), np.int32)
        meta[:, :3] = flat[: 3 * len(meta)].reshape(-1, 3)
        meta[:, 3] = kinds[np.concatenate([packed.head_rows, packed.complete_rows])]
        rest = flat[3 * len(meta) :]
        split = heads * packed.head_size
        head_entries, complete_entries = rest[: 2 * split].reshape(-1, 2), rest[2 * split :].reshape(-1, 2)

        grid = head_entries.reshape(heads, packed.head_size, 2)
        self._hand_out(
            batch, commits, packed.head_rows, meta[:heads],
            lambda first, last: grid[first:last, : meta[first, 0]].reshape(-1, 2),
        )  # fmt: skip
        starts = np.concatenate([[0], np.cumsum(meta[heads:, 0], dtype=np.int64)]).tolist()
        if starts[-1] > packed.prefix:
            more = packed.beyond[: starts[-1] - packed.prefix].cpu().numpy()
            complete_entries = np.concatenate([complete_entries, more])
        self._hand_out(
            batch, commits, packed.complete_rows, meta[heads:],
            lambda first, last: complete_entries[starts[first] : starts[last]],
        )  # fmt: skip

    def _hand_out(
        self, batch: Any, commits: Sequence[Any], rows: NDArray, meta: NDArray, entries: Callable[[int, int], NDArray]
    ) -> None:
        """meta: of these rows only. entries(first, last): of rows first to last, numbered as in meta."""
        failed = meta[:, 2].any()
        for first, row in enumerate(rows[:: self.block].tolist()):
            commit = commits[row // self.block]
            if commit is None:
                continue
            first *= self.block
            last = first + len(commit.token_ids)
            request = batch.reqs[row // self.block]
            rows_of(request).append(entries(first, last), meta[first:last])
            if failed:
                end_early(request, meta[first:last, 2])


def rows_of(request: Any) -> RequestRows:
    """The request's rows, which live on it until they are sent."""
    store = getattr(request, "sc_rows", None)
    if store is None:
        kind, _ = capture_of(request.sampling_params)
        store = request.sc_rows = RequestRows("head" if kind == HEAD else "complete")
    return store


def end_early(request: Any, statuses: NDArray[np.int32]) -> None:
    """End a request of which a row failed: what it would say next can train nothing."""
    worst = int(statuses.max())
    if worst != Status.OK and not request.finished():
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


def _room(array: NDArray[np.int32], used: int, more: int) -> NDArray[np.int32]:
    if used + more <= len(array):
        return array
    grown = np.empty((max(used + more, 2 * len(array)), array.shape[1]), np.int32)
    grown[:used] = array[:used]
    return grown
