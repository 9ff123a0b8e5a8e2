"""The trainer's weights on their way to the engines, with the mismatch that the settings declare."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import ray

from experiments.artifacts import HANDOFF_FILE, RESUME_FILE, record_handoff
from experiments.config import ExperimentConfig
from miles_ext.errors import CheckpointError
from miles_ext.weights import HandoffReport, WeightManifest
from rollout.pool import RolloutPool
from trainer.worker import TrainerGroup


class Delivery:
    """Hands versions over: with the declared transform, and `lag` handoffs late.

    manifest, reports: of the version that the engines serve now.
    """

    manifest: WeightManifest
    reports: list[HandoffReport]

    def __init__(
        self, trainer: TrainerGroup, pool: RolloutPool, config: ExperimentConfig, seed: int, folder: Path
    ) -> None:
        mismatch = config.rollout.mismatch
        self._trainer, self._pool, self._folder = trainer, pool, folder
        self._dtype, self._transform = config.rollout.dtype, mismatch.transform(seed)
        self._waiting: deque[tuple[WeightManifest, Sequence[ray.ObjectRef]]] = deque(maxlen=mismatch.lag + 1)
        self._exported = -1

    @property
    def alters(self) -> bool:
        """Whether the engines serve anything but the newest weights as they are."""
        return bool(self._transform) or self._waiting.maxlen != 1

    def prepare(self, step: int, version: int, *, again: bool = False) -> Callable[[], list[HandoffReport]]:
        """Export `version`; what hands over the one that is due after `step` where the engines do not serve it yet.

        again: it is a checkpoint's, and was handed over after `step` before the run was interrupted. CheckpointError
        where a lag is declared: a checkpoint holds no older weights.
        """
        if again and self._waiting.maxlen != 1:
            raise CheckpointError(
                "rollout.mismatch.lag is declared, and the older weights that engines served are in no checkpoint; "
                "make a new run with --resume never"
            )
        manifest, buckets = self._trainer.share(version, self._dtype)
        self._waiting.append((replace(manifest, transform=self._transform), buckets))
        due, buckets = self._waiting[0]
        file = RESUME_FILE if again else HANDOFF_FILE
        if due.version == self._exported:
            return lambda: self.reports
        self._exported = due.version
        return partial(self._deliver, step, due, buckets, file)

    def hand_over_plain(self, step: int, version: int) -> list[HandoffReport]:
        """The trainer's own weights, now and untransformed: to judge what was trained."""
        return self._deliver(step, *self._trainer.share(version, self._dtype))

    def _deliver(
        self, step: int, manifest: WeightManifest, buckets: Sequence[ray.ObjectRef], file: str = HANDOFF_FILE
    ) -> list[HandoffReport]:
        self.manifest, self.reports = manifest, self._pool.update_weights(manifest, buckets)
        record_handoff(self._folder, step, self.manifest, self.reports, file)
        return self.reports
