"""Recorded laws are the target's, and tokens are drawn from them: in every arm, whatever the draft proposes."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import rollout.embedded.verify
from miles_ext.capability import ArmKind
from miles_ext.records import Commit
from miles_ext.sampling import SamplingSpec
from rollout.embedded.engine import EmbeddedEngine
from rollout.engine import Request
from tests.rollout.tiny import ARMS, DEVICES, VOCAB, Reference, dense, requests, write_draft, write_target

SPECS = [
    {"capture": "complete"},
    {"capture": "complete", "temperature": 0.7, "top_k": 9, "top_p": 0.9},
    {"capture": "complete", "top_k": 9, "top_p": 0.8, "filter_order": "joint"},
    {"capture": "complete", "top_p": 0.95},
    {"capture": "head", "head_size": 8},
    {"capture": "head", "head_size": 3, "temperature": 1.3},
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
@pytest.mark.parametrize("arm", ARMS)
def test_recorded_laws_equal_a_float64_recompute(arm: ArmKind, model_type: str, device: str, tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", model_type=model_type)
    draft = write_draft(tmp_path / "draft", folder)
    engine = EmbeddedEngine(folder, draft, arm, device=device, max_concurrency=8, context_length=64)
    reference = Reference(folder)
    wanted = [one for i, spec in enumerate(SPECS) for one in requests(4, seed=100 * i, **spec)]
    for request, done in zip(wanted, engine.generate(wanted), strict=True):
        done.check(VOCAB)
        expected, found = reference.laws(done, request.spec), dense(done, VOCAB)
        assert done.support is not None
        if request.spec.capture == "head":
            assert (done.support.lengths == request.spec.head_size).all()
            smallest = np.nanmin(found, -1, keepdims=True)
            assert (np.isnan(found) <= (expected <= smallest + 1e-5)).all()
            expected = np.where(np.isnan(found), np.nan, expected)
        assert np.nansum(np.abs(found - expected), -1).max() <= 2e-5
        drawn = np.exp(done.support.sampled_logprobs)
        exact = reference.laws(done, request.spec)[np.arange(len(done)), done.response_ids]
        assert np.abs(drawn - exact).max() <= 1e-5


def _joint_law(target: Path, prompt: np.ndarray, spec: SamplingSpec, length: int) -> dict[tuple[int, ...], float]:
    """Exact probability of every response of `length` tokens, by enumeration in float64."""
    reference, law = Reference(target), {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for prefix, mass in law.items():
            row = reference.next_law(np.concatenate([prompt, prefix]).astype(np.int64), spec)
            grown |= {(*prefix, int(token)): mass * row[token] for token in np.flatnonzero(row)}
        law = grown
    return law


def _chi_square(engine: EmbeddedEngine, target: Path, spec: dict, count: int = 5000) -> tuple[float, Counter[int]]:
    """p-value of the first four tokens against enumeration, and how the tokens were committed."""
    prompt = np.array([5, 17, 3], np.int32)
    wanted = [
        Request(
            request_id=str(seed), prompt_ids=prompt, max_new_tokens=4,
            spec=SamplingSpec(seed=seed, capture="off", **spec),
        )
        for seed in range(count)
    ]  # fmt: skip
    done = engine.generate(wanted)
    exact = _joint_law(target, prompt, wanted[0].spec, 4)
    found = Counter(tuple(one.response_ids.tolist()) for one in done)
    assert found.keys() <= exact.keys(), "a response outside the support of the law"
    # Rare responses share one cell, so that every expectation is large enough for the test.
    common = [response for response, mass in exact.items() if mass * count >= 10]
    observed = np.array([found[response] for response in common] + [0])
    expected = np.array([exact[response] * count for response in common] + [0.0])
    observed[-1], expected[-1] = count - observed.sum(), count - expected.sum()
    kept = expected > 1e-9 * count
    kinds = Counter(itertools.chain.from_iterable(one.commit.tolist() for one in done))
    return float(stats.chisquare(observed[kept], expected[kept]).pvalue), kinds


LAW_SPECS = [{"top_k": 3}, {"top_k": 4, "top_p": 0.9, "temperature": 0.8}]


@pytest.mark.parametrize(
    ("arm", "spec"), [(ARMS[0], LAW_SPECS[0]), (ARMS[1], LAW_SPECS[1]), *((ARMS[2], s) for s in LAW_SPECS)]
)
def test_responses_follow_the_enumerated_law(arm: ArmKind, spec: dict, target: Path, draft: Path) -> None:
    engine = EmbeddedEngine(target, draft, arm, max_concurrency=512, context_length=16)
    p_value, kinds = _chi_square(engine, target, spec)
    assert p_value > 1e-4
    if arm != "regular":
        assert all(kinds[kind] > 100 for kind in (Commit.PREFILL, Commit.DRAFT, Commit.REJECT_BONUS))


def test_a_bonus_from_the_unreduced_law_is_caught(target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout.embedded.verify, "residual", lambda p, q: p)
    engine = EmbeddedEngine(target, draft, "dflash2", max_concurrency=512, context_length=16)
    assert _chi_square(engine, target, LAW_SPECS[0])[0] < 1e-9


@pytest.mark.parametrize("device", DEVICES)
def test_dflash_and_regular_decode_the_same_responses(device: str, target: Path, draft: Path) -> None:
    wanted = [one for i, spec in enumerate(SPECS) for one in requests(6, seed=100 * i, max_new_tokens=40, **spec)]
    outputs = {}
    for arm in ("regular", "dflash"):
        engine = EmbeddedEngine(target, draft, arm, device=device, max_concurrency=16, context_length=64)
        outputs[arm] = [one.response_ids.tolist() for one in engine.generate(wanted)]
    assert outputs["regular"] == outputs["dflash"]


@pytest.mark.parametrize("arm", ARMS)
def test_greedy_requests_follow_the_largest_logit(arm: ArmKind, target: Path, draft: Path) -> None:
    wanted = requests(6, temperature=0.0, capture="off")
    reference = Reference(target)
    for done in EmbeddedEngine(target, draft, arm, context_length=64).generate(wanted):
        laws = reference.laws(done, SamplingSpec())
        assert (laws.argmax(-1) == done.response_ids).all()
