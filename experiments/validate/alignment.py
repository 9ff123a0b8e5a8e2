"""Row `alignment`: every retained row is the law of its committed token, whatever ended the response and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.evidence import Row, all_of, at_least, at_most, must_fail
from experiments.validate.engines import MODELS, Model, Watched
from experiments.validate.settings import SETTINGS, Context
from miles_ext.capability import ArmKind
from miles_ext.records import Commit, Completion, Trajectory
from rollout.engine import Request
from trainer.batch import make_batch

TOLERANCE = 1e-6  # a row is the float32 law it was drawn from, up to one logarithm
UNFILTERED = SETTINGS[4]  # whole laws at temperature 1
QUICK_ROWS, FULL_ROWS = {"embedded": 3_000, "sglang": 5_000}, 100_000
SLOTS, CONTEXT = 12, 40


def rows(context: Context) -> list[Row]:
    found, everything = [], 0
    wanted = context.pick(QUICK_ROWS[context.engines.name], FULL_ROWS)
    for arm in context.engines.arms:
        tally = watch_batches(context, arm, wanted // len(context.engines.arms) + 1)
        everything += tally.rows
        missing = [name for name in expected(arm) if not tally.kinds[name]]
        counted = ", ".join(f"{count:,} {name}" for name, count in sorted(tally.kinds.items()))
        late = Row(f"alignment/control_{arm}", tally.late, f"of {tally.rows:,}", "every row", tally.late == tally.rows)
        found += [
            all_of(f"alignment/{arm}", tally.aligned, tally.rows, counted),
            Row(f"alignment/{arm}_cases", len(missing), "cases unseen", "0", not missing, ", ".join(missing)),
            must_fail(late, "rows compared one token late"),
            *trainer_rows(context, arm),
        ]
    found.append(at_least("alignment/rows", everything, wanted, "rows"))
    return found


@dataclass(slots=True)
class Tally:
    """rows seen, those aligned, those aligned one token late; kinds: commits and endings by name."""

    rows: int = 0
    aligned: int = 0
    late: int = 0
    kinds: Counter[str] = field(default_factory=Counter)


def watch_batches(context: Context, arm: ArmKind, wanted: int) -> Tally:
    """Batches of both models in every setting until `wanted` rows were seen, with fewer slots than requests."""
    tally, batch = Tally(), 0
    engines = {
        model: context.engines.open(arm, model, context_length=CONTEXT, max_concurrency=SLOTS) for model in MODELS
    }
    while tally.rows < wanted or batch < len(SETTINGS):
        model = MODELS[(batch + batch // len(SETTINGS)) % len(MODELS)]
        requests = varied_requests(context, model, batch)
        batch += 1
        with context.engines.watch(engines[model]) as watch:
            completions = engines[model].generate(requests)
        for request, completion in zip(requests, completions, strict=True):
            watched = watch.of(request)
            tally.rows += len(completion)
            tally.aligned += matching(completion, watched)
            tally.late += matching(completion, watched, late=1)
            tally.kinds.update(ending(request, completion, watched))
            tally.kinds.update(Commit(kind).name for kind in completion.commit.tolist())
    for engine in engines.values():
        engine.close()
    return tally


def expected(arm: ArmKind) -> list[str]:
    """What must have been seen of an arm."""
    endings = ["stop id", "stop string", "max tokens", "context limit"]
    if arm == "regular":
        return ["PREFILL", "PLAIN", *endings]
    return ["PREFILL", "DRAFT", "REJECT_BONUS", "FULL_BONUS", *endings, *(f"{name} inside a block" for name in endings)]


def trainer_rows(context: Context, arm: ArmKind) -> list[Row]:
    """Token t is scored from logits[P + t - 1]: on the engine's weights its logprobs are found there."""
    from transformers import AutoModelForCausalLM

    sample = context.sample(arm, UNFILTERED)
    trajectories = [
        Trajectory(completion=c, prompt_id=i, group=i, reward=0.0, loss_mask=np.ones(len(c), bool))
        for i, c in enumerate(sample.completions)
    ]  # fmt: skip
    ones = np.ones(len(trajectories))
    batch = make_batch(trajectories, np.arange(len(trajectories)), ones, ones)
    model = AutoModelForCausalLM.from_pretrained(context.engines.target("spread"), dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(batch.input_ids)).logits.flatten(0, 1)
    laws = torch.log_softmax(logits, -1).numpy()

    kind, limit = context.engines.trainer_gap

    def gap(name: str, rows: NDArray[np.int64]) -> Row:
        apart = np.abs(laws[rows, batch.sampled_ids] - batch.support.sampled_logprobs)
        detail = f"{len(rows):,} tokens in one padded batch; mean {apart.mean():.2g}, max {apart.max():.2g}"
        return at_most(name, float(apart.max() if kind == "max" else apart.mean()), limit, f"nats, {kind}", detail)

    return [
        gap(f"alignment/trainer_{arm}", batch.rows),
        must_fail(gap(f"alignment/control_trainer_{arm}", np.maximum(batch.rows - 1, 0)), "logits of one row before"),
    ]


def varied_requests(context: Context, model: Model, batch: int) -> list[Request]:
    """One batch in one setting; a quarter each ends by stop id, stop string, max tokens or the context limit."""
    requests = context.engines.requests(SETTINGS[batch % len(SETTINGS)], 2 * SLOTS, model, batch)
    stops = (15, 3) if model == "trained" else tuple(range(60))
    changed = []
    for i, request in enumerate(requests):
        if i % 4 == 0:
            request = replace(request, stop_ids=stops)
        elif i % 4 == 1:
            request = replace(request, stop_strings=("c0;", "1+1") if model == "trained" else ())
        elif i % 4 == 2:
            request = replace(request, max_new_tokens=7 + i % 5)
        else:
            request = replace(request, max_new_tokens=10 * CONTEXT)
        changed.append(request)
    return changed


def matching(completion: Completion, watched: Watched, late: int = 0) -> int:
    """Rows whose token, commit kind and law are those of the same place at the kernel's door, `late` places off."""
    assert completion.support is not None
    count = len(completion) - late
    support, tokens = completion.support[late:], completion.response_ids[late:]
    laws = np.stack(watched.laws[:count]).astype(np.float64) if count else np.zeros((0, 1))
    row = np.repeat(np.arange(count), support.lengths)
    off = np.abs(np.exp(support.logprobs.astype(np.float64)) - laws[row, support.token_ids]) > TOLERANCE
    here = np.arange(count)
    sampled = np.abs(np.exp(support.sampled_logprobs.astype(np.float64)) - laws[here, tokens]) <= TOLERANCE
    held = (np.array(watched.tokens[:count]) == tokens) & (np.array(watched.kinds[:count]) == completion.commit[late:])
    return int((held & sampled & (np.bincount(row, off, count) == 0)).sum())


def ending(request: Request, completion: Completion, watched: Watched) -> Sequence[str]:
    """How the response ended, and whether it was inside a block: the kernel had committed more than was kept."""
    count = len(completion)
    if completion.finish_reason == "stop":
        name = "stop id" if request.stop_ids else "stop string"
    elif count == request.max_new_tokens:
        name = "max tokens"
    else:
        name = "context limit"
        if count + len(request.prompt_ids) != CONTEXT:
            return ["unexplained end"]
    return [name, *([f"{name} inside a block"] if len(watched.tokens) > count else [])]
