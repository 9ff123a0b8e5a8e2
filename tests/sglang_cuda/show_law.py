"""Part `law`: the arms draw from one law, and record the same row in the same context."""

from __future__ import annotations

import numpy as np
import torch

from experiments.evidence import Row, at_least, report
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


def rows(servers: dict[ArmKind, Server], names: list[str], count: int, device: str) -> list[Row]:
    found = []
    for name in names:
        spec, prompt, places_of_case = CASES[name]
        drawn = {arm: draw(server, spec, prompt, count) for arm, server in servers.items()}
        again = draw(servers["regular"], spec, prompt, count)
        tokens = {arm: np.array([answer.ids for answer in answers]) for arm, answers in drawn.items()}
        pooled = np.concatenate([tokens["regular"], np.array([answer.ids for answer in again])])
        for places in places_of_case:
            for arm, sample in tokens.items():
                title = f"law/{arm} {name}, tokens {places[0]}, {places[1]}"
                found.append(judge(title, sample[:, places], pooled[:, places], THRESHOLD))
        if spec.capture == "complete":
            found += [calibration(f"law/{arm} {name}, tokens in their rows", drawn[arm]) for arm in servers]
            for arm in servers:
                if arm != "regular":
                    found += same_context(arm, name, drawn["regular"], drawn[arm])
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


def same_context(arm: ArmKind, name: str, regular: list[Answer], other: list[Answer]) -> list[Row]:
    """Rows of both arms after the same tokens: what is left between them is the arithmetic of bfloat16."""
    here, there = by_context(regular), by_context(other)
    common = sorted(here.keys() & there.keys())
    equal = sum(len(here[key]) == len(there[key]) for key in common)
    apart = [distance(here[key], there[key]) for key in common]
    sizes = [np.mean([len(rows[key]) for key in common]) for rows in (here, there)]
    largest = [max(map(len, rows.values())) for rows in (here, there)]
    detail = f"{len(common)} contexts met by both; mean size {sizes[0]:.3f} regular, {sizes[1]:.3f} {arm}; largest of "
    detail += f"all {largest[0]} and {largest[1]}; total variation mean {np.mean(apart):.5f}, max {max(apart):.5f}"
    unlike = next((key for key in common if len(here[key]) != len(there[key])), None)
    if unlike is not None:
        detail += f"; after {list(unlike)}: regular {written(here[unlike])}, {arm} {written(there[unlike])}"
    return [at_least(f"support/{arm} {name}", equal / len(common), 0.95, "of sizes equal to regular", detail)]


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
    """The control: how many sizes the other filter order would change."""
    some = answers[:256]
    logits = target.logits([answer.prompt for answer in some], [answer.ids for answer in some], device)
    first, joint = ((target.law(logits, spec, order) > 0).sum(-1) for order in ("top_k_first", "joint"))
    share = float((first != joint).double().mean())
    return report(name, share, "of sizes differ", "the same contexts under the other filter order")
