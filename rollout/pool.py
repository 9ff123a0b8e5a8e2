"""Rollout workers as one: shards out, completions back in order, dead workers replaced, weights to all or none.

Everything is done by one loop, `_drive`: poll every worker, let `policy.decide` judge, act.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_ext.capability import ArmKind, EngineCapability, require
from miles_ext.errors import CapabilityError, EngineError, WeightError
from miles_ext.records import Completion
from miles_ext.sampling import SamplingSpec
from miles_ext.weights import HandoffReport, WeightManifest
from rollout.config import RolloutConfig
from rollout.engine import Request
from rollout.member import Errand, Member, brief
from rollout.policy import Restart, Stop, decide
from rollout.proofs import dissenters, require_answers, require_distinct, require_handoff
from rollout.turns import Turns
from rollout.worker import CONTROL, RolloutWorker

POLL_S = 0.2
END_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Weights:
    """The version that every worker serves; the references keep its buckets in the object store for a restart.

    reports: of the workers that took it, by their number.
    """

    manifest: WeightManifest
    buckets: Sequence[ray.ObjectRef]
    reports: dict[int, HandoffReport] = field(default_factory=dict)


class RolloutPool:
    """`config.workers` engines of one arm. Actors are asked for at once and proved fit by `start`; `close` when done.

    spec: the law that every worker, a restarted one too, must prove that it honours before it serves.
    worker: what an actor is made of.
    May be used from several threads: calls are served one after another, in the order in which they came.

    Example: pool = RolloutPool(config, "dflash2", target, draft, spec); pool.start(); pool.generate(requests)
    """

    def __init__(
        self, config: RolloutConfig, arm: ArmKind, target: Path, draft: Path | None, spec: SamplingSpec,
        *, worker: type[RolloutWorker] = RolloutWorker,
    ) -> None:  # fmt: skip
        self._config, self._spec, self._worker = config, spec, worker
        self._arm: ArmKind = arm
        self._target, self._draft = target, draft if arm != "regular" else None
        amounts = {"CPU": config.cpus_per_worker, "GPU": config.gpus_per_worker}
        bundle = {name: amount for name, amount in amounts.items() if amount > 0}
        self._placement = placement_group([bundle] * config.workers, strategy="PACK") if bundle else None
        self._limits, self._turns, self._closed = config.limits(), Turns(), False
        self._current: Weights | None = None
        self._drafts: list[str] | None = None  # digests a rank, as the first engine loaded its draft
        self._members = [Member(i, partial(self._spawn, i), self._begin) for i in range(config.workers)]

    @property
    def restarts(self) -> int:
        """Workers replaced so far."""
        return sum(member.restarts for member in self._members)

    def start(self) -> list[EngineCapability]:
        """Wait until every engine has proved what its ranks say of themselves and decodes; their reports.

        Raises CapabilityError or CheckpointError: nothing has been sampled then.
        """
        with self._turns:
            self._drive()
        return self.capability()

    def capability(self) -> list[EngineCapability]:
        """One report for each rank of each worker, read now."""
        found: dict[int, list[EngineCapability]] = {}

        def accept(member: Member, reports: list[EngineCapability]) -> None:
            found[member.index] = reports

        with self._turns:
            self._require_open()
            for member in self._members:
                member.give(Errand("report", lambda actor: actor.capability.remote(), accept, again=True))
            self._drive()
        return [report for index in sorted(found) for report in found[index]]

    def rss_mb(self) -> float:
        """Largest resident size that any worker had so far, MiB; 0 where none says."""
        found = [0.0]
        for ref in [_beside(member.actor.rss_mb) for member in self._members]:
            with contextlib.suppress(RayError):
                found.append(ray.get(ref, timeout=self._config.heartbeat_timeout_s))
        return max(found)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of `requests`, one each, whatever order workers finish in or die.

        Raises RequestError where a request cannot be honoured, EngineError where a budget of failures is spent.
        """
        require_distinct(requests)
        done: dict[int, list[Completion]] = {}
        with self._turns:
            self._require_open()
            parts = np.array_split(np.arange(len(requests)), len(self._members))
            for member, part in zip(self._members, parts, strict=True):
                if not len(part):
                    continue
                if time.monotonic() - member.decoded_at > self._config.probe_interval_s:
                    member.give(self._probe())
                member.give(self._order([requests[i] for i in part], done))
            try:
                self._drive()
            except EngineError as error:
                lost = [requests[i].request_id for n, part in enumerate(parts) if n not in done for i in part]
                raise EngineError(f"{error}; unanswered: {len(lost)} of {len(requests)}, first {lost[:3]}") from error
        return [completion for index in sorted(done) for completion in done[index]]

    def update_weights(self, manifest: WeightManifest, buckets: Sequence[ray.ObjectRef]) -> list[HandoffReport]:
        """Hand every worker one version, all or none; a report a worker, with equal resident digests.

        Where some workers took it, the others are replaced and fed it before they serve. Raises WeightError where none
        took it or a digest differs: then the old version serves on.
        """
        update = Weights(manifest, buckets)
        refusals: dict[int, WeightError] = {}

        def took(member: Member, report: HandoffReport) -> None:  # replicas are compared when all have reported
            require_handoff(member.name, report, manifest, "", self._draft_digest)
            update.reports[member.index] = report

        def refused(member: Member, error: WeightError) -> None:
            refusals[member.index] = error

        with self._turns:
            self._require_open()
            for member in self._members:
                member.give(replace(self._feed(update), accept=took, refused=refused))
            self._drive()  # a worker that died in the middle comes back with the old version
            if refusals and not update.reports:
                raise next(iter(refusals.values()))
            self._current = update
            refusals |= dissenters(update.reports)
            for member in self._members:
                if member.index in refusals:
                    update.reports.pop(member.index, None)
                    self._replace(member, Restart(brief(refusals[member.index]), 0.0))
                elif member.index not in update.reports:
                    member.give(self._feed(update))
            self._drive()
        return [update.reports[index] for index in sorted(update.reports)]

    def close(self) -> None:
        """End the actors and free their resources; harmless when called twice, after a failure, or beside a call."""
        self._closed = True
        with self._turns:
            self._end([member.actor for member in self._members])
            if self._placement is not None:
                remove_placement_group(self._placement)
                self._placement = None

    def _drive(self) -> None:
        """Poll, decide, act until no worker has anything left to do."""
        try:
            while busy := [member for member in self._members if member.busy]:
                self._require_open()
                _wait([ref for member in busy for ref in member.awaited])
                for member in busy:
                    decision = decide(member.poll(self.restarts), self._limits)
                    if isinstance(decision, Stop):
                        raise EngineError(f"rollout worker {member.index} {decision.reason}") from member.error
                    if isinstance(decision, Restart):
                        self._replace(member, decision)
        except BaseException:
            for member in self._members:
                member.forget()
            raise

    def _require_open(self) -> None:
        """Raise EngineError once the pool is closed: Ray would start a cluster of its own to find the actors."""
        if self._closed:
            raise EngineError("the pool is closed, and what it had in flight is lost; make another")

    def _replace(self, member: Member, decision: Restart) -> None:
        later = f" in {decision.delay_s:.0f} s" if decision.delay_s else ""
        print(f"rollout worker {member.index} is replaced{later}: {decision.reason}", file=sys.stderr, flush=True)
        self._end([member.actor])
        member.restart(decision.delay_s)

    def _begin(self) -> list[Errand]:
        """From a bare actor to one that may serve: proved fit, fed the current weights, and decoding."""
        start = Errand("start", lambda actor: actor.start.remote(), self._accept_start)
        return [start, *([self._feed(self._current)] if self._current else []), self._probe()]

    def _accept_start(self, member: Member, reports: list[EngineCapability]) -> None:
        for report in reports:
            require(report, self._spec, self._arm, allow_test_verifier=self._config.accepts_test_verifier)
        drafts = [report.draft_digest for report in reports]
        self._drafts = self._drafts or drafts
        if drafts != self._drafts:
            raise CapabilityError(
                f"{member.name} loaded a draft of digests {drafts}; accepted: {self._drafts}, as the first worker of "
                "this run loaded it: the draft's files changed, or the servers differ"
            )

    def _feed(self, weights: Weights) -> Errand:
        def accept(member: Member, report: HandoffReport) -> None:
            resident = next(iter(weights.reports.values()), report).resident_digest
            require_handoff(member.name, report, weights.manifest, resident, self._draft_digest)
            weights.reports[member.index] = report

        def call(actor: Any) -> Any:
            return actor.update_weights.remote(weights.manifest, weights.buckets)

        return Errand("feed", call, accept)

    def _probe(self) -> Errand:
        def accept(member: Member, healthy: bool) -> None:
            if not healthy:
                raise EngineError(f"{member.name} decodes no finite token")
            member.decoded()

        return Errand("probe", lambda actor: actor.healthy.remote(), accept)

    def _order(self, requests: Sequence[Request], done: dict[int, list[Completion]]) -> Errand:
        oldest = self._current.manifest.version if self._current else 0

        def accept(member: Member, completions: list[Completion]) -> None:
            versions = range(oldest, self._current.manifest.version + 1) if self._current else range(0)
            require_answers(member.name, requests, completions, versions, self._draft_digest)
            done[member.index] = completions
            member.answered()

        return Errand("generate", lambda actor: actor.generate.remote(requests), accept, again=True)

    @property
    def _draft_digest(self) -> str:
        """Of the first rank, as its completions and handoffs name it."""
        return self._drafts[0] if self._drafts else ""

    def _spawn(self, index: int) -> Any:
        strategy: Any = "DEFAULT"
        if self._placement is not None:
            strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=index)
        options = {
            "num_cpus": self._config.cpus_per_worker, "num_gpus": self._config.gpus_per_worker,
            "scheduling_strategy": strategy, "max_restarts": 0, "max_task_retries": 0,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(self._config.threads)}},
        }  # fmt: skip
        groups: dict[str, Any] = {"concurrency_groups": {CONTROL: 2}}
        actor = ray.remote(**groups)(self._worker).options(**options)
        url = self._config.sglang.urls[index] if self._config.sglang.urls else ""
        return actor.remote(self._config, self._arm, self._target, self._draft, f"worker-{index}", url)

    def _end(self, workers: Sequence[Any]) -> None:
        """A server is given the time to end, so that whatever comes next finds its memory free."""
        if self._config.engine == "sglang" and workers:
            ray.wait([_beside(worker.close) for worker in workers], num_returns=len(workers), timeout=END_TIMEOUT_S)
        for worker in workers:
            with contextlib.suppress(ValueError):  # Ray's word for an actor that it no longer knows
                ray.kill(worker)


def _beside(method: Any) -> Any:
    """Call it though the worker is in another call."""
    return method.options(concurrency_group=CONTROL).remote()


def _wait(refs: list[Any]) -> None:
    """Until something is heard, or for a moment."""
    if refs:
        ray.wait(refs, num_returns=1, timeout=POLL_S)
    else:
        time.sleep(POLL_S)
