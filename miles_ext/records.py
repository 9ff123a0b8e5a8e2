"""Support rows, completions and trajectories: the record of what was sampled and from which law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from miles_ext.errors import SupportError

SupportKind = Literal["complete", "head"]
FinishReason = Literal["stop", "length", "abort"]
MASS_TOLERANCE = 2e-5
_DTYPES = {
    "token_ids": "int32", "logprobs": "float32", "offsets": "int64", "sampled_logprobs": "float32", "status": "uint8",
}  # fmt: skip


class Status(IntEnum):
    OK = 0
    OVERFLOW = 1
    INVALID = 2


class Commit(IntEnum):
    """How a token was committed."""

    PREFILL = 0
    DRAFT = 1
    REJECT_BONUS = 2
    FULL_BONUS = 3
    PLAIN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportRows:
    """Laws of T committed tokens as flat compressed rows; row t spans entries offsets[t]:offsets[t + 1].

    token_ids: int32 [nnz]. logprobs: float32 [nnz], natural log of q, likeliest first in a head row.
    offsets: int64 [T + 1]. sampled_logprobs: float32 [T], log q of the committed token.
    kind: `complete` rows hold every token of positive probability, `head` rows the K likeliest.
    status: uint8 [T] of `Status`; the entries of a row that is not OK carry no meaning.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    offsets: NDArray[np.int64]
    sampled_logprobs: NDArray[np.float32]
    kind: SupportKind
    status: NDArray[np.uint8]

    @classmethod
    def empty(cls, kind: SupportKind) -> Self:
        return cls(
            token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), offsets=np.zeros(1, np.int64),
            sampled_logprobs=np.zeros(0, np.float32), kind=kind, status=np.zeros(0, np.uint8),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Entries a row, int64 [T]."""
        return np.diff(self.offsets)

    def __getitem__(self, rows: slice) -> SupportRows:
        """Rows start:stop as views (step 1)."""
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise SupportError(f"step {step} in a slice of support rows; accepted: 1")
        stop = max(start, stop)
        first, last = self.offsets[start], self.offsets[stop]
        return replace(
            self, token_ids=self.token_ids[first:last], logprobs=self.logprobs[first:last],
            offsets=self.offsets[start : stop + 1] - first, sampled_logprobs=self.sampled_logprobs[start:stop],
            status=self.status[start:stop],
        )  # fmt: skip

    @staticmethod
    def concatenate(parts: Sequence[SupportRows]) -> SupportRows:
        kinds = {part.kind for part in parts}
        if len(kinds) != 1:
            raise SupportError(f"rows of kinds {sorted(kinds)} joined; accepted: one kind, of one part or more")
        lengths = np.concatenate([part.lengths for part in parts])
        return SupportRows(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            sampled_logprobs=np.concatenate([part.sampled_logprobs for part in parts]),
            kind=parts[0].kind,
            status=np.concatenate([part.status for part in parts]),
        )

    def check(self, sampled_ids: NDArray[np.integer], vocab_size: int) -> SupportRows:
        """Raise SupportError naming the first row that breaks the contract; return self.

        sampled_ids: [T], the committed tokens. Rows whose status is not OK are checked for layout only.
        """
        self._check_layout(len(sampled_ids))
        row_of = np.repeat(np.arange(len(self)), self.lengths)
        entry_ok = self.status[row_of] == Status.OK
        row_ok = self.status == Status.OK

        def refuse(bad_rows: NDArray[np.bool_], reason: str) -> None:
            if bad_rows.any():
                raise SupportError(f"support row {int(np.argmax(bad_rows))}: {reason}")

        def any_in_row(bad_entries: NDArray[np.bool_]) -> NDArray[np.bool_]:
            found = np.zeros(len(self), bool)
            found[row_of[bad_entries & entry_ok]] = True
            return found

        refuse(row_ok & (self.lengths == 0), "no entries; accepted: at least one")
        refuse(any_in_row((self.token_ids < 0) | (self.token_ids >= vocab_size)), f"id outside [0, {vocab_size})")
        refuse(any_in_row(~np.isfinite(self.logprobs)), "a logprob is not finite")
        refuse(row_ok & ~np.isfinite(self.sampled_logprobs), "the sampled logprob is not finite")
        refuse(row_ok & self._has_twins(row_of), "an id occurs twice")

        mass = np.bincount(row_of, weights=np.exp(self.logprobs.astype(np.float64)) * entry_ok, minlength=len(self))
        sampled_entry = self.token_ids == np.asarray(sampled_ids)[row_of]
        if self.kind == "complete":
            refuse(row_ok & (np.abs(mass - 1) > MASS_TOLERANCE), f"mass is not 1 within {MASS_TOLERANCE}")
            refuse(row_ok & ~any_in_row(sampled_entry), "the committed token is not in its support")
        else:
            refuse(row_ok & (mass > 1 + MASS_TOLERANCE), f"head mass exceeds 1 + {MASS_TOLERANCE}")
            rising = np.zeros(len(row_of), bool)
            rising[1:] = (np.diff(row_of) == 0) & (np.diff(self.logprobs) > 0)
            refuse(any_in_row(rising), "head entries are not in order of falling probability")
            last = self.logprobs[np.maximum(self.offsets[1:] - 1, 0)] if len(self.logprobs) else self.sampled_logprobs
            above = self.sampled_logprobs > last
            refuse(row_ok & above & ~any_in_row(sampled_entry), "the committed token is likelier than the head's last")
        differs = self.logprobs != self.sampled_logprobs[row_of]
        refuse(any_in_row(sampled_entry & differs), "the sampled logprob differs from the support's")
        return self

    def _has_twins(self, row_of: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Rows in which an id occurs twice. Short sorts are cheap: rows of one width are sorted side by side."""
        lengths = self.lengths
        if len(lengths) and (lengths == lengths[0]).all():
            ids = np.sort(self.token_ids.reshape(len(lengths), -1), axis=-1)
            return (np.diff(ids, axis=-1) == 0).any(-1)
        order = np.lexsort((self.token_ids, row_of))
        twins = (np.diff(row_of[order]) == 0) & (np.diff(self.token_ids[order]) == 0)
        found = np.zeros(len(lengths), bool)
        found[row_of[order][1:][twins]] = True
        return found

    def _check_layout(self, num_tokens: int) -> None:
        if self.kind not in get_args(SupportKind):
            raise SupportError(f"kind {self.kind!r}; accepted: {', '.join(get_args(SupportKind))}")
        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1:
                raise SupportError(f"{name} is {array.dtype} {list(array.shape)}; accepted: {dtype}, one axis")
        if len(self) != num_tokens or len(self.sampled_logprobs) != num_tokens or len(self.status) != num_tokens:
            raise SupportError(
                f"{len(self)} rows, {len(self.sampled_logprobs)} sampled logprobs and {len(self.status)} statuses for "
                f"{num_tokens} committed tokens; accepted: one of each a token"
            )
        falling = np.diff(self.offsets) < 0
        if self.offsets[0] != 0 or falling.any():
            raise SupportError(f"support row {int(np.argmax(falling))}: offsets must start at 0 and never fall")
        if not (self.offsets[-1] == len(self.token_ids) == len(self.logprobs)):
            raise SupportError(
                f"offsets end at {self.offsets[-1]} beside {len(self.token_ids)} ids and {len(self.logprobs)} logprobs"
            )
        unknown = self.status > max(Status)
        if unknown.any():
            raise SupportError(f"support row {int(np.argmax(unknown))}: status {self.status[unknown][0]} is unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecCounters:
    """Speculative work of one response. `live_steps`: verify steps while the response was unfinished."""

    live_steps: int = 0
    proposed: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One response as an engine committed it.

    prompt_ids: int32 [P]. response_ids: int32 [T], the EOS or stop token and the tokens of a stop string included.
    support: T rows, or None where capture was off; row t is the law of response token t given what precedes it.
    commit: uint8 [T] of `Commit`. weight_version: int64 [T]. text: the response, trimmed before a stop string.
    request_id: of the request that it answers; not kept in rollout files.
    """

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    support: SupportRows | None
    commit: NDArray[np.uint8]
    weight_version: NDArray[np.int64]
    finish_reason: FinishReason
    text: str = ""
    spec: SpecCounters = field(default_factory=SpecCounters)
    request_id: str = ""
    engine_id: str = ""
    draft_digest: str = ""

    def __len__(self) -> int:
        return len(self.response_ids)

    def check(self, vocab_size: int) -> Completion:
        """Raise SupportError where lengths disagree or a row breaks the contract; return self."""
        for name in ("commit", "weight_version"):
            if len(getattr(self, name)) != len(self):
                raise SupportError(f"{name} has {len(getattr(self, name))} entries for {len(self)} committed tokens")
        if len(self) and self.commit.max() > max(Commit):
            token = int(np.argmax(self.commit > max(Commit)))
            raise SupportError(f"token {token}: commit kind {self.commit[token]}; accepted: 0 to {max(Commit):d}")
        if self.support is not None:
            self.support.check(self.response_ids, vocab_size)
        return self

    @property
    def worst_status(self) -> Status:
        """OK where capture was off or every row is OK."""
        if self.support is None or not len(self.support):
            return Status.OK
        return Status(int(self.support.status.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A completion with what training needs. group: trajectories of one prompt share it. loss_mask: bool [T]."""

    completion: Completion
    prompt_id: int
    group: int
    reward: float
    loss_mask: NDArray[np.bool_]
