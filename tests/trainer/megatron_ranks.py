"""What each process of a group of ranks does for the megatron tests: run every case, leave the outcome in a folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from miles_ext.logprobs import support_logits
from miles_ext.records import Trajectory
from miles_ext.score_centering import SupportTensors
from trainer import checkpoint
from trainer.backends.base import Backend
from trainer.config import EstimatorSettings, TrainerConfig
from trainer.objective import SUMS, estimator, objective
from trainer.step import micro_batches, train_step

MODES = {
    mode: EstimatorSettings(mode=mode, tis_clip=1.3, mis_low=0.7, mis_high=1.6) for mode in ("none", "tis", "mis")
} | {"off": EstimatorSettings(mode="tis", centering="off")}
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Case:
    """model: key of the targets. laws: keys of the rollouts whose gradients are compared. steps: updates to train."""

    model: str
    tp: int = 1
    pp: int = 1
    dtype: Literal["float32", "bfloat16", "float64"] = "float64"
    laws: tuple[str, ...] = ("complete",)
    modes: tuple[str, ...] = ("tis",)
    steps: int = 0
    checkpoint: bool = False
    load: str = ""
    changes: dict[str, Any] = field(default_factory=dict)

    def config(self, workers: int) -> TrainerConfig:
        changes = {"lr": 1e-3, "micro_tokens": 20, "chunk_tokens": 5, "updates_per_rollout": 1, **self.changes}
        if workers == 1:
            return TrainerConfig(dtype=self.dtype, **changes)
        return TrainerConfig(
            backend="megatron", workers=workers, tp=self.tp, pp=self.pp, dtype=self.dtype, device="cpu", **changes
        )


TWO = {
    "tp": Case("padded", tp=2, laws=("complete", "head"), modes=tuple(MODES)),
    "pp": Case("untied", pp=2, laws=("complete", "head")),
    "pp tied": Case("tied", pp=2),
    "dp": Case("llama", laws=("complete", "head")),
    "tp llama": Case("llama", tp=2, laws=("head",)),
    "tp shared": Case("narrow", tp=2),
    "tp float32": Case("padded", tp=2, dtype="float32", steps=3, checkpoint=True),
    "pp float32": Case("tied", pp=2, dtype="float32", steps=3),
    "dp float32": Case("untied", dtype="float32", steps=3, checkpoint=True),
    "tp eps": Case("padded", tp=2, dtype="float32", steps=3, laws=(), changes={"eps": 1e-3}),
    "dp eps": Case("untied", dtype="float32", steps=3, laws=(), changes={"eps": 1e-3}),
    "tp bfloat16": Case("padded", tp=2, dtype="bfloat16", steps=3, laws=(), checkpoint=True),
    "dp bfloat16": Case("untied", dtype="bfloat16", steps=3, laws=()),
    "tp to dp": Case("padded", dtype="float32", laws=(), load="tp float32"),
    "dp to pp": Case("untied", pp=2, dtype="float32", laws=(), load="dp float32"),
    "tp to pp bfloat16": Case("padded", pp=2, dtype="bfloat16", laws=(), load="tp bfloat16"),
}
FOUR = {
    "tp dp": Case("padded", tp=2, laws=("complete", "head")),
    "tp pp": Case("tied", tp=2, pp=2),
    "tp shared by two": Case("tied", tp=4),
    "tp pp float32": Case("untied", tp=2, pp=2, dtype="float32", steps=3),
    "tp dp float32": Case("padded", tp=2, dtype="float32", steps=3),
}


def main(rank: int, world: int, port: int, targets: dict[str, Path], rollouts: dict, folder: Path) -> None:
    """Entry point of a spawned process; one group of ranks serves all cases."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    from megatron.core import parallel_state

    from trainer.backends.megatron import MegatronBackend

    for name, case in (TWO if world == 2 else FOUR).items():
        backend = MegatronBackend(case.config(world), targets[case.model], rank=rank, world_size=world)
        found = outcome(case, case.config(world), backend, rollouts[case.model], folder / name)
        if rank == 0:
            torch.save(found, folder / f"{name}.pt")
        parallel_state.destroy_model_parallel()
    assert torch.cuda.current_device.__module__ == "torch.cuda"  # nothing of the CPU's stand-ins is left behind
    torch.distributed.destroy_process_group()


def outcome(
    case: Case, config: TrainerConfig, backend: Backend, rollouts: dict[str, list[Trajectory]], folder: Path
) -> dict[str, Any]:
    """Everything that two backends are compared on; complete on rank 0."""
    found: dict[Any, Any] = {"initial": exported(backend)}
    for law in case.laws:
        for mode in case.modes:
            found[law, mode] = gradients(backend, config, rollouts[law], MODES[mode])
    if case.load:
        assert checkpoint.load(backend, folder.parent / case.load / "step") == 7
        found["loaded"] = exported(backend)
        found["next"] = train_step(backend, rollouts["head"], config, temperature=TEMPERATURE), exported(backend)
    if case.steps:
        for step in range(case.steps):
            last = folder / "audit" if step == case.steps - 1 else None
            found["metrics"] = train_step(backend, rollouts["complete"], config, temperature=TEMPERATURE, probe=last)
        found["trained"] = exported(backend)
    if case.checkpoint:
        checkpoint.save(backend, folder / "step", 7)
        found["next"] = train_step(backend, rollouts["head"], config, temperature=TEMPERATURE), exported(backend)
        checkpoint.load(backend, folder / "step")
        found["again"] = train_step(backend, rollouts["head"], config, temperature=TEMPERATURE), exported(backend)
    return found


def exported(backend: Backend) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in backend.export_hf()}


def gradients(
    backend: Any, config: TrainerConfig, rollout: list[Trajectory], settings: EstimatorSettings
) -> dict[str, Any]:
    """Logits, sampled and support logits, log-sum-exps and metric sums by loss token, and all gradients by HF name."""
    seen: list[tuple[Any, ...]] = []
    values = np.linspace(-1, 2, len(rollout))
    batches = micro_batches(rollout, np.arange(len(rollout)), values, config, backend.data_rank, backend.data_size)

    def watched(number: int):
        batch = batches[number]
        loss_fn = objective(batch, estimator(settings), TEMPERATURE, backend.shard)

        def call(logits: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            law = batch.support[rows]
            tensors = SupportTensors.from_arrays(
                law.token_ids, law.logprobs, law.offsets, batch.sampled_ids[rows], law.sampled_logprobs, law.kind
            )
            at = support_logits(
                logits.detach(), tensors.sampled, tensors.token_ids, tensors.rows, TEMPERATURE, shard=backend.shard
            )
            place = torch.from_numpy(np.stack([batch.trajectory[rows], batch.token[rows]]))
            seen.append((place, logits.detach().clone(), at.sampled, at.support, at.lse))
            return loss_fn(logits, rows)

        return call

    backend.zero_grad()
    sums = backend.forward_backward(batches, [watched(number) for number in range(len(batches))])
    sums = torch.zeros(len(SUMS), dtype=torch.float64) if sums is None else sums
    found: dict[str, Any] = {"sums": backend.sum_over_ranks(sums), "norm": backend.grad_norm()}
    found["logits"] = backend.whole_rows(
        torch.cat([logits for _, logits, *_ in seen]) if seen and backend.data_rank == 0 else None
    )
    columns = [torch.cat([entry[column] for entry in seen], dim=-1) if seen else None for column in (0, 2, 3, 4)]
    everyone: list[Any] = [columns]
    if backend.world_size > 1:
        everyone = [None] * backend.world_size
        torch.distributed.all_gather_object(everyone, columns if backend.data_rank == 0 else [None])
    found["places"], *found["support"] = next(columns for columns in everyone if columns[0] is not None)
    found["gradients"] = {}
    if backend.world_size == 1:
        found["gradients"] = {name: parameter.grad.clone() for name, parameter in backend.parameters.items()}
    else:
        state = backend.state
        mine = {hf: tensor.clone() for name in state.names() for hf, tensor in state.gather(name, "grad")}
        stages: list[dict] = [{}] * backend.world_size
        torch.distributed.all_gather_object(stages, mine)
        found["gradients"] = {name: tensor for stage in stages for name, tensor in stage.items()}
    backend.zero_grad()
    return found
