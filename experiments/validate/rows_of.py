"""Recorded rows beside what the probe saw at the accept kernel's door: the shared part of several rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.validate.engines import Sample
from miles_ext.records import SupportRows


@dataclass(slots=True)
class Comparison:
    """Recorded rows against laws. rows: how many. probability, logprob: largest error over the recorded entries;
    l1: largest L1 distance of a row, the mass of the law outside the record included where it is complete.
    sampled: largest error of the sampled token's log-probability. support: rows of another support than the law's.
    """

    rows: int = 0
    probability: float = 0.0
    logprob: float = 0.0
    l1: float = 0.0
    sampled: float = 0.0
    support: int = 0

    def add(self, recorded: SupportRows, tokens: NDArray[np.integer], laws: NDArray[np.floating]) -> None:
        """recorded: n rows. tokens: [n], the committed tokens. laws: [n, V]. Exact float64 arithmetic."""
        if not len(recorded):
            return
        laws = laws.astype(np.float64)
        row = np.repeat(np.arange(len(recorded)), recorded.lengths)
        exact, found = laws[row, recorded.token_ids], np.exp(recorded.logprobs.astype(np.float64))
        error = np.abs(found - exact)
        with np.errstate(divide="ignore"):
            logs = np.abs(recorded.logprobs - np.log(exact))
            sampled = np.abs(recorded.sampled_logprobs - np.log(laws[np.arange(len(laws)), tokens]))
        covered = np.bincount(row, weights=exact, minlength=len(recorded))
        beyond = np.maximum(laws.sum(1) - covered, 0.0) if recorded.kind == "complete" else 0.0
        l1 = np.bincount(row, weights=error, minlength=len(recorded)) + beyond
        if recorded.kind == "complete":
            other = ((laws > 0).sum(1) != recorded.lengths) | (np.bincount(row, exact <= 0, len(recorded)) > 0)
        else:  # a recorded entry and one tied with it may differ in the last bit of a logarithm of about -10
            last = recorded.logprobs[recorded.offsets[1:] - 1].astype(np.float64)
            other = (laws > np.exp(last)[:, None] * (1 + 1e-5)).sum(1) > recorded.lengths
        self.rows += len(recorded)
        self.probability = max(self.probability, float(error.max()))
        self.logprob = max(self.logprob, float(logs.max()))
        self.l1 = max(self.l1, float(l1.max()))
        self.sampled = max(self.sampled, float(sampled.max()))
        self.support += int(other.sum())


def each(sample: Sample) -> Iterator[tuple[SupportRows, NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]]:
    """(rows, tokens [T], kernel laws [T, V], raw logits [T, V]) of each response of a sample."""
    for completion, watched in zip(sample.completions, sample.watched, strict=True):
        assert completion.support is not None
        count = len(completion)
        yield (
            completion.support,
            completion.response_ids,
            np.stack(watched.laws[:count]),
            np.stack(watched.logits[:count]),
        )
