"""The embedded engine: continuous batching of regular or speculative decoding, with the law of every token recorded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray

from miles_ext.capability import FILTERED_PATCHES, VERIFIER_OF, ArmKind, EngineCapability
from miles_ext.errors import CheckpointError, RequestError, WeightError
from miles_ext.records import Commit, Completion, FinishReason, SpecCounters, Status, SupportKind, SupportRows
from miles_ext.sampling import FilterOrder, SamplingSpec
from miles_ext.tensors import digest, dtype_name
from miles_ext.weights import HandoffReport, WeightManifest
from rollout.embedded.arms import DFlash, DFlash2, Regular, Step
from rollout.embedded.batch import Batch, Reason, commit_kinds
from rollout.embedded.capture import SupportLog
from rollout.embedded.decoder import Decoder
from rollout.embedded.draft import Draft
from rollout.embedded.handoff import draft_digest, replace_weights
from rollout.embedded.laws import BatchLaw
from rollout.embedded.text import Text
from rollout.engine import Bucket, Request

_FINISH: dict[Reason, FinishReason] = {Reason.STOP: "stop", Reason.LENGTH: "length", Reason.ABORT: "abort"}
_GREEDY_HEAT = 0.02  # drafts for a greedy request are sampled nearly greedily; the target's law is exact anyway


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
        if threads:
            torch.set_num_threads(threads)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
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
        self.weight_version = 0
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
                },
            )
        ]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `rollout.engine.Engine`."""
        for request in requests:
            request.require(self.vocab_size, self.context_length)
            if request.stop_strings and (self.text.tokenizer is None or "" in request.stop_strings):
                raise RequestError(
                    f"request {request.request_id}: stop strings {request.stop_strings} must not be empty and need a "
                    "tokenizer.json beside the target; mend them or use stop_ids"
                )
        if not requests:
            return []
        batch = Batch(
            requests,
            context_length=self.context_length,
            capacity=self.max_concurrency,
            width=self.arm.width,
            purposes=self.arm.purposes,
            text=self.text,
        )
        run = _Run(self.arm, batch)
        with torch.inference_mode():
            while batch.unfinished:
                run.prefill()
                run.step()
        return self._completions(run)

    def update_weights(self, manifest: WeightManifest, buckets: Iterable[Bucket]) -> HandoffReport:
        """See `rollout.engine.Engine`. No request is in flight, so no cached key or value outlives its weights."""
        if manifest.version <= self.weight_version:
            raise WeightError(
                f"version {manifest.version} does not rise above {self.weight_version}; nothing was applied, "
                "send a later version"
            )
        report = replace_weights(self.target, self.draft, manifest, buckets, self._draft_digest)
        self.weight_version = manifest.version
        return report

    def healthy(self) -> bool:
        """Decodes one token greedily from token 0."""
        spec = SamplingSpec(temperature=0, capture="off")
        probe = Request(request_id="health", prompt_ids=np.zeros(1, np.int32), spec=spec, max_new_tokens=1)
        return self.generate([probe])[0].finish_reason != "abort"

    def close(self) -> None:
        """Drop weights and caches."""
        del self.arm, self.draft, self.target

    def _completions(self, run: _Run) -> list[Completion]:
        batch = run.batch
        support = run.support()
        done = []
        for i, request in enumerate(batch.requests):
            length = int(batch.length[i])
            ids = batch.tokens[i, :length].copy()
            done.append(
                Completion(
                    prompt_ids=request.prompt_ids,
                    response_ids=ids,
                    support=support[i],
                    commit=batch.commits[i, :length].copy(),
                    weight_version=np.full(length, self.weight_version, np.int64),
                    finish_reason=_FINISH[Reason(batch.reason[i])],
                    text=self.text.trimmed(ids, request.stop_strings),
                    spec=SpecCounters(
                        live_steps=int(batch.steps[i]),
                        proposed=int(batch.steps[i]) * (batch.width - 1),
                        accepted=int((batch.commits[i, :length] == Commit.DRAFT).sum()),
                    ),
                    engine_id=self.engine_id,
                    draft_digest=self._draft_digest,
                )
            )
        return done


class _Run:
    """One call of `generate`: moves arrays between the batch (host) and the arm (device)."""

    def __init__(self, arm: Regular, batch: Batch) -> None:
        self.arm, self.batch = arm, batch
        self.device = arm.target.device
        specs = [request.spec for request in batch.requests]
        self.law = BatchLaw(specs)
        self.heat = np.array([spec.temperature or _GREEDY_HEAT for spec in specs])
        self.logs: list[tuple[SupportLog, NDArray[np.bool_] | None]] = []  # None: every request is of this kind
        head_sizes = np.array([spec.head_size for spec in specs], np.int64)
        kinds: tuple[SupportKind, ...] = ("complete", "head")
        for kind in kinds:
            mine = np.array([spec.capture == kind for spec in specs])
            if mine.any():
                self.logs.append((SupportLog(kind, head_sizes, batch.tokens), None if mine.all() else mine))
        self.caps_bind = bool((batch.support_cap < arm.target.config.vocab_size).any())
        self.kinds = commit_kinds(arm.width)

    def prefill(self) -> None:
        """Admit waiting requests and commit their first tokens."""
        batch, new = self.batch, self.batch.admit()
        if not len(new):
            return
        slots = slice(len(batch.live) - len(new), len(batch.live))
        lengths = batch.prompt_length[new]
        tokens = np.zeros((len(new), lengths.max()), np.int64)
        for row, request in enumerate(new):
            tokens[row, : lengths[row]] = batch.requests[request].prompt_ids
        positions = np.arange(tokens.shape[1])
        positions = np.where(positions < lengths[:, None], positions, -1)
        logits = self.arm.prefill(self.put(tokens), self.put(positions), self.put(lengths - 1), slots)
        probs = self.law(logits, new)
        drawn = self.arm.first(probs, self.put(batch.draws(slots)))
        kinds = np.full((len(new), 1), Commit.PREFILL, np.uint8)
        self.commit(new, Step(probs, drawn), kinds)
        self.release()

    def step(self) -> None:
        """Commit what one step of the arm yields for every live request."""
        batch = self.batch
        rows = batch.live
        if not len(rows):
            return
        slots = slice(0, len(rows))
        starts = batch.prompt_length[rows] + batch.length[rows] - 1
        step = self.arm.step(
            self.put(batch.last[rows]),
            self.put(starts),
            slots,
            int(starts.max()) + 1,
            self.put(batch.draws(slots)),
            self.put(self.heat[rows]),
            lambda logits: self.law(logits, rows),
        )
        self.commit(rows, step, None)
        self.release()

    def commit(self, rows: NDArray[np.int64], step: Step, kinds: NDArray[np.uint8] | None) -> None:
        batch, probs = self.batch, step.probs
        # The one transfer of a step: tokens, counts and, where a cap may bind, the size of each support.
        report = [step.verdict.tokens, step.verdict.counts[:, None]]
        if self.caps_bind:
            report.append((probs > 0).sum(-1))
        host = torch.cat(report, 1).cpu().numpy()
        width = probs.shape[1]
        tokens, counts = host[:, :width], host[:, width]
        sizes = host[:, width + 1 :] if self.caps_bind else None
        if kinds is None:
            kinds = self.kinds[counts]
            batch.steps[rows] += 1
        start, keep = batch.commit(rows, tokens, counts, kinds, sizes)
        recorded = keep - (batch.status[rows] != Status.OK)
        for log, mine in self.logs:
            log.add(probs, rows, start, recorded if mine is None else recorded * mine[rows])

    def release(self) -> None:
        """Close the gaps that finished responses leave."""
        batch = self.batch
        invalid = np.flatnonzero(batch.status[batch.live] == Status.INVALID)
        if len(invalid):
            self.arm.clear(self.put(invalid))
        sources, targets = batch.release()
        if len(sources):
            length = int((batch.prompt_length[batch.live] + batch.length[batch.live]).max())
            self.arm.move(self.put(sources), self.put(targets), length)

    def put(self, array: NDArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def support(self) -> list[SupportRows | None]:
        """Support rows of every request, None where capture was off."""
        found: list[SupportRows | None] = [None] * len(self.batch.requests)
        for log, mine in self.logs:
            rows = log.rows(self.batch.status)
            for i in range(len(found)) if mine is None else np.flatnonzero(mine):
                found[i] = rows[i]
        return found
