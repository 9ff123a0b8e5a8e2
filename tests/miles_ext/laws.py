"""Hypothesis strategies of valid support rows, and the tokens that were drawn from them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from miles_ext.records import Commit, Status, SupportKind, SupportRows

VOCAB = 50


@st.composite
def sampled_rows(
    draw, min_rows: int = 0, kinds: tuple[SupportKind, ...] = ("complete", "head"), failures: bool = True
) -> tuple[SupportRows, NDArray[np.int32], NDArray[np.uint8]]:
    """(rows, committed ids int32 [T], commit kinds uint8 [T]); with failures some rows are not OK and empty."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(kinds))
    num = draw(st.integers(min_rows, 12))
    width = draw(st.integers(1, VOCAB))
    same_width = draw(st.booleans())
    parts, tokens, status = [], [], []
    for _ in range(num):
        size = width if same_width else int(rng.integers(1, width + 1))
        law = np.log(rng.dirichlet(np.full(VOCAB if kind == "head" else size, 0.5)) + 1e-30)
        law = (law - np.log(np.exp(law).sum())).astype(np.float32)
        if kind == "head":
            ids = np.argsort(-law, kind="stable")[:size].astype(np.int32)
            token = int(rng.choice(VOCAB, p=_normal(law)))
            parts.append((ids, law[ids], law[token]))
        else:
            ids = rng.choice(VOCAB, size, replace=False).astype(np.int32)
            place = int(rng.choice(size, p=_normal(law)))
            token = int(ids[place])
            parts.append((ids, law, law[place]))
        tokens.append(token)
        failed = failures and rng.random() < 0.15
        status.append(int(rng.choice([Status.OVERFLOW, Status.INVALID])) if failed else Status.OK)
        if failed:
            parts[-1] = (ids[:0], law[:0], np.float32(np.nan))
    rows = SupportRows(
        token_ids=np.concatenate([np.zeros(0, np.int32), *(ids for ids, _, _ in parts)]),
        logprobs=np.concatenate([np.zeros(0, np.float32), *(law for _, law, _ in parts)]),
        offsets=np.cumsum([0, *(len(ids) for ids, _, _ in parts)]).astype(np.int64),
        sampled_logprobs=np.array([sampled for _, _, sampled in parts], np.float32),
        kind=kind,
        status=np.array(status, np.uint8),
    )
    return rows, np.array(tokens, np.int32), rng.choice(list(Commit), num).astype(np.uint8)


def _normal(law: NDArray[np.float32]) -> NDArray[np.float64]:
    p = np.exp(law.astype(np.float64))
    return p / p.sum()


def same(one: SupportRows, other: SupportRows) -> bool:
    """Equal in kind, and in every array's dtype and bytes."""
    names = ("token_ids", "logprobs", "offsets", "sampled_logprobs", "status")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return one.kind == other.kind and all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)
