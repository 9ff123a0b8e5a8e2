"""Row `control`: without capture the engine is the same engine, and its law is that of stock code wherever both agree
by design. Stock is transformers' own sampling processors on the same raw logits; of sglang, see `on_sglang.control`."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.evidence import Row, all_of, at_least, at_most, must_fail, report
from experiments.validate.alignment import CONTEXT, SLOTS, varied_requests
from experiments.validate.engines import Sample
from experiments.validate.on_sglang import control as on_sglang
from experiments.validate.on_sglang.engines import SglangEngines
from experiments.validate.settings import Context, Setting
from miles_ext.capability import ArmKind
from miles_ext.law import law

LIMIT, MIN_SAME = 6.1e-8, 0.9


def rows(context: Context) -> list[Row]:
    if isinstance(context.engines, SglangEngines):
        return on_sglang.rows(context, context.engines)
    found, other = [], 0.0
    settings = context.settings_of(context.engines.vocab_size)
    for arm in context.engines.arms:
        same = total = 0
        worst, different = 0.0, 0
        for setting in settings:
            with_capture = context.sample(arm, setting)
            without = uncaptured(context, arm, with_capture)
            same += equal_laws(with_capture, without)
            total += len(with_capture.completions)
            for watched in without.watched[: context.pick(2, 8)]:
                logits, laws = np.stack(watched.logits), np.stack(watched.laws)
                expected = stock_law(logits, setting)
                different += int(((expected > 0) != (laws > 0)).any(1).sum())
                worst = max(worst, float(np.abs(expected.astype(float) - laws).sum(1).max()))
                hotter = stock_law(logits * np.float32(1.0001), setting)
                other = max(other, float(np.abs(hotter.astype(float) - laws).sum(1).max()))
        found += [
            all_of(f"control/{arm}_capture_off", same, total, "tokens and laws bit for bit as with it", "responses"),
            at_most(f"control/{arm}_stock", worst, LIMIT, "L1", f"{different} rows of another support"),
            Row(f"control/{arm}_stock_support", different, "rows differ", "0", different == 0),
            neighbours(context, arm),
        ]
    found.append(must_fail(at_most("control/control_temperature", other, LIMIT), "a temperature off by 0.01 %"))
    return found + by_design()


def neighbours(context: Context, arm: ArmKind) -> Row:
    """Responses that come and go in a few slots, against the same requests decoded alone: what a neighbour leaves in
    a cache slot must not reach anybody. Rounding may part a response now and then, so some may differ."""
    requests = varied_requests(context, "spread", 3)
    answers = []
    for slots in (SLOTS, 1):
        engine = context.engines.open(arm, context_length=CONTEXT, max_concurrency=slots)
        answers.append(engine.generate(requests))
        engine.close()
    same = sum(np.array_equal(a.response_ids, b.response_ids) for a, b in zip(*answers, strict=True))
    detail = f"{same} of {len(requests)} responses, {SLOTS} slots against 1"
    return at_least(f"control/{arm}_neighbours", same / len(requests), MIN_SAME, "the same", detail)


def uncaptured(context: Context, arm: ArmKind, sample: Sample) -> Sample:
    """The same requests with capture off."""
    requests = [replace(request, spec=replace(request.spec, capture="off")) for request in sample.requests]
    engine = context.engines.open(arm)
    with context.engines.watch(engine) as watch:
        completions = engine.generate(requests)
    engine.close()
    return Sample(sample.setting, requests, completions, [watch.of(request) for request in requests])


def equal_laws(a: Sample, b: Sample) -> int:
    """Responses with the same tokens, kinds and kernel laws, bit for bit."""
    return sum(
        left.tokens == right.tokens and left.kinds == right.kinds and np.array_equal(np.stack(left.laws), right.laws)
        for left, right in zip(a.watched, b.watched, strict=True)
    )


def stock_law(logits: NDArray[np.float32], setting: Setting) -> NDArray[np.float32]:
    """transformers' warpers in their own order: temperature, top-k, then top-p on what is left."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    spec, ids = setting.spec(0), cast(torch.LongTensor, torch.zeros(len(logits), 1, dtype=torch.long))
    scores = torch.from_numpy(logits)
    if spec.temperature != 1:
        scores = TemperatureLogitsWarper(spec.temperature)(ids, cast(torch.FloatTensor, scores))
    if spec.top_k:
        scores = TopKLogitsWarper(spec.top_k)(ids, cast(torch.FloatTensor, scores))
    if spec.top_p < 1:
        scores = TopPLogitsWarper(spec.top_p)(ids, cast(torch.FloatTensor, scores))
    return torch.softmax(scores, -1).numpy()


def by_design() -> list[Row]:
    """Where the law differs from stock on purpose: named, with the support sizes of one example."""
    tied = np.log(np.array([[0.4, 0.15, 0.15, 0.15, 0.15]], np.float32))
    steep = np.log(np.array([[0.3, 0.2, 0.15, 0.12, 0.1, 0.08, 0.05]], np.float32))
    cases = (
        ("tie at the top-p cutoff", tied, {"top_p": 0.5}, "every token tied with the last kept one stays"),
        ("joint order", steep, {"top_k": 3, "top_p": 0.6, "filter_order": "joint"}, "stock has top_k_first only"),
    )
    found = []
    for name, logits, fields, reason in cases:
        spec = {"top_k": 0, "filter_order": "top_k_first", "temperature": 1.0, **fields}
        ours = int((law(torch.from_numpy(logits), 1.0, spec["top_k"], spec["top_p"], spec["filter_order"]) > 0).sum())
        stock = int((stock_law(logits, Setting(name, tuple({**spec, "capture": "off"}.items()))) > 0).sum())
        found.append(report(f"control/by_design {name}", ours, "tokens kept", f"stock keeps {stock}: {reason}"))
    return found
