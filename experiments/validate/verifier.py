"""Row `verifier`: rows as the trainer decodes them (wire, disk, slicing, joining) against the kernel's own input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.evidence import Row, all_of, at_most, must_fail
from experiments.rollouts import load_rollout, save_rollout
from experiments.validate.engines import Sample
from experiments.validate.rows_of import Comparison
from experiments.validate.settings import Context
from miles_ext import wire
from miles_ext.errors import SupportError
from miles_ext.records import Completion, SupportRows, Trajectory
from trainer.batch import make_batch

LIMIT = 2e-5


def rows(context: Context) -> list[Row]:
    found, refused, broken = [], 0, 0
    shifted, settings = Comparison(), context.settings_of(context.engines.vocab_size)
    for arm in context.engines.arms:
        total = Comparison()
        for setting in settings:
            sample = context.sample(arm, setting)
            compare(as_trained_on(sample, context.scratch), sample, total)
        about = f"{total.rows:,} rows of {len(settings)} settings; logprobs; probability {total.probability:.2g}"
        found += [
            at_most(f"verifier/{arm}", max(total.logprob, total.sampled), LIMIT, "", about),
            Row(f"verifier/{arm}_support", total.support, "rows differ", "0", total.rows > 0 and total.support == 0),
        ]
        sample = context.sample(arm, settings[-1])
        compare(as_trained_on(sample, context.scratch), sample, shifted, late=1)
        caught, tried = truncation(sample, context.engines.vocab_size)
        refused, broken = refused + caught, broken + tried
    found += [
        must_fail(at_most("verifier/control_shifted", shifted.probability, LIMIT), "rows one token late"),
        all_of("verifier/control_truncated", refused, broken, "supports cut by their last entry and reported OK"),
    ]
    return found


def as_trained_on(sample: Sample, scratch: Path) -> SupportRows:
    """The rows of a sample's micro-batch, having gone over the wire, to disk and back, and through the batcher."""
    trajectories = [
        Trajectory(
            completion=over_the_wire(completion), prompt_id=i, group=i, reward=0.0,
            loss_mask=np.ones(len(completion), bool),
        )
        for i, completion in enumerate(sample.completions)
    ]  # fmt: skip
    ones = np.ones(len(trajectories))
    save_rollout(scratch / "wire.safetensors", 0, trajectories, ones)
    loaded = load_rollout(scratch / "wire.safetensors").trajectories
    return make_batch(loaded, np.arange(len(loaded)), ones, ones).support


def over_the_wire(completion: Completion) -> Completion:
    assert completion.support is not None
    message = json.loads(json.dumps(wire.pack(completion.support, completion.commit)))
    support, commit = wire.unpack(message)
    return replace(completion, support=support, commit=commit)


def compare(decoded: SupportRows, sample: Sample, total: Comparison, late: int = 0) -> None:
    """Add the decoded rows, response after response, to a comparison with the kernel's laws `late` tokens earlier."""
    start = 0
    for completion, watched in zip(sample.completions, sample.watched, strict=True):
        count = len(completion)
        part = decoded[start + late : start + count]
        laws = np.stack(watched.laws[: count - late])
        total.add(part, completion.response_ids[: count - late], laws)
        start += count


def truncation(sample: Sample, vocab: int) -> tuple[int, int]:
    """(caught, tried): rows without their last entry, still reported OK, that `check` refuses."""
    caught = tried = 0
    for completion in sample.completions:
        assert completion.support is not None
        row = completion.support[:1]
        if len(row.token_ids) < 2:
            continue
        cut = replace(row, token_ids=row.token_ids[:-1], logprobs=row.logprobs[:-1], offsets=row.offsets - [0, 1])
        tried += 1
        try:
            cut.check(completion.response_ids[:1], vocab)
        except SupportError:
            caught += 1
    return caught, tried
