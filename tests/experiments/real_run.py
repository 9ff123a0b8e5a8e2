"""A real run in one process: the embedded engine, the torch trainer, real handoffs and artifacts, no Ray."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.artifacts import record_handoff, record_start, write_manifest
from experiments.config import ExperimentConfig, save
from experiments.rollouts import rollout_file, save_rollout
from experiments.tracking import Tracker
from miles_ext.records import Trajectory
from miles_ext.seeds import request_seed
from rollout.embedded.engine import EmbeddedEngine
from rollout.engine import Request
from tests.rollout.tiny import VOCAB, write_draft, write_target
from trainer.backends.torch import TorchBackend
from trainer.handoff import export
from trainer.step import rollout_advantages, train_step


def make_run(folder: Path, **settings) -> Path:
    """Run every arm of a small experiment for its steps; the rewards count odd tokens. Returns the run directory."""
    target = write_target(folder / "target")
    draft = write_draft(folder / "draft", target)
    config = ExperimentConfig.model_validate(
        {
            "name": "exp", "steps": 3, "output_dir": folder / "runs", "save_support": "all",
            "arms": [{"name": "regular", "kind": "regular"}, {"name": "dflash2", "kind": "dflash2"}],
            "model": {"target": target, "draft": draft}, "trainer": {"lr": 1e-2, "updates_per_rollout": 2},
        }
        | settings
    )  # fmt: skip
    save(config)
    for arm in config.arms:
        run_arm(config.for_arm(arm), config.run_dir / f"{arm.name}-s0")
    return config.run_dir


def run_arm(config: ExperimentConfig, arm_dir: Path) -> None:
    (arm,) = config.arms
    engine = EmbeddedEngine(config.model.target, config.model.draft, arm.kind, context_length=64, max_concurrency=16)
    backend = TorchBackend(config.trainer, config.model.target)
    record_start(arm_dir, export(backend, 0, "float32")[0], engine.capability())
    tracker = Tracker(arm_dir, experiment=config.name, arm=arm.name, seed=0, config={}, wandb_mode="disabled")
    for step in range(config.steps):
        rng = np.random.default_rng(step)
        prompts = rng.integers(0, VOCAB, (4, 3)).astype(np.int32)
        requests = [
            Request(
                request_id=f"{group}-{sample}", prompt_ids=prompts[group], max_new_tokens=12,
                spec=config.sampling.spec(request_seed("exp", step, group, sample)),
            )
            for group in range(4) for sample in range(4)
        ]  # fmt: skip
        trajectories = [
            Trajectory(
                completion=completion, prompt_id=4 * step + i // 4, group=i // 4,
                reward=float(np.mean(completion.response_ids % 2)), loss_mask=np.ones(len(completion), bool),
            )
            for i, completion in enumerate(engine.generate(requests))
        ]  # fmt: skip
        values = rollout_advantages(trajectories, np.arange(len(trajectories)), config.trainer)
        save_rollout(rollout_file(arm_dir, step), step, trajectories, values)
        probe = arm_dir / "audit" if step == config.audited_step else None
        metrics = train_step(
            backend, trajectories, config.trainer, temperature=config.sampling.temperature, step=step, probe=probe
        )
        manifest, buckets = export(backend, step + 1, "float32")
        report = engine.update_weights(manifest, buckets)
        record_handoff(arm_dir, step, manifest, [report])
        reward = float(np.mean([trajectory.reward for trajectory in trajectories]))
        tracker.log(step, {**metrics, "rollout/raw_reward": reward, "handoff/seconds": report.seconds})
    tracker.finish()
    write_manifest(arm_dir)
