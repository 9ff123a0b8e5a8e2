"""Evidence of one update: logit gradients exactly as backward made them, and the weights that they were made with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from trainer.backends.base import Backend, LossFn
from trainer.batch import Batch
from trainer.config import EstimatorSettings

MAX_TOKENS = 256


class Probe:
    """Watches up to `MAX_TOKENS` loss tokens, spread evenly over one rank's micro-batches of one update."""

    def __init__(self, batches: Sequence[Batch], folder: Path) -> None:
        self.batches, self.folder = batches, folder
        owner = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
        place = np.concatenate([np.arange(len(batch)) for batch in batches])
        chosen = np.unique(np.linspace(0, len(owner) - 1, min(MAX_TOKENS, len(owner))).astype(np.int64))
        self.rows = [place[chosen][owner[chosen] == number] for number in range(len(batches))]
        self.gradients: dict[tuple[int, int], torch.Tensor] = {}

    def watch(self, number: int, loss_fn: LossFn) -> LossFn:
        """The loss function of micro-batch `number`, with the gradient of its watched logits kept."""

        def watched(logits: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            inside = self.rows[number]
            inside = inside[(inside >= rows.start) & (inside < rows.stop)]

            def keep(gradient: torch.Tensor) -> None:
                found = gradient[torch.from_numpy(inside - rows.start).to(gradient.device)]
                self.gradients[number, rows.start] = found.to("cpu", torch.float32)

            logits.register_hook(keep)
            return loss_fn(logits, rows)

        return watched

    def write(self, backend: Backend, settings: EstimatorSettings, temperature: float, step: int) -> None:
        """Write `weights/` (Hugging Face folder) and `probe.safetensors`: logit_grad float32 [n, V], trajectory and
        token int64 [n], advantage and scale float32 [n]. Collective; rank 0 writes what data rank 0 watched."""
        backend.save_hf(self.folder / "weights")
        watched = torch.cat([self.gradients[key] for key in sorted(self.gradients)]) if self.gradients else None
        gradients = backend.whole_rows(watched if backend.data_rank == 0 else None)
        if backend.rank != 0 or gradients is None:
            return

        def column(name: str) -> np.ndarray:
            return np.concatenate(
                [getattr(batch, name)[rows] for batch, rows in zip(self.batches, self.rows, strict=True)]
            )

        tensors = {name: torch.from_numpy(column(name)) for name in ("trajectory", "token")}
        tensors["advantage"] = torch.from_numpy(column("advantages")).float()
        tensors["scale"] = torch.from_numpy(column("scale")).float()
        tensors["logit_grad"] = gradients
        about = {
            "temperature": temperature, "estimator": settings.model_dump(), "step": step, "updates": backend.updates,
        }  # fmt: skip
        save_file(tensors, self.folder / "probe.safetensors", metadata={"probe": json.dumps(about)})
