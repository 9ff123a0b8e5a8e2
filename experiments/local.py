"""Both sides in this process, without Ray: for many small runs, where starting actors would take longer than training.

The same engine, trainer and proofs as behind the actors; nothing is restarted, since nothing here dies alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles_ext.capability import ArmKind, EngineCapability, require
from miles_ext.records import Completion
from miles_ext.sampling import SamplingSpec
from miles_ext.weights import HandoffReport, WeightManifest
from rollout.config import RolloutConfig
from rollout.engine import Request
from rollout.pool import RolloutPool
from rollout.proofs import require_answers, require_distinct, require_handoff
from rollout.worker import RolloutWorker
from trainer.config import TrainerConfig
from trainer.worker import TrainerGroup, TrainerWorker


class LocalPool(RolloutPool):
    """One worker, called directly; see `RolloutPool`."""

    def __init__(
        self, config: RolloutConfig, arm: ArmKind, target: Path, draft: Path | None, spec: SamplingSpec
    ) -> None:
        if config.workers != 1:
            raise ValueError(f"rollout.workers is {config.workers} without Ray; accepted: 1")
        self._worker = RolloutWorker(config, arm, target, draft if arm != "regular" else None, "local")
        self._loaded_for: ArmKind = arm
        self._wanted, self._versions = spec, range(0)

    def start(self) -> list[EngineCapability]:
        reports = self._worker.start()
        for report in reports:
            require(report, self._wanted, self._loaded_for)
        self._draft = reports[0].draft_digest
        return reports

    def capability(self) -> list[EngineCapability]:
        return self._worker.capability()

    def rss_mb(self) -> float:
        return self._worker.rss_mb()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        require_distinct(requests)
        completions = self._worker.engine.generate(requests)
        require_answers("the local worker", requests, completions, self._versions, self._draft)
        return completions

    def update_weights(self, manifest: WeightManifest, buckets: Sequence[Any]) -> list[HandoffReport]:
        report = self._worker.engine.update_weights(manifest, buckets)
        require_handoff("the local worker", report, manifest, "", self._draft)
        self._versions = range(manifest.version, manifest.version + 1)
        return [report]

    def close(self) -> None:
        self._worker.close()


class LocalTrainer(TrainerGroup):
    """One rank, called directly; see `TrainerGroup`."""

    def __init__(self, config: TrainerConfig, target: Path, seed: int) -> None:
        if config.workers != 1:
            raise ValueError(f"trainer.workers is {config.workers} without Ray; accepted: 1")
        self._rank = TrainerWorker(config, target, seed)

    def train(self, trajectories: Any, **settings: Any) -> dict[str, float]:
        return self._rank.train(trajectories, **settings)

    def share(self, version: int, dtype: str) -> tuple[WeightManifest, list[Any]]:
        return self._rank.export(version, dtype)

    def close(self) -> None:
        return None

    def _all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(self._rank, method)(*args, **kwargs)]
