"""Row `law`: speculative arms draw from the law of regular decoding, by chi-square with fixed seeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.evidence import Row, must_fail, report
from experiments.validate.settings import Context
from miles_ext.capability import ArmKind
from miles_ext.records import Completion, SupportRows
from miles_ext.sampling import SamplingSpec
from rollout.engine import Request

THRESHOLD, CONTROL = 1e-4, 1e-9
# Two uncertain places of one response. The spread model's blocks hold 4 tokens and the first token comes from the
# prefill: place 1 opens a block, and place 5 always lies in a later one.
PLACES = (1, 5)
BINS, MIN_EXPECTED, PLACE_BINS = 6, 8.0, 50
LAWS: dict[str, dict[str, Any]] = {
    "T1": {},
    "T0.7 k8 p0.9 top_k_first": {"temperature": 0.7, "top_k": 8, "top_p": 0.9},
    "k8 p0.8 joint": {"top_k": 8, "top_p": 0.8, "filter_order": "joint"},
    "T1.3 p0.9": {"temperature": 1.3, "top_p": 0.9},
}
CONTROL_LAW, FULL_ONLY = "T0.7 k8 p0.9 top_k_first", ("T1.3 p0.9",)
Pairs = NDArray[np.int64]


def rows(context: Context) -> list[Row]:
    count, found = context.pick(5_000, 20_000, served=(1_500, 5_000)), []
    for number, (name, fields) in enumerate(LAWS.items()):
        if context.quick and name in FULL_ONLY:
            continue
        order = fields.get("filter_order", "top_k_first")
        if context.engines.order not in (None, order):
            why = f"these servers sample in order {context.engines.order}; the row filters proves the other"
            found.append(report(f"law/{name}", 0, "not shown", why))
            continue
        first, second = (draw(context, "regular", fields, count, 10 * number + half) for half in (0, 1))
        pooled = np.concatenate([first, second])
        found.append(judge(f"law/regular {name}", first, second, THRESHOLD))
        for arm in context.engines.arms:
            if arm == "regular":
                continue
            stream = 10 * number + 2 + context.engines.arms.index(arm)
            found.append(judge(f"law/{arm} {name}", draw(context, arm, fields, count, stream), pooled, THRESHOLD))
            if name == CONTROL_LAW:
                broken = judge(f"law/control_{arm}", draw(context, arm, fields, count, stream, True), pooled, CONTROL)
                found.append(must_fail(broken, "bonus drawn from the target's law after a rejection, poor draft"))
    return found + [row for arm in context.engines.arms for row in calibration(context, arm, count // 5)]


def calibration(context: Context, arm: ArmKind, count: int) -> list[Row]:
    """Whether tokens are drawn from the very laws that are recorded beside them.

    A token's place in its recorded distribution function, spread over the token's own step, is uniform in [0, 1).
    """
    spec = SamplingSpec(capture="complete")
    completions = generate(context, arm, spec, count, stream=90 + context.engines.arms.index(arm))
    laws = SupportRows.concatenate([completion.support for completion in completions if completion.support is not None])
    tokens = np.concatenate([completion.response_ids for completion in completions])
    row = np.repeat(np.arange(len(laws)), laws.lengths)
    found = []
    # By likelihood a law that is too sharp or too flat shows, by id a draw that leans to one end of the vocabulary.
    for order, key in (("likelihood", -laws.logprobs), ("id", laws.token_ids)):
        entries = np.lexsort((key, row))
        chi2 = placed(laws.logprobs[entries], laws.token_ids[entries] == tokens[row], row)
        about = f"{len(tokens):,} tokens in their recorded laws, in order of {order}"
        found.append(_row(f"law/calibration_{arm} {order}", chi2, PLACE_BINS - 1, THRESHOLD, about))
        if order == "likelihood":
            chi2 = placed(1.25 * laws.logprobs[entries], laws.token_ids[entries] == tokens[row], row)
            sharper = _row(f"law/control_calibration_{arm}", chi2, PLACE_BINS - 1, CONTROL, about)
            found.append(must_fail(sharper, "recorded laws sharpened by a quarter"))
    return found


def placed(logprobs: NDArray[np.floating], drawn: NDArray[np.bool_], row: NDArray[np.int64]) -> float:
    """Chi-square against uniform of the drawn entries' places in the distribution functions of their rows."""
    q = np.exp(logprobs.astype(np.float64))
    total, above = np.bincount(row, q), np.cumsum(q)
    before = above[drawn] - q[drawn] - (np.cumsum(total) - total)
    place = (before + np.random.default_rng(17).random(len(total)) * q[drawn]) / total
    counts = np.bincount((place * PLACE_BINS).astype(int).clip(0, PLACE_BINS - 1), minlength=PLACE_BINS)
    return float(((counts - len(total) / PLACE_BINS) ** 2).sum() * PLACE_BINS / len(total))


def draw(
    context: Context, arm: ArmKind, fields: dict[str, Any], count: int, stream: int, broken: bool = False
) -> Pairs:
    """Tokens at `PLACES` of `count` responses to one prompt, int64 [count, 2]."""
    completions = generate(context, arm, SamplingSpec(**fields, capture="off"), count, stream, broken)
    return np.stack([completion.response_ids for completion in completions])[:, PLACES].astype(np.int64)


def generate(
    context: Context, arm: ArmKind, spec: SamplingSpec, count: int, stream: int, broken: bool = False
) -> list[Completion]:
    """`count` responses to one prompt; each stream has seeds of its own."""
    prompt = np.array([3, 141, 59, 26], np.int32)
    requests = [
        Request(
            request_id=str(i), prompt_ids=prompt, max_new_tokens=max(PLACES) + 1,
            spec=replace(spec, seed=(stream << 32) + i),
        )
        for i in range(count)
    ]  # fmt: skip
    settings = {"max_concurrency": 512, "context_length": 16}
    if broken:
        with context.engines.broken(arm, **settings) as engine:
            return engine.generate(requests)
    engine = context.engines.open(arm, "spread", **settings)
    completions = engine.generate(requests)
    engine.close()
    return completions


def judge(name: str, pairs: Pairs, pooled: Pairs, threshold: float) -> Row:
    chi2, freedom = chi_square(pairs, pooled)
    return _row(name, chi2, freedom, threshold, f"{len(pairs):,} samples against {len(pooled):,} regular")


def _row(name: str, chi2: float, freedom: int, threshold: float, about: str) -> Row:
    p = float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(chi2 / 2)))
    return Row(name, p, "p", f"> {threshold:g}", p > threshold, f"chi2 {chi2:.1f} on {freedom}, {about}")


def chi_square(pairs: Pairs, pooled: Pairs) -> tuple[float, int]:
    """Two-sample chi-square over joint cells of both places: the likeliest tokens of each, and all others as one.

    Cells that expect fewer than `MIN_EXPECTED` of the smaller sample are merged.
    """
    cells = [np.zeros(len(sample), np.int64) for sample in (pairs, pooled)]
    for place in range(len(PLACES)):
        tokens, counts = np.unique(pooled[:, place], return_counts=True)
        kept = tokens[np.argsort(-counts)[: BINS - 1]]
        for sample, cell in zip((pairs, pooled), cells, strict=True):
            match = sample[:, place, None] == kept
            cell *= BINS
            cell += np.where(match.any(1), match.argmax(1), BINS - 1)
    table = np.stack([np.bincount(cell, minlength=BINS ** len(PLACES)) for cell in cells]).astype(float)
    share = table.sum(1, keepdims=True) / table.sum()
    rare = table.sum(0) * share[0] < MIN_EXPECTED
    table = np.concatenate([table[:, ~rare], table[:, rare].sum(1, keepdims=True)], 1)
    table = table[:, table.sum(0) > 0]
    expected = table.sum(0) * share
    return float(((table - expected) ** 2 / expected).sum()), table.shape[1] - 1
