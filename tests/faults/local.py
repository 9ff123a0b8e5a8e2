"""The loop in one process: the real engine, trainer, artifacts and checkpoints, without Ray between them.

What a fault does to the loop is the same with Ray and without; without it a run takes a second and many can be made.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from experiments import local
from experiments.arms import run_arm
from experiments.artifacts import verify_manifest
from experiments.config import ExperimentConfig
from experiments.rollouts import load_rollout, rollout_files
from experiments.tracking import WALL_CLOCK

STEPS = 5


class LocalPool(local.LocalPool):
    """With its engine in reach."""

    @property
    def engine(self) -> Any:
        return self._worker.engine


class LocalTrainer(local.LocalTrainer):
    """With its backend in reach."""

    @property
    def backend(self) -> Any:
        return self._rank.backend


SIDES: dict[str, Any] = {}
"""What `run` puts in the place of Ray's actors; empty: they are used."""


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
    run_arm(config, arm, seed, said.append, debug=False, **SIDES)
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


def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `run` build both sides in this process."""
    monkeypatch.setitem(SIDES, "make_pool", LocalPool)
    monkeypatch.setitem(SIDES, "make_trainer", LocalTrainer)


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
