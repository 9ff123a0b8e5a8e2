"""The loop of continuous batching: prefill what fits, take a step, commit, close the gaps."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from miles_ext.records import Commit, Status, SupportKind, SupportRows
from rollout.embedded.arms import Regular, Step
from rollout.embedded.batch import Batch, commit_kinds
from rollout.embedded.capture import SupportLog
from rollout.embedded.laws import BatchLaw

_GREEDY_HEAT = 0.02  # drafts for a greedy request are sampled nearly greedily; the target's law is exact anyway


class Session:
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

    @torch.inference_mode()
    def advance(self) -> bool:
        """Admit what fits and take one step; false when every request has finished."""
        if self.batch.unfinished:
            self.prefill()
            self.step()
        return self.batch.unfinished

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
