"""Part `law`: the arms draw from one law, and record the same row in the same context."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from experiments.evidence import Row, all_of, report
from experiments.validate.law import THRESHOLD, judge
from miles_ext.capability import ArmKind
from miles_ext.records import SupportRows
from miles_ext.sampling import SamplingSpec
from tests.sglang_cpu.answers import Answer, ask
from tests.sglang_cpu.server import Server
from tests.sglang_cuda import target

LENGTH = 6
BATCH = 512
# No texts that the target knows: it is uncertain at these places. Token 0 comes from the prefill in every arm.
FIRST, SECOND = ([5, 6, 7, 8], ((0, 1), (1, 4))), ([200, 13, 77, 9], ((1, 2), (2, 3)))
CASES = {
    "T1": (SamplingSpec(capture="head", head_size=32), *FIRST),
    "T1 k4 p0.9": (SamplingSpec(top_k=4, top_p=0.9), *FIRST),
    "T1 k4 p0.9 other prompt": (SamplingSpec(top_k=4, top_p=0.9), *SECOND),
    "T0.7 k32 p0.95": (SamplingSpec(temperature=0.7, top_k=32, top_p=0.95), *FIRST),
}
BINS = 50
ROUNDING = 0.065  # relative: two logits below 16 in bfloat16 are each off by at most 2 ** -5
MASS = 0.02  # what such roundings leave of the mass above a cutoff; the other filter order moves it by 0.034 here


def rows(servers: dict[ArmKind, Server], names: list[str], count: int, device: str) -> list[Row]:
    found = []
    for name in names:
        spec, prompt, places_of_case = CASES[name]
        drawn = {arm: draw(server, spec, prompt, count) for arm, server in servers.items()}
        again = draw(servers["regular"], spec, prompt, count)
        tokens = {arm: np.array([answer.ids for answer in answers]) for arm, answers in drawn.items()}
        pooled = np.concatenate([tokens["regular"], np.array([answer.ids for answer in again])])
        unlike = {arm: near_ties(spec, drawn["regular"], drawn[arm]) for arm in servers}
        for places in places_of_case:
            for arm, sample in tokens.items():
                title = f"law/{arm} {name}, tokens {places[0]}, {places[1]}"
                kept, base = (avoiding(unlike[arm], ids, places[1]) for ids in (sample, pooled))
                row = judge(title, kept[:, places], base[:, places], THRESHOLD)
                left_out = len(sample) - len(kept)
                found.append(replace(row, detail=f"{row.detail}; {left_out} of {len(sample)} left out at near-ties"))
        if spec.capture == "complete":
            found += [calibration(f"law/{arm} {name}, tokens in their rows", drawn[arm]) for arm in servers]
            for arm in servers:
                if arm != "regular":
                    found += same_context(arm, name, spec, drawn["regular"], drawn[arm])
            found.append(other_order(f"support/joint instead, {name}", drawn["regular"], spec, device))
    return found


def draw(server: Server, spec: SamplingSpec, prompt: list[int], count: int) -> list[Answer]:
    answers = []
    for first in range(0, count, BATCH):
        prompts = [prompt] * min(BATCH, count - first)
        answers += ask(server, prompts, spec, max_new_tokens=LENGTH, ignore_eos=True)
    return answers


def calibration(name: str, answers: list[Answer]) -> Row:
    """A token's place in its recorded distribution function, spread over its own step, is uniform."""
    rows = SupportRows.concatenate([answer.rows for answer in answers])
    tokens = np.concatenate([answer.ids for answer in answers])
    row = np.repeat(np.arange(len(rows)), rows.lengths)
    likeliest_first = np.lexsort((-rows.logprobs, row))
    mass = np.exp(rows.logprobs[likeliest_first].astype(np.float64))
    above = np.cumsum(mass)
    hit = np.flatnonzero(rows.token_ids[likeliest_first] == tokens[row])
    start = np.concatenate([[0], above])[rows.offsets[:-1]]
    place = above[hit] - start - np.random.default_rng(17).random(len(hit)) * mass[hit]
    counts = np.bincount((place * BINS).astype(int).clip(0, BINS - 1), minlength=BINS)
    chi2 = float(((counts - len(hit) / BINS) ** 2).sum() * BINS / len(hit))
    halves = torch.tensor([(BINS - 1) / 2, chi2 / 2], dtype=torch.float64)
    p = float(torch.special.gammaincc(halves[0], halves[1]))
    complete = len(hit) == len(tokens)
    return Row(name, p, "p", f"> {THRESHOLD:g}", complete and p > THRESHOLD, f"chi2 {chi2:.1f} on {BINS - 1}, "
               f"{len(hit):,} of {len(tokens):,} tokens in their rows")  # fmt: skip


def near_ties(spec: SamplingSpec, regular: list[Answer], other: list[Answer]) -> set[tuple[int, ...]]:
    """Contexts after which the arms' supports differ by tokens so near to a cutoff that bfloat16 logits of different
    kernels put them on different sides of it. Responses that pass through one are left out of the chi-square in both
    arms alike, which leaves the laws of all the others comparable."""
    here, there = by_context(regular), by_context(other)
    return {key for key in here.keys() & there.keys() if differ(spec, here[key], there[key]) == "near tie"}


def differ(spec: SamplingSpec, one: dict[int, float], other: dict[int, float]) -> str:
    """`equal` supports, a `near tie`, or `apart`.

    Near: in the wider row each extra token is within ROUNDING (two roundings of a bfloat16 logit up to 16) of the
    likelihood of the last common one, as at a top-k cutoff, or the mass above it is within MASS of top_p.
    """
    if one.keys() == other.keys():
        return "equal"
    wide, narrow = (one, other) if len(one) >= len(other) else (other, one)
    if not narrow.keys() <= wide.keys():
        return "apart"
    last = min(wide[token] for token in narrow)
    for token in wide.keys() - narrow.keys():
        above = sum(prob for prob in wide.values() if prob > wide[token])
        at_top_k = len(wide) > spec.top_k > 0 or len(narrow) >= spec.top_k > 0
        if not (at_top_k and wide[token] >= last * (1 - ROUNDING)) and abs(above - spec.top_p) > MASS:
            return "apart"
    return "near tie"


def avoiding(contexts: set[tuple[int, ...]], ids: np.ndarray, last: int) -> np.ndarray:
    """Responses [n, t] of which no prefix up to the token at `last` is one of the contexts."""
    kept = [all(tuple(row[:t]) not in contexts for t in range(1, last + 1)) for row in ids.tolist()]
    return ids[np.array(kept, bool)]


def same_context(arm: ArmKind, name: str, spec: SamplingSpec, regular: list[Answer], other: list[Answer]) -> list[Row]:
    """Rows of both arms after the same tokens: what is left between them is the arithmetic of bfloat16."""
    here, there = by_context(regular), by_context(other)
    common = sorted(here.keys() & there.keys())
    kinds = {key: differ(spec, here[key], there[key]) for key in common}
    held = sum(kind != "apart" for kind in kinds.values())
    near = [key for key in common if kinds[key] == "near tie"]
    apart = [distance(here[key], there[key]) for key in common]
    sizes = [np.mean([len(rows[key]) for key in common]) for rows in (here, there)]
    detail = f"{len(near)} near ties; mean size {sizes[0]:.3f} regular, {sizes[1]:.3f} {arm}; "
    detail += f"total variation mean {np.mean(apart):.5f}, max {max(apart):.5f}"
    for key in [key for key in common if kinds[key] != "equal"][:3]:
        detail += f"; after {list(key)} ({kinds[key]}): regular {written(here[key])}, {arm} {written(there[key])}"
    return [all_of(f"support/{arm} {name}", held, len(common), detail, f"of {len(common)} equal or near ties")]


def by_context(answers: list[Answer]) -> dict[tuple[int, ...], dict[int, float]]:
    """The first row met after each sequence of response tokens, the prefill's left out."""
    found: dict[tuple[int, ...], dict[int, float]] = {}
    for answer in answers:
        offsets = answer.rows.offsets
        for t in range(1, len(answer.ids)):
            span = slice(offsets[t], offsets[t + 1])
            probs = np.exp(answer.rows.logprobs[span]).tolist()
            found.setdefault(tuple(answer.ids[:t]), dict(zip(answer.rows.token_ids[span].tolist(), probs, strict=True)))
    return found


def written(row: dict[int, float]) -> str:
    return ", ".join(f"{token}: {prob:.5f}" for token, prob in row.items())


def distance(one: dict[int, float], other: dict[int, float]) -> float:
    return sum(abs(one.get(token, 0.0) - other.get(token, 0.0)) for token in one.keys() | other.keys()) / 2


def other_order(name: str, answers: list[Answer], spec: SamplingSpec, device: str) -> Row:
    """The control: the other filter order on the same contexts must not pass as near ties."""
    some = answers[:256]
    logits = target.logits([answer.prompt for answer in some], [answer.ids for answer in some], device)
    laws = [target.law(logits, spec, order).flatten(0, 1) for order in ("top_k_first", "joint")]
    rows = [[{int(i): float(row[i]) for i in row.nonzero()[:, 0]} for row in law.cpu()] for law in laws]
    kinds = [differ(spec, one, other) for one, other in zip(*rows, strict=True)]
    apart = kinds.count("apart")
    detail = f"{kinds.count('near tie')} near ties beside them in {len(kinds)} contexts under the other order"
    if spec.top_k > 4:  # the orders hardly differ
        return report(name, apart, "apart", detail)
    return Row(name, float(apart), "apart", "> 0", apart > 0, detail)
