"""The embedded engine: continuous batching of regular or speculative decoding, with the law of every token recorded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from miles_ext.capability import FILTERED_PATCHES, VERIFIER_OF, ArmKind, EngineCapability
from miles_ext.errors import CheckpointError, RequestError, WeightError
from miles_ext.records import Commit, Completion, FinishReason, SpecCounters, SupportRows
from miles_ext.sampling import FilterOrder, SamplingSpec
from miles_ext.tensors import digest, dtype_name
from miles_ext.weights import HandoffReport, WeightManifest, spell
from rollout.embedded.arms import DFlash, DFlash2, Regular
from rollout.embedded.batch import Batch, Reason
from rollout.embedded.decoder import Decoder
from rollout.embedded.draft import Draft
from rollout.embedded.handoff import draft_digest, replace_weights
from rollout.embedded.session import Session
from rollout.embedded.text import Text
from rollout.engine import Bucket, Request

_FINISH: dict[Reason, FinishReason] = {Reason.STOP: "stop", Reason.LENGTH: "length", Reason.ABORT: "abort"}


class EmbeddedEngine:
    """One target, perhaps one draft, and one arm on one device; implements `rollout.engine.Engine`.

    device: `auto`, `cpu` or `cuda`. dtype: as torch spells it. max_concurrency: responses decoded at once.
    context_length: prompt plus response, in tokens. threads: torch threads of this process, None to leave them.
    Raises ValueError (CheckpointError among them) where a checkpoint is incomplete or does not fit.
    """

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | None = None,
        arm: ArmKind = "regular",
        *,
        device: str = "auto",
        dtype: str = "float32",
        max_concurrency: int = 128,
        context_length: int = 512,
        engine_id: str = "",
        threads: int | None = None,
    ) -> None:
        if arm not in get_args(ArmKind):
            raise ValueError(f"arm is {arm!r}; accepted: {', '.join(get_args(ArmKind))}")
        if arm != "regular" and draft is None:
            raise CheckpointError(f"arm {arm!r} needs a draft checkpoint and got none; name one, or use 'regular'")
        if dtype not in ("float32", "bfloat16", "float64"):
            raise ValueError(f"dtype is {dtype!r}; accepted: float32, bfloat16, float64")
        if max_concurrency < 1 or (threads is not None and threads < 1):
            raise ValueError(f"max_concurrency is {max_concurrency} and threads {threads}; accepted: at least 1")
        if threads:
            torch.set_num_threads(threads)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device is {device!r} and torch sees no GPU; accepted here: auto or cpu")
        self.kind: ArmKind = arm
        self.engine_id = engine_id or f"embedded-{os.getpid()}"
        self.context_length, self.max_concurrency = context_length, max_concurrency
        self.target = Decoder.from_hf(target, device, getattr(torch, dtype))
        limit = self.target.config.max_positions
        if not 2 <= context_length <= limit:
            raise ValueError(f"context_length is {context_length}; accepted: 2 to the {limit} positions of {target}")
        self.draft = Draft.from_pretrained(draft, self.target) if draft is not None and arm != "regular" else None
        self.text = Text(Path(target))
        self.arm = self._make_arm(draft)
        self.vocab_size = self.target.config.vocab_size
        self.weight_version, self.transform = 0, spell({})
        self.progress = 0
        self._draft_digest = draft_digest(self.draft)

    def _make_arm(self, draft_path: str | Path | None) -> Regular:
        slots, length = self.max_concurrency, self.context_length
        if self.draft is None:
            return Regular(self.target, slots, length)
        if self.kind == "dflash":
            return DFlash(self.target, self.draft, slots, length)
        if not self.draft.config.selector:
            raise CheckpointError(f"arm 'dflash2' needs a path selector and {draft_path} has none; use 'dflash'")
        return DFlash2(self.target, self.draft, slots, length)

    def capability(self) -> list[EngineCapability]:
        """See `rollout.engine.Engine`: digests are computed from the bytes in memory now."""
        speculative = isinstance(self.arm, DFlash)
        return [
            EngineCapability(
                engine="embedded",
                engine_version=version("torch"),
                arm=self.kind,
                verifier=VERIFIER_OF[self.kind],
                dflash_sampling_verify_available=speculative,
                filter_orders=get_args(FilterOrder),
                max_support=np.iinfo(np.int32).max,
                patches=FILTERED_PATCHES,
                vocab_size=self.vocab_size,
                weight_version=self.weight_version,
                resident_digest=digest(self.target.resident_tensors()),
                draft_digest=draft_digest(self.draft),
                engine_id=self.engine_id,
                extra={
                    "device": str(self.target.device),
                    "dtype": dtype_name(self.target.dtype),
                    "block_size": str(self.arm.width),
                    "transform": self.transform,
                },
            )
        ]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `rollout.engine.Engine`."""
        if not requests:
            return []
        session = self.start(requests)
        while session.advance():
            self.progress += 1
        return self.finish(session)

    def start(self, requests: Sequence[Request]) -> Session:
        """A session that decodes one step a call. It owns the caches: finish one before the next starts."""
        for request in requests:
            request.require(self.vocab_size, self.context_length)
            if request.stop_strings and (self.text.tokenizer is None or "" in request.stop_strings):
                raise RequestError(
                    f"request {request.request_id}: stop strings {request.stop_strings} must not be empty and need a "
                    "tokenizer.json beside the target; mend them or use stop_ids"
                )
        batch = Batch(
            requests,
            context_length=self.context_length,
            capacity=self.max_concurrency,
            width=self.arm.width,
            purposes=self.arm.purposes,
            text=self.text,
        )
        return Session(self.arm, batch)

    def finish(self, session: Session) -> list[Completion]:
        """Completions of a session that has nothing left to do."""
        support = session.support()
        return [self._completion(session.batch, i, support[i]) for i in range(len(support))]

    def update_weights(self, manifest: WeightManifest, buckets: Iterable[Bucket]) -> HandoffReport:
        """See `rollout.engine.Engine`. No request is in flight, so no cached key or value outlives its weights."""
        if manifest.version <= self.weight_version:
            raise WeightError(
                f"version {manifest.version} does not rise above {self.weight_version}; nothing was applied, "
                "send a later version"
            )
        report = replace_weights(self.target, self.draft, manifest, buckets, self._draft_digest)
        self.weight_version, self.transform = manifest.version, spell(manifest.transform)
        return report

    def healthy(self) -> bool:
        """Decodes one token greedily from token 0."""
        spec = SamplingSpec(temperature=0, capture="off")
        probe = Request(request_id="health", prompt_ids=np.zeros(1, np.int32), spec=spec, max_new_tokens=1)
        return self.generate([probe])[0].finish_reason != "abort"

    def close(self) -> None:
        """Drop weights and caches."""
        del self.arm, self.draft, self.target

    def _completion(self, batch: Batch, i: int, support: SupportRows | None) -> Completion:
        request, length = batch.requests[i], int(batch.length[i])
        ids, commit = batch.tokens[i, :length].copy(), batch.commits[i, :length].copy()
        steps = int(batch.steps[i])
        return Completion(
            prompt_ids=request.prompt_ids,
            response_ids=ids,
            support=support,
            commit=commit,
            weight_version=np.full(length, self.weight_version, np.int64),
            finish_reason=_FINISH[Reason(batch.reason[i])],
            text=self.text.trimmed(ids, request.stop_strings),
            spec=SpecCounters(
                live_steps=steps,
                proposed=steps * (batch.width - 1),
                accepted=int((commit == Commit.DRAFT).sum()),
            ),
            request_id=request.request_id,
            engine_id=self.engine_id,
            draft_digest=self._draft_digest,
        )
