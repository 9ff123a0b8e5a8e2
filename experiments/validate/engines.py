"""What the proof table asks of a kind of engine; the rows know nothing else of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from experiments.validate.settings import Setting
from miles_ext.capability import ArmKind
from miles_ext.records import Completion, SupportRows
from miles_ext.sampling import FilterOrder, SamplingSpec
from rollout.engine import Engine, Request

Logits = NDArray[np.float32]
Model = Literal["trained", "spread"]
"""`trained`: the shipped target and its good draft. `spread`: a random target whose laws spread their mass, and a draft
that is deliberately poor."""
MODELS: tuple[Model, ...] = ("trained", "spread")


@dataclass(slots=True)
class Watched:
    """What reached the accept kernel for one request, in order, copied at its door. T' >= T committed tokens: what
    follows an end inside a block is here too.

    tokens: the kernel's own answers. laws: its input rows [V]. logits: the raw target logits [V] that they came from.
    kinds: `Commit` of each token, from the kernel's counts.
    """

    tokens: list[int]
    laws: list[Logits]
    logits: list[Logits]
    kinds: list[int]


@dataclass(frozen=True, slots=True)
class Sample:
    """Responses and what the probe saw of them, in the same order."""

    setting: Setting
    requests: list[Request]
    completions: list[Completion]
    watched: list[Watched]


class Watch(Protocol):
    def of(self, request: Request) -> Watched:
        """What was seen of the request with this prompt (prompts must differ)."""
        ...


class Engines(Protocol):
    """One kind of engine."""

    name: str
    arms: tuple[ArmKind, ...]
    vocab_size: int
    dtype: str
    """Of its weights, and of what a trainer hands over to it."""
    allow_test_verifier: bool
    trainer_gap: tuple[Literal["max", "mean"], float]
    """How far the trainer's logprobs of committed tokens may lie from the recorded ones, in nats."""
    order: FilterOrder | None
    """The only filter order that its loaded engines sample in; None where they take any."""

    def target(self, model: Model) -> Path:
        """Hugging Face folder of the target's weights."""
        ...

    def open(self, arm: ArmKind, model: Model = "spread", **changes: Any) -> Engine:
        """A loaded engine, to be closed by the caller. changes: its settings; `target` loads other weights."""
        ...

    def watch(self, engine: Engine) -> AbstractContextManager[Watch]:
        """Probe the accept kernel's inputs while the block runs, without the engine's own bookkeeping."""
        ...

    def sample(self, arm: ArmKind, setting: Setting, model: Model, count: int) -> Sample:
        """`count` watched responses to prompts that differ, decoded in one batch."""
        ...

    def requests(self, setting: Setting, count: int, model: Model, seed: int = 0, tokens: int = 24) -> list[Request]:
        """`count` requests with prompts that differ; the seed settles prompts and draws."""
        ...

    def replay(self, engine: Engine, requests: Sequence[Request]) -> list[Completion]:
        """Responses that are the same again while weights and settings are."""
        ...

    def reset(self, engine: Engine, seed: int) -> None:
        """The next request to the engine, with this seed and whoever sends it, is answered as `replay` would."""
        ...

    def serve(self, engine: Engine, model: Model) -> AbstractContextManager[str]:
        """Address at which the engine answers HTTP."""
        ...

    def broken(self, arm: ArmKind, **changes: Any) -> AbstractContextManager[Engine]:
        """Sabotage for controls, on the spread model: the bonus after a rejection is drawn anew from the target's law,
        as if nothing had been rejected."""
        ...

    def corrupt_draft(self, engine: Engine) -> None:
        """Sabotage for controls: flip one bit of the private bytes of a broken engine's draft; twice is as before."""
        ...

    def close(self) -> None:
        """End what was started for the table."""
        ...

    def laws(self, logits: Sequence[Logits], specs: Sequence[SamplingSpec]) -> dict[str, list[SupportRows]]:
        """The engine's whole path from given logits to recorded rows: for each path by name, one row a case."""
        ...
