"""The engine protocol: what a rollout worker asks of any engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from miles_ext.capability import EngineCapability
from miles_ext.errors import RequestError
from miles_ext.records import Completion
from miles_ext.sampling import SamplingSpec
from miles_ext.weights import HandoffReport, WeightManifest

Bucket = Mapping[str, NDArray[Any]]  # HF name -> array as miles_ext.tensors.to_array makes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue. prompt_ids: int32 [P], P >= 1. stop_ids end a response and are part of it."""

    request_id: str
    prompt_ids: NDArray[np.int32]
    spec: SamplingSpec
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def require(self, vocab_size: int, context_length: int) -> Request:
        """Raise RequestError where an engine of this vocabulary and context cannot honour the request; return self."""
        ids = self.prompt_ids
        if not len(ids):
            raise RequestError(f"request {self.request_id}: the prompt is empty; accepted: at least one token")
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise RequestError(f"request {self.request_id}: prompt id outside [0, {vocab_size}); check the tokenizer")
        if len(ids) >= context_length:
            raise RequestError(
                f"request {self.request_id}: prompt of {len(ids)} tokens leaves no room in a context of "
                f"{context_length}; shorten it or raise the context length"
            )
        if self.max_new_tokens < 1:
            raise RequestError(f"request {self.request_id}: max_new_tokens is {self.max_new_tokens}; accepted: >= 1")
        try:
            self.spec.require_vocabulary(vocab_size)
        except ValueError as error:
            raise RequestError(f"request {self.request_id}: {error}") from error
        return self


class Engine(Protocol):
    """One engine and its loaded weights. Not thread-safe, `progress` and `close` apart: its worker serialises calls."""

    @property
    def progress(self) -> int:
        """Rises with every step of `generate`; may be read from another thread."""
        ...

    def capability(self) -> list[EngineCapability]:
        """One report a rank, computed from what is loaded now."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of `requests`.

        Raises RequestError before anything is generated where one cannot be honoured. OVERFLOW and INVALID rows come
        back in `support.status` with finish reason `abort`: the caller decides, nothing is resampled.
        """
        ...

    def update_weights(self, manifest: WeightManifest, buckets: Iterable[Bucket]) -> HandoffReport:
        """Replace the target weights, all or nothing, and leave the draft's private bytes alone.

        Raises WeightError, with the old weights and version still serving, where the received digest differs, the
        version does not rise, or the draft's bytes changed.
        """
        ...

    def healthy(self) -> bool:
        """Whether the engine really decodes a token now."""
        ...

    def close(self) -> None:
        """Release everything; leaves no process."""
        ...
