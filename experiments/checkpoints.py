"""What an arm goes on from: its newest whole checkpoint; its files are cut back to that step, so nothing is twice."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.ahead import FIRST_VERSION, Sampled
from experiments.artifacts import (
    AUDIT_FILE,
    HANDOFF_FILE,
    MANIFEST_FILE,
    RESUME_FILE,
    START_FILE,
    read_handoffs,
    write_whole,
)
from experiments.config import CheckpointConfig
from experiments.rollouts import load_rollout, rollout_file, rollout_files, save_rollout
from experiments.tracking import METRICS_FILE
from miles_ext.errors import CheckpointError
from miles_ext.weights import WeightManifest
from trainer import checkpoint
from trainer.worker import TrainerGroup

FOLDER = "checkpoints"
POINT_FILE = "run.json"
GROWING = (METRICS_FILE, HANDOFF_FILE)


@dataclass(frozen=True, slots=True)
class Point:
    """Where an arm stands: so many steps are done. wandb_id: "" where W&B knows nothing of it yet.

    record: the files that grow with every step, as they were then: bytes, and the SHA-256 of those.
    ahead: seconds that sampling took, of each rollout that is still to be trained on, in order of step.
    """

    step: int = 0
    wandb_id: str = ""
    record: dict[str, tuple[int, str]] = field(default_factory=dict)
    ahead: list[float] = field(default_factory=list)

    @property
    def version(self) -> int:
        """Of the weights after that many steps."""
        return FIRST_VERSION + self.step

    def folder(self, arm_dir: Path) -> Path:
        return arm_dir / FOLDER / f"step-{self.step:06d}"


def finished(arm_dir: Path) -> bool:
    """Whether the arm ran to its end: it is not run again."""
    file = arm_dir / MANIFEST_FILE
    return file.is_file() and not json.loads(file.read_text())["failure"]


def newest(arm_dir: Path, say: Callable[[str], None]) -> Point:
    """The point of the newest checkpoint that its table of contents vouches for; damaged ones are said and passed over.

    CheckpointError where there are checkpoints and none is whole: starting over would throw their work away.
    """
    damage = []
    for folder in checkpoint.saved(arm_dir / FOLDER):
        try:
            version = checkpoint.verify(folder)["version"]
            point = _read(folder / POINT_FILE)
            if (version, folder) != (point.version, point.folder(arm_dir)):
                raise CheckpointError(f"{folder} says step {point.step} of weights of version {version}")
            require_record(arm_dir, point)
            return point
        except CheckpointError as error:
            damage.append(str(error))
            say(f"{arm_dir.name}: {error}")
    if damage:
        raise CheckpointError(
            f"{arm_dir} has {len(damage)} checkpoints and none to go on from, first: {damage[0]}; restore one, or "
            "make a new run with --resume never"
        )
    return _read(arm_dir / POINT_FILE) if (arm_dir / POINT_FILE).is_file() else Point()


def require_record(arm_dir: Path, point: Point) -> None:
    """CheckpointError where the files of the steps before `point` are not all there: the record would have a hole."""
    wrong = [name for name, (size, digest) in point.record.items() if _sha256(arm_dir / name, size) != digest]
    files = [rollout_file(arm_dir, step) for step in range(point.step)]
    wrong += [file.name for file in files if not file.is_file()]
    if wrong:
        raise CheckpointError(
            f"{arm_dir} has a checkpoint after {point.step} steps, but {wrong} are missing or not what they were then; "
            "restore them"
        )


def cut_back(arm_dir: Path, point: Point, audited_step: int, keep: int) -> None:
    """Remove what was written after `point`: those steps are made again. W&B's files and `keep` checkpoints stay."""
    for name in (MANIFEST_FILE, AUDIT_FILE):
        (arm_dir / name).unlink(missing_ok=True)
    for name in GROWING:
        if (arm_dir / name).is_file():
            os.truncate(arm_dir / name, point.record[name][0] if point.step else 0)
    for part in (arm_dir / "rollouts").glob("*.part"):
        part.unlink()
    for file in rollout_files(arm_dir):
        if file >= rollout_file(arm_dir, point.step):
            file.unlink()
    if point.step == 0:
        (arm_dir / START_FILE).unlink(missing_ok=True)
        (arm_dir / RESUME_FILE).unlink(missing_ok=True)
    if audited_step >= point.step:
        shutil.rmtree(arm_dir / "audit", ignore_errors=True)
    for path in (arm_dir / FOLDER).glob("*/"):
        if not "step-" <= path.name <= point.folder(arm_dir).name:
            shutil.rmtree(path)
    checkpoint.prune(arm_dir / FOLDER, keep)


def begin(arm_dir: Path, wandb_id: str) -> None:
    """Write what an arm that is killed before its first checkpoint starts over from: the id of its W&B run."""
    write_whole(arm_dir / POINT_FILE, json.dumps(asdict(Point(0, wandb_id))) + "\n")


def due(config: CheckpointConfig, done: int, steps: int) -> bool:
    """Whether a checkpoint belongs after `done` of `steps` steps."""
    return done == steps or bool(config.every and done % config.every == 0)


def save(
    trainer: TrainerGroup, arm_dir: Path, step: int, wandb_id: str, keep: int, ahead: Sequence[Sampled] = ()
) -> None:
    """A checkpoint of weights, optimizer, random state and point; written whole, then older ones are removed.

    ahead: rollouts that were sampled and are still to be trained on; they go with it.

    What the arm wrote so far reaches the disk first: no checkpoint is ahead of its own record.
    """
    for name in GROWING:
        with (arm_dir / name).open("rb") as file:
            os.fsync(file.fileno())
    sizes = {name: (arm_dir / name).stat().st_size for name in GROWING}
    record = {name: (size, _sha256(arm_dir / name, size)) for name, size in sizes.items()}
    point = Point(step, wandb_id, record, [sampled.seconds for sampled in ahead])
    beside = arm_dir / FOLDER / "beside.partial"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    (beside / POINT_FILE).write_text(json.dumps(asdict(point)) + "\n")
    for sampled in ahead:
        nothing = np.zeros(len(sampled.trajectories))
        save_rollout(_ahead(beside, sampled.step), sampled.step, sampled.trajectories, nothing)
    trainer.save(point.folder(arm_dir), beside)
    checkpoint.prune(arm_dir / FOLDER, keep)


def restore(trainer: TrainerGroup, arm_dir: Path, point: Point) -> list[Sampled]:
    """Load the checkpoint of `point`; the rollouts that were sampled ahead. Nothing before the first step."""
    if point.step:
        trainer.load(point.folder(arm_dir))
    rollouts = [
        load_rollout(_ahead(point.folder(arm_dir), point.step + number)) for number in range(len(point.ahead))
    ]
    return [Sampled(r.step, r.trajectories, seconds) for r, seconds in zip(rollouts, point.ahead, strict=True)]


def require_same(arm_dir: Path, manifest: WeightManifest, drafts: set[str]) -> None:
    """CheckpointError where the restored weights are not the ones that were handed over last, or the drafts changed."""
    start = json.loads((arm_dir / START_FILE).read_text())
    began = {capability["draft_digest"] for capability in start["capabilities"]}
    if drafts != began:
        raise CheckpointError(
            f"{arm_dir} began with draft bytes {sorted(began)} and the engines have {sorted(drafts)} now; restore "
            "model.draft, or make a new run with --resume never"
        )
    sent = next(line["sent_digest"] for line in read_handoffs(arm_dir) if line["version"] == manifest.version)
    if sent != manifest.digest:
        raise CheckpointError(
            f"{arm_dir}: the weights of version {manifest.version} were {sent} when they were handed over and are "
            f"{manifest.digest} in the checkpoint; use an earlier one"
        )


def _read(file: Path) -> Point:
    try:
        known: dict[str, Any] = json.loads(file.read_text())
        record = {name: (int(known["record"][name][0]), str(known["record"][name][1])) for name in known["record"]}
        point = Point(int(known["step"]), str(known["wandb_id"]), record, [float(each) for each in known["ahead"]])
        if point.step and record.keys() != set(GROWING):
            raise ValueError(f"it tells of {sorted(record)} and not of {sorted(GROWING)}")
        return point
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} does not say where the arm stood: {error}; use an earlier one") from error


def _ahead(folder: Path, step: int) -> Path:
    return folder / f"ahead-{step:06d}.safetensors"


def _sha256(file: Path, size: int) -> str:
    """Of the first `size` bytes; "" where there are fewer."""
    content = file.read_bytes()[:size] if file.is_file() else b""
    return hashlib.sha256(content).hexdigest() if len(content) == size else ""
