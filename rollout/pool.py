"""Rollout workers as one: shards out, completions back in order, dead workers replaced, weights to all or none."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_ext.capability import ArmKind, EngineCapability, require
from miles_ext.errors import EngineError, WeightError
from miles_ext.records import Completion
from miles_ext.sampling import SamplingSpec
from miles_ext.weights import HandoffReport, WeightManifest
from rollout.config import RolloutConfig
from rollout.engine import Request
from rollout.worker import RolloutWorker

FAILURES = (RayActorError, EngineError, GetTimeoutError)
"""What does not depend on content: the worker is replaced and its requests are issued again with their own seeds."""

START_TIMEOUT_S = 1800.0  # loading a large checkpoint from a slow disk
END_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Weights:
    """The version that every worker serves; the references keep its buckets in the object store for a restart."""

    manifest: WeightManifest
    buckets: Sequence[ray.ObjectRef]


class RolloutPool:
    """`config.workers` engines of one arm. Actors are asked for at once and proved fit by `start`; `close` when done.

    spec: the law that every worker, a restarted one too, must prove that it honours before it serves.

    Example: pool = RolloutPool(config, "dflash2", target, draft, spec); pool.start(); pool.generate(requests)
    """

    def __init__(
        self, config: RolloutConfig, arm: ArmKind, target: Path, draft: Path | None, spec: SamplingSpec
    ) -> None:
        self._config, self._spec = config, spec
        self._arm: ArmKind = arm
        self._target, self._draft = target, draft if arm != "regular" else None
        amounts = {"CPU": config.cpus_per_worker, "GPU": config.gpus_per_worker}
        bundle = {name: amount for name, amount in amounts.items() if amount > 0}
        self._placement = placement_group([bundle] * config.workers, strategy="PACK") if bundle else None
        self._restarts = [0] * config.workers
        self._current: Weights | None = None
        self._capabilities: list[list[EngineCapability]] = [[] for _ in range(config.workers)]
        self._workers: list[Any] = [self._spawn(index) for index in range(config.workers)]
        self._starting: list[Any] = [worker.start.remote() for worker in self._workers]

    @property
    def restarts(self) -> int:
        """Workers replaced so far."""
        return sum(self._restarts)

    def start(self) -> list[EngineCapability]:
        """Wait for every engine and require what its ranks say of themselves; their reports.

        Raises CapabilityError or CheckpointError: nothing has been sampled then.
        """
        for index, starting in enumerate(self._starting):
            self._capabilities[index] = self._require(self._get(starting, START_TIMEOUT_S))
        return self.capability()

    def capability(self) -> list[EngineCapability]:
        """One report for each rank of each worker, read now."""
        return [report for ref in self._all("capability") for report in self._get(ref)]

    def healthy(self) -> list[bool]:
        """Whether each worker really decodes."""
        return [self._get(ref) for ref in self._all("healthy")]

    def rss_mb(self) -> float:
        """Largest resident size that any worker had so far, MiB."""
        return max(self._get(ref) for ref in self._all("rss_mb"))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of `requests`, whatever order workers finish in or die.

        Raises RequestError where a request cannot be honoured, EngineError where the budget of restarts is spent.
        """
        shards = [list(part) for part in np.array_split(np.arange(len(requests)), len(self._workers)) if len(part)]
        done: dict[int, list[Completion]] = {}
        pending = {self._issue(index, requests, shard): index for index, shard in enumerate(shards)}
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=self._config.request_timeout_s)
            for ref in ready or list(pending):  # none ready in time: all of them hang
                index = pending.pop(ref)
                try:
                    done[index] = self._get(ref, self._config.request_timeout_s if ready else 0)
                except FAILURES as error:
                    self._replace(index, error)
                    pending[self._issue(index, requests, shards[index])] = index
        return [completion for index in sorted(done) for completion in done[index]]

    def update_weights(self, manifest: WeightManifest, buckets: Sequence[ray.ObjectRef]) -> list[HandoffReport]:
        """Hand every worker one version, all or none; a report a worker, with equal resident digests.

        Where some workers took it, the others are replaced and fed it before they serve. Raises WeightError where none
        took it or a digest differs: then the old version serves on.
        """
        update = Weights(manifest, buckets)
        reports: dict[int, HandoffReport] = {}
        failed: dict[int, BaseException] = {}
        for index, ref in enumerate([self._feed(worker, update) for worker in self._workers]):
            try:
                reports[index] = self._get(ref)
            except (*FAILURES, WeightError) as error:
                failed[index] = error
        refusals = [error for error in failed.values() if isinstance(error, WeightError)]
        if refusals and not reports:
            for index, error in failed.items():
                if not isinstance(error, WeightError):
                    self._replace(index, error)
            raise refusals[0]
        self._current = update
        for index, error in failed.items():
            reports[index] = self._replace(index, error)
        return self._prove(manifest, [reports[index] for index in sorted(reports)])

    def close(self) -> None:
        """End the actors and free their resources; harmless when called twice or after a failure."""
        self._end(self._workers)
        self._workers = []
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    def _spawn(self, index: int) -> Any:
        strategy: Any = "DEFAULT"
        if self._placement is not None:
            strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=index)
        options = {
            "num_cpus": self._config.cpus_per_worker, "num_gpus": self._config.gpus_per_worker,
            "scheduling_strategy": strategy, "max_restarts": 0, "max_task_retries": 0,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(self._config.threads)}},
        }  # fmt: skip
        actor = ray.remote(RolloutWorker).options(**options)
        url = self._config.sglang.urls[index] if self._config.sglang.urls else ""
        return actor.remote(self._config, self._arm, self._target, self._draft, f"worker-{index}", url)

    def _replace(self, index: int, reason: BaseException) -> Any:
        """A new worker in the place of a failed one, proved fit and fed the current weights; its handoff report."""
        while True:
            self._restarts[index] += 1
            if self._restarts[index] > self._config.max_restarts:
                raise EngineError(
                    f"rollout worker {index} failed {self._restarts[index]} times, last: {_brief(reason)}; accepted: "
                    f"rollout.max_restarts = {self._config.max_restarts}; look at the worker's log or raise it"
                ) from reason
            print(f"rollout worker {index} is replaced: {_brief(reason)}", file=sys.stderr, flush=True)
            self._end([self._workers[index]])
            self._workers[index] = self._spawn(index)
            try:
                starting = self._workers[index].start.remote()
                self._capabilities[index] = self._require(self._get(starting, START_TIMEOUT_S))
                return self._get(self._feed(self._workers[index], self._current)) if self._current else None
            except FAILURES as error:
                reason = error

    def _end(self, workers: Sequence[Any]) -> None:
        """A server is given the time to end, so that whatever comes next finds its memory free."""
        if self._config.engine == "sglang" and workers:
            ray.wait([worker.close.remote() for worker in workers], num_returns=len(workers), timeout=END_TIMEOUT_S)
        for worker in workers:
            with contextlib.suppress(ValueError):  # Ray's word for an actor that it no longer knows
                ray.kill(worker)

    def _require(self, reports: list[EngineCapability]) -> list[EngineCapability]:
        for report in reports:
            require(report, self._spec, self._arm, allow_test_verifier=self._config.accepts_test_verifier)
        return reports

    def _prove(self, manifest: WeightManifest, reports: list[HandoffReport]) -> list[HandoffReport]:
        """What each engine claims against what was sent, against its replicas and against its draft as loaded."""
        for index, report in enumerate(reports):
            draft = self._capabilities[index][0].draft_digest
            wanted = (manifest.version, manifest.digest, reports[0].resident_digest, draft)
            found = (report.version, report.received_digest, report.resident_digest, report.draft_digest)
            if found != wanted:
                raise WeightError(
                    f"rollout worker {index} reports version and received, resident and draft digests {found}; "
                    f"accepted: {wanted}, as sent, as its replicas have and as its draft was loaded; restart the run"
                )
        return reports

    def _issue(self, index: int, requests: Sequence[Request], shard: Sequence[int]) -> Any:
        return self._workers[index].generate.remote([requests[i] for i in shard])

    def _feed(self, worker: Any, weights: Weights) -> Any:
        return worker.update_weights.remote(weights.manifest, weights.buckets)

    def _all(self, method: str) -> list[Any]:
        return [getattr(worker, method).remote() for worker in self._workers]

    def _get(self, ref: Any, timeout_s: float | None = None) -> Any:
        """The result, or the worker's own exception as it was raised there."""
        try:
            return ray.get(ref, timeout=self._config.request_timeout_s if timeout_s is None else timeout_s)
        except RayTaskError as error:
            raise error.cause from error


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
