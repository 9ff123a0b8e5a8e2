"""Rows on a Miles sample: one attribute that follows the response through resume, strip, reset and dict round trips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import numpy as np

from miles_ext.errors import SupportError
from miles_ext.records import SupportRows
from miles_ext.sampling import SamplingSpec

ATTRIBUTE = "sc_rows"  # of a sample, and the key of the training data


@dataclass(frozen=True, kw_only=True)
class SampleRows:
    """rows: the law of each response token. spec: what they were drawn with. vocab_size: of the engine's law."""

    rows: SupportRows
    spec: SamplingSpec
    vocab_size: int

    def __len__(self) -> int:
        return len(self.rows)

    def require(self, response: Sequence[int], spec: SamplingSpec, where: str) -> SampleRows:
        """Raise SupportError where the rows are not whole, not of this response or not of this law; return self."""
        if self.spec != spec:
            raise SupportError(f"{where} was sampled with {self.spec}, the trainer expects {spec}; use one for both")
        if len(self) != len(response):
            raise SupportError(f"{where}: {len(self)} support rows for a response of {len(response)} tokens")
        if self.rows.kind != spec.capture:
            raise SupportError(f"{where}: rows of kind {self.rows.kind!r}; accepted: {spec.capture!r}")
        failed = self.rows.status != 0
        if failed.any():
            raise SupportError(
                f"{where}: support row {int(np.argmax(failed))} has status {self.rows.status[failed][0]}; accepted: 0 "
                "(1: the support exceeds sc_max_support, raise it; 2: the engine's logits are not finite)"
            )
        ids = np.asarray(response, np.int64)
        if len(ids) and not (0 <= ids.min() and ids.max() < self.vocab_size):
            raise SupportError(f"{where}: token ids {ids.min()} to {ids.max()}; accepted: 0 to {self.vocab_size - 1}")
        try:
            self.rows.check(ids, self.vocab_size)
        except SupportError as error:
            raise SupportError(f"{where}: {error}") from error
        return self


def rows_of(sample: Any) -> SampleRows | None:
    return getattr(sample, ATTRIBUTE, None)


def append(sample: Any, more: SampleRows) -> None:
    """Rows of the tokens that were just appended to the response. SupportError where the law changed in between."""
    held = rows_of(sample)
    if held is not None and len(held):
        if (held.spec, held.vocab_size) != (more.spec, more.vocab_size):
            raise SupportError(f"a response begun with {held.spec} goes on with {more.spec}; sample it anew")
        more = replace(more, rows=SupportRows.concatenate([held.rows, more.rows]))
    setattr(sample, ATTRIBUTE, more)


def follow(sample_class: type) -> None:
    """Let the rows follow `strip_last_output_tokens` and `reset_for_retry`, which know Miles' own fields only."""
    if getattr(sample_class, "sc_followed", False):
        return
    strip, reset = sample_class.strip_last_output_tokens, sample_class.reset_for_retry

    @wraps(strip)
    def strip_last_output_tokens(self, n, tokenizer):
        before = self.response_length
        strip(self, n, tokenizer)
        held, stripped = rows_of(self), before - self.response_length
        if held is not None and stripped:
            setattr(self, ATTRIBUTE, replace(held, rows=held.rows[: len(held) - stripped]))

    @wraps(reset)
    def reset_for_retry(self):
        reset(self)
        if rows_of(self) is not None:
            delattr(self, ATTRIBUTE)

    sample_class.strip_last_output_tokens = strip_last_output_tokens
    sample_class.reset_for_retry = reset_for_retry
    sample_class.sc_followed = True
