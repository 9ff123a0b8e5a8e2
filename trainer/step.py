"""One train step: the trajectories of a rollout in, a few optimizer updates and the metrics of the step out."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from miles_ext.errors import TrainingError
from miles_ext.records import Trajectory
from trainer.advantages import advantages
from trainer.backends.base import Backend
from trainer.batch import Batch, Floats, Ints, make_batch, mini_batches, plan, token_scale, usable
from trainer.config import TrainerConfig
from trainer.objective import SUMS, TOKEN_MEANS, estimator, objective
from trainer.probe import Probe


def train_step(
    backend: Backend,
    trajectories: Sequence[Trajectory],
    config: TrainerConfig,
    *,
    temperature: float,
    step: int = 0,
    probe: Path | None = None,
    skips: int = 0,
) -> dict[str, float]:
    """Train on one rollout; metrics are global and the same on every rank. Collective over the backend's ranks.

    temperature: the sampler's, > 0. probe: folder for the logit gradients of the last update and the weights before
    it. skips: updates that may be left out because a loss or a gradient is not finite (train/skipped_updates).
    Raises SupportError for rows that must not be trained on, TrainingError for the update after those; neither it nor
    what was left out is applied.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; accepted: > 0, the temperature of the rollout")
    kept, dropped = usable(trajectories, config.content_failure)
    values = rollout_advantages(trajectories, kept, config)
    parts = [kept[part] for part in mini_batches([trajectories[i].group for i in kept], config.updates_per_rollout)]
    updates = []
    for part in parts:
        batches = micro_batches(trajectories, part, values, config, backend.data_rank, backend.data_size)
        here = Probe(batches, probe) if probe is not None and part is parts[-1] else None
        try:
            updates.append(update(backend, batches, config, temperature, here, step))
        except TrainingError as error:
            skips -= 1
            if skips < 0:
                raise
            print(f"left out: {error}", file=sys.stderr, flush=True)
    counted = {"train/skipped_updates": float(len(parts) - len(updates))}
    return {**merge(updates), **counted, "rollout/untrainable_groups": float(len(dropped))}


def rollout_advantages(trajectories: Sequence[Trajectory], kept: Ints, config: TrainerConfig) -> Floats:
    """Advantage of each trajectory, float64 [n]; 0 for those not in `kept`, which take no part."""
    values = np.zeros(len(trajectories))
    values[kept] = advantages(
        [trajectories[index].reward for index in kept], [trajectories[index].group for index in kept],
        config.advantage, baseline=config.advantage_baseline, std=config.advantage_std,
    )  # fmt: skip
    return values


def micro_batches(
    trajectories: Sequence[Trajectory], indices: Ints, values: Floats, config: TrainerConfig, rank: int, world_size: int
) -> list[Batch]:
    """This rank's share of a mini-batch: trajectories `indices`, their advantages in `values` (by trajectory)."""
    chosen = [trajectories[index] for index in indices]
    scale = token_scale([trajectory.loss_mask for trajectory in chosen], config.reduction)
    lengths = np.array([len(t.completion.prompt_ids) + len(t.completion) for t in chosen])
    return [
        make_batch(trajectories, indices[picked], values[indices[picked]], scale[picked])
        for picked in plan(lengths, world_size, config.micro_tokens)[rank]
    ]


def update(
    backend: Backend,
    batches: Sequence[Batch],
    config: TrainerConfig,
    temperature: float,
    probe: Probe | None = None,
    step: int = 0,
) -> dict[str, float]:
    """One optimizer update on this rank's micro-batches."""
    cfg = estimator(config.estimator)
    loss_fns = [objective(batch, cfg, temperature, backend.shard) for batch in batches]
    if probe:
        loss_fns = [probe.watch(number, loss_fn) for number, loss_fn in enumerate(loss_fns)]
    total = backend.forward_backward(batches, loss_fns)
    total = torch.zeros(len(SUMS), dtype=torch.float64) if total is None else total
    found = dict(zip(SUMS, backend.sum_over_ranks(total).tolist(), strict=True))
    norm = backend.grad_norm()
    if not (math.isfinite(found["loss"]) and math.isfinite(norm)):
        refuse(backend, found, norm)
    if probe:
        probe.write(backend, config.estimator, temperature, step)
    rate = backend.step(norm)
    return {**found, "train/grad_norm": norm, "train/lr": rate}


def refuse(backend: Backend, found: dict[str, float], norm: float) -> None:
    """Drop the gradient and raise, naming everything that is not finite."""
    sums = [name for name, value in found.items() if not math.isfinite(value)]
    gradients = backend.non_finite_gradients()
    backend.zero_grad()
    shown = f"{gradients[:3]}{' ...' if len(gradients) > 3 else ''}"
    raise TrainingError(
        f"update {backend.updates + 1}: loss {found['loss']}, gradient norm {norm}; not finite: {sums or 'no loss'}, "
        f"gradients of {len(gradients)} parameters {shown}; the weights were not touched; "
        "lower the learning rate or look at the rollout that was trained on"
    )


def merge(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step: token means over the loss tokens of all updates, the rest as means over updates.

    NaN where every update was left out: nothing was measured.
    """
    if not updates:
        names = ("train/loss", "train/grad_norm", "train/lr", *TOKEN_MEANS)
        return {**dict.fromkeys(names, math.nan), "train/updates": 0.0}
    tokens = sum(update["tokens"] for update in updates)
    return {
        "train/loss": sum(update["loss"] for update in updates) / len(updates),
        "train/grad_norm": sum(update["train/grad_norm"] for update in updates) / len(updates),
        "train/lr": updates[-1]["train/lr"],
        "train/updates": float(len(updates)),
        **{name: sum(update[name] for update in updates) / tokens for name in TOKEN_MEANS},
    }
