"""One engine behind a Ray actor. What it imports is all that a rollout process carries."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path

import ray

from miles_ext.capability import ArmKind, EngineCapability
from miles_ext.errors import EngineError
from miles_ext.records import Completion
from miles_ext.weights import HandoffReport, WeightManifest
from rollout.config import RolloutConfig
from rollout.engine import Bucket, Engine, Request

CONTROL = "control"
"""Ray's concurrency group for calls that must be answered while the engine works: `heartbeat`, `close`, `rss_mb`."""


class RolloutWorker:
    """Holds one engine; Ray runs its calls one after another, those of the group `CONTROL` beside them."""

    def __init__(
        self, config: RolloutConfig, arm: ArmKind, target: Path, draft: Path | None, engine_id: str, url: str = ""
    ) -> None:
        self._config, self._engine_id, self._url = config, engine_id, url
        self._arm: ArmKind = arm
        self._target, self._draft = target, draft
        self._engine: Engine | None = None
        self._fetched = 0

    def start(self) -> list[EngineCapability]:
        """Load the engine; what its ranks say of themselves. CheckpointError where the models do not fit."""
        self._engine = self._sglang() if self._config.engine == "sglang" else self._embedded()
        return self._engine.capability()

    def _embedded(self) -> Engine:
        from rollout.embedded.engine import EmbeddedEngine  # torch: in the actor alone, not in whoever creates it

        return EmbeddedEngine(
            self._target, self._draft, self._arm, device=self._config.device, dtype=self._config.dtype,
            max_concurrency=self._config.max_concurrency, context_length=self._config.context_length,
            engine_id=self._engine_id, threads=self._config.threads,
        )  # fmt: skip

    def _sglang(self) -> Engine:
        from rollout.sglang_engine.engine import SglangEngine

        return SglangEngine(self._config, self._arm, self._target, self._draft, self._engine_id, self._url)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in order. RequestError where one cannot be honoured, EngineError where the engine broke."""
        try:
            return self.engine.generate(requests)
        except RuntimeError as error:  # out of memory, a device fault: another engine may serve the same requests
            raise EngineError(f"{self._engine_id}: {type(error).__name__}: {error}") from error

    def update_weights(self, manifest: WeightManifest, buckets: Sequence[ray.ObjectRef]) -> HandoffReport:
        """Buckets are fetched from the object store one at a time, so that only one is held besides the weights."""
        return self.engine.update_weights(manifest, map(self._fetch, buckets))

    def _fetch(self, bucket: ray.ObjectRef) -> Bucket:
        self._fetched += 1
        return ray.get(bucket)

    def capability(self) -> list[EngineCapability]:
        return self.engine.capability()

    def healthy(self) -> bool:
        return self.engine.healthy()

    def heartbeat(self) -> int:
        """A number that rises while work goes on."""
        return self._fetched + (self._engine.progress if self._engine else 0)

    def close(self) -> None:
        """Release the engine; a server that it owns has ended when this returns."""
        if self._engine is not None:
            self._engine.close()

    def rss_mb(self) -> float:
        """Largest resident size of this process so far, MiB."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def pid(self) -> int:
        return os.getpid()

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineError(f"{self._engine_id} was asked to serve before it was started")
        return self._engine
