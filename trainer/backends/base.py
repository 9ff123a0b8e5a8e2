"""What a training backend offers. The step is written against this alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from trainer.batch import Batch

LossFn = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]
"""(logits [m, V] of the batch's scored rows `slice`, that slice) -> (loss to minimise, a scalar; metric sums [k])."""


class Backend(Protocol):
    """A model, its optimizer and its share of the data-parallel ranks. Collective: every rank makes the same calls."""

    rank: int
    world_size: int
    updates: int
    """Optimizer updates done."""

    def forward_backward(self, batch: Batch, loss_fn: LossFn) -> torch.Tensor | None:
        """Add the gradient of the batch's loss; return this rank's metric sums [k], or None where it scored no row.

        The backend owns the schedule: it may call `loss_fn` on any slices that cover the scored rows once.
        Gradients are summed, never averaged, over batches and ranks.
        """
        ...

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sum of a small tensor over the data-parallel ranks."""
        ...

    def grad_norm(self) -> float:
        """Global L2 norm of the summed gradient, equal on every rank."""
        ...

    def non_finite_gradients(self) -> list[str]:
        """Names of this rank's parameters whose gradient holds a non-finite number."""
        ...

    def step(self, grad_norm: float) -> float:
        """Clip by the given norm, update the weights, clear the gradient; return the learning rate used."""
        ...

    def zero_grad(self) -> None: ...

    def export_hf(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor on the host's or the model's device), one at a time, tied heads once."""
        ...

    def save_hf(self, folder: Path) -> None:
        """Write the weights and configuration as a Hugging Face folder (rank 0 writes)."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and update count into an existing folder (every rank its share)."""
        ...

    def load(self, folder: Path) -> None:
        """Inverse of `save`, for any number of ranks. CheckpointError where it is of another model."""
        ...
