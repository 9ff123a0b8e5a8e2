"""Row `filters`: the law after temperature and filters, case by case, in miles_ext.law and through whole engines."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.evidence import Row, all_of, must_fail
from experiments.oracle import token_law
from experiments.validate.settings import Context
from miles_ext.law import law
from miles_ext.records import SupportRows
from miles_ext.sampling import FilterOrder, SamplingSpec

TOLERANCE = 1e-6
CASES = Path(__file__).parents[2] / "tests" / "data" / "filters.json"
ORDER_OTHER_THAN: dict[FilterOrder, FilterOrder] = {"joint": "top_k_first", "top_k_first": "joint"}
Case = tuple[str, NDArray[np.float32], SamplingSpec, NDArray[np.float64]]  # name, logits, spec, exact law [V]


def rows(context: Context) -> list[Row]:
    published = json.loads((context.cases or CASES).read_text())
    cases, ties = [_case(case) for case in published["cases"]], random_ties(context.pick(200, 2000))
    found = [
        judge("filters/law", cases, [law_of(z, spec) for _, z, spec, _ in cases]),
        judge("filters/law_random_ties", ties, [law_of(z, spec) for _, z, spec, _ in ties]),
        *([identities(published["identities"])] if "identities" in published else []),
    ]
    for suffix, some in (("", cases), ("_random_ties", ties[: context.pick(20, 200)])):
        paths = context.engines.laws([z for _, z, _, _ in some], [spec for _, _, spec, _ in some])
        for path, supports in paths.items():
            laws = [dense(support, len(z)) for support, (_, z, _, _) in zip(supports, some, strict=True)]
            found.append(judge(f"filters/engine_{path}{suffix}", some, laws))
    dropped = [drop_a_tie(z, exact) for _, z, _, exact in ties]
    found.append(must_fail(judge("filters/control_dropped_tie", ties, dropped), "one of two tied tokens dropped"))
    ours = [_case(case) for case in json.loads(CASES.read_text())["cases"]]  # given ones may not depend on the order
    other = [law_of(z, replace(spec, filter_order=ORDER_OTHER_THAN[spec.filter_order])) for _, z, spec, _ in ours]
    found.append(must_fail(judge("filters/control_order", ours, other), "the other filter order"))
    return found


def judge(name: str, cases: Sequence[Case], laws: Sequence[NDArray[np.floating]]) -> Row:
    """Exact support and probabilities within the tolerance, of every case; `laws` [rows, V] a case."""
    held, worst, wrong = 0, 0.0, []
    for (case, _, _, exact), found in zip(cases, laws, strict=True):
        found = np.atleast_2d(found)
        same_support = bool(((found > 0) == (exact > 0)).all())
        error = float(np.abs(found - exact).max())
        worst = max(worst, error)
        good = same_support and error <= TOLERANCE
        held += good
        if not good:
            wrong.append(f"{case}: {'probabilities' if same_support else 'support'} off by {error:.2g}")
    detail = f"largest probability error {worst:.2g} (accepted {TOLERANCE})"
    return all_of(name, held, len(cases), "; ".join([detail, *wrong[:3]]), f"of {len(cases)} cases")


def law_of(logits: NDArray[np.float32], spec: SamplingSpec) -> NDArray[np.float32]:
    return law(torch.from_numpy(logits)[None], spec.temperature, spec.top_k, spec.top_p, spec.filter_order).numpy()


def dense(support: SupportRows, vocab: int) -> NDArray[np.float64]:
    """Recorded rows as laws [rows, V]; an id beyond the case's vocabulary shows as mass that is missing."""
    found = np.zeros((len(support), vocab + 1))
    row = np.repeat(np.arange(len(support)), support.lengths)
    found[row, np.minimum(support.token_ids, vocab)] = np.exp(support.logprobs.astype(np.float64))
    return found[:, :vocab]


def random_ties(count: int) -> list[Case]:
    """Logits on a coarse grid, so that most cutoffs are tied; a row that rounding may decide is drawn again."""
    rng, cases = np.random.default_rng(5), []
    while len(cases) < count:
        vocab = int(rng.integers(3, 40))
        z = (rng.integers(-6, 7, vocab) / 2).astype(np.float32)
        spec = SamplingSpec(
            temperature=float(rng.choice([0.5, 0.7, 1.0, 1.7])), top_k=int(rng.integers(0, vocab + 3)),
            top_p=float(rng.choice([0.2, 0.5, 0.8, 0.95, 1.0])), filter_order=("top_k_first", "joint")[rng.integers(2)],
        )  # fmt: skip
        exact, margin = token_law(z, spec.temperature, spec.top_k, spec.top_p, spec.filter_order)
        if margin > 1e-6:
            cases.append((f"ties {len(cases)}", z, spec, exact))
    return cases


def drop_a_tie(logits: NDArray[np.float32], exact: NDArray[np.float64]) -> NDArray[np.float64]:
    """The law without one kept token that is tied with another, renormalised; unchanged where no kept tokens tie."""
    kept = np.flatnonzero(exact)
    values, counts = np.unique(logits[kept], return_counts=True)
    if counts.max() < 2:
        return exact
    broken = exact.copy()
    broken[kept[logits[kept] == values[counts > 1][0]][0]] = 0.0
    return broken / broken.sum()


def identities(published: list[dict[str, Any]]) -> Row:
    """Rows that no filter touches are bit for bit softmax(logits / T), alone and beside filtered rows."""
    held, wrong = 0, []
    for case in published:
        z, heat = torch.from_numpy(_formula(case["logits_formula"], case["size"])), case["temperature"]
        plain = torch.softmax(z / heat, -1)
        alone = law(z[None], heat, case["top_k"], case["top_p"])[0]
        beside = law(torch.stack([z, z]), heat, [case["top_k"], 5], [case["top_p"], 0.5])[0]
        good = bool((alone > 0).all()) and torch.equal(alone, plain) and torch.equal(beside, plain)
        held += good
        wrong += [] if good else [case["name"]]
    detail = "; ".join(wrong) or "softmax bit for bit, alone and beside filtered rows"
    return all_of("filters/identities", held, len(published), detail)


def _case(case: dict[str, Any]) -> Case:
    z = np.array(case["logits"], np.float32)
    spec = SamplingSpec(**{name: case[name] for name in ("temperature", "top_k", "top_p", "filter_order")})
    exact = np.zeros(len(z))
    exact[case["support"]] = case["probs"]
    return f"{case['name']} ({case['filter_order']})", z, spec, exact


def _formula(text: str, size: int) -> NDArray[np.float32]:
    match = re.fullmatch(r"-\(i % (\d+)\) / (\d+)", text)
    if not match:
        raise ValueError(f"logits_formula is {text!r}; accepted: '-(i % A) / B' with whole numbers A and B")
    return (-(np.arange(size) % int(match[1])) / int(match[2])).astype(np.float32)
