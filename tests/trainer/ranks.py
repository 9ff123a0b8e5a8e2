"""What one of two processes does in test_ranks: train on the same trajectories as its peer and leave the outcome."""

from __future__ import annotations

from pathlib import Path

import torch

from miles_ext.records import Trajectory
from trainer.config import TrainerConfig
from trainer.worker import TrainerWorker

CONFIGS = {
    "float64": TrainerConfig(dtype="float64", workers=2, lr=1e-3, micro_tokens=20, chunk_tokens=3),
    "lonely": TrainerConfig(dtype="float64", workers=2, lr=1e-3, updates_per_rollout=4, advantage="raw"),
    "bfloat16": TrainerConfig(dtype="bfloat16", workers=2, lr=1e-3),
}
STEPS = 3


def outcome(name: str, worker: TrainerWorker, trajectories: list[Trajectory], folder: Path) -> None:
    """Train, and save metrics, the exported weights and a checkpoint; probe the last step."""
    metrics = []
    for step in range(STEPS):
        probe = folder / "audit" if step == STEPS - 1 else None
        metrics.append(worker.train(trajectories, temperature=1.0, step=step, probe=probe))
    manifest, buckets = worker.export(STEPS, "float64")
    worker.save(folder / "checkpoints" / "last")
    weights = {key: torch.from_numpy(array) for bucket in buckets for key, array in bucket.items()}
    result = {"metrics": metrics, "weights": weights, "digest": manifest.digest if buckets else ""}
    torch.save(result, folder / f"rank{worker.backend.rank}.pt")


def main(rank: int, port: int, target: Path, rollouts: dict[str, list[Trajectory]], folder: Path) -> None:
    """Entry point of a spawned process; one group of ranks serves all configurations."""
    for number, (name, config) in enumerate(CONFIGS.items()):
        (folder / name).mkdir(exist_ok=True)
        worker = TrainerWorker(config, target, 0, rank, 2, "127.0.0.1", port + number)
        outcome(name, worker, rollouts[name], folder / name)
        torch.distributed.destroy_process_group()
