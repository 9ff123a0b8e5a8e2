"""The sampling spec: everything that decides the law a token is drawn from, and what is recorded of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

FilterOrder = Literal["top_k_first", "joint"]
Capture = Literal["complete", "head", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How one request is sampled and captured.

    temperature: logits are divided by it in float32; 0 means greedy and is for evaluation only (capture off).
    top_k: keep the k likeliest tokens and every tie with the last of them; 0 is off.
    top_p: keep the smallest head of mass >= top_p and every tie with its last token; 1 is off.
    filter_order: `top_k_first` applies top_p to the renormalised top-k law, `joint` applies both to the unfiltered law.
    capture: `complete` records the whole support, `head` the `head_size` likeliest tokens of an unfiltered law.
    max_support: a complete support with more entries is an OVERFLOW, never truncated.
    seed: 63-bit; every draw of the request is a function of (seed, position, purpose).

    Example: SamplingSpec(temperature=0.7, top_k=32, top_p=0.95, seed=request_seed("run", 0, 3, 1))
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    filter_order: FilterOrder = "top_k_first"
    capture: Capture = "complete"
    head_size: int = 32
    max_support: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; accepted: finite and >= 0 (0 = greedy, evaluation)")
        if not (0 < self.top_p <= 1):
            raise ValueError(f"top_p is {self.top_p}; accepted: 0 < top_p <= 1 (1 turns the filter off)")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; accepted: an integer >= 0 (0 turns the filter off)")
        if self.filter_order not in get_args(FilterOrder):
            raise ValueError(f"filter_order is {self.filter_order!r}; accepted: {', '.join(get_args(FilterOrder))}")
        if self.capture not in get_args(Capture):
            raise ValueError(f"capture is {self.capture!r}; accepted: {', '.join(get_args(Capture))}")
        if self.head_size < 1 or self.max_support < 1:
            raise ValueError(f"head_size {self.head_size} and max_support {self.max_support} must both be >= 1")
        if not (0 <= self.seed < 2**63):
            raise ValueError(f"seed is {self.seed}; accepted: 0 <= seed < 2**63")
        if self.capture == "head" and self.is_filtered:
            raise ValueError(
                f"capture 'head' beside top_k={self.top_k}, top_p={self.top_p}: a head needs the unfiltered law; "
                "set capture to 'complete' or turn the filters off"
            )
        if self.is_greedy and self.capture != "off":
            raise ValueError("temperature 0 has no law to capture; set capture to 'off' or temperature above 0")

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError where this spec cannot be honoured over a vocabulary of `vocab_size` tokens."""
        if self.capture == "head" and self.head_size > vocab_size:
            raise ValueError(f"head_size {self.head_size} exceeds the vocabulary of {vocab_size}; lower head_size")
        if self.capture == "complete" and not self.is_filtered and vocab_size > self.max_support:
            raise ValueError(
                f"complete capture of an unfiltered law needs vocabulary <= max_support, got {vocab_size} > "
                f"{self.max_support}; capture a 'head', filter with top_k/top_p, or raise max_support"
            )
