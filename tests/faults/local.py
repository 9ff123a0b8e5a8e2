"""The loop in one process: the real engine, trainer, artifacts and checkpoints, without Ray between them.

What a fault does to the loop is the same with Ray and without; without it a run takes a second and many can be made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from experiments import loop
from experiments.arms import run_arm
from experiments.artifacts import verify_manifest
from experiments.config import ExperimentConfig
from experiments.rollouts import load_rollout, rollout_files
from experiments.tracking import WALL_CLOCK
from miles_ext.capability import EngineCapability
from miles_ext.records import Completion
from miles_ext.weights import HandoffReport, WeightManifest
from rollout.embedded.engine import EmbeddedEngine
from rollout.engine import Request
from trainer.worker import TrainerWorker

STEPS = 5


class LocalPool:
    """One engine in the place of `rollout.pool.RolloutPool`."""

    def __init__(self, config, arm, target, draft, spec) -> None:
        self.engine = EmbeddedEngine(
            target, draft, arm, context_length=config.context_length, max_concurrency=config.max_concurrency,
            engine_id="worker-0", threads=1,
        )  # fmt: skip

    def start(self) -> list[EngineCapability]:
        return self.capability()

    def capability(self) -> list[EngineCapability]:
        return self.engine.capability()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self.engine.generate(requests)

    def update_weights(self, manifest: WeightManifest, buckets) -> list[HandoffReport]:
        return [self.engine.update_weights(manifest, buckets)]

    def rss_mb(self) -> float:
        return 1.0

    def close(self) -> None:
        self.engine.close()


class LocalTrainer(TrainerWorker):
    """One rank in the place of `trainer.worker.TrainerGroup`."""

    def share(self, version: int, dtype: str) -> Any:
        return self.export(version, dtype)

    def close(self) -> None:
        del self.backend


def settings(models: dict[str, Path], folder: Path, **changes: Any) -> ExperimentConfig:
    """A small experiment of one arm and five steps, a checkpoint after every second one."""
    return ExperimentConfig.model_validate(
        {
            "name": "exp", "output_dir": folder, "steps": STEPS, "wandb_mode": "disabled", "model": models,
            "arms": [{"name": "dflash2", "kind": "dflash2"}], "seeds": [5],
            "task": {"prompts": 2, "samples": 2, "max_new_tokens": 6, "eval_problems": 2},
            "trainer": {"lr": 1e-2, "advantage": "raw", "advantage_baseline": 0.5},
            "rollout": {"context_length": 48, "max_concurrency": 8}, "checkpoint": {"every": 2, "keep": 2},
        }
        | changes
    )  # fmt: skip


def run(config: ExperimentConfig) -> tuple[Path, list[str]]:
    """One arm, from where it stands; its folder and what it said."""
    said: list[str] = []
    arm, seed = config.arms[0], config.seeds[0]
    run_arm(config, arm, seed, said.append, debug=False)
    return config.run_dir / f"{arm.name}-s{seed}", said


def evidence(folder: Path) -> dict[str, Any]:
    """Everything of a finished arm that must not depend on interruptions: bytes where they are ours."""
    assert verify_manifest(folder)["failure"] == ""
    handoffs = [json.loads(line) for line in (folder / "handoffs.jsonl").read_text().splitlines()]
    for line in handoffs:
        for report in line["reports"]:
            del report["seconds"]
    return {
        "metrics": settled(folder / "metrics.jsonl"),
        "handoffs": handoffs,
        "rollouts": {file.name: arrays(file) for file in rollout_files(folder)},
        "model": arrays(folder / "checkpoints" / "model" / "model.safetensors"),
        "probe": arrays(folder / "audit" / "probe.safetensors"),
        "start": (folder / "start.json").read_bytes(),
    }


def arrays(file: Path) -> dict[str, Any]:
    """Bytes of every array and the metadata: the order of metadata in a file is not settled."""
    with safe_open(file, "np") as opened:
        return {name: opened.get_tensor(name).tobytes() for name in opened.keys()} | dict(opened.metadata())  # noqa: SIM118


def settled(metrics: Path) -> str:
    """metrics.jsonl without what a clock or a process size says."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    kept = [{name: value for name, value in line.items() if not name.startswith(WALL_CLOCK)} for line in lines]
    return "\n".join(json.dumps(line) for line in kept)


def prompts_trained(folder: Path) -> list[int]:
    """Prompt ids in the order in which they were trained on, one for each group."""
    found = []
    for file in rollout_files(folder):
        groups = {t.group: t.prompt_id for t in load_rollout(file).trajectories}
        found += [groups[group] for group in sorted(groups)]
    return found


def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loop build its two sides in this process."""
    monkeypatch.setattr(loop, "RolloutPool", LocalPool)
    monkeypatch.setattr(loop, "TrainerGroup", LocalTrainer)


def at_call(number: int, action: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, with `action` before its call of that number (from 0)."""
    count = iter(range(1 << 30))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(count) == number:
            action()
        return call(*args, **kwargs)

    return wrapped


def last_rollout(folder: Path) -> list[Any]:
    """The trajectories of the audited step, laws and all."""
    return load_rollout(folder / "rollouts" / "step-000001.safetensors").trajectories
