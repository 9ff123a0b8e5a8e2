"""Row `forwards`: the same prefix through decoding, prefill and an uncached model, compared and only reported.

Different kernels and shapes round differently, so no two forwards are ever called equal here; what is recorded is
always the law of the very forward that a token was drawn from.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.evidence import Row, report
from experiments.validate.engines import MODELS, Model, Sample
from experiments.validate.settings import SETTINGS, Context
from miles_ext.capability import ArmKind

UNFILTERED = SETTINGS[4]  # whole laws at temperature 1


def rows(context: Context) -> list[Row]:
    found = []
    for model in MODELS:
        for arm in context.engines.arms:
            sample = context.sample(arm, UNFILTERED, model)
            decoded = [np.stack(w.logits[: len(c)]) for w, c in zip(sample.watched, sample.completions, strict=True)]
            paths = {"prefill": prefilled(context, arm, model, sample), "uncached": uncached(context, model, sample)}
            for name, other in paths.items():
                found.append(difference(f"forwards/{arm}_decode_{name} {model}", decoded, other))
    return found


def difference(name: str, a: list[NDArray[np.float32]], b: list[NDArray[np.float32]]) -> Row:
    """Largest L1 distance of the laws at temperature 1, and of the logits."""
    left, right = (torch.from_numpy(np.concatenate(part)).double() for part in (a, b))
    apart = (torch.softmax(left, -1) - torch.softmax(right, -1)).abs().sum(-1)
    logits = float((left - right).abs().max())
    detail = f"{len(left):,} rows, median {float(apart.median()):.2g}; largest logit difference {logits:.2g}"
    return report(name, float(apart.max()), "L1", detail)


def prefilled(context: Context, arm: ArmKind, model: Model, sample: Sample) -> list[NDArray[np.float32]]:
    """Logits [T, V] of each response, every row by a prefill of all that precedes it."""
    requests, counts = [], []
    for request, completion in zip(sample.requests, sample.completions, strict=True):
        counts.append(len(completion))
        for t in range(len(completion)):
            prefix = np.concatenate([request.prompt_ids, completion.response_ids[:t]])
            name = f"{request.request_id}+{t}"
            requests.append(replace(request, request_id=name, prompt_ids=prefix, max_new_tokens=1))
    engine = context.engines.open(arm, model)
    with context.engines.watch(engine) as watch:
        engine.generate(requests)
    engine.close()
    rows_ = np.stack([watch.of(request).logits[0] for request in requests])
    return np.split(rows_, np.cumsum(counts)[:-1])


def uncached(context: Context, model: Model, sample: Sample) -> list[NDArray[np.float32]]:
    """The same by transformers, each response in one forward pass."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(context.engines.target(model), dtype=torch.float32).eval()
    found = []
    for completion in sample.completions:
        ids = torch.from_numpy(np.concatenate([completion.prompt_ids, completion.response_ids]).astype(np.int64))
        with torch.no_grad():
            logits = loaded(ids[None]).logits[0]
        found.append(logits[len(completion.prompt_ids) - 1 : -1].numpy())
    return found
