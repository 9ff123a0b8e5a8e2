"""The requests of one call: which of them occupy a cache slot now, what they have committed, and when they end.

All state is flat numpy over requests; the live requests sit in slots 0 .. len(live) - 1, so that every forward pass
runs on a prefix of the cache and a finished response costs the others nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from miles_ext.records import Commit, Status
from miles_ext.seeds import Purpose, uniforms
from rollout.embedded.text import Text
from rollout.engine import Request

Ints = NDArray[np.int64]
_NONE: Ints = np.zeros(0, np.int64)
PREFILL_TOKENS = 16384  # prompt tokens, padding included, of one prefill pass


class Reason(IntEnum):
    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3


def commit_kinds(width: int) -> NDArray[np.uint8]:
    """Kinds [width + 1, width] of the tokens of a step, by how many it commits: drafts, then the bonus."""
    table = np.full((width + 1, width), Commit.DRAFT, np.uint8)
    table[np.arange(1, width + 1), np.arange(width)] = Commit.REJECT_BONUS
    table[width, width - 1] = Commit.FULL_BONUS if width > 1 else Commit.PLAIN
    return table


class Batch:
    """Requests in flight. `width`: slots of a step, 1 for regular decoding. `purposes`: the uniforms a step needs."""

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        context_length: int,
        capacity: int,
        width: int,
        purposes: Sequence[Purpose],
        text: Text,
    ) -> None:
        self.requests, self.capacity, self.width, self.text = requests, capacity, width, text
        self.prompt_length = np.array([len(r.prompt_ids) for r in requests], np.int64)
        wanted = np.array([r.max_new_tokens for r in requests], np.int64)
        self.limit = np.minimum(wanted, context_length - self.prompt_length)
        self.support_cap = np.array(
            [r.spec.max_support if r.spec.capture == "complete" else np.iinfo(np.int64).max for r in requests], np.int64
        )
        self.stop_ids = self._pad([r.stop_ids for r in requests])
        self.has_strings = np.array([bool(r.stop_strings) for r in requests])

        count, longest = len(requests), int(self.limit.max())
        self.tokens = np.zeros((count, longest + width), np.int32)
        self.commits = np.zeros((count, longest + width), np.uint8)
        self.length = np.zeros(count, np.int64)
        self.last = np.zeros(count, np.int64)
        self.reason = np.zeros(count, np.uint8)
        self.status = np.zeros(count, np.uint8)  # of the last token; all before it are OK
        self.steps = np.zeros(count, np.int64)

        self.live = _NONE
        self.waiting = 0  # requests[waiting:] hold no slot yet
        self.purposes = tuple(purposes)
        self._seeds = np.array([r.spec.seed for r in requests], np.uint64)
        self._draws = np.zeros((capacity, longest + width, len(self.purposes)))
        self._columns = np.arange(width)

    @staticmethod
    def _pad(groups: Sequence[tuple[int, ...]]) -> Ints | None:
        width = max(map(len, groups))
        if not width:
            return None
        return np.array([[*group, *[-2] * (width - len(group))] for group in groups], np.int64)

    @property
    def unfinished(self) -> bool:
        return bool(len(self.live)) or self.waiting < len(self.requests)

    def admit(self) -> Ints:
        """Give free slots, after the live ones, to waiting requests; return the new ones (none while few are free).

        A prefill delays every live row by about a step, so an eighth of the slots is refilled at a time.
        """
        free = min(self.capacity - len(self.live), len(self.requests) - self.waiting)
        remaining = len(self.requests) - self.waiting
        if not free or (len(self.live) and free < min(remaining, -(-self.capacity // 8))):
            return _NONE
        lengths = np.maximum.accumulate(self.prompt_length[self.waiting : self.waiting + free])
        fits = int(np.searchsorted(lengths * np.arange(1, free + 1), PREFILL_TOKENS, side="right"))
        new = np.arange(self.waiting, self.waiting + max(1, fits))
        slots = slice(len(self.live), len(self.live) + len(new))
        positions = np.arange(self._draws.shape[1])
        for i, purpose in enumerate(self.purposes):
            self._draws[slots, :, i] = uniforms(self._seeds[new, None], positions, purpose)
        self.waiting += len(new)
        self.live = np.concatenate([self.live, new])
        return new

    def draws(self, slots: slice) -> NDArray[np.float64]:
        """Uniforms [B, width, purposes] of the next positions of the requests in `slots`."""
        ids = np.arange(slots.start, slots.stop)
        return self._draws[ids[:, None], self.length[self.live[slots], None] + self._columns]

    def commit(
        self, rows: Ints, tokens: Ints, counts: Ints, kinds: NDArray[np.uint8], sizes: Ints | None = None
    ) -> tuple[Ints, Ints]:
        """Append the first `counts` of `tokens` [B, w] to requests `rows`, up to the first that ends a response.

        kinds: uint8 [B, w]. sizes: entries of each token's support, where some request has a cap that may bind.
        Returns (start, keep): response index of the first token and how many were kept, int64 [B] each.
        """
        start = self.length[rows]
        at = rows[:, None], start[:, None] + self._columns[: tokens.shape[1]]
        # What lies past the kept tokens is overwritten later or never read.
        self.tokens[at] = tokens
        self.commits[at] = kinds
        room = self.limit[rows] - start
        keep = np.minimum(counts, room)
        bad = tokens < 0
        if sizes is not None:
            bad |= sizes > self.support_cap[rows, None]
        ends = bad
        if self.stop_ids is not None:
            ends = bad | (tokens[:, :, None] == self.stop_ids[rows, None]).any(-1)
        ended = keep == room
        if ends.any():
            first = np.where(ends.any(1), ends.argmax(1) + 1, len(self._columns) + 1)
            keep = np.minimum(keep, first)
            ended |= keep == first
        self.length[rows] = start + keep
        strings = self.has_strings[rows]
        for i in np.flatnonzero(ended | strings).tolist():
            row, first, last = int(rows[i]), int(start[i]), int(keep[i]) - 1
            usable = last + (not bad[i, last])
            found = self._string_end(row, first + usable, usable) if strings[i] else None
            if found is not None:
                keep[i] = found
                self._end(row, first + found, Reason.STOP)
            elif bad[i, last]:
                invalid = tokens[i, last] < 0
                self._end(row, first + last + 1, Reason.ABORT, Status.INVALID if invalid else Status.OVERFLOW)
            elif ended[i]:
                self._end(row, first + last + 1, Reason.STOP if ends[i, last] else Reason.LENGTH)
        self.last[rows] = tokens[np.arange(len(rows)), keep - 1]
        return start, keep

    def _string_end(self, row: int, length: int, new: int) -> int | None:
        """How many of the last `new` of `length` tokens are needed to complete a stop string, or None."""
        return self.text.stop_after(self.tokens[row, :length], new, self.requests[row].stop_strings)

    def _end(self, row: int, length: int, reason: Reason, status: Status = Status.OK) -> None:
        self.length[row], self.reason[row], self.status[row] = length, reason, status
        if status == Status.INVALID:
            self.tokens[row, length - 1] = 0  # any id: its row is marked

    def release(self) -> tuple[Ints, Ints]:
        """Take finished requests out; return (sources, targets): slots whose contents must move into the gaps."""
        running = self.reason[self.live] == Reason.RUNNING
        count = int(running.sum())
        if count == len(self.live):
            return _NONE, _NONE
        targets = np.flatnonzero(~running[:count])
        sources = np.flatnonzero(running[count:]) + count
        live = self.live[:count].copy()  # a step that is being recorded may hold the old array
        live[targets] = self.live[sources]
        self._draws[targets] = self._draws[sources]
        self.live = live
        return sources, targets
